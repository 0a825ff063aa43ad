"""The reader of torch.profiler's traces, and the analysis of where the time of their steps goes.

A trace is Chrome's JSON, as `prof.export_chrome_trace("trace.json.gz")` writes it:

    {"deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}], "traceEvents": [
      {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#5", "ts": 100.0, "dur": 900.0},
      {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "tid": 9, "ts": 120.0,
       "dur": 5.0, "args": {"correlation": 7}},
      {"ph": "X", "cat": "kernel", "name": "sm90_xmma_fprop_implicit_gemm_bf16", "ts": 150.0,
       "dur": 80.0, "args": {"correlation": 7, "device": 0, "stream": 7}}]}

Times there are microseconds; here they are milliseconds since the file's first event. Only the
fields that are needed are kept of an event, so that a trace of 100 MB takes a fraction of the
memory that its JSON would. Format: Kineto, https://github.com/pytorch/kineto.
"""

import gzip
import json
import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from dlojz.runs.kinds import COMMUNICATION, MATRIX, WAITS, kind, on_tensor_cores
from dlojz.runs.spans import common, length, union, without

CHUNK = 1 << 20  # characters read at a time
STEP = re.compile(r"ProfilerStep#(\d+)")
GARBAGE = "Python GC"  # how torch names a run of the garbage collector
WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
# The files of torch and Python, which are not the trainee's.
FOREIGN = re.compile(r"^<|site-packages|dist-packages|/lib/python|^torch/|^threading|^contextlib")
LINE = re.compile(r"(.+\.py)\((\d+)\): (.+)")
PRINTS = "torch/_tensor_str.py"  # the one file of torch that tells why a tensor is read


class TraceError(ValueError):
    """An error that says why a file is not a trace."""


class Event(NamedTuple):
    """A named span of time on the host or on a device."""

    name: str
    begin: float  # ms
    end: float
    where: str  # the host's thread, or the device and its stream
    id: int = 0  # a launch and the work that it launched share this number

    @property
    def ms(self) -> float:
        """Return how long it took."""
        return self.end - self.begin


@dataclass
class Trace:
    """The events of a trace, each list in chronological order."""

    path: Path
    device: str | None  # the name of the machine's first GPU
    steps: list[Event] = field(default_factory=list)  # "ProfilerStep#5"
    work: list[Event] = field(default_factory=list)  # kernels and copies of the GPU
    calls: list[Event] = field(default_factory=list)  # calls of CUDA on the host
    ops: list[Event] = field(default_factory=list)  # operations of torch on the host
    ranges: list[Event] = field(default_factory=list)  # named by `record_function`
    lines: list[Event] = field(default_factory=list)  # Python functions, except torch's own

    @property
    def on_gpu(self) -> bool:
        """Return whether a GPU did anything."""
        return bool(self.work)

    @property
    def thread(self) -> str:
        """Return the host's training thread."""
        return self.steps[0].where


# Reading -----------------------------------------------------------------------------------------


def events(path: Path):
    """Yield (head, event) for each event of a trace.

    head: the fields of the file before its events. Raises TraceError if the file is not a trace, or
    is truncated.
    """
    scan, path = json.JSONDecoder().scan_once, Path(path)
    try:
        with open(path, "rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rt") if zipped else open(path) as file:
            head, text = _head(file, path)
            at = 0
            while True:
                while at < len(text) and text[at] in ", \n\r\t":
                    at += 1
                if text[at : at + 1] == "]":
                    return
                try:
                    event, at = scan(text, at)
                except (StopIteration, json.JSONDecodeError) as error:  # more text is needed
                    more = file.read(CHUNK)
                    if not more:
                        raise TraceError(f"{path}: cut short, or damaged") from error
                    text, at = text[at:] + more, 0
                    continue
                yield head, event
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: can't be read: {error}") from error


def _head(file, path):
    """Return the fields before the events, and the text read beyond them."""
    text = ""
    while not (found := re.search(r'"traceEvents"\s*:\s*\[', text)):
        more = file.read(CHUNK)
        if not more:
            raise TraceError(
                f'{path}: no "traceEvents" in it: expected what prof.export_chrome_trace writes'
            )
        text += more
    head = text[: found.start()].rstrip().rstrip(",")
    try:
        return json.loads(head + "}"), text[found.end() :]
    except json.JSONDecodeError:
        return {}, text[found.end() :]


