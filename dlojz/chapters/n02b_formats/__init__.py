"""Notebook 02b: formats of numbers, and odd sizes."""

from dlojz.chapters import face

__getattr__, __dir__ = face(__name__, "figures")
