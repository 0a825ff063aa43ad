"""The reader of torch.profiler's traces.

A trace is Chrome's JSON, as `prof.export_chrome_trace("trace.json.gz")` writes it:

    {"deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}], "traceEvents": [
      {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#5", "ts": 100.0, "dur": 900.0},
      {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "tid": 9, "ts": 120.0,
       "dur": 5.0, "args": {"correlation": 7}},
      {"ph": "X", "cat": "kernel", "name": "sm90_xmma_fprop_implicit_gemm_bf16", "ts": 150.0,
       "dur": 80.0, "args": {"correlation": 7, "device": 0, "stream": 7}}]}

Times there are microseconds; here they are milliseconds since the file's first event. An event
keeps only the fields that are needed, so that a trace of 100 MB takes a fraction of its JSON's
memory. Format: Kineto, https://github.com/pytorch/kineto. The names of AMD's and Intel's software
are in `kinds.MAKERS`.
"""

import gzip
import json
import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from dlojz.course import UserError
from dlojz.runs import outcome
from dlojz.runs.folder import path_of, trace_files
from dlojz.traces import kinds

CHUNK = 1 << 17  # characters read at a time: an error of JSON counts their lines
LONGEST = 1 << 15  # characters of the event to continue at after a broken one
# The end of an event and the begin of the next, and the end of the last event.
NEXT = re.compile(r'\}\s*,\s*(\{\s*"(?:ph|name|cat|pid|tid|ts)"\s*:)')
LAST = re.compile(r'\}\s*\]\s*(,\s*"\w+"\s*:.*)?\}\s*$', re.DOTALL)
BARE = re.compile(r"\s*\[(?=\s*\{)")  # Chrome's other form: a list of events, and nothing around it
STEP = re.compile(r"ProfilerStep#(\d+)")
GARBAGE = "Python GC"  # torch's name of a run of the garbage collector
# The categories of events, also from old versions. Kineto has no others for a processor and the
# GPUs of kinds.MAKERS (libkineto/src/ActivityType.cpp): another category means another device.
WORK = {"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"}
CALLS = {category for maker in kinds.MAKERS.values() for category in maker.calls}
OPS = {"cpu_op", "operator"}
IGNORED = {
    *("", "trace", "overhead", "gpu_user_annotation", "cpu_instant_event", "external_correlation"),
    *("cuda_sync", "cuda_event", "cuda_profiler_range", "gpu_pm_counter", "collective_comm"),
}
UNKNOWN = "a device that this reader does not know"
NOT_RECORDED = "a device whose work is not in the trace"
OF_A_DEVICE = re.compile(r"[hnrx]ccl:")  # collectives between devices
LAUNCHES = re.compile(r"\w*Launch")
MOST = 0.5  # share of a trace's time: ranges that cover more of it are its steps
# The files of torch and Python.
FOREIGN = re.compile(r"^<|site-packages|dist-packages|/lib/python|^torch/|^threading|^contextlib")
LINE = re.compile(r"(.+\.py)\((\d+)\): (.+)")
PRINTS = "torch/_tensor_str.py"  # the one file of torch that explains a read of a tensor


class TraceError(UserError):
    """A file that is not a trace, with the reason."""


class Event(NamedTuple):
    """A named span of time on the host or on a device."""

    name: str
    begin: float  # ms
    end: float
    where: str  # the host's thread, or the device and its stream
    id: int = 0  # a launch and the work that it launched share this number

    @property
    def ms(self) -> float:
        """Return the duration."""
        return self.end - self.begin


@dataclass
class Trace:
    """The events of a trace, each list in chronological order."""

    path: Path
    device: str | None  # the name of the machine's first GPU
    steps: list[Event] = field(default_factory=list)  # "ProfilerStep#5"
    work: list[Event] = field(default_factory=list)  # kernels and copies of the GPU
    calls: list[Event] = field(default_factory=list)  # calls of the GPU's runtime on the host
    ops: list[Event] = field(default_factory=list)  # operations of torch on the host
    ranges: list[Event] = field(default_factory=list)  # named by `record_function`
    lines: list[Event] = field(default_factory=list)  # Python functions, except torch's own
    unknown: Counter = field(default_factory=Counter)  # events of categories that have no list
    notes: list[str] = field(default_factory=list)  # for the reader of its figures

    @property
    def on_gpu(self) -> bool:
        """Return whether a GPU did anything."""
        return bool(self.work)

    @property
    def unseen(self) -> str:
        """Return the device whose work is missing in the trace; "" if there is none."""
        if self.work:
            return ""
        if self.unknown:
            return UNKNOWN
        asked = any(LAUNCHES.match(c.name) for c in self.calls)
        return NOT_RECORDED if asked or any(OF_A_DEVICE.match(r.name) for r in self.ranges) else ""

    @property
    def thread(self) -> str:
        """Return the host's training thread."""
        return self.steps[0].where


