"""Tables and figures: `report` shows runs; what one notebook draws is in its chapter.

They read jobs, folders and recordings, and write nothing.
"""
