"""Notebook 10b: eight bits and fewer."""

from dlojz.chapters import face

__getattr__, __dir__ = face(__name__, "figures")
