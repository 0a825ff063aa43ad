"""Computes the figures of a run from its log; all tables, figures and checks take theirs here."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dlojz import log
from dlojz.chronometer import PHASES

MIN_ENERGY_WINDOW_S = 2.0  # the counter moves every 100 ms: 5 % of this


@dataclass(frozen=True)
class Summary:
    """A run in figures. What was not measured is None: no sensor, no measured step.

    Measured steps are those after the warm-up. With several processes, images are summed over
    them, the wall time and the memory are those of the slowest and the fullest.
    """

    name: str  # the job's id, or the recording's file name
    state: str
    reason: str | None = None  # of a state other than COMPLETED
    notes: tuple[str, ...] = ()
    model: str = "?"
    data: str = "?"
    image_size: int = 0  # pixels
    batch_size: int = 0  # images per process
    size: int = 1  # processes
    device: str = "?"  # cpu, cuda:0
    device_name: str = "?"
    optimizer: str = "?"
    versions: dict = field(default_factory=dict)
    date: str = ""
    arguments: dict = field(default_factory=dict)
    recorded: bool = False  # kept in reference/, not made by the reader
    parameter_bytes: int | None = None

    steps: int = 0  # measured, of one process
    clock: str = "host"  # which clock step_ms and shares come from
    images_per_s: float | None = None  # wall clock, over the measured windows
    device_images_per_s: float | None = None  # the same by the device's clock
    step_ms: float | None = None  # median
    step_ms_spread: tuple[float, float] | None = None  # 10th and 90th percentile
    phase_ms: dict = field(default_factory=dict)  # mean over the steps, by phase
    shares: dict = field(default_factory=dict)  # of the step's time, by phase; sums to 1
    ahead_ms: float | None = None  # median: how far the host ran ahead of the device
    epoch_s: float | None = None  # all training images at images_per_s
    train_images: int | None = None
    validation_s: float | None = None  # the last validation

    peak_memory_bytes: int | None = None
    memory_of: str = "process"  # "device": the tensors on it; "process": resident on the host
    memory_limit_bytes: int | None = None  # of the device
    energy_per_image_j: float | None = None
    power_w: float | None = None  # mean over the measured windows

    epochs: tuple[dict, ...] = ()  # losses and accuracies, as logged
    seconds: float | None = None  # spent in training steps, all of them, by the host's clock

    @property
    def synthetic(self) -> bool:
        return self.data == "synthetic"

    @property
    def completed(self) -> bool:
        return self.state == "COMPLETED"


def summary(run) -> Summary:
    """The figures of a run: a Job, its folder, or the file of a recording.

    A run that left no log (it is queued, or failed before it began) has a state and no figures.
    """
    if isinstance(run, Summary):
        return run
    path = Path(getattr(run, "directory", run))
    status = getattr(run, "status", None)
    try:
        ranks = log.read_ranks(path) if path.is_dir() else [log.read(path)]
    except log.LogError as error:
        if status is None:
            raise
        reason = status.get("reason") or (None if path.joinpath("stdout.txt").exists() else error)
        return Summary(path.name, status["state"], reason)
    first = ranks[0]
    outcome = {"completed": "COMPLETED", "out_of_memory": "OUT_OF_MEMORY", None: "RUNNING"}
    ended = first.end.get("outcome")
    return Summary(
        name=path.stem if path.is_file() else path.name,
        state=status["state"] if status else outcome.get(ended, "FAILED"),
        reason=(status or {}).get("reason") or first.end.get("error"),
        notes=tuple(first.notes) if status is None or status["state"] == "RUNNING" else (),
        **_identity(first),
        **_speed(ranks),
        **_memory(ranks),
        epochs=tuple(first.epochs),
    )


def _identity(run):
    arguments, setup = run.start.get("arguments", {}), run.setup
    return {
        "model": arguments.get("model", "?"),
        "data": arguments.get("data", "?"),
        "image_size": arguments.get("image_size", 0),
        "batch_size": arguments.get("batch_size", 0),
        "size": run.start.get("size", 1),
        "device": setup.get("device", "?"),
        "device_name": setup.get("device_name", "?"),
        "optimizer": setup.get("optimizer", "?"),
        "versions": run.start.get("versions", {}),
        "date": run.start.get("time", "")[:10],
        "arguments": arguments,
        "recorded": "command" in run.start,
        "parameter_bytes": setup.get("parameter_bytes"),
        "train_images": setup.get("train_images"),
        "validation_s": run.validations[-1]["seconds"] if run.validations else None,
    }


def measured(run) -> np.ndarray:
    """Indices of the measured steps: those of the windows or, in a cut log, after the warm-up."""
    if run.windows:
        spans = [(w["first_step"], w["first_step"] + w["steps"]) for w in run.windows]
        return np.concatenate([np.arange(a, min(b, len(run.steps))) for a, b in spans])
    return np.arange(run.first_step + run.setup.get("warmup_steps", 0), len(run.steps))


def step_times(run) -> tuple[str, dict[str, np.ndarray]]:
    """The clock ("device" where there is one) and its milliseconds, by phase and step."""
    clock = "device" if len(run.steps.device_ms["data"]) == len(run.steps) > 0 else "host"
    times = run.steps.device_ms if clock == "device" else run.steps.host_ms
    return clock, {phase: np.asarray(times[phase]) for phase in PHASES}


def _speed(ranks):
    first = ranks[0]
    chosen = measured(first)
    seconds = sum(sum(first.steps.host_ms[p]) for p in PHASES) / 1000
    if len(chosen) == 0:
        return {"seconds": seconds}
    clock, times = step_times(first)
    times = {phase: values[chosen] for phase, values in times.items()}
    steps_ms = sum(times.values())
    images = sum(int(np.asarray(r.steps.images)[measured(r)].sum()) for r in ranks)
    wall_s = max(_wall_s(r) for r in ranks)
    found = {
        "steps": len(chosen),
        "clock": clock,
        "images_per_s": images / wall_s,
        "step_ms": float(np.median(steps_ms)),
        "step_ms_spread": tuple(np.percentile(steps_ms, (10, 90)).tolist()),
        "phase_ms": {p: float(v.mean()) for p, v in times.items()},
        "shares": {p: float(v.sum() / steps_ms.sum()) for p, v in times.items()},
        "seconds": seconds,
    }
    if first.setup.get("train_images"):
        found["epoch_s"] = first.setup["train_images"] / found["images_per_s"]
    if clock == "device":
        found["device_images_per_s"] = 1000 * images / steps_ms.sum()
        found["ahead_ms"] = float(np.nanmedian(np.asarray(first.steps.ahead_ms)[chosen]))
    long_enough = wall_s >= MIN_ENERGY_WINDOW_S
    if long_enough and first.windows and all("energy_j" in w for r in ranks for w in r.windows):
        energy = sum(w["energy_j"] for r in ranks for w in r.windows)
        found["energy_per_image_j"] = energy / images
        found["power_w"] = energy / wall_s
    return found


def _wall_s(run):
    if run.windows:
        return sum(w["wall_s"] for w in run.windows)
    host = sum(np.asarray(run.steps.host_ms[p])[measured(run)].sum() for p in PHASES)
    return host / 1000


def _memory(ranks):
    memories = [r.memory for r in ranks if r.memory]
    kind = "device" if any("device_peak_bytes" in m for m in memories) else "process"
    peaks = [m[f"{kind}_peak_bytes"] for m in memories if f"{kind}_peak_bytes" in m]
    return {
        "memory_of": kind,
        "peak_memory_bytes": max(peaks, default=None),
        "memory_limit_bytes": next((m.get("device_total_bytes") for m in memories), None),
    }


@dataclass(frozen=True)
class MemoryFit:
    """Peak memory as a straight line over the batch size: bytes = fixed + per_image * images."""

    fixed_bytes: float  # the model, its gradients and its optimizer; and the process, on a host
    per_image_bytes: float  # what the forward pass keeps for the backward pass


def fit_memory(summaries) -> MemoryFit | None:
    """Least squares over the completed runs; None with fewer than two batch sizes."""
    points = {s.batch_size: s.peak_memory_bytes for s in summaries if s.completed}
    points = {b: m for b, m in points.items() if m}
    if len(points) < 2:
        return None
    # Weighted by 1/batch: small batches tell about the fixed part, and must be heard.
    batches = np.array(list(points), float)
    slope, fixed = np.polyfit(batches, np.array(list(points.values()), float), 1, w=1 / batches)
    return MemoryFit(max(0.0, fixed), slope)
