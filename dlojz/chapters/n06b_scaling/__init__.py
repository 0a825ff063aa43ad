"""Notebook 06b: accumulation, scaling and statistics over processes."""
