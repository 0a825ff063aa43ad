"""Figures of notebook 08 on single updates: a finder's learning rates, and an optimizer's costs."""

import statistics
from functools import partial

import numpy as np

from dlojz.chapters.n08_large_batch.figures import by_optimizer
from dlojz.figures import drawing
from dlojz.figures.look import PALETTE, SERIES, entitle
from dlojz.runs.stats import summary
from dlojz.table import Table

# The finder --------------------------------------------------------------------------------------

finder_of = partial(drawing.of_experiment, field="losses", experiment="experiments/finder.py")
RULES = {"square root": ("s", 0.5), "linear": ("^", 1.0)}


def lowest(run) -> dict[int, float]:
    """Return the learning rate of the lowest loss, by batch: the geometric mean of the seeds."""
    found = {}
    for case in finder_of(run).cases.values():
        rate = case["rates"][int(np.nanargmin(case["losses"]))]
        found.setdefault(case["batch"], []).append(rate)
    return {batch: statistics.geometric_mean(rates) for batch, rates in sorted(found.items())}


def plot_finder(run, batches_run=None, ax=None):
    """Draw the finder's curves for each batch, with the rates that train best, and the rules'.

    batches_run: of batches.py, whose SGD chose its rate by training.
    """
    minima = lowest(run)
    chosen = {s.batch: s.rate for s in by_optimizer(batches_run)["sgd"]} if batches_run else {}
    with drawing.axes(ax, (9, 4.8)) as ax:
        for number, (batch, least) in enumerate(minima.items()):
            colour = SERIES[number]
            label = f"batch {batch:,}, lowest at {least:.2g}"
            for case in finder_of(run).cases.values():
                if case["batch"] == batch:
                    ax.plot(case["rates"], case["losses"], color=colour, lw=1, alpha=0.7)
            ax.plot([], [], color=colour, label=label)
            if batch in chosen:
                _mark(ax, chosen[batch], number, "o")
            if chosen and batch > min(chosen):
                for marker, power in RULES.values():
                    _mark(ax, chosen[min(chosen)] * (batch / min(chosen)) ** power, number, marker)
        if chosen:
            marks = {"the rate that trains best": "o"}
            marks |= {f"{rule} rule": marker for rule, (marker, _) in RULES.items()}
            for label, marker in marks.items():
                ax.plot([], [], marker, ls="", color=PALETTE["limit"], ms=8, label=label)
        first = max(case["losses"][0] for case in finder_of(run).cases.values())
        ax.set(xscale="log", ylim=(0, 1.5 * first), xlabel="learning rate", ylabel="loss")
        drawing.legend(ax, 1, (0, 0), fontsize=8)
        setting = f"SGD, one update at each rate; lines: seeds; {drawing.where(run)}"
        entitle(ax, finder_text(minima, chosen), setting)
    return ax


def _mark(ax, rate, number, marker):
    """Mark a rate near the bottom of the axes, at a height for each batch."""
    look = {"color": SERIES[number], "mec": "white", "ms": 9, "ls": ""}
    ax.plot([rate], [0.04 + 0.06 * number], marker, transform=ax.get_xaxis_transform(), **look)


def finder_text(minima: dict[int, float], chosen: dict[int, float]) -> str:
    """Return the rate that trains best, as a multiple of that of the lowest loss."""
    ratios = {b: chosen[b] / rate for b, rate in minima.items() if b in chosen}
    if not ratios:
        told = ", ".join(f"{rate:.2g} (batch {batch:,})" for batch, rate in minima.items())
        return f"The loss is lowest at {told}"
    told = ", ".join(f"{ratio:.2g} (batch {batch:,})" for batch, ratio in ratios.items())
    return f"The rate that trains best, as a multiple of that of the lowest loss:\n{told}"


# The costs ---------------------------------------------------------------------------------------

costs_of = partial(
    drawing.of_experiment, field="state_bytes", experiment="experiments/optimizer_costs.py"
)
WAYS = {"one by one": SERIES[1], "foreach": SERIES[4], "fused": SERIES[2], "compiled": SERIES[0]}


def costs(run) -> Table:
    """Return a table of the cost of an update: its time, per parameter too, and its bytes."""
    rows = []
    for case in costs_of(run).cases.values():
        low, middle, high = (f(case["ms"]) for f in (min, statistics.median, max))
        ms = f"{middle:,.3g} ({low:,.3g} to {high:,.3g})"
        ns, size = 1e6 * middle / case["parameters"], case["state_bytes"] / case["parameters"]
        first = f"{case['first_s']:.0f}" if case["way"] == "compiled" else ""
        rows.append((case["title"], case["way"], ms, f"{ns:.3g}", f"{size:.3g}", first))
    head = ("", "", "ms", "ns/parameter", "bytes/parameter", "compiled in (s)")
    return Table(head, rows, "<<>>>>")


def plot_costs(run, ax=None):
    """Draw the time of an update by optimizer and by the way in which it updates."""
    cases = list(costs_of(run).cases.values())
    names = list(dict.fromkeys(case["title"] for case in cases))
    with drawing.axes(ax, (9, 1.9 + 0.75 * len(names)), "x") as ax:
        for case in cases:
            ways = [c["way"] for c in cases if c["title"] == case["title"]]
            at = names.index(case["title"]) + 0.2 * (ways.index(case["way"]) - (len(ways) - 1) / 2)
            low, middle, high = (f(case["ms"]) for f in (min, statistics.median, max))
            ax.barh(at, middle, 0.18, color=WAYS[case["way"]], label=case["way"])
            ends = [[middle - low], [high - middle]]
            ax.errorbar(middle, at, xerr=ends, color="black", lw=1, capsize=2)
            ax.text(high, at, f"  {middle:.3g}", va="center", fontsize=8)
        size = {c["title"]: c["state_bytes"] / c["parameters"] for c in cases}
        drawing.rows(ax, [f"{name}\n{size[name]:.2g} bytes/parameter" for name in names])
        ax.margins(x=0.1)
        ax.set_xlabel("ms of an update (median; line: all rounds)")
        drawing.legend(ax, 4, (0, 1))
        model = f"{summary(run).model}, {cases[0]['parameters']:,} parameters in "
        model += f"{cases[0]['weights']} tensors; {drawing.where(run)}"
        entitle(ax, costs_text(cases), model)
    return ax


def costs_text(cases: list[dict]) -> str:
    """Return the time of LAMB's update in that of fused AdamW's, one by one and compiled."""
    ms = {(c["optimizer"], c["way"]): statistics.median(c["ms"]) for c in cases}
    base, told = ms["adamw", "fused"], []
    for way in ("one by one", "compiled"):
        if ("lamb", way) in ms:
            told.append(f"{ms['lamb', way] / base:.2g} times {way}")
    return f"LAMB's update, in those of fused AdamW: {', '.join(told)}"
