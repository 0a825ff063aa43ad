"""The group of a run's processes."""

import torch

_kept = []


def are_joined() -> bool:
    """Return whether this process is in a group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def keep_group():
    """Keep the process group alive until the process ends, even after it was left.

    Otherwise a DDP model may hold the last reference. Freeing it waits, with Python's lock, for a
    thread of gloo that may need the lock to free a tensor: the process hangs after the end of its
    log.
    """
    if are_joined():
        _kept.append(torch.distributed.group.WORLD)


def leave_group():
    """Leave the process group, unless the trainer has left it."""
    if are_joined():
        torch.distributed.destroy_process_group()