def read(path: Path) -> Trace:
    """Return the trace in this file. Raises TraceError, also if no step is marked in it."""
    trace = Trace(Path(path), None)
    origin = None
    for head, event in events(path):
        if event.get("ph") != "X" or "dur" not in event:
            continue
        if origin is None:
            origin = event["ts"]
            trace.device = next((d.get("name") for d in head.get("deviceProperties", [])), None)
        _sort(trace, event, origin)
    if not trace.steps:
        raise TraceError(f"{path}: no step in it; call prof.step() at the end of each step")
    for each in (trace.steps, trace.work, trace.calls, trace.ops, trace.ranges, trace.lines):
        each.sort(key=lambda e: (e.begin, -e.end))
    return trace


def _sort(trace, event, origin):
    """Append an event to the list that it belongs to, or drop it."""
    kind, name, args = event.get("cat"), event["name"], event.get("args", {})
    if kind in WORK:
        target, where = trace.work, f"{args.get('device', 0)} stream {args.get('stream', 0)}"
    else:
        where = str(event.get("tid"))
        if kind in ("cuda_runtime", "cuda_driver"):
            target = trace.calls
        elif kind == "cpu_op":
            target = trace.ops
        elif kind == "user_annotation" or name == GARBAGE:
            target = trace.steps if STEP.match(name) else trace.ranges
        elif kind == "python_function" and tells(name):
            target = trace.lines
        else:
            return
    begin = (event["ts"] - origin) / 1000
    end = begin + event["dur"] / 1000
    target.append(Event(name, begin, end, where, args.get("correlation", 0)))


def tells(name: str) -> bool:
    """Return whether a trace is read for this Python function."""
    return LINE.match(name) and (PRINTS in name or not FOREIGN.search(name))


# Where the time goes -----------------------------------------------------------------------------

DATA, SYNC, COLLECTOR, LAUNCHES = "data", "synchronisation", "garbage collector", "launches"
NEITHER = (LAUNCHES, None)  # the cause of a gap without a wait before it
PYTHON = "Python between the operations"  # on a CPU, which launches nothing
COPY = re.compile(r"^cudaMemcpy(Async)?$")
LOADER = re.compile(r"^enumerate\(DataLoader\)|^data$")  # torch's range and the Chronometer's
AHEAD_MS = 0.2  # from a call to its work: if longer, the device had other work to do first
FEW = 10  # kernels and copies that do not suffice for the host to get ahead
LONG_MS = 0.05  # a copy that blocks the host for this long counts as a wait
BOUND = 0.85  # a step that computes for more of its time than this is compute-bound
GLOO = re.compile(r"^gloo:")  # the ranges of gloo's threads

WORDS = {
    LAUNCHES: "launch bound",
    PYTHON: "held up by Python between the operations",
    SYNC: "synchronisation bound",
    DATA: "data bound",
    COMMUNICATION: "communication bound",
    COLLECTOR: "held up by Python's garbage collector",
}


class Wait(NamedTuple):
    """A place where the host waits for the device."""

    call: str
    why: str  # the operation that caused it
    line: str  # of the trainee's file, if the trace has it
    count: int
    ms: float
    idle_ms: float  # how long the device was idle because of it


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

    @property
    def lost(self) -> dict[str, float]:
        """Return the shares of the step in which nothing is computed, by cause."""
        found = Counter(self.idle)
        found[COMMUNICATION] += self.exposed_ms
        found[SYNC] += self.pageable_ms
        return {cause: ms / self.step_ms for cause, ms in found.most_common() if ms > 0}

    @property
    def verdict(self) -> str:
        """Return what bounds the time of a step, in a few words."""
        if sum(self.lost.values()) <= 1 - BOUND:
            return "GPU bound" if self.device else "processor bound"
        return WORDS[next(iter(self.lost))]


def analyse(trace: Trace) -> Reading:
    """Return where the time of the steps of a trace goes."""
    return _of_gpu(trace) if trace.on_gpu else _of_processor(trace)


def _of_gpu(trace):
    """Return the reading of a process with one GPU, whose streams are merged."""
    work, free = _asked_in_the_steps(trace)
    end, steps = max(e.end for e in work), len(trace.steps)
    by_kind = defaultdict(list)
    for e in work:
        by_kind[kind(e.name)].append((e.begin, e.end))
    compute = union(s for k, found in by_kind.items() if k != COMMUNICATION for s in found)
    pageable = union((e.begin, e.end) for e in work if "Pageable" in e.name)
    others = union((e.begin, e.end) for e in work if not e.name.startswith("Mem"))
    idle, waits = _causes(trace, holes(trace), steps)
    return Reading(
        steps=steps,
        step_ms=(end - free) / steps,
        device=trace.device or "GPU",
        kinds={k: length(union(found)) / steps for k, found in by_kind.items()},
        tensor_cores=_share([e for e in work if kind(e.name) == MATRIX]),
        idle=idle,
        exposed_ms=length(without(union(by_kind[COMMUNICATION]), compute)) / steps,
        waits=waits,
        pageable_ms=length(without(pageable, others)) / steps,
        launches=len(work) / steps,
    )


