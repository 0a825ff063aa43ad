"""The table and the figure of notebook 04c: a slow program's operators, and its faults' costs."""

import statistics
from collections import Counter
from typing import NamedTuple

from dlojz.chapters.n04c_slow import cases as slow
from dlojz.figures import drawing
from dlojz.figures.look import PALETTE
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


def plot_costs(job, ax=None):
    """Draw the time of a run by repair, one after the other, and each fault's alone."""
    rungs = ladder(job)
    with drawing.axes(ax, (9, 3.8), "x") as ax:
        for row, rung in enumerate(rungs):
            ax.barh(row, rung.ms, 0.65, color=PALETTE["forward"])
            alone = f"; alone {rung.alone:.2f} times the clean program" if rung.alone else ""
            ax.text(rung.ms, row, f"  {rung.ms:.0f} ms{alone}", va="center", fontsize=9)
        drawing.rows(ax, [rung.what for rung in rungs])
        ax.set(xlim=(0, 1.7 * max(rung.ms for rung in rungs)))
        ax.set_xlabel("time of a run (ms): training and validation, median")
        drawing.caption(ax, f"repaired one after the other; {drawing.where(job)}")
    return ax
