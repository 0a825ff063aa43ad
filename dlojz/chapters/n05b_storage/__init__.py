"""Notebook 05b: files, shards and their storage."""
