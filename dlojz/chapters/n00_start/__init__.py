"""Notebook 00: the baseline on the processor."""

from dlojz.chapters import face

__getattr__, __dir__ = face(__name__, "figures")
