"""Figures of notebook 02b: sizes around multiples of 8, and kernels that use tensor cores."""

import re
from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from dlojz.figures import drawing, report
from dlojz.figures.look import PALETTE, entitle
from dlojz.runs import log
from dlojz.table import Table
from dlojz.traces import kinds

WIDTH = 58  # characters of a kernel's name
OTHER, EIGHTS = (PALETTE[name] for name in ("limit", "speed"))
SPECIAL = {
    **{"0": 0.0, "2⁻²⁴, the smallest": 2.0**-24, "2⁻¹⁴, the smallest with all its bits": 2.0**-14},
    **{"1": 1.0, "65,504, the largest": 65504.0, "infinity": np.inf, "NaN": np.nan},
}


def bits() -> Table:
    """Return a table of the bits of fp16 numbers, the special ones among them."""
    rows = []
    for name, value in SPECIAL.items():
        word = f"{np.array(value, np.float16).view(np.uint16):016b}"
        rows.append((name, word[0], word[1:6], word[6:]))
    return Table(("fp16", "sign", "exponent", "mantissa"), rows, "<<<<")


def plot_multiples(run, axes=None):
    """Draw the speeds of experiments/multiples.py by size, with multiples of 8 in colour."""
    run, found = report.measured(run), defaultdict(list)  # "channels": [(63, 51.2, "GFLOP/s"), ...]
    for m in run.measures:
        found[m.what].append((m.x, m.value, m.unit))
    with drawing.axes(axes, (11, 2.2 * len(found)), shape=(len(found), 1)) as axes:
        for ax, (what, points) in zip(axes, found.items(), strict=True):
            sizes, values, (unit, *_) = zip(*points, strict=True)
            if unit == "GFLOP/s" and max(values) >= 1000:
                values, unit = np.divide(values, 1000), "TFLOP/s"
            colours = [OTHER if size % 8 else EIGHTS for size in sizes]
            ax.bar([str(size) for size in sizes], values, 0.7, color=colours)
            ax.set(ylabel=unit, xlabel=what)
        entitle(axes, _eights_text(found), f"blue: multiples of 8; {report.experiment_text(run)}")
    return axes


def _eights_text(found):
    """Return the first quantity's best speed at a multiple of 8, relative to its best beside."""
    what, points = next(iter(found.items()))
    eight, other = (
        max((value for size, value, _ in points if bool(size % 8) == beside), default=0)
        for beside in (False, True)
    )
    if not eight or not other:
        return f"Speed by {what}"
    return f"{what.capitalize()}: a multiple of 8 is up to {eight / other:.2g} times as fast"


def by_name(named: Mapping, most: int = 2) -> Table:
    """Return a table of the longest matrix kernels of runs on a GPU: do they use tensor cores?

    named: training runs, as {label: run}; a run on a processor has no kernels, and no rows.
    """
    rows = []
    for label, run in named.items():
        us = log.read(run).last.kernels_us
        found = [n for n in sorted(us, key=us.get, reverse=True) if kinds.kind(n) == kinds.MATRIX]
        for name in found[:most]:
            part = kinds.tells(name)
            cores = "yes" if kinds.on_tensor_cores(name) else "no"
            rows.append((label, _clipped(name, part), part.strip("<"), cores))
    head = ("run", "kernel", "says so", "tensor cores")
    return Table(head, rows, "<<<<", "no kernel of a GPU in these runs")


def _clipped(name, part):
    """Return a name without what follows the part that tells, but with its first words at least."""
    name = re.sub(r"^void |\(.*", "", name)
    end = max(WIDTH, name.find(part) + len(part))
    return name if len(name) <= end + 1 else name[:end] + "…"
