"""The prediction of the gain and cost of compiling a model, from a profile of its eager step.

A compiler leaves the library's matrix products unchanged. It keeps a part of the time of other
kernels, and of the host's time to launch them:

    device = matrix + keeps["normalization"] * normalization + keeps["rest"] * rest + update
    host = keeps["host"] * launching + update's launching
    step = the longer of the two on a GPU, their sum on a processor, which is its own host

The gain is this step with all `keeps` at 1, divided by the step with those of a fit. Its certainty
depends on the side that decides the step, see `decides`: a GPU computes the same kernels in the
same time, but its host may have other work. So each of the two has an interval of its own.

The compile time is extrapolated from one compiled block:

    seconds = start + block's seconds * (size of the model / size of the block) ** power
    size = operations + kernel * different operations

Operations that differ by operator or shape need kernels of their own. A fit (worth.toml) is based
on models that were also compiled for real, see `fit`. It is valid for its hardware.
"""

import math
import statistics
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dlojz.chapters.n09_compile import breakeven
from dlojz.course import UserError
from dlojz.runs.folder import path_of
from dlojz.traces import breakdown, host
from dlojz.traces.kinds import MATRIX, NORMALIZATION, kind
from dlojz.traces.trace import Trace, open_traces

FITS = Path(__file__).with_name("worth.toml")
UPDATE = "dlojz: update"  # the range of the update in a trace
MODES = ("default", "reduce-overhead", "max-autotune")  # of torch.compile
PARTS = ("matrix", "normalization", "rest")  # of the device's time
DEVICE, HOST = "device", "host"  # the side that decides a step
KEEPS_OF = {DEVICE: ("normalization", "rest"), HOST: ("host",)}
NOTHING_DONE = {"normalization": 1.0, "rest": 1.0, "host": 1.0}  # `keeps` of eager
FIRST_GUESS = {"normalization": 0.5, "rest": 0.5, "host": 0.5}
FIRST_COSTS = {"kernel": 1.0, "power": 0.7}
# The weight of the first guess in a fit, so that few or noisy models do not make it absurd: a
# coefficient off by a factor of two weighs as much as one model off by 7 %.
HELD = 0.01
COVERED = 0.9  # the share of measurements that an interval is meant to hold
DISTURBED = 0.3  # eager steps that differ by more were disturbed
PAYS, NEVER, OPEN = "it pays", "it does not pay", "too close to tell"


@dataclass(frozen=True)
class Block:
    """A submodule that was compiled with an empty cache."""

    name: str
    operations: int  # of a forward pass
    different: int  # of these, by operator, shapes and dtypes
    compile_s: float
    gain: float  # times as fast as eager, the block alone


@dataclass(frozen=True)
class Profile:
    """An eager training step: the parts of its time, and the size of the model."""

    on_gpu: bool
    step_ms: float
    device_ms: Mapping[str, float]  # forward and backward: "matrix", "normalization", "rest"
    update_ms: float  # optimizer and metrics, outside of the model
    host_ms: float  # to launch forward and backward; on a processor, Python between operations
    update_host_ms: float
    launches: Mapping[str, int]  # of the model's kernels, in the same parts; {} on a processor
    operations: int
    different: int
    start_s: float  # of the compiler: its first, tiny compilation
    block: Block
    varied: float = 0.0  # from the fastest to the slowest window of steps, over the median
    nchw: bool = False  # convolutions on a GPU whose weights are not channels_last

    @classmethod
    def of(cls, found: Mapping) -> "Profile":
        """Return a profile from JSON."""
        return cls(**found | {"block": Block(**found["block"])})


@dataclass(frozen=True)
class Fit:
    """Coefficients, and their errors for the models that they were fitted to."""

    device: str
    on_gpu: bool
    mode: str
    torch: str
    date: str
    models: int
    decided: Mapping[str, int]  # the number of models whose step DEVICE decided, or HOST
    keeps: Mapping[str, float]
    costs: Mapping[str, float]
    gain_within: Mapping[str, float]  # by deciding side, a factor that holds nine of ten models
    compile_within: float
    command: str = ""


@dataclass(frozen=True)
class Range:
    """A value, and the interval in which it is expected."""

    value: float
    low: float
    high: float

    @classmethod
    def within(cls, value: float, factor: float) -> "Range":
        return cls(value, value / factor, value * factor)

    def __add__(self, more: float) -> "Range":
        return Range(self.value + more, self.low + more, self.high + more)

    def __contains__(self, measured: float) -> bool:
        return self.low <= measured <= self.high


