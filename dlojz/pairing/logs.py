"""Two runs that there are, compared by their logs: work, losses, speed, and the parts of a step.

The logs of separate jobs hold less than a pair that is run for the purpose, see `pairing.steps`: no
bytes of batches, no order of turns, and no run of before with its weights off by a rounding.
"""

import math
from dataclasses import dataclass

import numpy as np

from dlojz import launch
from dlojz.course import UserError
from dlojz.pairing.accounts import ROUNDING
from dlojz.pairing.steps import Findings, disturbed, parts
from dlojz.runs import derived, log, stats
from dlojz.runs.folder import events_file

BLOCKS, LEAST = 8, 4  # of a run's measured steps, and steps in a block: the interval is of blocks
SETUP = {"optimizer": "optimizer", "parameters": "parameters", "parameter_bytes": "bytes of them"}
PER_STEP = {"images": "images of a step", "lr": "learning rate"}
UNSEEN = (
    "not seen, as two jobs cannot show it: what another time of day changes in the speed, and "
    "whether a rounding sets the losses apart; and no log holds the bytes of batches, or settings "
    "of an optimizer but the learning rate: `dlojz pair` of the two programs sees all that"
)


@dataclass(frozen=True, repr=False)
class Logs(Findings):
    """The comparison of two jobs by their logs."""

    steps: int  # in both logs
    work: tuple[str, ...]  # differences, as far as the logs hold it
    apart: int | None  # the first step whose losses differ by more than a rounding
    off: float | None  # the largest relative difference of two losses; None without losses
    ratio: float  # of the speed, in images
    half: float | None  # of the 95 % interval of its logarithm; None for too few steps
    cautions: tuple[str, ...]

    @property
    def lines(self) -> list[str]:
        work = [f"work differs: {difference}" for difference in self.work]
        same = f"work, as far as the logs hold it: the same in the first {self.steps:,} steps"
        found = [*self.head, *(work or [same]), self._losses, self._speed, *self.cautions]
        return [*found, UNSEEN]

    @property
    def _speed(self):
        text = f"speed of after, in images: {self.ratio:.2f} times that of before"
        if self.cautions:
            return f"{text}: not to be judged, for the reasons below"
        if self.half is None:
            return f"{text} (no interval, which needs {BLOCKS * LEAST} measured steps of both)"
        low, high = (self.ratio * math.exp(sign * self.half) for sign in (-1, 1))
        text += f" ({low:.2f} to {high:.2f} by the spread of the steps within each job)"
        if low <= 1 <= high:
            text += f": no difference of over {100 * max(high - 1, 1 / low - 1):.0f} % shown"
        return text

    @property
    def _losses(self):
        if self.off is None:
            return "losses: not in both logs"
        if self.apart is None:
            return f"losses: the same in the first {self.steps:,} steps (off by {self.off:.1e})"
        return f"losses: apart from step {self.apart:,} on, by up to {self.off:.1e}"

    def to_dict(self) -> dict:
        """Return all of it, for programs."""
        names = "steps", "work", "apart", "off", "ratio", "half", "cautions"
        return {name: getattr(self, name) for name in names} | super().to_dict()


def by_logs(before, after) -> Logs:
    """Return the comparison of two ended jobs, by their numbers, from their logs.

    Raises UserError for a job that runs or failed, and for one without measured training steps;
    LookupError for a number that no job has.
    """
    jobs = [launch.find(number) for number in (before, after)]
    for job in jobs:
        _refuse(job)
    found = stats.compare(jobs[:1], jobs[1:])  # raises for a job that has not ended well
    figures, runs = [stats.summary(job) for job in jobs], [log.read(job) for job in jobs]
    count = min(len(run.steps) for run in runs)
    apart, off = _losses(*(run.steps.loss[:count] for run in runs))
    return Logs(
        tuple(f"job {job.id}, {job.command}" for job in jobs),
        parts(*([job.directory] for job in jobs)),
        count,
        tuple(_work(figures, runs, count)),
        apart,
        off,
        found.ratio,
        _half(runs),
        tuple(_cautions(figures, found)),
    )


def _refuse(job):
    if job.is_series:
        raise UserError(f"job {job.id} is a series of runs: expected the number of a single run")
    if job.state.final and not events_file(job.directory).exists():
        raise UserError(
            f"job {job.id} has no training steps in a log: expected a job of `dlojz watch`, or of "
            "a program with our Chronometer"
        )


def _work(figures, runs, count):
    """Yield each difference of the work that the logs hold."""
    for name in ("model", "batch_size", "image_size", "data", "size"):
        yield from _named(stats.COMPARED[name], *(getattr(s, name) for s in figures))
    for name, text in SETUP.items():
        yield from _named(text, *(run.setup.get(name) for run in runs))
    for name, text in PER_STEP.items():
        first, second = (np.asarray(getattr(run.steps, name)[:count]) for run in runs)
        if len(steps := np.flatnonzero(~np.isclose(first, second, 1e-9, 0, equal_nan=True))):
            step = steps[0]
            yield f"{text}: {first[step]:g}, then {second[step]:g} (step {step:,})"


def _named(text, first, second):
    if first != second:
        yield f"{text}: {first}, then {second}"


def _losses(first, second):
    """Return the first step whose losses are apart, and their largest relative difference."""
    first, second = map(np.asarray, (first, second))
    if np.isnan(first).all() or np.isnan(second).all():
        return None, None
    equal = (first == second) | (np.isnan(first) & np.isnan(second))
    off = np.where(equal, 0, np.abs(first - second) / np.maximum(np.abs(first), 1e-30))
    steps = np.flatnonzero(~(off <= ROUNDING))
    return (int(steps[0]) if len(steps) else None), float(np.nanmax(off))


def _half(runs) -> float | None:
    """Return half the width of the 95 % interval of the logarithm of the ratio of two speeds.

    Neighbouring steps are alike, so a run's spread is that of the speeds of blocks of its steps.
    """
    halves = []
    for run in runs:
        chosen = derived.measured(run)
        if len(chosen) < BLOCKS * LEAST:
            return None
        ms, images = sum(derived.step_times(run)[1].values()), np.asarray(run.steps.images)
        blocks = np.array_split(chosen, BLOCKS)
        speeds = [math.log(images[block].sum() / ms[block].sum()) for block in blocks]
        halves.append(stats.half_width(speeds))
    return math.hypot(*halves)


def _cautions(figures, found):
    """Yield the reasons why the ratio of the speeds is less sure than it looks."""
    if len(names := dict.fromkeys(s.device_name for s in figures)) > 1:
        yield f"other devices: {', then '.join(names)}: the speeds are not those of the programs"
    yield from map(str, disturbed(found))
