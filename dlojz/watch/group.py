"""Processes that end without having left their group leave a file."""

import atexit
from contextlib import suppress

from dlojz import idr_torch
from dlojz.runs.folder import group_file
from dlojz.training import distributed

_watched = []  # the folders of the runs watched in this process


def watch(run):
    """Watch the group of a run's process, which it may have joined."""
    distributed.keep_group()
    if distributed.are_joined():
        _watched.append(run.folder)


@atexit.register  # at import, to be called after the trainer's own functions
def _note():
    """Leave a file if the process is still in its group: the log has its end already."""
    if distributed.are_joined():
        for folder in _watched:
            with suppress(OSError):  # a full disk
                group_file(folder, idr_torch.rank).touch()
