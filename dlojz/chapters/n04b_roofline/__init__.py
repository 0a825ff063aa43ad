"""Notebook 04b: the roofline, and a segment mean."""

from dlojz.chapters import face

__getattr__, __dir__ = face(__name__, "figures", "kernels")
