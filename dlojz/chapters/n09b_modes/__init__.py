"""Notebook 09b: modes of the compiler, and when compiling pays."""

from dlojz.chapters import face

__getattr__, __dir__ = face(__name__, "figures", "worth_figures")
