"""The reader of torch.profiler's traces, and the analysis of where the time of their steps goes.

On a GPU the question is why it was idle. A gap has a reason on the host: before the call whose
kernel ended it, the host did something else. It waited for a batch or for the device, it collected
garbage, allocated memory, copied, or did nothing that the trace tells. `runs.whatif` replays host
and device without each of these in turn: what the step gains is what the cause costs, in its own
gap and in those that follow until the host is ahead again. Only what remains, when the host does
nothing but launch, is called launch bound.

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
from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from dlojz.runs import whatif
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

DATA, COLLECTOR, ALLOCATOR = "data", "garbage collector", "memory allocation"
COPIES, READS, SYNC = "copies to the device", "results that the host reads", "synchronisation"
AWAY = "the host, which does something else"
LAUNCHES, PAUSES = "launches", "pauses between kernels"
PYTHON = "Python between the operations"  # on a CPU, which launches nothing
COPY = re.compile(r"^cudaMemcpy(Async)?$")
ALLOCATES = re.compile(
    r"^cu(da)?(Malloc|Free|Host|Mem(Alloc|Free|Create|Release|Map|Unmap|Address))"
)
LOADER = re.compile(r"^enumerate\(DataLoader\)|^data$")  # torch's range and the Chronometer's
# How print(tensor) looks without Python's functions: what is finite and not zero is selected, and
# then number after number is read. Only these operations come in between.
FINITE, SELECTS = "aten::isfinite", "aten::masked_select"
FORMATS = re.compile(
    "^aten::(masked_select|item|is_nonzero|unbind|select|slice|detach|resolve_conj|resolve_neg"
    "|ceil|ne|eq|__and__|abs|to|min|max|div|gt|lt)$"
)
AWAY_MS = 3  # without a call of CUDA; a host that launches calls every 0.1 ms, at most 2.7
MAYBE_PRINT = "print, it seems"
LONG_MS = 0.05  # a copy that blocks the host for this long counts as a wait
BOUND = 0.85  # a step that computes for more of its time than this is compute-bound
DDP = "DistributedDataParallel.forward"  # measures itself in its first steps, and waits for that
ASKS = {  # operations that give the host a number, as they are written
    "aten::is_nonzero": "if tensor",
    "aten::item": ".item()",
    "aten::_local_scalar_dense": ".item()",
}
COPYING = ("aten::to", "aten::_to_copy", "aten::copy_")
GLOO = re.compile(r"^gloo:")  # the ranges of gloo's threads

WORDS = {
    LAUNCHES: "launch bound",
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
    op: str  # the operation of torch that calls, if any
    why: str  # the same, as it is written in a program
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
    functions: bool = False  # whether Python's functions were recorded, which slows the host

    @property
    def lost(self) -> dict[str, float]:
        """Return the shares of the step in which nothing is computed, by cause."""
        found = Counter(self.idle)
        found[COMMUNICATION] += self.exposed_ms
        found[COPIES] += self.pageable_ms
        return {cause: ms / self.step_ms for cause, ms in found.most_common() if ms > 0}

    @property
    def verdict(self) -> str:
        """Return what bounds the time of a step, in a few words."""
        shares = Counter()
        for cause, share in self.lost.items():
            if cause != PAUSES:  # the device needs them, however early it was asked
                shares[WORDS[cause]] += share
        if shares.total() <= 1 - BOUND:
            return "GPU bound" if self.device else "processor bound"
        words = shares.most_common(1)[0][0]
        slowed = self.functions and words == WORDS[LAUNCHES]
        return f"{words}, while Python's functions are recorded" if slowed else words


def analyse(trace: Trace) -> Reading:
    """Return where the time of the steps of a trace goes."""
    return _of_gpu(trace) if trace.on_gpu else _of_processor(trace)


def _of_gpu(trace):
    """Return the reading of a process with one GPU, whose streams are merged."""
    work, free = _asked_in_the_steps(trace)
    steps = len(trace.steps)
    by_kind = defaultdict(list)
    for e in work:
        by_kind[kind(e.name)].append((e.begin, e.end))
    compute = union(s for k, found in by_kind.items() if k != COMMUNICATION for s in found)
    pageable = union((e.begin, e.end) for e in work if "Pageable" in e.name and "HtoD" in e.name)
    others = union((e.begin, e.end) for e in work if not e.name.startswith("Mem"))
    idle, waits = _causes(trace, work, free)
    busy = length(_spans(work))
    return Reading(
        steps=steps,
        step_ms=busy / steps + sum(idle.values()),
        device=trace.device or "GPU",
        kinds={k: length(union(found)) / steps for k, found in by_kind.items()},
        tensor_cores=_share([e for e in work if kind(e.name) == MATRIX]),
        idle=idle,
        exposed_ms=length(without(union(by_kind[COMMUNICATION]), compute)) / steps,
        waits=waits,
        pageable_ms=length(without(pageable, others)) / steps,
        launches=len(work) / steps,
        functions=bool(trace.lines),
    )


def holes(trace: Trace) -> list[tuple[float, float]]:
    """Return the spans in which the device was idle, in the steps of a trace."""
    work, free = _asked_in_the_steps(trace)
    busy = _spans(work)
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


def _causes(trace, work, free):
    """Return the device's idle time, {cause: ms per step}, and the host's waits for the device."""
    waits, steps = _waits(trace), len(trace.steps)
    found, rest = whatif.costs(
        whatif.tasks(_calls_of(trace, work), free),
        free,
        (trace.steps[0].begin, trace.steps[-1].end),
        _held_up(trace, waits),
    )
    idle = Counter({cause: ms / steps for cause, ms in found.items()})
    idle |= {LAUNCHES: rest.waits / steps, PAUSES: rest.pauses / steps}
    places, total = defaultdict(list), Counter()
    for wait in waits:
        total[_paid(wait.cause)] += wait.ms
    for wait in waits:
        lost = found[_paid(wait.cause)] * wait.ms / total[_paid(wait.cause)]
        places[wait.call, wait.op, wait.why, wait.line].append((wait.ms, lost))
        if wait.cause == SYNC:  # which is paid together with what the host reads
            idle[SYNC] += lost / steps
            idle[READS] -= lost / steps
    told = [
        Wait(*place, len(each), sum(ms for ms, _ in each), sum(lost for _, lost in each))
        for place, each in places.items()
    ]
    idle = {cause: ms for cause, ms in idle.items() if ms > 1e-9}
    return idle, sorted(told, key=lambda w: (-w.idle_ms, -w.ms))


def _paid(cause):
    """Return the cause under which the replay takes a wait away.

    Waits for the device go together, and their cost is divided by how long they took: without the
    first of them the host would have waited at the next.
    """
    return READS if cause == SYNC else cause


def _calls_of(trace, work):
    """Return what the replay asks of each task: (call began, it ended, work began, it ended)."""
    calls = {c.id: c for c in trace.calls if c.id}
    found = []
    for e in work:
        call = calls.get(e.id, e)
        # A copy from pageable memory blocks the host: what precedes it on the device is the call.
        began = max(call.begin, min(e.begin, call.end)) if "Pageable" in e.name else call.begin
        found.append((began, max(call.end, began), e.begin, e.end))
    return found


def _held_up(trace, waits):
    """Return the spans of the steps in which something kept the host from launching, by cause.

    Those that name what the host did come before those that only tell that it did not launch, and
    the waits for the device come last: while it waits, the device is usually busy.
    """
    copies = [e for e in trace.ops if e.where == trace.thread and e.name == "aten::pin_memory"]
    found = {
        DATA: _loading(trace),
        COLLECTOR: _spans(collections(trace)),
        ALLOCATOR: _spans(allocations(trace)),
        COPIES: _spans([*copies, *(w for w in waits if w.cause == COPIES)]),
        AWAY: _spans(absences(trace)),
        READS: _spans(w for w in waits if w.cause != COPIES),
    }
    begin, end = trace.steps[0].begin, trace.steps[-1].end
    return {
        cause: [(max(a, begin), min(b, end)) for a, b in each if a < end and b > begin]
        for cause, each in found.items()
    }


def _spans(events):
    return union((e.begin, e.end) for e in events)


def _launching(trace):
    """Return the threads that launch: the training thread, and on a GPU the backward pass's."""
    done = {e.id for e in trace.work}
    return {trace.thread} | {c.where for c in trace.calls if c.id and c.id in done}


