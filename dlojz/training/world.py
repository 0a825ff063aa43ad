"""The group of the processes of a run, and how a process leaves it."""

import torch

_kept = []


def are_joined() -> bool:
    """Return whether this process is in a group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def keep_group():
    """Keep the process group until the process ends, also when it was left.

    Else a DDP model may hold the last reference to it. When that is freed it waits, with Python's
    lock, for a thread of gloo that may need the lock to free a tensor: such a process hangs behind
    the end of its log.
    """
    if are_joined():
        _kept.append(torch.distributed.group.WORLD)


def leave_group():
    """Leave the process group, unless the trainer did."""
    if are_joined():
        torch.distributed.destroy_process_group()
