"""The log of a run: events, one JSON object per line, written and read by this module alone.

Each process of a run writes one file in the run's folder: `events.jsonl` (rank 0),
`events.rank1.jsonl`, ... Names end in their units. A sample of each event:

{"event": "start", "schema": 2, "time": "2026-11-21T08:00:00+00:00", "rank": 0, "size": 1, "hostname": "node1", "pid": 4711, "arguments": {"batch_size": 32, "model": "resnet18"}, "trainer": "trainer.py", "trainer_sha256": "9f86d081884c7d65", "git": "0a1b2c3", "versions": {"python": "3.11.7", "torch": "2.11.0"}, "cpu": "AMD EPYC", "cpu_count": 2, "instructions": ["AVX2"], "threads": 2}
{"event": "setup", "device": "cpu", "device_name": "AMD EPYC", "warmup_steps": 3, "parameters": 11181642, "parameter_bytes": 44726568, "optimizer": "SGD", "classes": 10, "train_images": 1000, "val_images": 200, "steps_per_epoch": 32, "steps": 12}
{"event": "step", "epoch": 0, "step": 0, "images": 32, "lr": 0.004, "loss": 2.31, "host_ms": {"data": 40.1, "transfer": 0.1, "forward": 60.2, "backward": 101.5, "update": 5.3}}
{"event": "step", "epoch": 0, "step": 1, "images": 32, "lr": 0.004, "loss": 2.29, "host_ms": {"data": 0.1, "transfer": 0.1, "forward": 6.2, "backward": 7.5, "update": 1.3}, "device_ms": {"data": 0.0, "transfer": 1.1, "forward": 16.2, "backward": 31.5, "update": 1.9}, "ahead_ms": 35.4}
{"event": "window", "first_step": 3, "steps": 9, "wall_s": 1.86, "energy_j": 640.2, "others_cpu": 0.13, "sm_clock_mhz": [1980, 1755], "throttled": ["power cap"], "host_memory_bytes": 912345678}
{"event": "validation", "seconds": 0.91}
{"event": "epoch", "epoch": 0, "train_loss": 2.2, "train_accuracy": 0.21, "val_loss": 2.1, "val_accuracy": 0.25}
{"event": "memory", "process_peak_bytes": 812345678}
{"event": "rates", "rates": [1e-05, 0.01, 10.0], "losses": [2.31, 2.29, NaN]}
{"event": "measure", "what": "kept for backward", "value": 1.2e9, "unit": "bytes", "x": 64}
{"event": "case", "case": "channels_last", "step_ms": [31.2, 31.4]}
{"event": "evidence", "when": "probe", "logits": {"dtype": "bfloat16", "device": "cuda:0"}}
{"event": "end", "outcome": "completed", "time": "2026-11-21T08:01:00+00:00"}

`evidence` is what a training run really did, as `dlojz.watch.evidence` saw it, in the records of `dlojz.runs.records`:
`when` is samples, mixtures, normalized, begun, made_up, geometry, probe, last, whole, profiler, audit, stopwatch or replay. A small experiment writes a `measure` for each of its figures (`x` is
the size or step at which it was measured), and a `case` for values that belong together, with the fields that it needs.
`host_ms` and `device_ms` are the two clocks of `dlojz.training.chronometer`; `ahead_ms` is how far the host ran
ahead of the device. A window's last fields are what may have disturbed it, and the memory in use as it ended: see `dlojz.machine.meters`.
`outcome` is completed, failed, out_of_memory or interrupted; the last three come with an `error`. A value that no sensor reports (energy on a laptop) is absent. `NaN` is written
as Python's json does: a loss that diverged must not look like a missing one.
"""  # noqa: E501  a sample line must stay one line: a test parses these very lines

import io
import json
import os
import sys
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

from dlojz import course, idr_torch
from dlojz.machine import cpus, meters
from dlojz.runs import outcome, records
from dlojz.runs.advice import advice
from dlojz.runs.columns import Steps
from dlojz.runs.console import Progress
from dlojz.runs.folder import events_file, new_run, path_of, trace_file
from dlojz.runs.origin import origin

SCHEMA = 2
# Steps that the Chronometer leaves out: cuDNN picks kernels, the allocator grows, workers start. It
# waits on, up to the second number, until an update is seen: a gradient scaler skips the first.
WARMUP_STEPS, MOST_WARMUP_STEPS = 3, 12
ACCOUNTED = "step "  # the begin of a case's name, in an account: see `dlojz.watch.account`
EVENTS = ("start", "setup", "evidence", "step", "window", "validation", "epoch", "memory")
EVENTS += ("rates", "measure", "case", "end")

