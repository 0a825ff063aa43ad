"""The idle time of a device, and that with a host that had not been held up.

A host asks a device for work, which the device does in that order. So work begins

    begin = max(asked + latency, free + pause)

where `free` is the time at which the device has done all earlier work. If the host asked before
that, the device did not wait for it, but paused for some microseconds between two kernels.
Otherwise it waited, and the latency is that from the call to the work.

Without a span in which the host was held up, it would have asked for all later work sooner by that
span. The replay computes the idle time of the device in that case. So a wait also accounts for the
gaps after it, until the host is ahead again, and for nothing if the device had enough work
meanwhile. The steps are replayed twice in a row, since a training repeats them, and the second time
counts: so a wait at the end of the last step is not lost, and no step lacks a predecessor.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from dlojz.traces.spans import union, without


class Task(NamedTuple):
    """A piece of work for a device; all times in ms."""

    asked: float  # the begin of the host's call
    latency: float  # from the call to the work, if the device waited for the host
    pause: float  # after the previous work, if the device did not wait
    busy: float  # the additional time that the device is busy


class Replay(NamedTuple):
    """A device's time in the steps of a trace; all times in ms."""

    pauses: float
    waits: float  # for the host


def tasks(work, free: float) -> list[Task]:
    """Return the tasks of a device that is free from the time `free` on.

    work: (begin and end of the call, begin and end of the work), in order of the work's begin.
    """
    found = []
    for asked, returned, begin, end in work:
        late, own = returned > free, max(0.0, begin - free)
        latency = begin - asked if late and own else min(0.0, begin - asked)
        found.append(Task(asked, latency, 0.0 if late else own, max(0.0, end - max(begin, free))))
        free = max(free, end)
    return found


def replay(found: Sequence[Task], free: float, steps: tuple[float, float], skipped) -> Replay:
    """Return the idle time of the steps, had the host not spent these spans.

    steps: the begin of the first and the end of the last, on the host. skipped: a union of spans.
    """
    ends = [end for _, end in skipped]
    saved = [0.0, *accumulate(end - begin for begin, end in skipped)]
    sooner = []
    for task in found:
        at = bisect_right(ends, task.asked)
        inside = max(0.0, task.asked - skipped[at][0]) if at < len(skipped) else 0.0
        sooner.append(task.asked - saved[at] - inside)
    for _ in range(2):
        pauses = waits = 0.0
        for asked, task in zip(sooner, found, strict=True):
            pauses += task.pause
            begin = max(asked + task.latency, free + task.pause)
            waits += begin - free - task.pause
            free = begin + task.busy
        # The device continues; the host begins the same steps once more.
        free -= steps[1] - steps[0] - saved[-1]
    return Replay(pauses, waits)


def costs(found: Sequence[Task], free: float, steps, causes) -> tuple[dict, Replay]:
    """Return the cost of each cause, and the idle time that no cause explains, in ms.

    causes: {name: union of the spans in which it held up the host}, removed one after the other, so
    that time with two causes counts for the first.
    """
    before, skipped, gains = replay(found, free, steps, []), [], {}
    for name, spans in causes.items():
        mine = without(spans, skipped)
        skipped = union([*skipped, *mine])
        after = replay(found, free, steps, skipped) if mine else before
        gains[name] = before.waits - after.waits
        before = after
    return gains, before
