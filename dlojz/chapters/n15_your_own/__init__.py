"""Notebook 15: a training program of one's own, watched, changed and compared."""

from dlojz.chapters import face

__getattr__, __dir__ = face(__name__, "gains")