def synchronisations(trace: Trace) -> list[Event]:
    """Return the calls in which a training thread waits for the device, in the steps."""
    threads = _launching(trace)
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


def allocations(trace: Trace) -> list[Event]:
    """Return the calls that take memory from CUDA or give it back; many wait for the device."""
    threads = _launching(trace)
    return [c for c in trace.calls if c.where in threads and ALLOCATES.match(c.name)]


def absences(trace: Trace) -> list[Event]:
    """Return the spans of the steps in which the host asks for nothing for long.

    On a GPU it calls nothing of CUDA then, on a processor it runs no operation. Without Python's
    functions in the trace nothing tells a sleep from a garbage collection. The name is that of the
    operation or the line that surrounds the span, if there is one.
    """
    threads = _launching(trace)
    whole = [(trace.steps[0].begin, trace.steps[-1].end)]
    asking = _spans(c for c in trace.calls if c.where in threads) if trace.on_gpu else []
    asking = asking or _spans([*trace.ops, *(e for e in trace.ranges if GLOO.match(e.name))])
    known = union([*asking, *_loading(trace), *_spans(collections(trace))])
    spans = [s for s in without(whole, known) if s[1] - s[0] >= AWAY_MS]
    return [Event(_place(trace, begin, end), begin, end, trace.thread) for begin, end in spans]


