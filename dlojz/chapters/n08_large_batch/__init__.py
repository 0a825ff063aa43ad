"""Notebook 08: large batches."""

from dlojz.chapters import face

__getattr__, __dir__ = face(__name__, "figures", "paying", "per_update", "history", "own")
