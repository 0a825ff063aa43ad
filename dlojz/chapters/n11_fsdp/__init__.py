"""Notebook 11: one copy of the model, in shards."""

from dlojz.chapters import face

__getattr__, __dir__ = face(__name__, "figures")
