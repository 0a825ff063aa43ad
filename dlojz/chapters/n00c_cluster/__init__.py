"""Notebook 00c: the queue and the job script of a cluster."""

from dlojz.chapters import face

__getattr__, __dir__ = face(__name__, "figures", "batch")