def holes(trace: Trace) -> list[tuple[float, float]]:
    """Return the spans in which the device was idle, in the steps of a trace."""
    work, free = _asked_in_the_steps(trace)
    busy = union((e.begin, e.end) for e in work)
    return without([(free, max(e.end for e in work))], busy)


def in_steps(trace: Trace) -> list[Event]:
    """Return the device's work in the steps of a trace."""
    return _asked_in_the_steps(trace)[0] if trace.on_gpu else []


def _asked_in_the_steps(trace):
    """Return the work launched since the first step began, and when the device was free for it.

    As a trace begins, the device still works on an earlier step: the trace holds these kernels, but
    not the calls that launched them.
    """
    begin = trace.steps[0].begin
    asked = {c.id: c.begin for c in trace.calls if c.id}
    work, earlier = [], []
    for e in trace.work:
        mine = not asked or asked.get(e.id, begin - 1) >= begin
        (work if mine else earlier).append(e)
    if not work:
        raise TraceError(f"{trace.path}: no step in it asked the GPU for anything")
    return work, max([begin, *(e.end for e in earlier if e.begin < work[0].begin)])


def _share(matrix):
    total = sum(e.ms for e in matrix)
    return sum(e.ms for e in matrix if on_tensor_cores(e.name)) / total if total else None


def _causes(trace, gaps, steps):
    """Return the device's idle time, {cause: ms per step}, and the host's waits for the device."""
    waits = _waits(trace)
    idle, behind = Counter(), Counter()
    for gap, (cause, wait) in zip(
        gaps, _lasting(trace, gaps, _firsts(trace, gaps, waits)), strict=True
    ):
        idle[cause] += (gap[1] - gap[0]) / steps
        behind[wait] += gap[1] - gap[0]
    places = defaultdict(list)
    for i, (wait, why, line) in enumerate(waits):
        places[wait.name, why, line].append((wait.ms, behind[i]))
    told = [
        Wait(*place, len(each), sum(ms for ms, _ in each), sum(lost for _, lost in each))
        for place, each in places.items()
    ]
    return dict(idle), sorted(told, key=lambda w: (-w.idle_ms, -w.ms))


def _firsts(trace, gaps, waits):
    """Return for each gap what held the host up as it began: (cause, index of the wait)."""
    data, garbage = _loading(trace), _collecting(trace)
    begins = [w.begin for w, _, _ in waits]
    found = []
    for gap in gaps:
        ms = gap[1] - gap[0]
        at = bisect_right(begins, gap[0]) - 1
        if common([gap], data) > ms / 2:
            found.append((DATA, None))
        elif common([gap], garbage) > ms / 2:
            found.append((COLLECTOR, None))
        elif at >= 0 and waits[at][0].end >= gap[0]:  # the host was waiting when work ran out
            found.append((SYNC, at))
        else:
            found.append(NEITHER)
    return found


def _lasting(trace, gaps, firsts):
    """Return `firsts` with the later gaps, while the host catches up, under the same cause.

    If the host is held up again before it ever gets ahead, the work is too small for its launches,
    and these gaps stay LAUNCHES, unless it launched too little between two waits to get ahead.
    """
    ahead, begins = _ahead(trace), [e.begin for e in trace.work]
    found, since = list(firsts), None  # since: the gap in which the host lost its lead
    moments = [*(gap[0] for gap in gaps), float("inf")]
    for i, (moment, (cause, _)) in enumerate(zip(moments, [*firsts, NEITHER], strict=True)):
        if since is not None:
            stretch = gaps[since][1], moment
            again = cause == firsts[since][0] == SYNC and _between(begins, stretch) <= FEW
            if again or _between(ahead, stretch):
                found[since:i] = [firsts[since]] * (i - since)
                since = None
        if cause != LAUNCHES:
            since = i
    return found


def _between(moments, stretch):
    """Return how many of these sorted moments are in a stretch of time."""
    return bisect_right(moments, stretch[1]) - bisect_left(moments, stretch[0])


