"""Notebook 00b: the speed of this machine."""

from dlojz.chapters import face

__getattr__, __dir__ = face(__name__, "figures")
