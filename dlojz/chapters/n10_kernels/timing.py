"""Calls that are timed on cold operands: no cache has kept them since the call before."""

import ctypes
from contextlib import suppress

import torch

from dlojz.chapters import session

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # of glibc's malloc.h
COLD_BYTES = {"cpu": 128 << 20, "cuda": 512 << 20}  # several times the last cache
MOST = 1024  # copies


def copies(make, device) -> list:
    """Return tuples of random tensors, each by make(): as many as no cache holds together."""
    first = make()
    count = -(-COLD_BYTES[device.type] // sum(map(session.size, first)))
    return [first, *(make() for _ in range(min(MOST, count) - 1))]


def keep_pages():
    """Let this process keep the memory that it frees; where the C library can't, do nothing.

    Else a large result lies in new pages each time, which the system fills with zeros first: on a
    processor that took as long as ReLU.
    """
    with suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.mallopt(TRIM_THRESHOLD, -1)
        library.mallopt(MMAP_MAX, 0)


class Cycle:
    """A call on each of several operands in turn: `len` calls, whose results it keeps to its end.

    Kept, the next call writes elsewhere: the results are cold, too.
    """

    def __init__(self, call, operands):
        self.call, self.operands = call, operands

    def __len__(self):
        return len(self.operands)

    def __call__(self):
        return [self.call(*each) for each in self.operands]


def in_graph(cycle: Cycle, device):
    """Return a call that repeats the kernels of a cycle; on a processor, the cycle itself.

    In a CUDA graph no kernel waits for Python, whose calls take longer than a small kernel.
    """
    cycle()  # compiles, tunes and allocates
    if device.type != "cuda":
        return cycle
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        cycle()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cycle()
    return graph.replay


def by_call(cycles, device, rounds: int, from_python=False) -> dict:
    """Return the milliseconds of one call of each cycle, by round; the cycles take turns.

    from_python: also the time in which Python launches the kernels, on a GPU without a graph.
    """
    calls = {name: c if from_python else in_graph(c, device) for name, c in cycles.items()}
    spent = session.in_turn(calls, device, rounds, warm_up=1)
    return {name: [ms / len(cycles[name]) for ms in each] for name, each in spent.items()}
