"""Notebook 04c: a slow program to repair."""

from dlojz.chapters import face

__getattr__, __dir__ = face(__name__, "figures")