@dataclass(frozen=True)
class Prediction:
    """The expected gain and cost of compiling."""

    step_ms: float  # eager
    gain: Range  # eager step / compiled step
    compile_s: Range
    decides: str = DEVICE  # or HOST

    @property
    def break_even(self) -> Range:
        """Return the number of steps that pay for the compile time; infinity: never."""
        ends = [
            (self.compile_s.value, self.gain.value),
            (self.compile_s.low, self.gain.high),
            (self.compile_s.high, self.gain.low),
        ]
        return Range(*(breakeven.steps(paid_s, self.step_ms, gain) for paid_s, gain in ends))

    def answer(self, steps: int) -> str:
        """Return the answer for a training run of this length."""
        even = self.break_even
        return PAYS if steps >= even.high else NEVER if steps < even.low else OPEN


# The profile of a trace --------------------------------------------------------------------------


def split(trace: Trace) -> dict:
    """Return the parts of a profile in a trace of one step, whose update is a range."""
    update = replace(trace, steps=[e for e in trace.ranges if e.name == UPDATE])
    whole, after = breakdown.analyse(trace), breakdown.analyse(update)
    found = {
        "on_gpu": trace.on_gpu,
        "device_ms": _minus(_in_parts(whole.kinds), _in_parts(after.kinds)),
        "update_ms": sum(after.kinds.values()),
        "launches": _minus(_launches(trace), _launches(update)),
    }
    if not trace.on_gpu:
        found["update_host_ms"] = sum(after.idle.values())
        found["host_ms"] = max(0.0, sum(whole.idle.values()) - found["update_host_ms"])
    return found


def of_a_run(run, step_ms: float) -> Profile:
    """Return the profile of a watched run's last recorded step, without a block.

    Raises UserError for a run that does not say what compiling would gain.
    """
    job, found = f"job {path_of(run).name}", open_traces(path_of(run))[0]
    last = found.steps[-1]
    updates = [r for r in found.ranges if r.name.startswith("Optimizer.step")]
    updates = [r for r in updates if last.begin <= r.begin < last.end]
    if any(r.name.startswith("Torch-Compiled Region") for r in (*found.ranges, *found.ops)):
        raise UserError(f"{job}: its model is compiled already: expected an eager one")
    if len(updates) != 1:
        raise UserError(f"{job}: {len(updates)} updates in the recorded step; expected one")
    found = replace(found, steps=[last], ranges=[updates[0]._replace(name=UPDATE)])
    reading = breakdown.analyse(found)
    if found.on_gpu and reading.verdict != "GPU bound":
        raise UserError(
            f"{job}: {reading.verdict}, and a run under watch does not say how long the host alone "
            'needs: expected the model, `dlojz worth compile "module:function -b 64"`'
        )
    parts = {"host_ms": 0.0, "update_host_ms": 0.0} | split(found)
    waits = reading.idle.get(host.DATA, 0.0)  # no compiler shortens these
    parts["update_host_ms"] += waits
    parts["host_ms"] = max(0.0, parts["host_ms"] - waits)
    none = Block("", 0, 0, 0.0, 1.0)
    return Profile(**parts, step_ms=step_ms, operations=0, different=0, start_s=0.0, block=none)


def _in_parts(kinds):
    found = dict.fromkeys(PARTS, 0.0)
    for name, ms in kinds.items():
        found[_part(name)] += ms
    return found


def _part(of_kind):
    return {MATRIX: "matrix", NORMALIZATION: "normalization"}.get(of_kind, "rest")


def _launches(trace):
    return Counter(_part(kind(e.name)) for e in breakdown.in_steps(trace))


def _minus(whole, part):
    return {name: max(0, value - part.get(name, 0)) for name, value in whole.items()}


# The prediction ----------------------------------------------------------------------------------


def sides_ms(profile: Profile, keeps: Mapping[str, float]) -> dict[str, float]:
    """Return the times of DEVICE and HOST for a step, if a compiler keeps these parts."""
    parts = profile.device_ms
    others = keeps["normalization"] * parts["normalization"] + keeps["rest"] * parts["rest"]
    device = parts["matrix"] + others + profile.update_ms
    return {DEVICE: device, HOST: keeps["host"] * profile.host_ms + profile.update_host_ms}


