"""The reader of torch.profiler's traces.

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

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


def events(path: Path):
    """Yield (head, event) for each event of a trace.

    head: the fields of the file before its events. Raises TraceError if the file is not a trace, or
    is truncated.
    """
    scan, path = json.JSONDecoder().scan_once, Path(path)
    try:
        with open(path, "rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
        with (gzip.open if zipped else open)(path, "rt", encoding="utf-8") as file:
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
