"""The breakdown of a trace's steps: the time of work, the idle time, and its causes.

A gap on a GPU has its cause on the host: before the call whose kernel ended it, the host did
something else, see `traces.host`. `traces.whatif` replays host and device without each cause in
turn: the step's gain is the cost of the cause, in its own gap and in the next ones until the host
is ahead again. Only the rest, with a host that does nothing but launch, is called launch-bound.
"""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import NamedTuple

from dlojz.traces import host, kinds, spans, whatif
from dlojz.traces.host import ALLOCATOR, AWAY, COLLECTOR, COPIES, DATA, READS, SYNC
from dlojz.traces.kinds import COMMUNICATION, MATRIX, PAGEABLE, kind
from dlojz.traces.spans import common, length, union, without
from dlojz.traces.trace import Event, Trace, TraceError

LAUNCHES, PAUSES = "launches", "pauses between kernels"
PYTHON = "Python between the operations"  # on a CPU, which launches nothing
BOUND = 0.85  # the share of computing above which a step is compute-bound
FEW = 10  # kernels, too few for an average of a training's launches
TOO_FEW = "too few kernels to tell what bounds them"
WELL = "GPU bound", "processor bound"

WORDS = {
    LAUNCHES: "launch bound",
    PAUSES: "held up by pauses between kernels",
    PYTHON: "held up by Python between the operations",
    SYNC: "synchronisation bound",
    READS: "synchronisation bound",
    DATA: "data bound",
    COMMUNICATION: "communication bound",
    COLLECTOR: "held up by Python's garbage collector",
    ALLOCATOR: "held up by the allocation of memory",
    COPIES: "held up by copies to the device",
    AWAY: "held up by a host that is busy elsewhere",
}


class Wait(NamedTuple):
    """A place where the host waits for the device."""

    call: str
    op: str  # torch's operation around the call, if any
    why: str  # the operation, as it is written in a program
    line: str  # the trainee's, if the trace has it
    count: int
    ms: float
    idle_ms: float  # the device's idle time because of it


@dataclass(frozen=True)
class Reading:
    """The breakdown of a step's time; all times in milliseconds per step."""

    steps: int
    step_ms: float
    device: str | None
    kinds: dict[str, float]  # the device's work, by kind
    tensor_cores: float | None  # their share of the matrix products' time; None on a CPU
    idle: dict[str, float]  # idle time of the device, by cause
    exposed_ms: float  # communication that no other work overlaps
    waits: list[Wait]
    pageable_ms: float  # copies of memory that was not pinned
    launches: float  # kernels per step
    functions: bool = False  # Python's functions were recorded, which slows the host
    unseen: str = ""  # a device that worked, missing in the trace

    @property
    def lost(self) -> dict[str, float]:
        """Return the shares of the step without computing, by cause."""
        found = Counter(self.idle)
        found[COMMUNICATION] += self.exposed_ms
        found[COPIES] += self.pageable_ms
        return {cause: ms / self.step_ms for cause, ms in found.most_common() if ms > 0}

    def without_profiler(self, step_ms: float) -> "Reading":
        """Return the reading of a step that takes `step_ms` on average without the profiler.

        The device's work stays the same. A profiler lengthens each launch, and stops the host now
        and then to write, so what it added is taken from the idle time of these two causes first.
        """
        if not self.device or step_ms >= self.step_ms:
            return self
        work_ms = self.step_ms - sum(self.idle.values())
        left = max(step_ms - work_ms, 0.0)  # of the idle time
        idle = {}
        for mine in (self.idle.keys() - {LAUNCHES, AWAY}, self.idle.keys() & {LAUNCHES, AWAY}):
            had = sum(self.idle[cause] for cause in mine)
            keep = min(left / had, 1.0) if had else 0.0
            idle |= {cause: keep * self.idle[cause] for cause in mine}
            left -= keep * had
        idle = {cause: idle[cause] for cause in self.idle}
        return replace(self, step_ms=work_ms + sum(idle.values()), idle=idle)

    @property
    def verdict(self) -> str:
        """Return the bottleneck of a step, in a few words."""
        if self.unseen:
            return self.unseen
        shares = Counter()
        for cause, share in self.lost.items():
            shares[WORDS[cause]] += share
        if shares[WORDS[PAUSES]] <= 1 - BOUND:  # the device needs them, however early the launch
            del shares[WORDS[PAUSES]]
        if shares.total() <= 1 - BOUND:
            return WELL[0] if self.device else WELL[1]
        words = shares.most_common(1)[0][0]
        if words != WORDS[LAUNCHES]:
            return words
        if self.few:
            return TOO_FEW
        return f"{words}, while Python's functions are recorded" if self.functions else words

    @property
    def few(self) -> bool:
        """Return whether the steps have too few kernels for an average."""
        return self.launches * self.steps < FEW


