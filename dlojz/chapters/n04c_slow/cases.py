"""Shared facts of the job, the check and the figures of the exercise 04_slow."""

from collections.abc import Sequence
from typing import NamedTuple

from dlojz.runs import stats

NAME = "04_slow"
# The functions of the program with a fault each, in the order of repair.
FUNCTIONS = ("augmented", "normalised", "balanced_loss", "clip", "train_step", "evaluate")


class Result(NamedTuple):
    """A result of a run, which is that of the clean program."""

    words: str
    hint: str  # if it differs
    counted: bool = False  # it is a number of answers


RESULTS = {
    "losses": Result("losses", "values"),
    "right": Result("right answers", "counts", counted=True),
    "val_loss": Result("loss in the validation", "validation"),
    "val_right": Result("right answers in the validation", "counts", counted=True),
    "change": Result("change of the weights", "values"),
}
MARGIN = 0.03  # share of the clean program's time
LOOK = 6  # pairs of runs between two looks at their interval


def ratio(mine: Sequence[float], clean: Sequence[float]) -> tuple[float, float, float]:
    """Return the ratio of the two sides' times over these pairs, with its 95 % interval."""
    return stats.interval([m / c for m, c in zip(mine, clean, strict=True)])


def as_fast(low: float, high: float) -> bool | None:
    """Return whether a ratio in this interval is within the margin; None leaves it open."""
    limit = 1 + MARGIN
    return True if high <= limit else False if low > limit else None
