"""Notebook 09: a network that the compiler breaks, to repair."""
