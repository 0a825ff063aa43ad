"""The accuracy of whole trainings, compared with that of clean ones by pairs of the same seed."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

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
