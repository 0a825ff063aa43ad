"""The host's time in a trace's steps, apart from launching.

It waits for a batch or for the device, collects garbage, allocates memory of the device, copies, or
does something that is not in the trace.
"""

import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from dlojz.traces import spans
from dlojz.traces.kinds import ALLOCATES, BLOCKING, COPYING, TO_HOST, WAITS
from dlojz.traces.trace import GARBAGE, LINE, PRINTS, Event, Trace

DATA, COLLECTOR, ALLOCATOR = "data", "garbage collector", "memory allocation"
COPIES, READS, SYNC = "copies to the device", "results that the host reads", "synchronisation"
AWAY = "the host, which does something else"
LOADER = re.compile(r"^enumerate\(DataLoader\)|^data$")  # torch's range and the Chronometer's
# print(tensor) without Python's functions: it selects finite numbers that are not zero, and then
# reads number after number, with only these operations in between.
FINITE, SELECTS = "aten::isfinite", "aten::masked_select"
FORMATS = re.compile(
    "^aten::(masked_select|item|is_nonzero|unbind|select|slice|detach|resolve_conj|resolve_neg"
    "|ceil|ne|eq|__and__|abs|to|min|max|div|gt|lt)$"
)
AWAY_MS = 3  # without a call of the runtime; a launching host calls every 0.1 ms, at most 2.7
AWAY_RECORDED_MS = 4  # with Python's functions, which slow it: 5.1, else at most 3.05
MAYBE_PRINT = "print, it seems"
SKEW_MS = 0.01  # between the clocks of host and device: at most 0.008 in traces of an MI300X
LONG_MS = 0.05  # a copy that blocks the host for this long counts as a wait
DDP = "DistributedDataParallel.forward"  # waits in its first steps, to measure itself
ASKS = {  # operations that give the host a number, as written in a program
    "aten::is_nonzero": "if tensor",
    "aten::item": ".item()",
    "aten::_local_scalar_dense": ".item()",
}
COPIES_OF = ("aten::to", "aten::_to_copy", "aten::copy_")
OPTIMIZER = re.compile(r"^Optimizer\.")  # torch's ranges, such as "Optimizer.step#SGD.step"
GLOO = re.compile(r"^gloo:")  # the ranges of gloo's threads


class Asked(NamedTuple):
    """A wait of the host for the device."""

    cause: str
    call: str
    op: str
    why: str
    line: str
    begin: float  # of all that the host did for it
    end: float
    ms: float  # of the call


def waits(trace: Trace) -> list[Asked]:
    """Return the host's waits for the device, in chronological order."""
    every = []
    asked = synchronisations(trace)
    for thread in {c.where for c in asked}:
        mine = [c for c in asked if c.where == thread]
        ops, lines, ranges = (
            [e for e in each if e.where == thread]
            for each in (trace.ops, trace.lines, trace.ranges)
        )
        copies, printing = _copies(trace, thread), _printing(ops)
        outside = zip(*(around(mine, each) for each in (ops, lines, ranges)), strict=True)
        found = [*zip(mine, outside, strict=True), (None, ([], [], []))]
        for (call, of), (_, of_next) in pairwise(found):
            if BLOCKING.match(call.name) and of[0][-1:] == of_next[0][-1:] != []:
                continue  # a copy whose operation goes on to synchronise: it waits once
            copy = copies[1][bisect_right(copies[0], call.begin) - 1] if copies[0] else ""
            every.append(_asked(call, *of, copy, printing))
    return sorted(every, key=lambda wait: wait.begin)


def _asked(call, ops, lines, ranges, copy, printing):
    cause, why, whole = READS, "", call
    ops = [e for e in ops if not e.name.startswith("autograd::")]
    formats = [e for e in lines if PRINTS in e.name]
    asks = [e for e in ops if e.name in ASKS]
    if formats:
        why, whole = "print", formats[0]
    elif ops and ops[0].begin in printing:
        why, whole = MAYBE_PRINT, ops[0]
    elif asks:
        why, whole = ASKS[asks[0].name], asks[0]
    elif any(e.name in COPIES_OF for e in ops):
        cause, why = (READS, ".cpu()") if TO_HOST.match(copy) else (COPIES, "a copy")
    elif ops:
        why = ops[0].name
    else:
        cause, why = SYNC, next((e.name for e in ranges if e.name == DDP), "")
    op, line = ops[0].name if ops else "", _line([e.name for e in lines])
    return Asked(cause, call.name, op, why, line, whole.begin, whole.end, call.ms)


def _copies(trace, thread):
    """Return the times of a thread's calls for copies, and the names of the copies."""
    names = {e.id: e.name for e in trace.work if e.name.startswith("Memcpy")}
    found = [(c.begin, names[c.id]) for c in trace.calls if c.where == thread and c.id in names]
    return [begin for begin, _ in found], [name for _, name in found]


def _printing(ops) -> set[float]:
    """Return the begins of the operations that are likely a print of a tensor."""
    found, end, finite, selected = set(), 0.0, False, False
    for op in ops:
        if op.end <= end:
            continue
        end = op.end
        finite = op.name == FINITE or (finite and bool(FORMATS.match(op.name)))
        selected = finite and (selected or op.name == SELECTS)
        if selected:
            found.add(op.begin)
    return found


