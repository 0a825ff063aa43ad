"""Notebook 14: a race against the clock, with others or with yourself."""

from dlojz.chapters import face

__getattr__, __dir__ = face(__name__, "figures", "oneself")
