"""The files that runs write, and the numbers in them: every reader of a log, trace or outcome."""

from dlojz.runs.folder import recorded, recordings

__all__ = ["recorded", "recordings"]
