"""The work of torch.compile in a run: compilations, graphs, breaks and generated kernels.

Torch announces the begin and end of a compilation, and keeps counters.
"""

import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable

import torch

from dlojz.runs import records
from dlojz.traces import kinds
from dlojz.training import private
from dlojz.training.flags import declared
from dlojz.training.replaced import replaced


def is_compiled(model) -> bool:
    """Return whether a module was given to torch.compile, which begins in its first call."""
    return any(map(private.is_compiled, model.modules()))


class Compilations:
    """The compilations of a process from now on. Made before the trainer's first step."""

    def __init__(self, place: Callable[[], tuple[str, int]]):
        """place: returns "train" or "val", and the number of training steps so far."""
        self._place, self._begun, self._seen = place, None, []
        private.on_compilations(self._starts, self._ends)

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
        """Return the record; torch's counters are those since the process began."""
        counters = private.compile_counters()
        stats, inductor = counters["stats"], counters["inductor"]
        return records.Compilation(
            seen=self._seen,
            graphs=stats["unique_graphs"],
            operations=stats["calls_captured"],
            breaks=breaks(counters),
            differentiated=counters["aot_autograd"]["ok"],
            generated=inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_hit"],
        )


def words(model, args) -> dict[str, str]:
    """Return the mode or backend that the trainer's `compiled` asks for, by word of --compile.

    torch.compile judges its arguments at once, and compiles in a first call that never comes: a run
    in a mode of Inductor would take a compiler and minutes. {}: the trainer compiles elsewhere.
    """
    compiled = getattr(sys.modules["__main__"], "compiled", None)
    (flag,) = (flag for flag in declared("compile") if flag.label == "--compile")
    found = {}
    for word in flag.choices if compiled else ():
        asked = found[word] = []

        def note(*names, asked=asked, real=torch.compile, **how):
            asked.append(f"mode {how.get('mode') or 'default'}")
            if how.get("backend", "inductor") != "inductor":
                asked[-1] = f"backend {how['backend']}"
            return real(*names, **how)

        with replaced(torch, compile=note):
            try:
                compiled(model, Namespace(**vars(args) | {"compile": word}))
            except Exception as error:  # of any kind: it is the trainer's code
                asked[:] = [f"{type(error).__name__}: {error}".partition("\n")[0]]
    return {word: ", ".join(dict.fromkeys(asked)) for word, asked in found.items() if asked}


def breaks(counters) -> dict:
    """Return the number of graph breaks by the first line of their reason."""
    found = Counter()
    for counter in ("graph_break", "unimplemented"):
        for reason, count in counters[counter].items():
            found[reason.splitlines()[0]] += count
    return dict(found)


def coverage(events) -> dict:
    """Return the number of compiled regions in a step, and the matrix products outside them.

    events: the profiler's. Regions of the backward pass count, too. A replayed CUDA graph is one
    region without operations of its own.
    """
    regions = [e for e in events if kinds.COMPILED.match(e.name())]
    inside = [(e.start_ns(), e.start_ns() + e.duration_ns()) for e in regions]
    outside = Counter()
    for event in events:
        kind = kinds.MATRIX_OPS.get(event.name())
        if kind and not any(begin <= event.start_ns() < end for begin, end in inside):
            outside[kind] += 1
    return {"compiled_regions": len(regions), "uncompiled": dict(outside)}
