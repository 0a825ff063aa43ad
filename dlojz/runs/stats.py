"""The figures of a run, from its log, and the speed of runs compared with that of others.

All tables, figures and checks take their numbers from here. `summary` returns one run in figures;
`compare` decides from pairs of runs whether a change made the training faster.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from dlojz.course import UserError
from dlojz.runs import derived, log, outcome, outside
from dlojz.runs.folder import events_file, path_of
from dlojz.runs.outside import Outside

MIN_PAIRS = 6  # with fewer, an interval says more about Student's t than about the runs
EARLY_PAIRS = 3  # a gain is clear as early as this, if its 99 % interval says so
LEVEL, EARLY_LEVEL = 0.95, 0.99
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
    foreign: bool = False  # a program without our Chronometer, which writes no log
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
    tokens_per_s: float | None = None  # the same in tokens; None for images
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
    compile_s: float | None = None  # what torch.compile took: see derived.py
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
    outside: Outside | None = None  # of a job without a log: what its keeper saw

    @property
    def recorded(self) -> bool:
        return self.command is not None

    @property
    def synthetic(self) -> bool:
        return self.data == "synthetic"

    @property
    def mean_step_ms(self) -> float:
        """Return the mean of the steps, as measured without a profiler; 0 without a step."""
        return sum(self.phase_ms.values())

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
            found.append(_clock_text(*self.sm_clock_mhz))
        return "; ".join(filter(None, found))


def _clock_text(top, low):
    """Return the fall of a GPU's clock in words; "" if it is normal."""
    return f"the GPU's clock fell from {top} to {low} MHz" if low < (1 - CLOCK_FALL) * top else ""


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
        return _without_log(path_of(run), status, error)
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
        **derived.speed(ranks),
        **derived.memory(ranks),
        **derived.compiled(first),
        first_load_s=derived.first_load_s(ranks),
        **derived.disturbance(ranks),
        epochs=tuple(first.epochs),
        divergence=derived.divergence(ranks),
        scale=first.whole.scale,
        skipped=derived.skipped(first),
    )


def _without_log(folder, status, error):
    """Return the summary of a job without a log: what its keeper saw from outside."""
    completed = status["state"] == "COMPLETED"
    foreign = status["state"] != "QUEUED" and outcome.is_foreign(folder)
    expected = (foreign or not completed) and isinstance(error, log.NoLogError)
    times = [status[name] for name in ("started", "ended") if status.get(name)]
    return Summary(
        folder.name,
        status["state"],
        status.get("reason"),
        () if expected else (str(error),),
        foreign=foreign,
        peak_memory_bytes=status.get("peak_memory_bytes"),
        memory_of="largest process",
        outside=outside.read(folder),
        cpu_s=status.get("cpu_s"),
        seconds=times[1] - times[0] if len(times) == 2 else None,
    )


def _notes(run, status):
    """Return the notes on a log; none for a job that failed, whose log may well lack an end."""
    news = status is None or status["state"] in ("RUNNING", "COMPLETED")
    return tuple(run.notes) if news else ()


def _identity(run):
    start, setup = run.start, run.setup
    arguments = start.get("arguments", {})
    return {
        **_known(arguments, "model", "data", "image_size", "batch_size"),
        **_known(setup, "device", "device_name", "optimizer", "parameter_bytes", "train_images"),
        **_known(start, "size", "versions", "arguments", "trainer_sha256", "command"),
        "started": start.get("time", ""),
        "num_workers": run.probe.loader.num_workers,
        "cpus": start.get("cpu_count"),
        "windows": len(run.stopwatch.windows or run.windows),
        "validation_s": run.validations[-1]["seconds"] if run.validations else None,
    }


def _known(event, *names):
    return {name: event[name] for name in names if name in event}


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
    low: float | None  # of the ratio's interval; None with fewer than MIN_PAIRS
    high: float | None
    margin: float  # a ratio within a factor of 1 + margin of 1 counts as 1
    pairs: int
    word: str  # FASTER, SLOWER or NO_DIFFERENCE
    cautions: tuple[Caution, ...] = ()

    @property
    def comparable(self) -> bool:
        """Return whether it is the same training on the same hardware, apart from the change."""
        return all(caution.kind != Caution.NOT_COMPARABLE for caution in self.cautions)

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(map(str, self.cautions))

    def __str__(self):
        digits, interval, word = 2, "", self.word
        if self.low is not None:
            digits = 3 if self.high - self.low < 0.02 else 2
            ends = f"{self.low:.{digits}f} to {self.high:.{digits}f}"
            interval = f"{100 * level(self.pairs):.0f} % interval {ends}, "
            if word == NO_DIFFERENCE and not self.low <= 1 <= self.high:
                word = f"no difference of over {100 * self.margin:.0f} % shown"
        but = "" if self.comparable else ", but the runs are not comparable"
        times = f"{self.ratio:.{digits}f} times as fast"
        return f"{times} ({interval}{_pairs_text(self.pairs)}): {word}{but}"


