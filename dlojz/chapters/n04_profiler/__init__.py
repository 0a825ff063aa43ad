"""Notebook 04: the profiler, and the mysteries."""
