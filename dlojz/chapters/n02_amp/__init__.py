"""Notebook 02: mixed precision."""

from dlojz.chapters import face

__getattr__, __dir__ = face(__name__, "figures")