def around(inner: Sequence[Event], outer: Sequence[Event]) -> list[list[Event]]:
    """Return the events of `outer` around each of `inner`, widest first; all of one thread."""
    found, stack, rest = [], [], iter(outer)
    following = next(rest, None)
    for event in inner:
        while following and following.begin <= event.begin:
            stack.append(following)
            following = next(rest, None)
        stack = [e for e in stack if e.end >= event.begin]
        found.append([e for e in stack if e.end >= event.end])
    return found


def _line(lines):
    """Return the innermost function that is not torch's."""
    own = [name for name in lines if PRINTS not in name]
    if not own:
        return ""
    path, line, function = LINE.match(own[-1]).groups()
    return f"{Path(path).name}, {function} (from line {line})"


def held_up(trace: Trace, waited: Sequence[Asked]) -> dict:
    """Return the spans of the steps in which the host was kept from launching, by cause.

    Named activities of the host come before mere absences, and waits for the device come last,
    because the device is usually busy meanwhile.
    """
    copies = [e for e in trace.ops if e.where == trace.thread and e.name == "aten::pin_memory"]
    found = {
        DATA: loading(trace),
        COLLECTOR: spans.of(collections(trace)),
        COPIES: spans.of([*copies, *(w for w in waited if w.cause == COPIES)]),
        ALLOCATOR: spans.of(allocations(trace)),
        AWAY: spans.of(absences(trace)),
        READS: spans.of(w for w in waited if w.cause != COPIES),
    }
    begin, end = trace.steps[0].begin, trace.steps[-1].end
    return {
        cause: [(max(a, begin), min(b, end)) for a, b in each if a < end and b > begin]
        for cause, each in found.items()
    }


def _launching(trace):
    done = {e.id for e in trace.work}
    return {trace.thread} | {c.where for c in trace.calls if c.id and c.id in done}


def synchronisations(trace: Trace) -> list[Event]:
    """Return the calls in which a training thread waits for the device, in the steps."""
    threads, done = _launching(trace), {e.id: e.end for e in trace.work}
    return spans.outermost(
        c
        for c in trace.calls
        if c.where in threads
        and (
            WAITS.match(c.name)
            or (COPYING.match(c.name) and c.ms >= LONG_MS)
            or blocks(c, done.get(c.id, c.end))
        )
        and c.begin >= trace.steps[0].begin
        and c.end <= trace.steps[-1].end
    )


def blocks(call: Event, done: float) -> bool:
    """Return whether a call is a copy's, and returned when the copy was done."""
    return bool(BLOCKING.match(call.name)) and call.end >= done - SKEW_MS


def collections(trace: Trace) -> list[Event]:
    """Return the runs of Python's garbage collector."""
    return [e for e in trace.ranges if e.name == GARBAGE]


def allocations(trace: Trace) -> list[Event]:
    """Return the calls that allocate or free memory of the device; many wait for it."""
    threads = _launching(trace)
    return spans.outermost(c for c in trace.calls if c.where in threads and ALLOCATES.match(c.name))


def absences(trace: Trace) -> list[Event]:
    """Return the long spans of the steps without a request by the host.

    On a GPU these have no call of its runtime, on a processor no operation. Without Python's
    functions in the trace a sleep looks like a garbage collection. The name is that of the
    operation or the line around the span, if any. An optimizer that sorts its parameters before its
    first call counts as launching.
    """
    threads = _launching(trace)
    whole = [(trace.steps[0].begin, trace.steps[-1].end)]
    asking = spans.of(c for c in trace.calls if c.where in threads) if trace.on_gpu else []
    asking = asking or spans.of([*trace.ops, *(e for e in trace.ranges if GLOO.match(e.name))])
    if trace.on_gpu and not asking:
        return []  # a trace of the device only
    known = spans.union([*asking, *loading(trace), *spans.of(collections(trace))])
    least_ms = AWAY_RECORDED_MS if trace.lines else AWAY_MS
    long = [s for s in spans.without(whole, known) if s[1] - s[0] >= least_ms]
    found = [Event(_place(trace, begin, end), begin, end, trace.thread) for begin, end in long]
    return [s for s in found if not any(OPTIMIZER.match(name) for name in _phases(trace, s))]


def phase_of(trace: Trace, span: Event) -> str:
    """Return the innermost range around the middle of a span, such as "update", or ""."""
    return next(reversed(_phases(trace, span)), "")


def _phases(trace, span):
    """Return the names of the ranges around the middle of a span, widest first."""
    middle = (span.begin + span.end) / 2
    return [e.name for e in trace.ranges if e.where == span.where and e.begin <= middle < e.end]


def _place(trace, begin, end):
    """Return the name of a span's place: an operation that takes most of it, or the line."""
    most = [
        e.name
        for e in trace.ops
        if e.where == trace.thread and min(e.end, end) - max(e.begin, begin) > (end - begin) / 2
    ]
    if most:
        return most[0]
    middle = (begin + end) / 2
    mine = [e.name for e in trace.lines if e.where == trace.thread and e.begin <= middle < e.end]
    return _line(mine)


def loading(trace: Trace) -> list[tuple[float, float]]:
    """Return the spans in which the training thread waited for a batch."""
    return spans.of(e for e in trace.ranges if e.where == trace.thread and LOADER.match(e.name))
