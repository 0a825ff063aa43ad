"""Notebook 02b: formats of numbers, and odd sizes."""
