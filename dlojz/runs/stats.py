"""The figures of a run, from its log, and the speed of runs compared with that of others.

All tables, figures and checks take their numbers from here. `summary` returns one run in figures;
`compare` decides from pairs of runs whether a change made the training faster.
"""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dlojz.course import UserError
from dlojz.runs import log, outcome
from dlojz.runs.folder import events_file, path_of
from dlojz.runs.log import PHASES

MIN_ENERGY_WINDOW_S = 2.0  # the counter moves every 100 ms: 5 % of this

MIN_PAIRS = 6  # with fewer, an interval says more about Student's t than about the runs
# Two identical runs can differ by this much, so a ratio this close to 1 counts as no difference.
MARGIN_GPU, MARGIN_CPU = 0.01, 0.03
FASTER, SLOWER, NO_DIFFERENCE = "faster", "slower", "no difference shown"

# Shares above which to warn.
SPREAD_GPU, SPREAD_CPU = 0.02, 0.05  # standard deviation of one side's speeds, of their mean
CLOCK_FALL = 0.05  # of the GPU's SM clock
OTHERS_CPU = 0.10  # of the CPUs that the run may use
POWER_CAP = "power cap"  # normal for a busy GPU
DATA_BOUND = 0.20  # of a step, waiting for images


@dataclass(frozen=True)
class Summary:
    """The figures of a run. A figure without a sensor or a measured step is None.

    Measured steps are those after the warm-up. With several processes, images are summed over
    them, the wall time is that of the slowest process and the memory that of the fullest.
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
    started: str = ""  # when, with the date first
    arguments: dict = field(default_factory=dict)
    trainer_sha256: str | None = None
    num_workers: int | None = None  # of its DataLoader
    command: str | None = None  # that made a recording of reference/; None: it is none
    parameter_bytes: int | None = None
    cpus: int | None = None  # that each process may use

    windows: int = 0  # measured to their end
    steps: int = 0  # measured, of one process
    clock: str = "host"  # which clock step_ms and shares come from
    images_per_s: float | None = None  # wall clock, over the measured windows
    device_images_per_s: float | None = None  # the same by the device's clock
    step_ms: float | None = None  # median
    step_ms_spread: tuple[float, float] | None = None  # 10th and 90th percentile
    phase_ms: dict = field(default_factory=dict)  # mean over the steps, by phase
    shares: dict = field(default_factory=dict)  # of the step's time, by phase; sums to 1
    # Median: how far the host ran ahead of the device; with several processes, the last of them,
    # for which the others wait.
    ahead_ms: float | None = None
    epoch_s: float | None = None  # all training images at images_per_s
    train_images: int | None = None
    validation_s: float | None = None  # the last validation
    compile_s: float | None = None  # what torch.compile took: see `compile_seconds`
    compile_share: float | None = None  # of the time from the log's first line to its last
    compile_cached: bool = False  # the code for training came from an earlier process
    graphs: int = 0  # that it made
    graph_breaks: int = 0
    first_load_s: float | None = None  # until the first batch was there, in the slowest process

    peak_memory_bytes: int | None = None
    # "device": the tensors on it; "process": resident on the host, as "largest process", which is
    # that of a job without a log.
    memory_of: str = "process"
    memory_limit_bytes: int | None = None  # of the device
    host_memory_bytes: int | None = None  # of all processes with their workers, as a window ended
    energy_per_image_j: float | None = None
    power_w: float | None = None  # mean over the measured windows

    others_cpu: float | None = None  # CPUs that others kept busy, in the worst window
    sm_clock_mhz: tuple[int, int] | None = None  # of the GPU: highest, and lowest at a window's end
    throttled: tuple[str, ...] = ()  # why the GPU had lowered its clock

    epochs: tuple[dict, ...] = ()  # losses and accuracies, as logged
    divergence: str = ""  # "nan from step 2 of 8 on", of the training's loss
    scale: float | None = None  # of a gradient scaler, at the end
    skipped: tuple[int, int] | None = None  # how many updates it skipped, and how many were due
    # Spent in training steps, all of them, by the host's clock; without a log, in the whole job.
    seconds: float | None = None
    cpu_s: float | None = None  # of a job without a log: the CPU time of all its processes

    @property
    def recorded(self) -> bool:
        return self.command is not None

    @property
    def synthetic(self) -> bool:
        return self.data == "synthetic"

    @property
    def date(self) -> str:
        return self.started[:10]

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def completed(self) -> bool:
        return self.state == "COMPLETED"

    @property
    def crowded(self) -> bool:
        """Return whether others kept enough CPUs busy to make the speed unreliable."""
        return bool(self.others_cpu and self.cpus and self.others_cpu > OTHERS_CPU * self.cpus)

    @property
    def disturbance(self) -> str:
        """Return a sentence on what may have slowed this run down; "" if nothing was seen."""
        found = []
        if self.crowded:
            found.append(f"{crowd_text(self.others_cpu, self.cpus)}: repeat it")
        if unusual := [why for why in self.throttled if why != POWER_CAP]:
            found.append(f"the GPU had lowered its clock ({', '.join(unusual)})")
        elif self.sm_clock_mhz and not self.throttled:
            top, low = self.sm_clock_mhz
            if low < (1 - CLOCK_FALL) * top:
                found.append(f"the GPU's clock fell from {top} to {low} MHz")
        return "; ".join(found)


def crowd_text(busy: float, cpus: int, at_most: bool = False) -> str:
    """Return the CPUs that others kept busy in words: "others kept 0.9 of 2 CPUs busy"."""
    return f"others kept {'up to ' * at_most}{busy:.1f} of {cpus} CPUs busy"


def summary(run) -> Summary:
    """Return the figures of a run: a Job, its folder, a recording's file, or a log.Run.

    A job without a log (it is queued, or failed before it began) has a state and no figures. If the
    log of a job cannot be read, a note says so.
    """
    if isinstance(run, Summary):
        return run
    status = getattr(run, "status", None)
    try:
        ranks = log.read_ranks(run)
    except log.LogError as error:
        if status is None:
            raise
        return _without_log(path_of(run).name, status, error)
    first, path = ranks[0], ranks[0].path
    recording = path != events_file(path.parent)
    states = {"completed": "COMPLETED", "out_of_memory": "OUT_OF_MEMORY", None: "RUNNING"}
    ended = first.end.get("outcome")
    return Summary(
        name=path.stem if recording else path.parent.name,
        state=status["state"] if status else states.get(ended, "FAILED"),
        reason=(status or {}).get("reason") or first.end.get("error"),
        notes=_notes(first, status),
        **_identity(first),
        **_speed(ranks),
        **_memory(ranks),
        **_compiled(first),
        first_load_s=_first_load_s(ranks),
        **_disturbance(ranks),
        epochs=tuple(first.epochs),
        divergence=_divergence(ranks),
        scale=first.whole.scale,
        skipped=_skipped(first),
    )


def _without_log(name, status, error):
    """Return the summary of a job without a log: what its keeper saw from outside."""
    state, reason = status["state"], status.get("reason")
    expected = state != "COMPLETED" or reason == outcome.NO_CHRONOMETER
    notes = () if expected and isinstance(error, log.NoLogError) else (str(error),)
    times = [status[name] for name in ("started", "ended") if status.get(name)]
    return Summary(
        name,
        state,
        reason,
        notes,
        peak_memory_bytes=status.get("peak_memory_bytes"),
        memory_of="largest process",
        cpu_s=status.get("cpu_s"),
        seconds=times[1] - times[0] if len(times) == 2 else None,
    )


def _notes(run, status):
    """Return the notes on a log; none for a job that failed, whose log may well lack an end."""
    news = status is None or status["state"] in ("RUNNING", "COMPLETED")
    return tuple(run.notes) if news else ()


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
        "started": run.start.get("time", ""),
        "arguments": arguments,
        "trainer_sha256": run.start.get("trainer_sha256"),
        "num_workers": run.probe.loader.num_workers,
        "command": run.start.get("command"),
        "parameter_bytes": setup.get("parameter_bytes"),
        "cpus": run.start.get("cpu_count"),
        "windows": len(run.audit.windows if _is_audited(run) else run.windows),
        "train_images": setup.get("train_images"),
        "validation_s": run.validations[-1]["seconds"] if run.validations else None,
    }


def measured(run) -> np.ndarray:
    """Return the indices of the measured steps: in the windows or, if none, after the warm-up."""
    if run.windows:
        spans = [(w["first_step"], w["first_step"] + w["steps"]) for w in run.windows]
        return np.concatenate([np.arange(a, min(b, len(run.steps))) for a, b in spans])
    return np.arange(run.first_step + run.setup.get("warmup_steps", 0), len(run.steps))


def step_times(run) -> tuple[str, dict[str, np.ndarray]]:
    """Return the clock ("device" where there is one) and its milliseconds, by phase and step."""
    clock = "device" if len(run.steps.device_ms["data"]) == len(run.steps) > 0 else "host"
    times = run.steps.device_ms if clock == "device" else run.steps.host_ms
    return clock, {phase: np.asarray(times[phase]) for phase in PHASES}


def lead_ms(run):
    """Return the lead of a process over its device in a measured step, in ms; None if unknown."""
    ahead = np.asarray(run.steps.ahead_ms)[measured(run)]
    known = ahead[~np.isnan(ahead)]  # NaN before the window
    return float(np.median(known)) if len(known) else None


def _speed(ranks):
    first = ranks[0]
    chosen = measured(first)
    seconds = sum(sum(first.steps.host_ms[p]) for p in PHASES) / 1000
    if len(chosen) == 0:
        return {"seconds": seconds}
    clock, times = step_times(first)
    times = {phase: values[chosen] for phase, values in times.items()}
    steps_ms = sum(times.values())
    images, wall_s = _audited_speed(ranks) if _is_audited(first) else _told_speed(ranks)
    if not (wall_s and images and 0 < steps_ms.sum() < math.inf):
        return {"seconds": seconds}
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
        if ahead := [ms for rank in ranks if (ms := lead_ms(rank)) is not None]:
            found["ahead_ms"] = min(ahead)
    long_enough = wall_s >= MIN_ENERGY_WINDOW_S
    if long_enough and first.windows and all("energy_j" in w for r in ranks for w in r.windows):
        energy = sum(w["energy_j"] for r in ranks for w in r.windows)
        images, wall_s = _told_speed(ranks)  # the sensors' window, which an auditor's is not
        found["energy_per_image_j"] = energy / images
        found["power_w"] = energy / wall_s
    return found


def _is_audited(run):
    """Return whether an auditor measured the speed: in a check's runs, but for those profiled."""
    return bool(run.audit) and run.audit.timed


