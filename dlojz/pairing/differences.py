"""The difference between two programs, from whole trainings of both with the same seeds."""

import math
import statistics
from dataclasses import asdict, dataclass
from html import escape

import numpy as np

from dlojz.runs.stats import EARLY_PAIRS, LEVEL, MARGIN_CPU, Comparison, half_width, judge
from dlojz.table import Table

HEAD = ("seed", "before", "after", "difference", "time before", "time after", "times as fast")
WIDE = 4  # the ends of an interval this many times apart say nothing
POWER = 0.8  # the share of tries in which a planned number of seeds shows a difference
MOST_SEEDS = 10_000


@dataclass(frozen=True)
class Pairs:
    """The numbers that two programs gave with the same seeds, and their differences."""

    before: str  # its command
    after: str
    values: dict[int, tuple[float, float]]  # by seed: before, after
    seconds: dict[int, tuple[float, float]]  # of those that ran one after the other
    unit: str = ""  # "points" of percentages
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()  # trainings without a number, and why

    @property
    def differences(self) -> list[float]:
        return [after - before for before, after in self.values.values()]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.differences)

    @property
    def half(self) -> float | None:
        """Return half the width of the difference's 95 % interval; None for one seed."""
        return half_width(self.differences) if len(self.differences) > 1 else None

    @property
    def shown(self) -> bool:
        """Return whether the interval excludes 0."""
        return self.half is not None and abs(self.mean) > self.half

    @property
    def not_excluded(self) -> float | None:
        """Return the largest difference, of either sign, inside the interval."""
        return None if self.half is None else abs(self.mean) + self.half

    @property
    def seeds_for_half(self) -> int | None:
        """Return about how many seeds show half of `not_excluded` in 4 of 5 tries."""
        from scipy.special import stdtrit

        if not self.half:
            return None
        error = 2 * statistics.stdev(self.differences) / self.not_excluded  # of one difference
        seeds = np.arange(3, MOST_SEEDS)
        t = stdtrit(seeds - 1, (1 + LEVEL) / 2) + stdtrit(seeds - 1, POWER)
        return int(seeds[t * error <= seeds**0.5][0])

    @property
    def times(self) -> Comparison | None:
        """Return the speed of whole runs, compared; None if no pair ran in turn."""
        if not self.seconds:
            return None
        found = judge([b / a for b, a in self.seconds.values()], MARGIN_CPU, EARLY_PAIRS)
        return Comparison(*found[:3], MARGIN_CPU, len(self.seconds), found[3])

    @property
    def times_text(self) -> str:
        times = self.times
        if times and times.low and times.high > WIDE * times.low:
            ratios = [before / after for before, after in self.seconds.values()]
            return (
                f"whole runs, after: {min(ratios):.2f} to {max(ratios):.2f} times as fast, too far "
                "apart to compare; measure them when nothing else runs"
            )
        return f"whole runs, after: {times or 'no two of a seed ran in turn'}"

    @property
    def finding(self) -> str:
        """Return the difference with its interval, or the largest that is not excluded."""
        count, half, mean = len(self.values), self.half, self.text(self.mean, "+")
        if half is None:
            return f"{mean} with one seed: an interval needs at least 2, so take more --seeds"
        if not any(self.differences):
            return f"equal with each of {count} seeds"
        ends = f"{self.text(self.mean - half).split()[0]} to {self.text(self.mean + half)}"
        interval = f"{100 * LEVEL:.0f} % interval {ends}, {count} seeds"
        if self.shown:
            word = "higher" if self.mean > 0 else "lower"
            return f"after is {self.text(abs(self.mean))} {word} ({interval})"
        none = f"no difference of over {self.text(self.not_excluded)} shown"
        return f"{none} (mean {mean}, {interval})"

    @property
    def lines(self) -> list[str]:
        """Return the finding, what more seeds would show, the times, and the notes."""
        found = [self.finding]
        if not self.shown and (seeds := self.seeds_for_half):
            half = self.text(self.not_excluded / 2)
            found.append(f"to show a difference of half that, {half}, takes about {seeds} seeds")
        return [*found, self.times_text, *(f"note: {n}" for n in (*self.notes, *self.missing))]

    @property
    def table(self) -> Table:
        return Table(HEAD, [self._row(seed) for seed in self.values], ">>>>>>>")

    def _row(self, seed):
        before, after = self.values[seed]
        row = (str(seed), f"{before:.6g}", f"{after:.6g}", self.text(after - before, "+"))
        first, second = self.seconds.get(seed, (None, None))
        times = first and (f"{first:.3g} s", f"{second:.3g} s", f"{first / second:.2f}")
        return (*row, *(times or ("", "", "")))

    def text(self, value: float, sign: str = "") -> str:
        """Return a difference with its unit, and two digits of the interval's width."""
        width = max(self.half or 0, abs(self.mean) / 50)
        digits = min(12, max(0, 1 - math.floor(math.log10(width)))) if width else 0
        return f"{value:{sign}.{digits}f} {self.unit}".rstrip()

    def __repr__(self):
        return "\n".join([repr(self.table), "", *self.lines])

    def _repr_html_(self):
        return "".join([self.table._repr_html_(), *(f"<p>{escape(t)}</p>" for t in self.lines)])

    def to_dict(self) -> dict:
        """Return all of it, for programs."""
        names = ("mean", "half", "shown", "not_excluded", "seeds_for_half")
        times = self.times and [self.times.ratio, self.times.low, self.times.high]
        found = {name: getattr(self, name) for name in names} | {"times_as_fast": times}
        return asdict(self) | found | {"level": LEVEL, "text": self.lines}
