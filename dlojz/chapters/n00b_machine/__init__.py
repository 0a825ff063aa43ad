"""Notebook 00b: what this machine reaches."""

from dlojz.chapters import face

__getattr__, __dir__ = face(__name__, "figures")
