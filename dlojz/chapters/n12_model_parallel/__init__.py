"""Notebook 12: one model over several processes, by tensors, sequence and stages."""

from dlojz.chapters import face

__getattr__, __dir__ = face(__name__, "figures", "choosing_figures", "checked", "eight")
