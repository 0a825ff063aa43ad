"""Tables and drawings: `report` shows runs, and each notebook's subject has a module of its own.

They take jobs, folders or recordings, and read; they write nothing.
"""
