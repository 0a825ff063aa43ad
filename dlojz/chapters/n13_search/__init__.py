"""Notebook 13: hyper-parameter search, in which each trial is a job."""

from dlojz.chapters import face

__getattr__, __dir__ = face(__name__, "study", "recorded", "figures")