# The fields that readers compute with, by event; those of `start` may be missing.
TEXT, COUNT, NUMBER = (str, "text"), (int, "a whole number"), ((int, float), "a number")
FIELDS = {
    "start": {"time": TEXT, "size": COUNT, "arguments": (dict, "an object")},
    "window": {"first_step": COUNT, "steps": COUNT, "wall_s": NUMBER},
    "validation": {"seconds": NUMBER},
    "measure": {"what": TEXT, "value": NUMBER, "unit": TEXT},
    "end": {"outcome": TEXT},
}
# The errors that a malformed event raises in a reader.
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError)
AGAIN = "the log is damaged there, so submit the run again"


class LogError(course.UserError):
    """An unreadable log, with its file, its line and what was expected."""


class NoLogError(LogError):
    """A missing log: the run is still queued, or failed before it began."""


class OtherSchemaError(ValueError):
    """A log of a schema that this version of the course does not know."""


# Writing ------------------------------------------------------------------------------------


def open_run(args, quiet=False) -> "RunLog":
    """Open the log of this process, in $DLOJZ_RUN if a launcher set it, else in a new folder.

    quiet: whether it prints nothing, as for a program that has its own lines.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # torch's profiler complains without a GPU
    course.guard_compiled_code()  # on this node, wherever the job was submitted
    folder = os.environ.get("DLOJZ_RUN")
    if folder is None:
        if idr_torch.size > 1:
            raise RuntimeError(
                f"{idr_torch.size} processes, but no folder for their logs: set DLOJZ_RUN to an "
                "empty folder that all of them see, or submit the run: dlojz submit --help"
            )
        folder = new_run()
    return RunLog(Path(folder), args, quiet)


class RunLog:
    """The writer of the events of one process, as they come; the sink of a Chronometer."""

    def __init__(self, folder: Path, args, quiet=False):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        path = events_file(folder, idr_torch.rank)
        cut = path.exists() and not path.read_bytes().endswith(b"\n")
        self._file = path.open("ab", buffering=0)  # a killed run keeps all that was resolved
        if cut:  # an earlier process was killed in the middle of a line
            self._append(b"\n")
        self._args = args
        self._device = self._sensors = None
        self._last_words = []  # calls that log something before the end
        self._ended = False
        self._memory = {}
        self._progress = Progress() if idr_torch.is_master and not quiet else None
        sys.excepthook = self._on_error
        self._write("start", schema=SCHEMA, time=_now(), **origin(), arguments=vars(args))

    def setup(self, device, training, train_loader, val_loader):
        """Write the model, the device and the data of this run, and how many steps it takes."""
        self._device = device
        steps = len(train_loader.batch_sampler)
        cut = min(steps, self._args.test_nsteps) if self._args.test else steps
        weights = list(training.model.parameters())
        self._write(
            "setup",
            device=str(device),
            device_name=_device_name(device),
            warmup_steps=WARMUP_STEPS,
            **_sizes(weights),
            optimizer=_named(training.optimizer),
            classes=len(train_loader.dataset.classes),
            train_images=len(train_loader.dataset),
            val_images=len(val_loader.dataset),
            steps_per_epoch=steps,
            steps=cut * self._args.epochs,
        )

    def program(self, device, weights, optimizers=()):
        """Write the device, the weights and the optimizers of a watched program: its `setup`."""
        self._device = device
        named = {"optimizer": " and ".join(map(_named, optimizers))} if optimizers else {}
        where = {"device": str(device), "device_name": _device_name(device)}
        self._write("setup", **where, warmup_steps=WARMUP_STEPS, **_sizes(weights), **named)

    def rates(self, table):
        """Write the table of a learning-rate finder: pairs of a rate and a loss."""
        rates, losses = zip(*table, strict=True)
        self._write("rates", **records.Rates([*rates], [*losses]).written())

    def step(self, values: dict, host_ms: dict, device_ms: dict | None, ahead_ms: float | None):
        """Write one training step, as the Chronometer resolved it."""
        fields = {**values, "host_ms": _rounded(host_ms)}
        if device_ms is not None:
            fields["device_ms"] = _rounded(device_ms)
        if ahead_ms is not None:
            fields["ahead_ms"] = round(ahead_ms, 3)
        self._write("step", **fields)
        if self._progress:
            self._progress.step(fields)

    def window_opens(self):
        """Read the sensors as a measured window begins, while the device is idle."""
        self._sensors = meters.Sensors(self._device, idr_torch.size) if self._device else None

    def window(self, **fields):
        """Write a measured window that has ended: `first_step`, `steps`, `wall_s`."""
        sensors = self._sensors.window() | meters.host_memory() if self._sensors else {}
        self._write("window", **fields, **sensors)

    def epoch(self, epoch: int, train: dict, val: dict):
        """Write the end of an epoch: what `train_one_epoch` and `evaluate` returned."""
        fields = {"epoch": epoch}
        fields |= {f"train_{name}": value for name, value in train.items()}
        fields |= {f"val_{name}": value for name, value in val.items()}
        self._write("epoch", **fields)
        if self._progress:
            self._progress.epoch(fields)

    def validation(self, seconds: float):
        """Write the seconds of a validation, between two waits for the device."""
        self._write("validation", seconds=seconds)

    def evidence(self, seen: records.Record):
        """Write evidence of what the run really did: one of the records of `records.EVIDENCE`."""
        when = next(name for name, kind in records.EVIDENCE.items() if kind is type(seen))
        self._write("evidence", when=when, **seen.written())

    def save_trace(self, profiler):
        """Save the trace of a torch.profiler.profile; to be its `on_trace_ready`."""
        file = trace_file(self.folder, idr_torch.rank)
        temporary = file.with_name(f".{file.name}")  # keeps the .gz, for which torch compresses
        profiler.export_chrome_trace(str(temporary))
        temporary.replace(file)

    def before_end(self, call):
        """Call `call()` just before the log ends, well or badly."""
        self._last_words.append(call)

    def note_memory(self):
        """Keep the process's peak memory so far: what follows is not part of the training."""
        peak = meters.peak_memory(self._device).get("process_peak_bytes")
        self._memory = {"process_peak_bytes": peak}

    def experiment(self, device):
        """Write the device of a small experiment, in place of `setup`."""
        self._write("setup", device=str(device), device_name=_device_name(device))

    def measure(self, what: str, value: float, unit: str, **where):
        """Write one figure of a small experiment.

        where: x (a size, a step) and variant.
        """
        self._write("measure", **records.Measure(what, value, unit, **where).written())

    def case(self, name: str, **fields):
        """Write the results of a small experiment in one of its cases."""
        self._write("case", case=name, **fields)

    def fail(self, error: str):
        """Write that the run failed, by this error."""
        if not self._ended:
            self._finish("failed", error=error)

    def end(self):
        """Write that the run is complete; once, as a check may end it before a `finally` does."""
        if not self._ended:
            self._finish("completed")

    def _finish(self, outcome, **fields):
        last_words, self._last_words, self._ended = self._last_words, [], True
        for call in last_words:
            call()
        if self._device:
            self._write("memory", **(meters.peak_memory(self._device) | self._memory))
        self._write("end", outcome=outcome, time=_now(), **fields)
        if self._progress and outcome == "completed":
            print(f"log: {self._file.name}", flush=True)

    def _on_error(self, kind, error, traceback):
        """Write the error that ended a run; replaces sys.excepthook."""
        how = "failed"
        if issubclass(kind, KeyboardInterrupt):
            how = "interrupted"
        elif outcome.OUT_OF_MEMORY.search(f"{kind.__name__} {error}"):
            how = "out_of_memory"
        tip = advice(error)
        told = f"{kind.__name__}: {error}"[:2000] + (f"\n{tip}" if tip else "")
        if course.no_room(error):
            self._last_words.clear()  # so little is left that only the end may fit
        with suppress(OSError):  # what is said below matters more than this line
            self._finish(how, error=told)
        if kind.__module__.startswith("dlojz."):  # our own errors say what to do: no traceback
            print(f"{kind.__name__}: {error}", file=sys.stderr)
        else:
            sys.__excepthook__(kind, error, traceback)
        if tip:
            print(f"What to do: {tip}", file=sys.stderr)

    def _write(self, event, **fields):
        line = json.dumps({"event": event, **fields}, default=_plain)
        self._append(f"{line}\n".encode())

    def _append(self, line: bytes):
        """Write a line whole, or nothing of it: a disk may be full in its middle."""
        size, left = os.fstat(self._file.fileno()).st_size, line
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            with suppress(OSError):  # btrfs needs room for that, too
                self._file.truncate(size)
            raise


