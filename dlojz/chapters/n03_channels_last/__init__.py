"""Notebook 03: channels_last."""

from dlojz.chapters import face

__getattr__, __dir__ = face(__name__, "figures")