def open_trace(of) -> Trace:
    """Return the trace of a file, or of the first process of a job or of a run's folder.

    A trace is returned as it is. Raises TraceError.
    """
    return of if isinstance(of, Trace) else read(_files(of)[0])


def open_traces(of) -> list[Trace]:
    """Return the traces of all processes of a job or of a run's folder, or the one of a file."""
    return [of] if isinstance(of, Trace) else [*map(read, _files(of))]


def _files(of):
    path = path_of(of)
    if files := trace_files(path) if path.is_dir() else [path]:
        return files
    if (path / "trainer.py").exists() and outcome.is_foreign(path):
        raise TraceError(
            f"{path}: no trace in it, as its program writes none there: `dlojz watch` writes one "
            "of any program, and `dlojz trace FILE` reads one of torch.profiler"
        )
    raise TraceError(
        f"{path}: no trace in it; was the run submitted with --profile, and has it ended?"
    )


class _Text:
    """The text of a file from a place on, read piece by piece."""

    def __init__(self, file):
        self.file, self.text, self.at = file, "", 0
        self.line, self.column = 1, 1  # of the text's first character

    def more(self) -> bool:
        """Read on, at least as much as is left, and return whether there was more.

        So a text is searched a few times at most, however long it becomes.
        """
        rest = self.text[self.at :]
        added = self.file.read(max(CHUNK, len(rest)))
        self.line, self.column = self.place(self.at)
        self.text, self.at = rest + added, 0
        return bool(added)

    def place(self, at) -> tuple[int, int]:
        """Return the line and the column of a character of the text."""
        begin = self.text.rfind("\n", 0, at)
        column = at - begin if begin >= 0 else at + self.column
        return self.line + self.text.count("\n", 0, at), column