def _audited_speed(ranks):
    """Return the images and seconds of the windows that the auditors measured."""
    windows = [r.audit.windows for r in ranks]
    images = sum(w["images"] for own in windows for w in own)
    return images, max(sum(w["wall_s"] for w in own) for own in windows)


def _told_speed(ranks):
    """Return the images and seconds of the Chronometer's windows."""
    images = sum(int(np.asarray(r.steps.images)[measured(r)].sum()) for r in ranks)
    return images, max(_wall_s(r) for r in ranks)


def _wall_s(run):
    if run.windows:
        return sum(w["wall_s"] for w in run.windows)
    host = sum(np.asarray(run.steps.host_ms[p])[measured(run)].sum() for p in PHASES)
    return host / 1000


def _compiled(run):
    seen = run.compilation
    if not seen.graphs:
        return {}
    breaks, seconds = sum(seen.breaks.values()), compile_seconds(run)
    return {
        "compile_s": seconds,
        # The log's times are whole seconds.
        "compile_share": min(1.0, seconds / run.seconds) if run.seconds else None,
        "compile_cached": seen.cached,
        "graphs": seen.graphs,
        "graph_breaks": breaks,
    }


def compile_seconds(run: log.Run) -> float:
    """Return the seconds of compiling, in training and validation.

    Of a step it is what the compiler says, or what the step took longer than others: the compiler
    counts neither the kernels that it tries before it chooses one, nor how they are loaded.
    """
    host = np.add(run.steps.host_ms["forward"], run.steps.host_ms["backward"])
    told = Counter()
    for one in run.compilation.seen:
        told[one["mode"], run.first_step + one["step"] - 1] += one["seconds"]
    longer = ((host - np.median(host)) / 1000).tolist() if len(host) else []
    return sum(
        max(seconds, longer[step]) if mode == "train" and 0 <= step < len(longer) else seconds
        for (mode, step), seconds in told.items()
    )


