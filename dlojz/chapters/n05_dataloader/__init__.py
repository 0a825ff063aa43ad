"""Notebook 05: the DataLoader."""

from dlojz.chapters import face

__getattr__, __dir__ = face(__name__, "figures", "search")
