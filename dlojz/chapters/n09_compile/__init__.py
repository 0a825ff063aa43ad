"""Notebook 09: torch.compile."""

from dlojz.chapters import face

__getattr__, __dir__ = face(__name__, "figures")