def _plain(value):
    """Return the number in a tensor that holds one, such as an accuracy; else the value as text."""
    with suppress(AttributeError, RuntimeError, ValueError):
        return value.item()
    return str(value)


def _now():
    return datetime.now(UTC).isoformat(timespec="seconds")


def _rounded(durations):
    return {phase: round(ms, 4) for phase, ms in durations.items()}


def _sizes(weights) -> dict[str, int]:
    sizes = [(p.numel(), p.element_size()) for p in weights]
    return {
        "parameters": sum(count for count, _ in sizes),
        "parameter_bytes": sum(count * size for count, size in sizes),
    }


def _named(optimizer) -> str:
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return type(optimizer).__name__ + (", fused" if fused else "")


def _device_name(device):
    if device.type != "cuda":
        return cpus.name()
    import torch

    return torch.cuda.get_device_name(device)


# Reading ------------------------------------------------------------------------------------


class Cases(dict):
    """The fields of each case of an experiment, by its name; LogError for one that is missing."""

    def __init__(self, path: Path):
        self.path = path

    def __missing__(self, name):
        raise LogError(
            f"{self.path}: no case {name!r} in it: did the run end before, or is it one of another "
            "experiment? job.explain() says more"
        )


@dataclass
class Run:
    """The log of one process. `start`, `setup`, `memory` and `end` are {} where missing.

    A job that was stopped and resumed has several starts; `windows` count from the first of them.
    """

    path: Path
    start: dict = field(default_factory=dict)
    setup: dict = field(default_factory=dict)
    steps: Steps = field(default_factory=Steps)
    windows: list = field(default_factory=list)
    validations: list = field(default_factory=list)
    epochs: list = field(default_factory=list)
    samples: records.Samples = field(default_factory=records.Samples)
    mixtures: records.Mixtures = field(default_factory=records.Mixtures)
    normalized: records.Normalized = field(default_factory=records.Normalized)
    begun: records.Begun = field(default_factory=records.Begun)
    made_up: records.MadeUp = field(default_factory=records.MadeUp)
    geometry: records.Geometry = field(default_factory=records.Geometry)
    probe: records.Probe = field(default_factory=records.Probe)
    share: records.Share = field(default_factory=records.Share)
    middle: records.MiddleStep = field(default_factory=records.MiddleStep)
    last: records.LastStep = field(default_factory=records.LastStep)
    whole: records.WholeRun = field(default_factory=records.WholeRun)
    compilation: records.Compilation = field(default_factory=records.Compilation)
    profiler: records.Profiling = field(default_factory=records.Profiling)
    audit: records.Audit = field(default_factory=records.Audit)
    stopwatch: records.Stopwatch = field(default_factory=records.Stopwatch)
    replay: records.Replay = field(default_factory=records.Replay)
    rates: records.Rates = field(default_factory=records.Rates)
    measures: list[records.Measure] = field(default_factory=list)
    cases: dict[str, dict] = field(default_factory=dict)  # see Cases
    memory: dict = field(default_factory=dict)
    end: dict = field(default_factory=dict)
    notes: list = field(default_factory=list)  # for the reader: a torn line, no end
    first_step: int = 0  # index in `steps` of the first step after the last start

    @property
    def seconds(self) -> float:
        """Return the time from the log's first line to its last; 0 if it has no end."""
        times = [datetime.fromisoformat(e["time"]) for e in (self.start, self.end) if "time" in e]
        return (times[-1] - times[0]).total_seconds() if times else 0.0

    @cached_property
    def ranks(self) -> list["Run"]:
        """Return the logs of all processes, by rank; only this one for a recording in one file."""
        size, folder = self.start.get("size", 1), self.path.parent
        if self.path != events_file(folder):
            return [self]
        missing = f"the run had {size} processes: did this one start?"
        return [self, *(_read(events_file(folder, rank), missing) for rank in range(1, size))]

    @property
    def in_the_middle(self) -> "Run":
        """Return this log with the step in the middle that was profiled as its last."""
        ranks = [replace(run, last=run.middle) for run in self.ranks]
        ranks[0].ranks = ranks
        return ranks[0]