def _first_load_s(ranks):
    found = [r.steps.host_ms["data"][r.first_step] for r in ranks if len(r.steps) > r.first_step]
    return max(found) / 1000 if found else None


def _memory(ranks):
    memories = [r.memory for r in ranks if r.memory]
    kind = "device" if any("device_peak_bytes" in m for m in memories) else "process"
    peaks = [m[f"{kind}_peak_bytes"] for m in memories if f"{kind}_peak_bytes" in m]
    held = [[w["host_memory_bytes"] for w in r.windows if "host_memory_bytes" in w] for r in ranks]
    return {
        "host_memory_bytes": sum(map(max, held)) if all(held) else None,
        "memory_of": kind,
        "peak_memory_bytes": max(peaks, default=None),
        "memory_limit_bytes": next((m.get("device_total_bytes") for m in memories), None),
    }


def _disturbance(ranks):
    windows = [w for r in ranks for w in r.windows]
    clocks = [w["sm_clock_mhz"] for w in windows if "sm_clock_mhz" in w]
    return {
        "others_cpu": max((w["others_cpu"] for w in windows if "others_cpu" in w), default=None),
        "sm_clock_mhz": (max(map(max, clocks)), min(c[1] for c in clocks)) if clocks else None,
        "throttled": tuple(dict.fromkeys(word for w in windows for word in w.get("throttled", ()))),
    }


