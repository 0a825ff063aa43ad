"""The most that a kernel of one's own could gain, by the trace of a training."""

import re
from collections import Counter

import numpy as np

from dlojz.table import Table
from dlojz.traces import breakdown, kinds
from dlojz.traces.trace import open_trace

ELSEWHERE = (kinds.MATRIX, kinds.COPIES, kinds.COMMUNICATION)  # no work for a kernel of one's own
IN_CPP, LONGEST = re.compile(r"void |aten::"), 50
# Words around what a kernel of torch computes, in its name.
AROUND = re.compile(
    r"void|at|aten|native|anonymous|namespace|\w*elementwise_kernel|(Unary|Binary|A?)Functor|c10|\d+"
    r"|BFloat16|Half|float|int|multi_tensor_apply_kernel|TensorListMetadata|reduce_kernel|ReduceOp"
)


def gains(of, rows: int = 8) -> Table:
    """Return a table of the kernels or operations of a step that tensor cores cannot compute.

    Each with the gain that a kernel of one's own could have at most, as if it took no time.
    of: a trace, its file, or a job that has written one.
    """
    trace = open_trace(of)
    step = breakdown.analyse(trace).step_ms
    found = Counter()
    for name, spent in breakdown.named(trace).items():
        if (kind := kinds.kind(name)) not in ELSEWHERE:
            found[kind, short(name)] += np.array(spent)
    order = sorted(found, key=lambda key: -found[key][1])
    lines = [(*key[::-1], *found[key]) for key in order[:rows]]
    lines += [("all of these kinds", "", *sum(found.values()))] if found else []
    what = "kernel" if trace.on_gpu else "operation"
    head = (what, "kind", "times a step", "ms of a step", "share", "gain, at most")
    return Table(head, [_gain(*line, step) for line in lines], "<<>>>>", "nothing to show")


def _gain(name, kind, times, ms, step):
    """Return the row of a kernel: its share of a step, and the step's speed-up without it."""
    rest = f"x {step / (step - ms):.2f}" if ms < step else "all"
    return name, kind, f"{times:,.0f}", f"{ms:.2f}", f"{ms / step:.1%}", rest


def short(name: str) -> str:
    """Return the short name of a kernel or an operation, from the one that C++ gave it."""
    words = (word for word in re.findall(r"\w+", name) if not AROUND.fullmatch(word))
    return next(words, name) if IN_CPP.match(name) else name[:LONGEST]
