"""Shared facts of the job, the check and the figures of the exercise 04_slow."""

from collections.abc import Sequence

from dlojz.runs import stats

NAME = "04_slow"
# The functions of the program with a fault each, in the order of repair.
FUNCTIONS = ("augmented", "normalised", "balanced_loss", "clip", "train_step", "evaluate")
MARGIN = 0.03  # share of the clean program's time
LOOK = 6  # pairs of runs between two looks at their interval


def ratio(mine: Sequence[float], clean: Sequence[float]) -> tuple[float, float, float]:
    """Return the ratio of the two sides' times over these pairs, with its 95 % interval."""
    return stats.interval([m / c for m, c in zip(mine, clean, strict=True)])


def as_fast(low: float, high: float) -> bool | None:
    """Return whether a ratio in this interval is within the margin; None leaves it open."""
    limit = 1 + MARGIN
    return True if high <= limit else False if low > limit else None
