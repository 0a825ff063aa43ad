"""What runs have written: numbers only. Each reader of a log, a trace or an outcome is here."""

from dlojz.runs.folder import recorded, recordings

__all__ = ["recorded", "recordings"]
