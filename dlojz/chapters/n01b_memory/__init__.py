"""Notebook 01b: the memory of a step, tensor by tensor."""

from dlojz.chapters import face

__getattr__, __dir__ = face(__name__, "figures")