def _divergence(ranks):
    """Return the training's loss and its first step, in words, if it is not finite; else ""."""
    if ranks[0].setup.get("device") == "meta":  # whose tensors have no values
        return ""
    steps = min(len(rank.steps) for rank in ranks)
    losses = np.array([np.asarray(rank.steps.loss)[:steps] for rank in ranks])
    wrong = ~np.isfinite(losses)
    lost = wrong.any(axis=0)
    if not lost.any():
        return ""
    first, count = int(lost.argmax()), int(lost.sum())
    if count == steps - first:
        value = losses[wrong[:, first], first][0]
        return f"{value} from step {first + 1} of {steps} on"
    return f"not finite in {count} of {steps} steps, first in step {first + 1}"


def _skipped(run):
    """Return the number of updates that a gradient scaler skipped, and of those that were due."""
    made, accumulate = run.whole.optimizer_steps, run.start.get("arguments", {}).get("accumulate")
    if run.whole.scale is None or made is None:
        return None
    steps = np.asarray(run.steps.step)[run.first_step :]
    due = int(((steps + 1) % (accumulate or 1) == 0).sum())
    return max(0, due - made), due


@dataclass(frozen=True)
class MemoryFit:
    """A straight line of peak memory over batch size: bytes = fixed + per_image * images."""

    fixed_bytes: float  # the model, its gradients, its optimizer and, on a CPU, the process
    per_image_bytes: float  # what the forward pass keeps for the backward pass


def fit_memory(summaries) -> MemoryFit | None:
    """Return a least-squares fit of the completed runs; None with fewer than two batch sizes."""
    points = {s.batch_size: s.peak_memory_bytes for s in summaries if s.completed}
    points = {b: m for b, m in points.items() if m}
    if len(points) < 2:
        return None
    # Weighted by 1/batch: it is the small batches that determine the fixed part.
    batches = np.array(list(points), float)
    slope, fixed = np.polyfit(batches, np.array(list(points.values()), float), 1, w=1 / batches)
    return MemoryFit(max(0.0, fixed), slope)


# Paired comparison --------------------------------------------------------------------------