def _ahead(trace):
    """Return when the device began work launched long before, so that the host was ahead."""
    asked = {c.id: c.end for c in trace.calls if c.id}
    # Collectives are left out: they also wait for other streams and processes.
    own = [e for e in trace.work if kind(e.name) != COMMUNICATION]
    return [e.begin for e in own if e.begin - asked.get(e.id, e.begin) >= AHEAD_MS]


def synchronisations(trace: Trace) -> list[Event]:
    """Return the calls in which a training thread waits for the device, in the steps.

    On a GPU there are two such threads: the backward pass has its own.
    """
    done = {e.id for e in trace.work}
    threads = {trace.thread} | {c.where for c in trace.calls if c.id and c.id in done}
    return [
        c
        for c in trace.calls
        if c.where in threads
        and (WAITS.match(c.name) or (COPY.match(c.name) and c.ms >= LONG_MS))
        and c.begin >= trace.steps[0].begin
        and c.end <= trace.steps[-1].end
    ]


def collections(trace: Trace) -> list[Event]:
    """Return the runs of Python's garbage collector."""
    return [e for e in trace.ranges if e.name == GARBAGE]


def _waits(trace):
    """Return the host's waits for the device, [(call, why, line)] in chronological order."""
    told = []
    asked = synchronisations(trace)
    for thread in {c.where for c in asked}:
        mine = [c for c in asked if c.where == thread]
        names = _around(mine, [e for e in trace.ops if e.where == thread])
        lines = _around(mine, [e for e in trace.lines if e.where == thread])
        told += [
            (call, _why(ops, found), _line(found))
            for call, ops, found in zip(mine, names, lines, strict=True)
        ]
    return sorted(told, key=lambda wait: wait[0].begin)


def _around(inner, outer):
    """Return for each of `inner` the names of the events of `outer` around it, widest first."""
    found, stack, rest = [], [], iter(outer)
    following = next(rest, None)
    for event in inner:
        while following and following.begin <= event.begin:
            stack.append(following)
            following = next(rest, None)
        stack = [e for e in stack if e.end >= event.begin]
        found.append([e.name for e in stack if e.end >= event.end])
    return found


def _why(ops, lines):
    """Return the operation that makes the host wait, as it is written in the trainer."""
    if any(PRINTS in name for name in lines):
        return "print"
    if not ops:
        return ""
    if "aten::item" in ops or "aten::_local_scalar_dense" in ops:
        return ".item()"
    if any(name in ("aten::to", "aten::_to_copy", "aten::copy_") for name in ops):
        return "a copy"
    return ops[0]


def _line(lines):
    """Return the innermost function that is not torch's."""
    own = [name for name in lines if PRINTS not in name]
    if not own:
        return ""
    path, line, function = LINE.match(own[-1]).groups()
    return f"{Path(path).name}, {function} (from line {line})"


def _loading(trace):
    """Return the spans in which the training thread waited for a batch."""
    return union(
        (e.begin, e.end) for e in trace.ranges if e.where == trace.thread and LOADER.match(e.name)
    )


def _collecting(trace):
    return union((e.begin, e.end) for e in collections(trace))


def _of_processor(trace):
    """Return the reading of a process without a GPU, with the own time of each operation."""
    whole, steps = [(trace.steps[0].begin, trace.steps[-1].end)], len(trace.steps)
    loading, collecting = _loading(trace), _collecting(trace)
    ops = [e for e in trace.ops if common([(e.begin, e.end)], whole) > 0]
    # Operations that load images in this thread are not part of the training.
    ops = [e for e in ops if not any(begin <= e.begin < end for begin, end in loading)]
    own = Counter()
    for thread in {e.where for e in ops}:
        stack = []
        for e in (e for e in ops if e.where == thread):
            while stack and stack[-1].end <= e.begin:
                stack.pop()
            own[kind(e.name)] += e.ms
            if stack:
                own[kind(stack[-1].name)] -= e.ms
            stack.append(e)
    computing = union((e.begin, e.end) for e in ops)
    talking = union((e.begin, e.end) for e in trace.ranges if GLOO.match(e.name))
    exposed = common(whole, without(talking, union([*computing, *loading])))
    own[COMMUNICATION] = exposed
    named = union([*loading, *collecting, *computing, *talking])
    idle = {
        DATA: common(whole, loading) / steps,
        COLLECTOR: common(whole, collecting) / steps,
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
    )
