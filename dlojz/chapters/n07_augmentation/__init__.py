"""Notebook 07: augmentation."""

from dlojz.chapters import face

__getattr__, __dir__ = face(__name__, "figures")