def _pairs_text(count):
    return f"{count} pair{'s' * (count > 1)}"


def compare(
    before_runs: Sequence, after_runs: Sequence, same_hardware: bool = True, least: int = MIN_PAIRS
) -> Comparison:
    """Return the speed-up that a change brought, from pairs of completed runs.

    before_runs, after_runs: anything `summary` takes; the first of each make a pair, which should
        have run one shortly after the other, and so on.
    same_hardware: False allows the device to differ between before and after.
    least: give an interval from this number of pairs on.

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
    margin = MARGIN_GPU if all(s.on_gpu for s in before + after) else MARGIN_CPU
    ratios = [a.images_per_s / b.images_per_s for b, a in zip(before, after, strict=True)]
    ratio, low, high, word = judge(ratios, margin, least)
    cautions = tuple(_cautions(before, after, same_hardware, least))
    return Comparison(ratio, low, high, margin, len(ratios), word, cautions)


def judge(
    ratios: Sequence[float], margin: float, least: int = MIN_PAIRS
) -> tuple[float, float | None, float | None, str]:
    """Return the ratios' geometric mean, its interval, and the word that the rule allows."""
    if len(ratios) < least:
        return statistics.geometric_mean(ratios), None, None, NO_DIFFERENCE
    mean, low, high = interval(ratios, level(len(ratios)))
    slower = SLOWER if high <= 1 / (1 + margin) else NO_DIFFERENCE
    return mean, low, high, FASTER if low >= 1 + margin else slower


def level(pairs: int) -> float:
    """Return the level of the interval of a gain: higher where few pairs were enough."""
    return LEVEL if pairs >= MIN_PAIRS else EARLY_LEVEL


def interval(ratios: Sequence[float], level: float = LEVEL) -> tuple[float, float, float]:
    """Return the geometric mean of paired ratios, and the ends of its interval."""
    logs = [math.log(r) for r in ratios]
    mean, half = statistics.fmean(logs), half_width(logs, level)
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def half_width(values: Sequence[float], level: float = LEVEL) -> float:
    """Return half the width of the interval of a mean, by Student's t."""
    from scipy.special import stdtrit  # here: its import takes 0.4 s

    if len(values) < 2:
        raise ValueError(f"{len(values)} value: an interval needs at least 2")
    t = float(stdtrit(len(values) - 1, (1 + level) / 2))
    return t * statistics.stdev(values) / len(values) ** 0.5


def _measured_run(run, side):
    """Return the summary of a run that has a speed to compare. Raises UserError."""
    s = summary(run)
    if not s.completed:
        todo = "see its stderr.txt, then submit it again"
        if s.state in ("QUEUED", "RUNNING"):
            todo = "wait for it, job.wait(), or submit it again if it was killed"
        why = f" ({s.reason})" if s.reason else ""
        raise UserError(f"run {s.name} ({side}) is {s.state}{why}, expected COMPLETED: {todo}")
    if not s.windows or not s.images_per_s:
        raise UserError(
            f"run {s.name} ({side}) measured nothing: all its steps are warm-up; submit it again "
            f"with more steps{', such as --test-nsteps 12' * ('test_nsteps' in s.arguments)}"
        )
    return s


def _cautions(before, after, same_hardware, least):
    """Yield the reasons why this comparison is less sure than it looks."""
    if (missing := least - len(before)) > 0:
        text = f"{_pairs_text(len(before))}, {least} are needed for an interval"
        yield Caution(Caution.TOO_FEW, f"{text}; submit {missing} more")
    yield from _differences(before, after, same_hardware)
    for rule in (_diverged, _disturbed, _data_bound):
        yield from rule(before, "before")
        yield from rule(after, "after")


COMPARED = {
    "batch_size": "batch size",
    "image_size": "image size",
    "model": "model",
    "data": "data",
    "size": "number of processes",
    "device_name": "device",
}


def _differences(before, after, same_hardware):
    for name, text in COMPARED.items():
        values = ((getattr(b, name), getattr(a, name)) for b, a in zip(before, after, strict=True))
        differ = next(((was, now) for was, now in values if was != now), None)
        if differ and (same_hardware or name != "device_name"):
            text = f"{text} {differ[0]} before, {differ[1]} after; submit both alike"
            yield Caution(Caution.NOT_COMPARABLE, text)


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
    if throttled := [s for s in runs if s.throttled]:
        why = ", ".join(dict.fromkeys(word for s in throttled for word in s.throttled))
        count = f"{len(throttled)} of {len(runs)} runs {side}"
        yield Caution(Caution.DISTURBED, f"the GPU had lowered its clock in {count} ({why})")
    clocks = [s.sm_clock_mhz for s in runs if s.sm_clock_mhz]
    if clocks and (text := _clock_text(max(c[0] for c in clocks), min(c[1] for c in clocks))):
        yield Caution(Caution.DISTURBED, f"{text} in the runs {side}")
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
