"""Profilers' traces: their spans and kinds of work, what limits a step, and which fault it has."""