def read(run) -> Run:
    """Return the log of a run: of a Job, a run's folder (both: rank 0), or the file of a log.

    A Run is returned as it is. A torn last line and a missing end are normal in a killed run, and
    become notes. Anything else that is malformed raises LogError with file and line number.
    """
    if isinstance(run, Run):
        return run
    path = path_of(run)
    try:
        return _read(events_file(path) if path.is_dir() else path, "did the run start?")
    except NoLogError as error:
        raise _of_job(run, error) from None


def _of_job(run, error) -> NoLogError:
    """Return the error of a missing log, with the state of its job and what to do."""
    state = getattr(run, "status", {}).get("state", "COMPLETED")
    if state == "COMPLETED":
        return error
    waits = state in ("QUEUED", "RUNNING")
    then = "job.wait(), and again" if waits else f"`dlojz report {run.id}` says more"
    return NoLogError(f"job {run.id} is {state}: {error}; {then}")


def read_ranks(run) -> list[Run]:
    """Return the logs of all processes of a run, by rank. Raises LogError."""
    return read(run).ranks


def _read(path, missing):
    run = Run(path, cases=Cases(path))
    try:
        file = io.TextIOWrapper(course.open_regular(path), encoding="utf-8", errors="replace")
    except course.FileError as error:
        raise LogError(str(error)) from None
    except OSError as error:
        said = outcome.errors(path.parent).strip().splitlines()
        why = f"its stderr ends with: {said[-1]}" if said else missing
        if (path.parent / "trainer.py").exists() and outcome.is_foreign(path.parent):
            why = "no Chronometer in its program" + (f", and {why}" if said else "")
        raise NoLogError(f"{path}: no log to read ({error.strerror}): {why}") from error
    torn = None  # the error of a line that is not JSON: forgiven if it is last, or before a restart
    with file:
        for number, line in enumerate(iter(lambda: file.readline(course.SMALL), ""), 1):
            if torn and not line.startswith('{"event": "start"'):
                raise torn
            torn = None
            try:
                _take(run, json.loads(line))
            except json.JSONDecodeError:
                torn = LogError(f"{path}:{number}: not a JSON object: {line[:80]!r}; {AGAIN}")
                run.notes.append(f"line {number} was cut: the run was killed while it wrote")
            except OtherSchemaError as error:
                raise LogError(f"{path}:{number}: {error}") from error
            except MALFORMED as error:
                why = f"{_complaint(error)}: {line[:80]!r}; {AGAIN}"
                raise LogError(f"{path}:{number}: {why}") from error
    if torn and line.endswith("\n"):
        raise torn
    if not run.start:
        run.notes.append("an empty log: the run has just begun, or could not write (disk full?)")
    elif not run.end:
        run.notes.append("no end: the run is still going, was killed, or left without run.end()")
    return run


