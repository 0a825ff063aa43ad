"""Notebook 10c: attention without its matrix, and sequences of unequal lengths."""

from dlojz.chapters import face

__getattr__, __dir__ = face(__name__, "figures")
