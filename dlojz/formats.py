"""Number formats: what they hold, and what becomes of the numbers of a run. Computes only."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from dlojz.runs import log
from dlojz.table import Table


@dataclass(frozen=True)
class Format:
    """A floating-point format: a sign, an exponent and a mantissa, as in IEEE 754."""

    exponent_bits: int
    mantissa_bits: int
    bytes: int  # in memory

    @property
    def largest_exponent(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def normal(self) -> int:
        """The exponent of the smallest number that has all its bits."""
        return 1 - self.largest_exponent

    @property
    def subnormal(self) -> int:
        """The exponent of the smallest number of all: one bit is left."""
        return self.normal - self.mantissa_bits

    @property
    def largest(self) -> float:
        return (2 - self.spacing) * 2.0**self.largest_exponent

    @property
    def spacing(self) -> float:
        """From 1 to the next number."""
        return 2.0**-self.mantissa_bits


FORMATS = {
    "fp32": Format(8, 23, 4),
    "tf32": Format(8, 10, 4),
    "bf16": Format(8, 7, 2),
    "fp16": Format(5, 10, 2),
}


def points(run, unit: str) -> dict[str, tuple[list, list]]:
    """What an experiment measured in `unit` as "name / x": the xs and the values, by name."""
    read = log.read(Path(getattr(run, "directory", run)))
    found = defaultdict(lambda: ([], []))
    for measure in read.measures:
        if measure["unit"] == unit:
            name, _, x = measure["what"].partition(" / ")
            found[name][0].append(x)
            found[name][1].append(measure["value"])
    if not found:
        units = sorted({m["unit"] for m in read.measures})
        raise ValueError(f"{read.path}: no {unit!r} among {units}: see the job's stderr.txt")
    return dict(found)


@dataclass(frozen=True)
class Fate:
    """What becomes of numbers in a format, as shares of those that are not zero."""

    zero: float
    subnormal: float  # they keep some of their bits
    infinite: float


def fate(counts: Mapping[int, int], number_format: Format, scale_exponent: int = 0) -> Fate:
    """counts: how many numbers lie in [2^e, 2^(e+1)), by e; they are times 2^scale_exponent."""
    total = sum(counts.values())

    def share(low, high):
        return sum(n for e, n in counts.items() if low <= e + scale_exponent < high) / total

    # Half of the smallest number and more is rounded up to it; what is below becomes zero.
    edge = number_format.subnormal - 1
    return Fate(
        share(-inf, edge),
        share(edge, number_format.normal),
        share(number_format.largest_exponent + 1, inf),
    )


def skipped(scales: Sequence[float]) -> list[int]:
    """The steps whose gradients were not finite: the scale is smaller after them."""
    return [i for i, (a, b) in enumerate(itertools.pairwise(scales)) if b < a]


def dtypes(run) -> Table:
    """What entered and left each kind of layer in a run's first step, and what stayed in fp32."""
    try:
        seen = log.read(Path(getattr(run, "directory", run))).evidence["probe"]
    except (log.LogError, KeyError):
        return Table(("what",), [], "<", "nothing was seen: the run ended before its first step")
    layers = Counter()
    for row in seen["layers"]:
        layers[row["layer"], row["in"], row["out"]] += row["count"]
    rows = [(f"{count} x {layer}", a, b) for (layer, a, b), count in layers.items()]
    rows.append(("the loss", seen["logits"]["dtype"], seen["loss"]["dtype"]))
    kept = {
        "weights": seen["parameters"]["dtypes"],
        "gradients of the weights": seen["gradients"]["dtypes"],
        "optimizer's state": seen["optimizer_state"],
    }
    rows += [(what, "", ", ".join(found)) for what, found in kept.items()]
    return Table(("what", "in", "out, or kept in"), rows, "<<<")