def phase_of(trace: Trace, span: Event) -> str:
    """Return the innermost range in which the middle of a span is, such as "update", or ""."""
    middle = (span.begin + span.end) / 2
    around = [e for e in trace.ranges if e.where == span.where and e.begin <= middle < e.end]
    return around[-1].name if around else ""


def _place(trace, begin, end):
    """Return what a trace knows of a span: an operation that lasts for most of it, or the line."""
    most = [
        e.name
        for e in trace.ops
        if e.where == trace.thread and min(e.end, end) - max(e.begin, begin) > (end - begin) / 2
    ]
    if most:
        return most[0]
    middle = (begin + end) / 2
    around = [e for e in trace.lines if e.where == trace.thread and e.begin <= middle < e.end]
    return _line([e.name for e in around])


class _Asked(NamedTuple):
    """A wait of the host for the device."""

    cause: str
    call: str
    op: str
    why: str
    line: str
    begin: float  # of all that the host did for it
    end: float
    ms: float  # of the call


def _waits(trace):
    """Return the host's waits for the device, in chronological order."""
    told = []
    asked = synchronisations(trace)
    for thread in {c.where for c in asked}:
        mine = [c for c in asked if c.where == thread]
        ops, lines, ranges = (
            [e for e in each if e.where == thread]
            for each in (trace.ops, trace.lines, trace.ranges)
        )
        copies, printing = _copies(trace, thread), _printing(ops)
        for call, *around in zip(
            mine, _around(mine, ops), _around(mine, lines), _around(mine, ranges), strict=True
        ):
            copy = copies[1][bisect_right(copies[0], call.begin) - 1] if copies[0] else ""
            told.append(_asked(call, *around, copy, printing))
    return sorted(told, key=lambda wait: wait.begin)


def _asked(call, ops, lines, ranges, copy, printing):
    """Return what a wait is for; copy: what the last one before it copies, and where to."""
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
    elif any(e.name in COPYING for e in ops):
        cause, why = (READS, ".cpu()") if "DtoH" in copy else (COPIES, "a copy")
    elif ops:
        why = ops[0].name
    else:
        cause, why = SYNC, next((e.name for e in ranges if e.name == DDP), "")
    op, line = ops[0].name if ops else "", _line([e.name for e in lines])
    return _Asked(cause, call.name, op, why, line, whole.begin, whole.end, call.ms)


def _copies(trace, thread):
    """Return when a thread called for each copy, and the names of these copies."""
    names = {e.id: e.name for e in trace.work if e.name.startswith("Memcpy")}
    found = [(c.begin, names[c.id]) for c in trace.calls if c.where == thread and c.id in names]
    return [begin for begin, _ in found], [name for _, name in found]


def _printing(ops) -> set[float]:
    """Return when those operations began that look as if a tensor was printed."""
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


def _around(inner, outer):
    """Return for each of `inner` the events of `outer` around it, widest first."""
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


def _loading(trace):
    """Return the spans in which the training thread waited for a batch."""
    return _spans(e for e in trace.ranges if e.where == trace.thread and LOADER.match(e.name))


def _of_processor(trace):
    """Return the reading of a process without a GPU, with the own time of each operation."""
    whole, steps = [(trace.steps[0].begin, trace.steps[-1].end)], len(trace.steps)
    loading, collecting = _loading(trace), _spans(collections(trace))
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
    away = _spans(absences(trace))
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