def analyse(trace: Trace) -> Reading:
    """Return a trace's reading: the parts of its steps' time, empty if it lacks the device."""
    if trace.unseen:
        ms = length(spans.of(trace.steps)) / len(trace.steps)
        return Reading(len(trace.steps), ms, None, {}, None, {}, 0, [], 0, 0, unseen=trace.unseen)
    return _of_gpu(trace) if trace.on_gpu else _of_processor(trace)


def _of_gpu(trace):
    """Return the reading of a process with one GPU, whose streams are merged."""
    work, free = _asked_in_the_steps(trace)
    steps = len(trace.steps)
    by_kind = defaultdict(list)
    for e in work:
        by_kind[kind(e.name)].append(e)
    compute = spans.of(e for e in work if kind(e.name) != COMMUNICATION)
    talking = spans.of(by_kind.get(COMMUNICATION, ()))
    pageable = spans.of(e for e in work if PAGEABLE.match(e.name))
    others = spans.of(e for e in work if kind(e.name) != kinds.COPIES)
    idle, waits = _causes(trace, work, free)
    busy = length(spans.of(work))
    return Reading(
        steps=steps,
        step_ms=busy / steps + sum(idle.values()),
        device=trace.device or "GPU",
        kinds={k: length(spans.of(found)) / steps for k, found in by_kind.items()},
        tensor_cores=_share(by_kind.get(MATRIX, ())),
        idle=idle,
        exposed_ms=length(without(talking, compute)) / steps,
        waits=waits,
        pageable_ms=length(without(pageable, others)) / steps,
        launches=len(work) / steps,
        functions=bool(trace.lines),
    )


def holes(trace: Trace) -> list[tuple[float, float]]:
    """Return the spans in which the device was idle, in the steps of a trace.

    On a processor: those without an operation or a communication.
    """
    if not trace.on_gpu:
        talking = (e for e in trace.ranges if host.GLOO.match(e.name))
        return without(
            [(trace.steps[0].begin, trace.steps[-1].end)], spans.of([*trace.ops, *talking])
        )
    work, free = _asked_in_the_steps(trace)
    busy = spans.of(work)
    return without([(free, max(e.end for e in work))], busy)


def in_steps(trace: Trace) -> list[Event]:
    """Return the device's work in the steps of a trace."""
    return _asked_in_the_steps(trace)[0] if trace.on_gpu else []


def named(trace: Trace) -> dict[str, tuple[float, float]]:
    """Return the kernels of a step by name, or a processor's operations: number, own milliseconds.

    Of what is named several times, all times are added.
    """
    work = [(e, e.ms) for e in in_steps(trace)] if trace.on_gpu else own_times(_computing(trace))
    count, spent, steps = Counter(), Counter(), len(trace.steps)
    for e, ms in work:
        count[e.name] += 1
        spent[e.name] += ms
    return {name: (count[name] / steps, ms / steps) for name, ms in spent.most_common()}


def _asked_in_the_steps(trace):
    """Return the work launched since the first step began, and the time the device was free for it.

    As a trace begins, the device still works on an earlier step, whose launches the trace lacks.
    """
    begin = trace.steps[0].begin
    asked = {c.id: c.begin for c in trace.calls if c.id}
    work, earlier = [], []
    for e in trace.work:
        mine = not asked or asked.get(e.id, begin - 1) >= begin
        (work if mine else earlier).append(e)
    if not any(e.ms for e in work):
        raise TraceError(f"{trace.path}: no step in it asked the GPU for anything")
    return work, max([begin, *(e.end for e in earlier if e.begin < work[0].begin)])


def launching(trace: Trace) -> dict[str, tuple[float, float]]:
    """Return the askers of a step's kernels: {name: (kernels a step, their mean in ms)}.

    The name is the optimizer's, else that of the outermost operation around the call, if there is
    one. The asker of most kernels comes first.
    """
    spent = defaultdict(list)
    work = {e.id: e for e in in_steps(trace) if e.id}
    calls = [c for c in trace.calls if c.id in work]
    for thread in {c.where for c in calls}:
        mine = [c for c in calls if c.where == thread]
        around = ([e for e in each if e.where == thread] for each in (trace.ranges, trace.ops))
        for call, ranges, ops in zip(mine, *(host.around(mine, e) for e in around), strict=True):
            updates = [e for e in ranges if host.OPTIMIZER.match(e.name)]
            for first in [*updates, *ops][:1]:
                spent[first.name].append(work[call.id].ms)
    most = sorted(spent.items(), key=lambda item: -len(item[1]))
    return {name: (len(ms) / len(trace.steps), sum(ms) / len(ms)) for name, ms in most}


