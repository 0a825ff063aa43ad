"""Notebook 01: the trainer on a GPU."""

from dlojz.chapters import face

__getattr__, __dir__ = face(__name__, "figures")
