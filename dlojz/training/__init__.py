"""The modules that the trainer imports.

They import torch when they are loaded, except flags.py, which the launcher reads."""