def _share(matrix):
    """Return the share of matrix kernels' time on tensor cores; None if no name indicates it."""
    total = sum(e.ms for e in matrix)
    if not total or not any(kinds.tells(e.name) for e in matrix):
        return None
    return sum(e.ms for e in matrix if kinds.on_tensor_cores(e.name)) / total


def _causes(trace, work, free):
    """Return the device's idle time, {cause: ms per step}, and the host's waits for the device."""
    waits, steps = host.waits(trace), len(trace.steps)
    found, rest = whatif.costs(
        whatif.tasks(_calls_of(trace, work), free),
        free,
        (trace.steps[0].begin, trace.steps[-1].end),
        host.held_up(trace, waits),
    )
    idle = Counter({cause: ms / steps for cause, ms in found.items()})
    idle |= {LAUNCHES: rest.waits / steps, PAUSES: rest.pauses / steps}
    places, total = defaultdict(list), Counter()
    for wait in waits:
        total[_paid(wait.cause)] += wait.ms
    for wait in waits:
        lost = found[_paid(wait.cause)] * wait.ms / total[_paid(wait.cause)]
        places[wait.call, wait.op, wait.why, wait.line].append((wait.ms, lost))
        if wait.cause == SYNC:  # replayed together with the host's reads
            idle[SYNC] += lost / steps
            idle[READS] -= lost / steps
    waited = [
        Wait(*place, len(each), sum(ms for ms, _ in each), sum(lost for _, lost in each))
        for place, each in places.items()
    ]
    idle = {cause: ms for cause, ms in idle.items() if ms > 1e-9}
    return idle, sorted(waited, key=lambda w: (-w.idle_ms, -w.ms))


def _paid(cause):
    """Return the cause that a wait is replayed under.

    Waits for the device are replayed together, and their cost is divided by duration: without the
    first of them the host would have waited at the next.
    """
    return READS if cause == SYNC else cause


def _calls_of(trace, work):
    """Return the times of each task to replay: (call began, it ended, work began, it ended)."""
    calls = {c.id: c for c in trace.calls if c.id}
    found = []
    for e in work:
        if (call := calls.get(e.id)) is None:  # unknown: as if launched in time
            found.append((e.begin, -math.inf, e.begin, e.end))
            continue
        # Such a copy blocks the host, so its call precedes it on the device.
        blocks = "Pageable" in e.name or PAGEABLE.match(e.name) or host.blocks(call, e.end)
        began = max(call.begin, min(e.begin, call.end)) if blocks else call.begin
        found.append((began, max(call.end, began), e.begin, e.end))
    return found


def _of_processor(trace):
    """Return the reading of a process without a GPU, from each operation's own time."""
    whole, steps = [(trace.steps[0].begin, trace.steps[-1].end)], len(trace.steps)
    loading, collecting = host.loading(trace), spans.of(host.collections(trace))
    ops = _computing(trace)
    computing = spans.of(ops)
    talking = spans.of(e for e in trace.ranges if host.GLOO.match(e.name))
    exposed = common(whole, without(talking, union([*computing, *loading])))
    own = Counter()
    for e, ms in own_times(ops):
        own[kind(e.name)] += ms
    own[COMMUNICATION] = exposed
    away = spans.of(host.absences(trace))
    named = union([*loading, *collecting, *computing, *talking, *away])
    idle = {
        DATA: common(whole, loading) / steps,
        COLLECTOR: common(whole, collecting) / steps,
        AWAY: length(away) / steps,
        PYTHON: length(without(whole, named)) / steps,
    }
    return Reading(
        steps=steps,
        step_ms=length(whole) / steps,
        device=None,
        kinds={k: ms / steps for k, ms in own.most_common() if ms > 0},
        tensor_cores=None,
        idle={cause: ms for cause, ms in idle.items() if ms > 0},
        exposed_ms=exposed / steps,
        waits=[],
        pageable_ms=0.0,
        launches=len(ops) / steps,
        functions=bool(trace.lines),
    )


def _computing(trace):
    """Return the operations in the steps of a processor's trace, without those that load images."""
    whole, loading = [(trace.steps[0].begin, trace.steps[-1].end)], host.loading(trace)
    ops = [e for e in trace.ops if common([(e.begin, e.end)], whole) > 0]
    # Operations that load images in this thread are not part of the training.
    return [e for e in ops if not any(begin <= e.begin < end for begin, end in loading)]


def own_times(ops) -> list[tuple[Event, float]]:
    """Return each operation with its time, without that of the operations inside of it."""
    own, stacks = [], defaultdict(list)
    for e in ops:
        stack = stacks[e.where]
        while stack and own[stack[-1]][0].end <= e.begin:
            stack.pop()
        if stack:
            around, ms = own[stack[-1]]
            own[stack[-1]] = around, ms - e.ms
        stack.append(len(own))
        own.append((e, e.ms))
    return own
