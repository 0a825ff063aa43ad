"""Notebook 10: kernels, and what limits them."""

from dlojz.chapters import face

__getattr__, __dir__ = face(__name__, "figures", "shapes_and_strings", "listing", "amdahl")