@dataclass(frozen=True)
class Caution:
    """Something that makes a comparison less sure than it looks."""

    TOO_FEW, NOT_COMPARABLE = "too few", "not comparable"
    DISTURBED, DATA_BOUND = "disturbed", "data-bound"

    kind: str  # one of these
    text: str
    again: bool = False  # measuring again may help

    def __str__(self):
        return f"{self.kind}: {self.text}"


@dataclass(frozen=True)
class Comparison:
    """The ratio of the speed after a change to the speed before it, from pairs of runs."""

    ratio: float  # geometric mean over the pairs
    low: float | None  # of the ratio's 95 % interval; None with fewer than MIN_PAIRS
    high: float | None
    margin: float  # a ratio within a factor of 1 + margin of 1 counts as 1
    pairs: int
    word: str  # FASTER, SLOWER or NO_DIFFERENCE
    comparable: bool = True  # the same training on the same hardware, apart from the change
    cautions: tuple[Caution, ...] = ()

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(map(str, self.cautions))

    def __str__(self):
        count = f"{self.pairs} pair{'s' if self.pairs > 1 else ''}"
        digits, interval = 2, ""
        if self.low is not None:
            digits = 3 if self.high - self.low < 0.02 else 2
            interval = f"95 % interval {self.low:.{digits}f} to {self.high:.{digits}f}, "
        but = "" if self.comparable else ", but the runs are not comparable"
        word = self.word
        if word == NO_DIFFERENCE and self.low is not None and not self.low <= 1 <= self.high:
            word = f"no difference of over {100 * self.margin:.0f} % shown"
        return f"{self.ratio:.{digits}f} times as fast ({interval}{count}): {word}{but}"


def compare(before_runs: Sequence, after_runs: Sequence, same_hardware: bool = True) -> Comparison:
    """Return the speed-up that a change brought, from pairs of completed runs.

    before_runs, after_runs: anything `summary` takes; the first of each make a pair, which should
        have run one shortly after the other, and so on.
    same_hardware: False allows the device to differ between before and after.

    Speeds are wall-clock over the measured windows, so that neither warm-up nor compilation counts.
    Raises UserError for runs without such a speed.
    """
    if len(before_runs) != len(after_runs) or not before_runs:
        raise UserError(
            f"{len(before_runs)} runs before and {len(after_runs)} after: expected pairs, as many "
            "of one as of the other, and at least one"
        )
    before = [_measured_run(r, "before") for r in before_runs]
    after = [_measured_run(r, "after") for r in after_runs]
    pairs = list(zip(before, after, strict=True))
    margin = MARGIN_GPU if all(s.on_gpu for s in before + after) else MARGIN_CPU
    ratio, low, high, word = judge([a.images_per_s / b.images_per_s for b, a in pairs], margin)
    different = [
        *_differences(pairs, same_hardware),
        *_diverged(before, "before"),
        *_diverged(after, "after"),
    ]
    cautions = (
        *_too_few(len(pairs)),
        *different,
        *_disturbed(before, "before"),
        *_disturbed(after, "after"),
        *_data_bound(before, "before"),
        *_data_bound(after, "after"),
    )
    return Comparison(ratio, low, high, margin, len(pairs), word, not different, cautions)


def judge(ratios: Sequence[float], margin: float) -> tuple[float, float | None, float | None, str]:
    """Return the ratios' geometric mean, its interval, and the word that the rule allows."""
    if len(ratios) < MIN_PAIRS:
        return statistics.geometric_mean(ratios), None, None, NO_DIFFERENCE
    mean, low, high = interval(ratios)
    slower = SLOWER if high <= 1 / (1 + margin) else NO_DIFFERENCE
    return mean, low, high, FASTER if low >= 1 + margin else slower


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean of paired ratios, and the ends of its 95 % interval."""
    logs = [math.log(r) for r in ratios]
    mean, half = statistics.fmean(logs), half_width(logs)
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def half_width(values: Sequence[float]) -> float:
    """Return half the width of the 95 % interval of a mean, by Student's t."""
    from scipy.special import stdtrit  # here: its import takes 0.4 s

    if len(values) < 2:
        raise ValueError(f"{len(values)} value: an interval needs at least 2")
    return float(stdtrit(len(values) - 1, 0.975)) * statistics.stdev(values) / len(values) ** 0.5


