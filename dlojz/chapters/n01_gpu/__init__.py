"""Notebook 01: the trainer on a GPU."""
