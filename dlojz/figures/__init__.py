"""Tables and figures: `report` shows runs, and each notebook's subject has a module of its own.

They read jobs, folders and recordings, and write nothing.
"""