def _complaint(error):
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return f"no field {error}" if isinstance(error, KeyError) else str(error)


def _take(run, event):
    """Add an event to a run, in the field that it belongs to. Raises one of MALFORMED."""
    if not isinstance(event, dict):
        raise TypeError("not a JSON object")
    kind = event["event"]
    if kind not in EVENTS:
        raise ValueError(f"unknown event {kind!r}, expected one of {', '.join(EVENTS)}")
    if kind != "start" and not run.start:
        raise ValueError(f"{kind!r} before the run's start, which is the first line of a log")
    _check(kind, event)
    if kind == "step":
        run.steps.append(event)
    elif kind == "window":
        run.windows.append(event | {"first_step": event["first_step"] + run.first_step})
    elif kind in ("validation", "epoch"):
        getattr(run, kind + "s").append(event)
    elif kind == "measure":
        run.measures.append(records.Measure.read(event))
    elif kind == "rates":
        run.rates = records.Rates.read(event)
    elif kind == "case":
        run.cases[event["case"]] = {k: v for k, v in event.items() if k not in ("event", "case")}
    elif kind == "evidence":
        if event["when"] not in records.EVIDENCE:
            known = ", ".join(records.EVIDENCE)
            raise ValueError(f"unknown evidence {event['when']!r}, expected one of {known}")
        setattr(run, event["when"], records.EVIDENCE[event["when"]].read(event))
    else:
        if kind == "start":
            run.first_step, run.end = len(run.steps), {}
        setattr(run, kind, event)


def _check(kind, event):
    """Raise for a field of FIELDS that is missing or has the wrong type."""
    if kind == "start" and event["schema"] != SCHEMA:
        raise OtherSchemaError(
            f"schema {event['schema']!r}, expected {SCHEMA}: another version wrote it; "
            "run it again, or update the course, git pull"
        )
    for name, (expected, word) in FIELDS.get(kind, {}).items():
        if kind == "start" and name not in event:
            continue
        if not isinstance(event[name], expected):
            raise TypeError(f"{name} is {event[name]!r}, expected {word}")
    if kind == "start" and event.get("size", 1) < 1:
        raise ValueError(f"size is {event['size']}, expected one process or more")
