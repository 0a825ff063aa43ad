"""Notebook 04b: the roofline, and a segment mean."""