def modelled_ms(profile: Profile, keeps: Mapping[str, float]) -> float:
    """Return the time of a step, if a compiler keeps these parts."""
    ms = sides_ms(profile, keeps).values()
    return max(ms) if profile.on_gpu else sum(ms)


def decides(profile: Profile, keeps: Mapping[str, float]) -> str:
    """Return DEVICE if it needs longer than its host, eager and compiled, else HOST.

    A processor is its own host, so it always decides.
    """
    steps = [sides_ms(profile, kept) for kept in (NOTHING_DONE, keeps)]
    busy = all(ms[DEVICE] > ms[HOST] for ms in steps)
    return DEVICE if busy or not profile.on_gpu else HOST


def gain(profile: Profile, keeps: Mapping[str, float]) -> float:
    """Return eager step / compiled step. Errors of the model in both cancel out."""
    return modelled_ms(profile, NOTHING_DONE) / modelled_ms(profile, keeps)


def compile_s(profile: Profile, costs: Mapping[str, float]) -> float:
    """Return the seconds of compiling the whole model with an empty cache, without the start."""
    whole, block = (
        part.operations + costs["kernel"] * part.different for part in (profile, profile.block)
    )
    return profile.block.compile_s * (whole / block) ** costs["power"]


def total_s(row: Mapping) -> float:
    """Return the measured seconds of compiling, with the compiler's start."""
    return row["profile"]["start_s"] + row["measured"]["compile_s"]


def measured_break_even(row: Mapping) -> float:
    """Return the measured break-even in steps."""
    eager_ms = statistics.median(row["measured"]["eager_ms"])
    return breakeven.steps(total_s(row), eager_ms, row["measured"]["gain"])


def predict(profile: Profile, fit: Fit) -> Prediction:
    """Return the expected gain and cost of compiling."""
    decided = decides(profile, fit.keeps)
    return Prediction(
        profile.step_ms,
        Range.within(gain(profile, fit.keeps), fit.gain_within[decided]),
        Range.within(compile_s(profile, fit.costs), fit.compile_within) + profile.start_s,
        decided,
    )


def unseen(profile: Profile, fit: Fit, device: str, torch: str) -> list[str]:
    """Return a sentence on each omission or guess of the prediction."""
    notes = [
        "only one block was compiled: a graph break or a recompilation elsewhere costs more",
        "the batch was in memory: a training run that waits for its images gains less",
        "one process: DDP cuts the graph where its buckets end",
    ]
    decided = decides(profile, fit.keeps)
    if (models := fit.decided[decided]) <= len(KEEPS_OF[decided]):
        notes.insert(
            0,
            f"the {decided} decides here, as it did for {models} of the models that were measured: "
            "the interval of the gain is a guess",
        )
    if device != fit.device:
        notes.insert(0, f"the coefficients are of {fit.device}: for {device} they are a guess")
    if torch != fit.torch:
        notes.insert(0, f"the coefficients are of torch {fit.torch}, and this is {torch}")
    if profile.varied > DISTURBED:
        notes.insert(
            0, f"the eager steps differed by {100 * profile.varied:.0f} %: what else runs here?"
        )
    if profile.nchw:
        notes.append("weights in NCHW: the compiler changes the layout, which may gain much more")
    return notes


# The fits ----------------------------------------------------------------------------------------


def fits() -> list[Fit]:
    """Return all fits. Raises UserError for a damaged file."""
    try:
        found = tomllib.loads(FITS.read_text(encoding="utf-8"))
        return [Fit(**fit) for fit in found.get("fit", ())]
    except (tomllib.TOMLDecodeError, UnicodeError, AttributeError, TypeError) as error:
        raise UserError(
            f"{FITS} is damaged: {error}. Expected what `python tools/worth.py` writes: "
            "`git checkout` brings it back"
        ) from error


def must_know(mode: str):
    """Raise UserError if there is no fit of this mode, for any device."""
    known = fits()
    if mode not in {fit.mode for fit in known}:
        raise UserError(_unknown(mode, "any device", known))


