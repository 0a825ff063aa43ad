"""The tables of torch's averages and of the segment mean, and the roofline, of notebook 04b."""

from collections import defaultdict

import matplotlib.pyplot as plt
import numpy as np

from dlojz.figures import report
from dlojz.figures.look import KINDS, PALETTE, SERIES, entitle, percent, style
from dlojz.runs import log, stats
from dlojz.table import Table
from dlojz.traces import kinds

SHOWN = 5  # kinds of layers; the others are drawn together
OF_KINDS = {  # by a word in a layer's name; the rest has a series
    "Conv": KINDS[kinds.MATRIX],
    "Norm": KINDS[kinds.NORMALIZATION],
    "others": PALETTE["limit"],
}
COUNTED = ("operations", "kernels", "reads")  # per call, as dlojz.watch.evidence counts them


def averages(run, by_shape=False, most: int = 8, only: str = "") -> Table:
    """Return a table of a run of experiments/averages.py: the operations that take most time.

    by_shape: whether those with inputs of other shapes have rows of their own.
    only: a word that is in the names of those to be shown, such as "convolution".
    """
    cases = report.measured(run).cases
    rows = cases["by name and shapes" if by_shape else "by name"]["rows"]
    rows = [row for row in rows if only in row["op"]][:most]
    cells = [
        (
            row["op"].removeprefix("aten::"),
            " ".join("x".join(map(str, shape)) for shape in row["shapes"][:2]),
            f"{row['calls']:.3g}",
            f"{row['ms']:.2f}",
            ("-" if row["bytes"] < 0 else "") + report.bytes_text(abs(row["bytes"])),
        )
        for row in rows
    ]
    head = ("operation", "its first inputs", "calls", "ms", "memory")
    table = [cell if by_shape else (cell[0], *cell[2:]) for cell in cells]
    return Table(head if by_shape else (head[0], *head[2:]), table, "<" * (1 + by_shape) + ">>>")


def ways(run) -> Table:
    """Return a table of a run of experiments/segment_mean.py: each way, its times, its calls.

    An older run does not know how long a way takes with its backward pass.
    """
    cases = log.read(run).cases
    times = {"ms": "median ms", "and_backward_ms": "and backward"}
    times = {what: head for what, head in times.items() if all(what in c for c in cases.values())}
    rows = [
        (
            name,
            *(f"{np.median(case[what]):.3g}" for what in times),
            *(f"{case[what]}" for what in COUNTED),
        )
        for name, case in cases.items()
    ]
    head = ("way", *times.values(), "operations", "kernels", "results the host waits for")
    align = "<" + ">" * (len(head) - 1)
    return Table(head, rows, align, "the run has not ended well: job.explain() says why")


def plot_roofline(run, ax=None):
    """Draw a run of experiments/roofline.py: each layer under the roof of this machine.

    Left of the bend a layer is limited by memory, right of it by arithmetic.
    """
    found = log.read(run)
    best = {m.what: m.value for m in found.measures}
    layers = found.cases["layers"]["layers"]
    memory, matrix = best["memory"] * 1e9, best["matrix product"] * 1e12
    with style(grid="both"):
        ax = ax or plt.subplots(figsize=(9, 4.2))[1]
        x = np.geomspace(0.03, 3000, 200)
        ax.plot(x, np.minimum(memory * x, matrix) / 1e9, color="black", label="what is possible")
        series = iter(SERIES[1:])
        for kind, mine in _by_kind(layers).items():
            colour = next((c for word, c in OF_KINDS.items() if word in kind), None) or next(series)
            speed = [a["flops"] / a["ms"] / 1e6 for a in mine]
            size = [20 + 400 * a["count"] * a["ms"] / _total(layers) for a in mine]
            intensity = [a["flops"] / a["bytes"] for a in mine]
            share = _total(mine) / _total(layers)
            look = {"s": size, "color": colour, "alpha": 0.75, "label": f"{kind}: {share:.0%}"}
            ax.scatter(intensity, speed, **look)
        ax.set(xscale="log", yscale="log", ylabel="GFLOP/s")
        ax.set_xlabel("arithmetic intensity (operations per byte moved)")
        where = report.hardware_text(stats.summary(found))
        name = found.start["arguments"]["model"]
        title = f"{name}, {best['memory']:,.0f} GB/s, {1000 * best['matrix product']:,.0f} GFLOP/s"
        ax.legend(title="share of the forward time", loc="upper left", bbox_to_anchor=(1, 1))
        entitle(ax, _limited_text(layers, matrix / memory), f"{title}; {where}")
    return ax


def _limited_text(layers, bend):
    """Return the share of the forward pass in layers that memory limits."""
    left = _total(a for a in layers if a["flops"] / a["bytes"] < bend) / _total(layers)
    text = f"{percent(left)} of the forward pass is in layers that memory limits"
    return f"{text}: below {bend:.0f} operations per byte"


def _by_kind(layers) -> dict[str, list]:
    """Return the layers of each of the kinds that take the most time, and the others together."""
    found = defaultdict(list)
    for layer in layers:
        found[layer["kind"]].append(layer)
    order = sorted(found, key=lambda kind: -_total(found[kind]))
    most, others = order[:SHOWN], order[SHOWN:]
    kept = {kind: found[kind] for kind in most}
    return kept | ({"others": [a for kind in others for a in found[kind]]} if others else {})


def _total(layers):
    return sum(a["count"] * a["ms"] for a in layers)
