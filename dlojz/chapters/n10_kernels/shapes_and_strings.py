"""Figures of notebook 10: a function from a string, the shapes of convolutions, the dispatcher."""

import statistics
from functools import partial

import numpy as np

from dlojz.chapters.n10_kernels.figures import draw_line, rate, setting
from dlojz.figures import drawing, report
from dlojz.figures.look import SERIES, entitle
from dlojz.table import Table

shapes_of = partial(drawing.of_experiment, field="shape", experiment="experiments/shapes.py")
answers_of = partial(drawing.of_experiment, field="asked", experiment="experiments/dispatch.py")
inlined_of = partial(drawing.of_experiment, field="what", experiment="experiments/inline.py")


# load_inline -------------------------------------------------------------------------------------


def inlined(run) -> Table:
    """Return a table of a run of experiments/inline.py: build, speed, inputs, broken builds."""
    cases, rows = inlined_of(run).cases, []
    for name, case in cases.items():
        if case["what"] == "build":
            rows.append((f"first build, {case['language']}", report.duration_text(case["first_s"])))
        elif case["what"] == "again":
            rows.append(("the same in another process", report.duration_text(case["again_s"])))
        elif case["what"] == "time":
            low, middle, high = rate(case)
            rows.append((f"speed: {name}", f"{middle:,.4g} GB/s ({low:,.4g} to {high:,.4g})"))
        else:
            rows.append((f"{case['what']}: {name}", case["result"]))
    return Table(("what", "result"), rows, "<<")


# The shapes of convolutions ----------------------------------------------------------------------


def _shapes(run, kind) -> dict[int, dict]:
    """Return the cases of a kind, by channels."""
    cases = shapes_of(run).cases.values()
    return {case["channels"]: case for case in cases if case["shape"] == kind}


def plot_shapes(run, axes=None):
    """Draw the time of dense and depthwise convolutions by width, and of wide and deep chains."""
    dense, depthwise = (_shapes(run, kind) for kind in ("dense", "depthwise"))
    chains = _shapes(run, "as many operations")
    with drawing.axes(axes, (10, 4.2), shape=(1, 2), width_ratios=(3, 2)) as axes:
        left, right = axes
        for cases, colour, label in (
            (dense, SERIES[2], "dense"),
            (depthwise, SERIES[1], "depthwise"),
        ):
            draw_line(left, list(cases), [_span(case) for case in cases.values()], colour, label)
        left.set_yscale("log")
        left.set_xscale("log", base=2)
        left.set_xticks(list(dense), [f"{n:,}" for n in dense])
        left.set(xlabel="channels", ylabel="ms of a layer")
        drawing.legend(left, 2)
        spans = np.transpose([_span(case) for case in chains.values()])
        names = [f"{case['layers']} of {channels:,}" for channels, case in chains.items()]
        ends = [spans[1] - spans[0], spans[2] - spans[1]]
        right.bar(names, spans[1], 0.6, yerr=ends, capsize=3, color=SERIES[0])
        right.set(xlabel="layers of channels, as many operations in all", ylabel="ms")
        entitle(right, _widths(dense, depthwise, chains), setting(run))
    return axes


def _span(case) -> list[float]:
    """Return the lowest, the median and the highest milliseconds."""
    return [f(case["ms"]) for f in (min, statistics.median, max)]


def _widths(dense, depthwise, chains) -> str:
    """Return the ratios of operations and of times, for depthwise and for deep, in words."""
    widest = max(dense)
    saved = _span(dense[widest])[1] / _span(depthwise[widest])[1]
    wide, deep = chains[max(chains)], chains[min(chains)]
    more = _span(deep)[1] / _span(wide)[1]
    fewer = dense[widest]["flops"] / depthwise[widest]["flops"]
    return (
        f"{widest:,} channels: depthwise has {fewer:,.0f} times fewer operations, and takes "
        f"1/{saved:.2g} of the time\n{deep['layers']} narrow layers take {more:.2g} times as long "
        "as one wide layer with as many operations"
    )


# The dispatcher ----------------------------------------------------------------------------------


def dispatched(run) -> Table:
    """Return a table of a run of experiments/dispatch.py: who answers, for which operand."""
    rows = []
    for case in answers_of(run).cases.values():
        keys = ", ".join(key for key in case["keys"] if key != "ADInplaceOrView")
        count = f"{len(case['operations'])}" if case["answered"] else "none"
        rows.append((case["asked"], case["of"], keys, count, case["result"]))
    return Table(("", "operand", "keys", "operations inside", "result"), rows, "<<<><")
