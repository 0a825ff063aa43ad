"""The table and the figure of notebook 04c: a slow program's operators, and its faults' costs."""

import statistics
from collections import Counter
from itertools import pairwise
from typing import NamedTuple

from dlojz.chapters.n04c_slow import cases as slow
from dlojz.figures import drawing
from dlojz.figures.look import PALETTE, entitle
from dlojz.runs import log
from dlojz.table import Table
from dlojz.traces.trace import open_trace

PHASES = ("data", "forward", "backward", "update")  # of a step, by the job's marks
NODE = "autograd::engine::evaluate_function: "  # before the name of a backward function
SHOWN = 3  # operators to name in each phase


def operators(job) -> Table:
    """Return a table of the phases of a step and of the validation, with their operators."""
    found, rows = open_trace(job), []
    steps, outermost = len(found.steps), [*_outermost(found.ops)]
    for phase in PHASES:
        ranges = [r for r in found.ranges if r.name == phase and _in_a_step(found, r)]
        ms = sum(r.end - r.begin for r in ranges) / steps
        asked = Counter(
            op.name for op in outermost if any(r.begin <= op.begin < r.end for r in ranges)
        )
        most = ", ".join(
            f"{n / steps:.3g} {name.removeprefix(NODE)}" for name, n in asked.most_common(SHOWN)
        )
        rows.append((phase, f"{ms:.2f}", f"{asked.total() / steps:,.0f}", most))
    cases = log.read(job).cases
    batch = 1000 * cases["parts"]["validation_s"] / cases["parts"]["batches"]
    kept = cases["mine"]["kept_bytes"] / 1e6
    note = f"keeps {kept:.3g} MB for a backward pass" if kept else ""
    rows.append(("validation", f"{batch:.2f}", "", note))
    return Table(("phase", "ms a step", "operators a step", "most of them"), rows, "<>><")


def _outermost(ops):
    """Yield the operators that are not called by another one."""
    ends = {}
    for op in sorted(ops, key=lambda op: (op.begin, -op.end)):
        if op.begin >= ends.get(op.where, op.begin):
            ends[op.where] = op.end
            yield op


def _in_a_step(found, one):
    return any(step.begin <= one.begin < step.end for step in found.steps)


class Rung(NamedTuple):
    """A program in which the first few faults are repaired."""

    what: str
    ms: float  # of a run, median
    alone: float | None  # the clean program with only this fault, relative to without it


def ladder(job) -> list[Rung]:
    """Return the rungs of the repair, fault by fault, from a job with --costs."""
    spent = {name: c["seconds"] for name, c in log.read(job).cases.items() if "seconds" in c}
    names, clean = slow.FUNCTIONS, spent[f"repaired {len(slow.FUNCTIONS)}"]
    texts = ["as it is handed out", *(f"{name} repaired" for name in names[:-1])]
    rungs = []
    for number, text in enumerate([*texts, "all six repaired"]):
        ms = 1000 * statistics.median(spent[f"repaired {number}"])
        repaired = names[number - 1] if number else None
        pairs = zip(spent[f"only {repaired}"], clean, strict=True) if repaired else []
        ratios = [one / without for one, without in pairs]
        rungs.append(Rung(text, ms, statistics.median(ratios) if ratios else None))
    return rungs


def _repaired_text(rungs):
    """Return the gain of all repairs, and the one that saves the most."""
    saved, most = max((one.ms - other.ms, other.what) for one, other in pairwise(rungs))
    gain = rungs[0].ms / rungs[-1].ms
    text = f"All six repaired: {gain:.2g} times as fast; "
    return f"{text}the most, {saved:,.0f} ms, with {most}"


def plot_costs(job, axes=None):
    """Draw the time of a run by repair, one after the other, and each fault's alone."""
    rungs, layout = ladder(job), {"sharey": True, "width_ratios": (1.6, 1)}
    with drawing.axes(axes, (10, 3.8), "x", shape=(1, 2), **layout) as axes:
        ax, beside = axes
        for row, rung in enumerate(rungs):
            last = row == len(rungs) - 1
            ax.barh(row, rung.ms, 0.65, color=PALETTE["after" if last else "before"])
            saved = f", {rungs[row - 1].ms - rung.ms:,.0f} less" if row else ""
            ax.text(rung.ms, row, f"  {rung.ms:,.0f} ms{saved}", va="center", fontsize=9)
            if rung.alone:
                beside.barh(row, rung.alone - 1, 0.65, 1, color=PALETTE["failure"])
                beside.text(max(1, rung.alone), row, f"  {rung.alone:.2f}", va="center", fontsize=9)
        drawing.rows(ax, [rung.what for rung in rungs])
        ax.set(xlim=(0, 1.4 * max(rung.ms for rung in rungs)))
        ax.set_xlabel("a run, repaired so far (ms, median)")
        beside.axvline(1, color=PALETTE["limit"], lw=1)
        beside.set_xlabel("this fault alone (times the clean program)")
        beside.margins(x=0.2)
        entitle(axes, _repaired_text(rungs), f"training and validation; {drawing.where(job)}")
    return axes
