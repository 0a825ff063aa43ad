"""This machine: its processors, GPUs, meters and facts, and the doctor that interprets them.

This room imports no other room of dlojz.
"""