def fit_for(device: str, on_gpu: bool, mode: str) -> Fit:
    """Return the fit of this device, or of one of its kind. Raises UserError."""
    known = [fit for fit in fits() if fit.on_gpu == on_gpu]
    found = [fit for fit in known if fit.mode == mode]
    if not found:
        raise UserError(_unknown(mode, "a GPU" if on_gpu else "a CPU", known))
    return next((fit for fit in found if fit.device == device), found[-1])


def _unknown(mode, where, known):
    modes = ", ".join(sorted({fit.mode for fit in known})) or "none"
    return (
        f"no coefficients for mode {mode} on {where} (known there: {modes}): --measure compiles "
        "the whole model, and `python tools/worth.py` makes coefficients"
    )


def fit(rows: Sequence[Mapping], command: str = "") -> Fit:
    """Return the best coefficients for these rows, of one device and mode.

    rows: the results of `measuring --measure`. The error of a logarithm is minimised, so that twice
    as much counts like half as much.
    """
    last, on_gpu = rows[-1], rows[-1]["profile"]["on_gpu"]
    keeps, gain_within, decided = _fitted_by_side(rows, on_gpu)
    costs, compile_within = _fitted(compile_s, FIRST_COSTS, rows, "compile_s")
    origin = (last["device"], on_gpu, last["mode"], last["torch"], last["date"])
    made_of = (_models(rows), decided)
    return Fit(*origin, *made_of, keeps, costs, gain_within, compile_within, command)


def _fitted_by_side(rows, on_gpu):
    """Return `keeps`, and by deciding side the factor of the gain and the number of models.

    A first fit to all rows finds the side that decides each. Then the device's `keeps` are fitted
    to the rows that it decides, and the host's to the others, because a noisy host tells nothing
    about a GPU. A side with too few models keeps the first fit.
    """
    keeps, within = _fitted(gain, FIRST_GUESS, rows, "gain")
    if not on_gpu:
        return keeps, {DEVICE: within}, {DEVICE: _models(rows)}
    sides = {side: [] for side in KEEPS_OF}
    for row in rows:
        sides[decides(Profile.of(row["profile"]), keeps)].append(row)
    gain_within, decided = dict.fromkeys(sides, within), {s: _models(sides[s]) for s in sides}
    if all(decided[side] > len(names) for side, names in KEEPS_OF.items()):
        for side, names in KEEPS_OF.items():
            first = {name: FIRST_GUESS[name] for name in names}
            found, gain_within[side] = _fitted(
                lambda profile, some: gain(profile, keeps | some), first, sides[side], "gain"
            )
            keeps.update(found)
    return keeps, gain_within, decided


def _models(rows):
    return len({row["model"] for row in rows})


def _fitted(predicted, first, rows, name):
    """Return coefficients, none negative, and the factor within which they predict.

    The factor is that of a prediction for another model: Student's t, for the remaining degrees of
    freedom. The rows of one model count as one, since their errors have the same causes.
    """
    from scipy.optimize import minimize  # slow to import
    from scipy.special import stdtrit

    models = _models(rows)
    free = models - len(first)
    if free < 1:
        raise UserError(f"{models} models: a fit needs more than {len(first)}")
    pairs = [(Profile.of(row["profile"]), row["measured"][name]) for row in rows]

    def errors(logs):
        chosen = _chosen(first, logs)
        return [math.log(predicted(profile, chosen) / value) for profile, value in pairs]

    start = [math.log(value) for value in first.values()]

    def cost(logs):
        far = sum((log - guess) ** 2 for log, guess in zip(logs, start, strict=True))
        return sum(error**2 for error in errors(logs)) + HELD * far

    options = {"xatol": 1e-5, "fatol": 1e-10, "maxiter": 4000, "maxfev": 4000}
    best = minimize(cost, start, method="Nelder-Mead", options=options).x
    squares = statistics.fmean(error**2 for error in errors(best))
    wide = float(stdtrit(free, (1 + COVERED) / 2)) * math.sqrt(1 + 1 / models)
    return _chosen(first, best), math.exp(wide * math.sqrt(squares * models / free))


def _chosen(first, logs):
    return {name: math.exp(log) for name, log in zip(first, logs, strict=True)}


def leave_one_out(rows: Sequence[Mapping]) -> list[Prediction]:
    """Return each row's prediction by a fit of all other models."""
    found = []
    for row in rows:
        others = fit([other for other in rows if other["model"] != row["model"]])
        found.append(predict(Profile.of(row["profile"]), others))
    return found