def _measured_run(run, side):
    """Return the summary of a run that has a speed to compare. Raises UserError."""
    s = summary(run)
    if s.state in ("QUEUED", "RUNNING"):
        raise UserError(
            f"run {s.name} ({side}) is {s.state}, expected COMPLETED: wait for it, job.wait(), or "
            "submit it again if it was killed"
        )
    if not s.completed:
        why = f" ({s.reason})" if s.reason else ""
        raise UserError(
            f"run {s.name} ({side}) is {s.state}{why}, expected COMPLETED: see its "
            "stderr.txt, then submit it again"
        )
    if not s.windows or not s.images_per_s:
        raise UserError(
            f"run {s.name} ({side}) measured nothing: all its steps are warm-up; submit it again "
            "with more, such as --test-nsteps 12"
        )
    return s


def _too_few(pairs):
    if pairs < MIN_PAIRS:
        yield Caution(
            Caution.TOO_FEW,
            f"{pairs} pair{'s' if pairs > 1 else ''}, {MIN_PAIRS} are needed for an "
            f"interval; submit {MIN_PAIRS - pairs} more",
        )


COMPARED = {
    "batch_size": "batch size",
    "image_size": "image size",
    "model": "model",
    "data": "data",
    "size": "number of processes",
    "device_name": "device",
}


def _differences(pairs, same_hardware):
    found = {}
    for b, a in pairs:
        for name, text in COMPARED.items():
            was, now = getattr(b, name), getattr(a, name)
            if was != now and (same_hardware or name != "device_name"):
                found.setdefault(name, f"{text} {was} before, {now} after; submit both alike")
    return [Caution(Caution.NOT_COMPARABLE, text) for text in found.values()]


def _diverged(runs, side):
    if lost := [s for s in runs if s.divergence]:
        count = f"{len(lost)} of {len(runs)} runs {side}"
        text = f"the loss is {lost[0].divergence} in {count}, which did not train"
        yield Caution(Caution.NOT_COMPARABLE, text)


def _disturbed(runs, side):
    """Yield possible reasons why some runs of one side were slower than others."""
    speeds = [s.images_per_s for s in runs]
    limit = SPREAD_GPU if all(s.on_gpu for s in runs) else SPREAD_CPU
    if len(runs) > 1 and (spread := statistics.stdev(speeds) / statistics.fmean(speeds)) > limit:
        text = f"the speeds {side} spread by {spread:.1%}, more than the {limit:.0%} of a quiet "
        text += "machine; measure again when nothing else runs"
        yield Caution(Caution.DISTURBED, text, again=True)
    throttled = [s for s in runs if s.throttled]
    if throttled:
        why = ", ".join(dict.fromkeys(word for s in throttled for word in s.throttled))
        count = f"{len(throttled)} of {len(runs)} runs {side}"
        yield Caution(Caution.DISTURBED, f"the GPU had lowered its clock in {count} ({why})")
    clocks = [s.sm_clock_mhz for s in runs if s.sm_clock_mhz]
    if clocks:
        top, low = max(c[0] for c in clocks), min(c[1] for c in clocks)
        if low < (1 - CLOCK_FALL) * top:
            text = f"the GPU's clock fell from {top} to {low} MHz in the runs {side}"
            yield Caution(Caution.DISTURBED, text)
    if crowded := [s for s in runs if s.crowded]:
        worst = max(crowded, key=lambda s: s.others_cpu)
        busy = crowd_text(worst.others_cpu, worst.cpus, at_most=True)
        count = f"{len(crowded)} of {len(runs)} runs {side}"
        text = f"{busy} in {count}; stop them and measure again"
        yield Caution(Caution.DISTURBED, text, again=True)


def _data_bound(runs, side):
    waited = statistics.median(s.shares["data"] for s in runs)
    if waited > DATA_BOUND and not any(s.synthetic for s in runs):
        yield Caution(
            Caution.DATA_BOUND,
            f"the runs {side} waited for images for {waited:.0%} of a step, which "
            "hides the rest; compare with --data synthetic",
        )
