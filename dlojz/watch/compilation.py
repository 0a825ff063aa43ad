"""What torch.compile made of a run: its compilations, graphs, breaks and generated kernels.

`torch._dynamo` says when a compilation begins and ends, and counts what it met. That is no public
interface: tests/test_compilation.py holds what is read here, for the versions that we test.
"""

import time
from collections import Counter
from collections.abc import Callable

from torch._dynamo import OptimizedModule
from torch._dynamo.callback import callback_handler
from torch._dynamo.utils import counters

from dlojz.runs import records
from dlojz.traces import kinds


def is_compiled(model) -> bool:
    """Return whether a module was given to torch.compile. That begins in its first call."""
    return any(
        isinstance(module, OptimizedModule) or module._compiled_call_impl is not None
        for module in model.modules()
    )


class _Kept(list):
    """A list of callbacks whose first stays when `torch.compiler.reset()` clears it."""

    def clear(self):
        del self[1:]


class Compilations:
    """The compilations of a process from now on. Made before the trainer's first step."""

    def __init__(self, place: Callable[[], tuple[str, int]]):
        """place: returns "train" or "val", and how many training steps have begun."""
        self._place, self._begun, self._seen = place, None, []
        starts, ends = callback_handler.start_callbacks, callback_handler.end_callbacks
        callback_handler.start_callbacks = _Kept([self._starts, *starts])
        callback_handler.end_callbacks = _Kept([self._ends, *ends])

    def _starts(self, event):
        self._begun = time.perf_counter()

    def _ends(self, event):
        mode, step = self._place()
        seconds = time.perf_counter() - self._begun
        why = event.callback_trigger.name.lower()
        self._seen.append(
            {"id": event.compile_id, "why": why, "mode": mode, "step": step, "seconds": seconds}
        )

    def seen(self) -> records.Compilation:
        """Return what was seen; of what torch counts, all since the process began."""
        stats, inductor = counters["stats"], counters["inductor"]
        return records.Compilation(
            seen=self._seen,
            graphs=stats["unique_graphs"],
            operations=stats["calls_captured"],
            breaks=self._breaks(),
            differentiated=counters["aot_autograd"]["ok"],
            generated=inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_hit"],
        )

    def _breaks(self):
        """Return why graphs broke, or frames were given up: the first line of each reason."""
        found = Counter()
        for counter in ("graph_break", "unimplemented"):
            for reason, count in counters[counter].items():
                found[reason.splitlines()[0]] += count
        return dict(found)


def coverage(events) -> dict:
    """Return how many compiled regions ran in a step, and which matrix products lay outside.

    events: the profiler's. Regions of the backward pass count, too. A CUDA graph that is replayed
    is one region without operations of its own.
    """
    regions = [e for e in events if kinds.COMPILED.match(e.name())]
    inside = [(e.start_ns(), e.start_ns() + e.duration_ns()) for e in regions]
    outside = Counter()
    for event in events:
        kind = kinds.MATRIX_OPS.get(event.name())
        if kind and not any(begin <= event.start_ns() < end for begin, end in inside):
            outside[kind] += 1
    return {"compiled_regions": len(regions), "uncompiled": dict(outside)}
