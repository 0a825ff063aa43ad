"""Notebook 06: several processes."""

from dlojz.chapters import face

__getattr__, __dir__ = face(__name__, "figures")
