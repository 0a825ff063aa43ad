"""Notebook 11b: copies of shards, and batches in parts."""

from dlojz.chapters import face

__getattr__, __dir__ = face(__name__, "figures", "float8")
