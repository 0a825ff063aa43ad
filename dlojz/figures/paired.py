"""The accuracies of whole trainings, compared with the clean ones by pairs of the same seed."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, zip_longest

from dlojz import course
from dlojz.course import UserError
from dlojz.figures.report import measured
from dlojz.runs.stats import NO_DIFFERENCE, half_width

BETTER, WORSE, EQUAL, TOO_FEW = "better", "worse", "equal in every seed", "too few seeds"


@dataclass(frozen=True)
class Difference:
    """The difference of a variant's accuracy from the clean run's, over the seeds of both."""

    mean: float
    # Half the width of the 95 % interval, and so the smallest mean that would have been seen; None
    # with fewer than two seeds.
    half: float | None
    seeds: int

    @property
    def word(self) -> str:
        """Return the conclusion, in a word."""
        if self.half is None:
            return TOO_FEW
        if self.mean == self.half == 0:
            return EQUAL
        if abs(self.mean) <= self.half:
            return NO_DIFFERENCE
        return BETTER if self.mean > 0 else WORSE


def difference(clean: Mapping[int, float], other: Mapping[int, float]) -> Difference | None:
    """Return the difference of accuracies that are given by seed; None if they share no seed."""
    pairs = [other[seed] - clean[seed] for seed in clean if seed in other]
    if not pairs:
        return None
    half = half_width(pairs) if len(pairs) > 1 else None
    return Difference(statistics.fmean(pairs), half, len(pairs))


@dataclass(frozen=True)
class Row:
    """The trainings of one variant, and how they differ from the clean ones of the same seeds."""

    title: str
    accuracies: dict[int, float]  # by seed
    points: list[float]  # the differences, in percentage points, by pair
    difference: Difference  # in percentage points


def rows(run, only=None) -> list[Row]:
    """Return the variants of an experiment; the clean training comes first.

    only: the names of the others to return, in the order wanted; by default all, in their order.
    """
    run, found = measured(run), {}
    for case in trainings(run):
        by_seed = found.setdefault(case["variant"], (case["title"], {}))[1]
        by_seed[case["seed"]] = 100 * case["accuracy"]
    first, (_, clean) = next(iter(found.items()))
    made = []
    for name in dict.fromkeys([first, *(found if only is None else _known(only, found, run.path))]):
        made.append(row(found[name][0], clean, found[name][1]))
    return [*filter(None, made)]


def row(title: str, clean: Mapping[int, float], by_seed: Mapping[int, float]) -> Row | None:
    """Return the row of a variant, from accuracies in percent by seed; None if none is common."""
    told = difference(clean, by_seed)
    points = [by_seed[seed] - clean[seed] for seed in clean if seed in by_seed]
    return told and Row(title, {s: a / 100 for s, a in by_seed.items()}, points, told)


def trainings(run) -> list[dict]:
    """Return the results of each training in an experiment, in the order they were dealt out in.

    Processes that trained the same logged it twice; the first counts.
    """
    dealt = chain(*zip_longest(*(log.cases.items() for log in measured(run).ranks)))
    found = {}
    for name, case in filter(None, dealt):
        found.setdefault(name, case)
    return [*found.values()]


def _known(only, there, path):
    """Return the names of these variants, or of this one; raise UserError for one not in a run."""
    only = [only] if isinstance(only, str) else only
    if missing := [name for name in only if name not in there]:
        program = course.experiment("accuracy.py").relative_to(course.course_root())
        raise UserError(
            f"{path}: no variant {missing[0]!r} in it; expected some of {', '.join(there)}. Train "
            f'it with submit("{program} --variants {missing[0]}")'
        )
    return only


def words(told: Difference) -> str:
    """Return the conclusion from a difference in percentage points, in a few words."""
    if told.word in (EQUAL, TOO_FEW):
        return told.word
    if told.word in (BETTER, WORSE):
        return f"{abs(told.mean):.1f} ± {told.half:.1f} points {told.word}"
    return f"no difference shown (would have seen {told.half:.1f} points)"


def plot_row(ax, at: float, row: Row, colour: str, hollow: bool = False):
    """Draw the differences of a variant at a height: seeds, their mean, and its 95 % interval."""
    told = row.difference
    ax.plot(row.points, [at] * len(row.points), "o", ms=3.5, color=colour, alpha=0.4, mew=0)
    text = f"{told.mean:+.1f}".replace("-", "\N{MINUS SIGN}")
    end = max(row.points)
    if told.half is not None:
        ends = (told.mean - told.half, told.mean + told.half)
        ax.plot(ends, (at, at), color=colour, lw=4, solid_capstyle="butt", alpha=0.55)
        text, end = f"{text} ± {told.half:.1f}", max(end, ends[1])
    look = {"mfc": "white", "mec": colour} if hollow else {"mec": "white"}
    ax.plot(told.mean, at, "D", ms=6, color=colour, **look)
    ax.text(end, at, f"  {text}", va="center", fontsize=8, color=colour)