def events(path: Path, broken: list):
    """Yield (head, event) for each event of a trace.

    head: the fields of the file before its events. broken: gets an item for each place with events
    that are not JSON, because torch does not escape a quote in a name; the first item is its line
    and column. Raises TraceError if the file is not a trace, or is truncated.
    """
    scan, path = json.JSONDecoder(strict=False).scan_once, Path(path)
    try:
        with open(path, "rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
        with (gzip.open if zipped else open)(
            path, "rt", encoding="utf-8-sig", errors="replace"
        ) as file:
            text = _Text(file)
            head = _head(text, path)
            while True:
                while text.text[text.at : text.at + 1] in {*", \n\r\t"}:
                    text.at += 1
                if text.text[text.at : text.at + 1] == "]":
                    return
                try:
                    event, text.at = scan(text.text, text.at)
                except (StopIteration, json.JSONDecodeError, RecursionError) as error:
                    within = getattr(error, "pos", text.at) - text.at
                    following = _after(text, scan)
                    if following is None and text.more():
                        continue
                    if following is None and not LAST.search(text.text):
                        raise TraceError(f"{path}: cut short, or damaged") from error
                    broken.append(None if broken else text.place(text.at + within))
                    if following is None:
                        return
                    text.at = following
                    continue
                yield head, event
    except (OSError, EOFError) as error:
        raise TraceError(f"{path}: can't be read: {error}") from error


def _after(text, scan) -> int | None:
    """Return the place of the next whole event; None if more text is needed."""
    for found in NEXT.finditer(text.text, text.at):
        begin = found.start(1)
        try:
            # Not in the whole text: an error of JSON counts all lines before it.
            if "ph" in scan(text.text[begin : begin + LONGEST], 0)[0]:  # else a part of an event
                return begin
        except (StopIteration, json.JSONDecodeError, RecursionError):
            continue
    return None


def _head(text, path):
    """Return the fields before the events, and read on to the first event."""
    text.more()
    if found := BARE.match(text.text):
        text.at = found.end()
        return {}
    while not (found := re.search(r'"traceEvents"\s*:\s*\[', text.text)):
        if not text.more():
            raise TraceError(
                f'{path}: no "traceEvents" in it: expected what prof.export_chrome_trace writes'
            )
    text.at = found.end()
    try:
        return json.loads(text.text[: found.start()].rstrip().rstrip(",") + "}")
    except json.JSONDecodeError:
        return {}


def read(path: Path, marked: bool = False) -> Trace:
    """Return the trace in this file. Raises TraceError.

    marked: require steps marked by `prof.step()`. Otherwise a repeated range is taken as a step, or
    the whole trace.
    """
    trace, broken, left_out, origin = Trace(Path(path), None), [], 0, None
    for head, event in events(path, broken):
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        if (times := _times(event)) is None:
            left_out += 1
            continue
        if origin is None:
            origin, trace.device = times[0], _device(head)
        _sort(trace, event, (times[0] - origin) / 1000, times[1] / 1000)
    if broken:
        line, column = broken[0]
        places = f"{len(broken):,} place{'s' * (len(broken) > 1)}"
        trace.notes.append(
            f"events that are not JSON, left out in {places}, first in line {line}, column {column}"
        )
    if left_out:
        trace.notes.append(f"left out: {_events(left_out)} without a name or a time")
    for category, count in trace.unknown.items():
        trace.notes.append(f"{_events(count)} of {UNKNOWN} (category {category!r})")
    if not trace.steps and marked:
        raise TraceError(f"{path}: no step in it; call prof.step() at the end of each step")
    for each in (trace.steps, trace.work, trace.calls, trace.ops, trace.ranges, trace.lines):
        each.sort(key=lambda e: (e.begin, -e.end))
    if not trace.steps:
        trace.steps, words = _steps(trace)
        trace.notes.append(f"no step is marked in it by prof.step(), so {words}")
    if others := [s for s in trace.steps if s.where != trace.thread]:
        trace.steps = [s for s in trace.steps if s.where == trace.thread]
        trace.notes.append(
            f"left out: steps of other threads, {len(others)}; their work is counted"
        )
    if trace.steps[-1].end <= trace.steps[0].begin:
        raise TraceError(f"{path}: its steps take no time: {trace.steps[0].name}")
    return trace


def _events(count):
    return f"{count:,} event{'s' * (count > 1)}"


def _times(event) -> tuple[float, float] | None:
    """Return an event's begin and duration, in microseconds; None if it lacks them."""
    try:
        begin, us = float(event["ts"]), float(event["dur"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    known = us >= 0 and math.isfinite(begin + us) and isinstance(event.get("name"), str)
    return (begin, us) if known else None


def _device(head) -> str | None:
    found = head.get("deviceProperties")
    names = [d.get("name") for d in found if isinstance(d, dict)] if isinstance(found, list) else []
    return next((name for name in names if isinstance(name, str)), None)


def _sort(trace, event, begin, ms):
    kind, name, args = str(event.get("cat", "")).lower(), event["name"], event.get("args")
    args, where = args if isinstance(args, dict) else {}, str(event.get("tid"))
    if kind in WORK:
        target, where = trace.work, f"{args.get('device', 0)} stream {args.get('stream', 0)}"
    elif kind in CALLS:
        target = trace.calls
    elif kind in OPS:
        target = trace.ops
    elif kind == "user_annotation" or name == GARBAGE:
        target = trace.steps if STEP.match(name) else trace.ranges
    elif kind == "python_function":
        if not tells(name):
            return
        target = trace.lines
    else:
        trace.unknown.update({kind} - IGNORED)
        return
    number = args.get("correlation", 0)
    name = name if name.isprintable() else "".join(c if c.isprintable() else "?" for c in name)
    target.append(
        Event(name, begin, begin + ms, where, number if isinstance(number, int | str) else 0)
    )


def _steps(trace) -> tuple[list[Event], str]:
    """Return the ranges to take as the steps of a trace without marks, and their name.

    That is the outermost range repeated in one thread, with any number in its name, if it covers
    most of the time; else the whole trace.
    """
    # The profiler waits for the device at its end, which does not belong to the program.
    calls = [c for c in trace.calls if not kinds.WAITS.match(c.name)]
    host = [*calls, *trace.ops, *trace.ranges]
    timed = host or trace.work
    if not timed:
        lost = f", only {trace.notes[-1]}" if trace.notes else ""
        raise TraceError(
            f"{trace.path}: no operation, call or kernel in it{lost}; record it in the thread that "
            "trains, and export it from `on_trace_ready`: a schedule's next wait empties it"
        )
    begin = min(e.begin for e in timed)
    named = defaultdict(list)
    for e in trace.ranges:
        if e.name != GARBAGE and kinds.kind(e.name) != kinds.COMMUNICATION:
            named[e.where, re.sub(r"\d+", "#", e.name)].append(e)
    repeated = [
        found
        for found in named.values()
        if len(found) > 1 and all(a.end <= b.begin for a, b in pairwise(found))
    ]
    most = max(repeated, key=lambda found: (sum(e.ms for e in found), -len(found)), default=[])
    if sum(e.ms for e in most) > MOST * _extent(timed):
        return most, f"each of the {len(most)} ranges like {most[0].name!r} is taken as one"
    threads = defaultdict(list)
    for e in host:
        threads[e.where].append(e)
    longest = max(threads.values(), key=_extent, default=timed)
    whole = Event("all of the trace", begin, begin + _extent(timed), longest[0].where)
    return [whole], "all of it is taken as one"


def _extent(found):
    return max(e.end for e in found) - min(e.begin for e in found)


def tells(name: str) -> bool:
    """Return whether the reader keeps this Python function."""
    return LINE.match(name) and (PRINTS in name or not FOREIGN.search(name))
