"""Figures of notebook 10b: weights of few bits, and the numbers of a training in FP8."""

import statistics
from functools import partial

import numpy as np
from matplotlib.ticker import LogLocator, NullFormatter

from dlojz.figures import drawing, report
from dlojz.figures.look import FORMATS, PALETTE, SERIES, entitle
from dlojz.runs import log
from dlojz.table import Table

WIDE = ("bf16", "fp32")  # on a GPU, on a processor
COLOURS = {**FORMATS, "torchao int8": SERIES[3]}
SHARED = dict(zip(("tensor", "row", "32 numbers"), SERIES, strict=False))
CASTS = dict(zip(("current", "delayed", "row"), SERIES[1:], strict=False))
BYTES = {"bf16": 2, "fp32": 4, "int8": 1, "int4": 0.5}

weights_of = partial(drawing.of_experiment, field="kind", experiment="experiments/int8.py")
quantized_of = partial(drawing.of_experiment, field="per", experiment="experiments/quantized.py")
scales_of = partial(drawing.of_experiment, field="format", experiment="experiments/scales.py")
layers_of = partial(drawing.of_experiment, field="part", experiment="experiments/break_even.py")


def _speeds(run) -> dict[str, float]:
    """Return the speeds of a machine, by name: memory in GB/s, products in TFLOP/s."""
    return {m.what: m.value for m in log.read(run).measures}


def _setting(run) -> str:
    return f"{drawing.where(run)}; a bar spans all rounds"


def _bars(ax, x, spans, **look):
    """Draw medians, with a bar from the lowest to the highest."""
    low, middle, high = np.transpose([[f(s) for f in (min, statistics.median, max)] for s in spans])
    look = {"marker": "o", "ms": 4, "capsize": 2} | look
    ax.errorbar(x, middle, [middle - low, high - middle], **look)


def _ratio(case, than) -> list[float]:
    """Return the speed of a case relative to another one, by round."""
    return [a / b for a, b in zip(than["ms"], case["ms"], strict=True)]


# Whole numbers -----------------------------------------------------------------------------------


def _timed(run, several: bool) -> list[dict]:
    """Return the timed cases of batches of several rows, or of one."""
    cases = weights_of(run).cases.values()
    return [case for case in cases if "ms" in case and (case["batch"] > 1) == several]


def plot_weights(run, ax=None):
    """Draw the weights per second of a linear layer with one row, by its width."""
    cases, memory = _timed(run, several=False), _speeds(run)["memory"]
    widths = list(dict.fromkeys(case["width"] for case in cases))
    with drawing.axes(ax, (9, 4.6)) as ax:
        for way in dict.fromkeys(case["way"] for case in cases):
            mine = [case for case in cases if case["way"] == way]
            rates = [[c["width"] ** 2 / ms / 1e6 for ms in c["ms"]] for c in mine]
            look = {"ls": "-" if "compiled" in way else ":", "color": COLOURS[mine[0]["kind"]]}
            _bars(ax, [case["width"] for case in mine], rates, label=way, **look)
        for kind in dict.fromkeys(case["kind"] for case in cases):
            if kind in BYTES:
                look = {"color": COLOURS[kind], "ls": "--", "lw": 0.8}
                ax.axhline(memory / BYTES[kind], **look)
                text, above = f"a copy's speed, in {kind}", {"xytext": (0, 2), "fontsize": 8}
                at = widths[0], memory / BYTES[kind]
                ax.annotate(text, at, textcoords="offset points", **above)
        ax.set(xlabel="inputs and outputs of the layer, one row", yscale="log")
        ax.yaxis.set_major_formatter(lambda y, _: f"{y:,g}")
        ax.set_ylabel("billions of weights per second")
        ax.set_xticks(widths, [f"{width:,}" for width in widths])
        drawing.legend(ax, 4)
        entitle(ax, _fewer(cases, widths[-1]), _setting(run))
    return ax


def _fewer(cases, width) -> str:
    """Return the gain of int8 over the wide weights in words, at a width."""
    ms = {c["way"]: statistics.median(c["ms"]) for c in cases if c["width"] == width}
    wide = next(way for way in ms if way in WIDE)
    told = [
        f"{way} x {ms[wide] / ms[way]:.2g}"
        for way in ("int8", "int8, compiled", "int4, compiled")
        if way in ms
    ]
    return f"{width:,} x {width:,} weights and one row, relative to {wide}: {'; '.join(told)}"


def gain(run) -> float | None:
    """Return the speed of compiled int8 at the largest width, relative to the wide weights."""
    cases = _timed(run, several=False)
    most = max(case["width"] for case in cases)
    ms = {c["way"]: statistics.median(c["ms"]) for c in cases if c["width"] == most}
    wide = next(way for way in ms if way in WIDE)
    return ms[wide] / ms["int8, compiled"] if "int8, compiled" in ms else None


def weights(run) -> Table:
    """Return a table of each way at the largest width: bytes of a weight, error, bytes per s."""
    cases = weights_of(run).cases.values()
    most = max(case["width"] for case in cases)
    rows = []
    for case in cases:
        if case["width"] == most and case["batch"] == 1:
            rows.append((case["way"], *_row(case)))
    return Table(("weights", "bytes of each", "error", "ms", "GB/s"), rows, "<>>>>")


def _row(case):
    if "ms" not in case:
        return "", "", case["error"][:60], ""
    low, middle, high = (f(case["ms"]) for f in (min, statistics.median, max))
    size = BYTES.get(case["kind"], 1) * case["width"] ** 2
    ms = f"{middle:,.3g} ({low:,.3g} to {high:,.3g})"
    return (
        f"{BYTES.get(case['kind'], 1):g}",
        f"{case['away']:.2%}",
        ms,
        f"{size / middle / 1e6:,.4g}",
    )


def plot_batches(run, ax=None):
    """Draw the gain of int8 over the wide weights by the rows of a batch, and the roof's.

    run: one with --batches.
    """
    speeds, cases = _speeds(run), [c for c in weights_of(run).cases.values() if "ms" in c]
    width = max(cases, key=lambda case: case["batch"])["width"]
    cases = [case for case in cases if case["width"] == width]
    wide = {case["batch"]: case for case in cases if case["way"] in WIDE}
    memory, product = 1e9 * speeds["memory"], 1e12 * speeds["matrix product"]
    kind = next(iter(wide.values()))["way"]
    batches = np.geomspace(min(wide), max(wide), 200)
    times = {}
    for each in (kind, "int8"):  # weights, and what goes in and out
        moved = BYTES[each] * width**2 + 2 * BYTES[kind] * width * batches
        times[each] = np.maximum(moved / memory, 2 * width**2 * batches / product)
    with drawing.axes(ax, (9, 4.4)) as ax:
        for way, ls in (("int8", ":"), ("int8, compiled", "-")):
            mine = [c for c in cases if c["way"] == way]
            if mine:
                ratios = [_ratio(case, wide[case["batch"]]) for case in mine]
                look = {"ls": ls, "color": SERIES[1], "label": way}
                _bars(ax, [case["batch"] for case in mine], ratios, **look)
        ax.plot(batches, times[kind] / times["int8"], "k--", lw=1, label="under the roof")
        ax.axhline(1, color=PALETTE["limit"], lw=1)
        ax.set_xscale("log", base=2)
        ax.set_xticks(list(wide), [f"{batch:,}" for batch in wide])
        ax.set(xlabel="rows", ylabel=f"times as fast as {kind}", ylim=(0, None))
        drawing.legend(ax, 3)
        title = _until(cases, wide, batches, times[kind] / times["int8"])
        entitle(ax, title, f"{width:,} x {width:,} weights; {_setting(run)}")
    return ax


def _until(cases, wide, batches, predicted) -> str:
    """Return the largest batch at which int8 is faster in words, and that of the roof."""
    found = {case["way"] for case in cases}
    way = "int8, compiled" if "int8, compiled" in found else "int8"
    mine = [case for case in cases if case["way"] == way]
    ratios = {case["batch"]: statistics.median(_ratio(case, wide[case["batch"]])) for case in mine}
    pays = [batch for batch, ratio in ratios.items() if ratio > 1]
    most = f"with up to {max(pays)} rows" if pays > [1] else "with one row only"
    measured = most if pays else "with none of these batches"
    above = batches[predicted > 1.05]
    return f"{way}: faster {measured}; under the roof, with up to {above.max():,.0f}"


# A trained model ---------------------------------------------------------------------------------


def plot_bits(run, axes=None):
    """Draw the accuracy of a trained model, and the error of its weights, by their bits."""
    cases = [case for case in quantized_of(run).cases.values() if "seed" in case]
    before = [case["accuracy"] for case in cases if case["bits"] is None]
    with drawing.axes(axes, (10, 4.2), shape=(1, 2)) as axes:
        for per, colour in SHARED.items():
            mine = [case for case in cases if case["per"] == per]
            bits = sorted({case["bits"] for case in mine}, reverse=True)
            for ax, what in zip(axes, ("accuracy", "away"), strict=True):
                spans = [[100 * c[what] for c in mine if c["bits"] == n] for n in bits]
                _bars(ax, bits, spans, color=colour, label=f"a scale per {per}")
        axes[0].axhspan(100 * min(before), 100 * max(before), color=PALETTE["limit"], alpha=0.2)
        axes[0].axhline(100 * statistics.mean(before), color=PALETTE["limit"], label="before")
        axes[0].set(ylabel="accuracy (%)", xlabel="bits of a weight")
        axes[1].set(ylabel="error of the weights (%)", yscale="log")
        axes[1].set_xlabel("bits of a weight")
        for ax in axes:
            ax.invert_xaxis()
        drawing.legend(axes[0], 2)
        seeds = f"seeds: {len(before)}, a bar spans them; {drawing.where(run)}"
        entitle(axes[0], _kept(cases, before), seeds)
    return axes


def _kept(cases, before) -> str:
    """Return the fewest bits that cost less than a point of accuracy, by what shares a scale."""
    mean, told = statistics.mean(before), []
    for per in SHARED:
        found = {}
        for case in cases:
            if case["per"] == per:
                found.setdefault(case["bits"], []).append(case["accuracy"])
        enough = []
        for bits in sorted(found, reverse=True):
            if mean - statistics.mean(found[bits]) > 0.01:
                break
            enough.append(bits)
        told.append(f"{min(enough) if enough else 'none'} ({per})")
    told = ", ".join(told)
    return f"Fewest bits that stay within a point of {mean:.1%}, by what shares a scale: {told}"


def evaluations(run) -> Table:
    """Return a table of the trainer's evaluation of the last model, and of its int8 weights."""
    found, rows = quantized_of(run), []
    for case in found.cases.values():
        if "ms" in case:
            speeds = [1000 * case["images"] / ms for ms in case["ms"]]
            low, middle, high = (f(speeds) for f in (min, statistics.median, max))
            rows.append((f"{case['way']}, images/s", f"{middle:,.0f} ({low:,.0f} to {high:,.0f})"))
        elif "error" in case:
            rows.append((case["way"], case["error"][:80]))
    before = [c["accuracy"] for c in found.cases.values() if c["bits"] is None and "seed" in c]
    after, speeds = found.cases["int8, accuracy"]["accuracy"], _speeds(run)
    share = speeds["weights of linear layers"] / speeds["weights"]
    rows.append(
        ("accuracy of the last training, before and with int8", f"{before[-1]:.2%}, {after:.2%}")
    )
    rows.append(("share of the weights in those layers", f"{share:.0%}"))
    return Table(("the trainer's evaluation", ""), rows, "<>")


# Floats of eight bits ----------------------------------------------------------------------------


def formats(run) -> Table:
    """Return a table of what each format keeps of a training's tensors, as medians of its steps."""
    rows = []
    for case in scales_of(run).cases.values():
        if not case["scale"].startswith("delayed"):
            away, zeros = (statistics.median(case[what]) for what in ("away", "zeros"))
            scale = {"none": "none", "tensor": "of the tensor", "row": "of each row"}[case["scale"]]
            rows.append((case["tensor"], case["format"], scale, f"{away:.2%}", f"{zeros:.2%}"))
    rows.sort(key=lambda row: ("inputs", "weights", "gradients").index(row[0]))
    return Table(("tensor", "format", "scale", "error", "became zero"), rows, "<<<>>")


def plot_delayed(run, axes=None):
    """Draw the errors of casts with current and with delayed scales, over a training."""
    cases = scales_of(run).cases
    names = dict(zip(("tensor", "delayed", "delayed, with room"), SERIES[1:], strict=False))
    with drawing.axes(axes, (10, 4.2), shape=(1, 2), sharey=True) as axes:
        for ax, (tensor, kind) in zip(
            axes, (("weights", "E4M3"), ("gradients", "E5M2")), strict=True
        ):
            for scale, colour in names.items():
                case = cases[f"{tensor}, {kind}, {scale}"]
                label = scale.replace("tensor", "current")
                look = {"color": colour, "label": label, "marker": "o", "ms": 3}
                # In step 0 the last layer is zero, and with it the gradients of all others.
                ax.plot(case["steps"][1:], [100 * value for value in case["worst"][1:]], **look)
            ax.set_xlabel(f"step ({tensor}, {kind})")
        axes[0].set(ylabel="error of the worst layer (%)", ylim=(0, None))
        drawing.legend(axes[0], 3)
        entitle(axes[0], _late(cases), f"history of 16 steps; {drawing.where(run)}")
    return axes


def _late(cases) -> str:
    """Return the largest errors of the gradients with each kind of scale, in words."""
    worst = {
        scale: 100 * max(cases[f"gradients, E5M2, {scale}"]["worst"])
        for scale in ("tensor", "delayed", "delayed, with room")
    }
    return (
        "The gradients' largest error: {tensor:.1f} % with current scales, {delayed:.1f} % with "
        "delayed ones, {delayed, with room:.1f} % with a power of two of room".format(**worst)
    )


def casts(run) -> Table:
    """Return a table of the casts of one large matrix: their time, and the bytes that they move."""
    rows = []
    for case in layers_of(run).cases.values():
        if case["part"] == "cast":
            if "ms" in case:
                low, middle, high = (f(case["ms"]) for f in (min, statistics.median, max))
                ms = f"{middle:,.3g} ({low:,.3g} to {high:,.3g})"
                moved = report.bytes_text(case["bytes"])
                rows.append((case["way"], moved, ms, f"{case['bytes'] / middle / 1e6:,.4g}"))
            else:
                rows.append((case["way"], "", case["error"][:60], ""))
    return Table(("scale", "bytes moved", "ms", "GB/s"), rows, "<>>>")


def _layers(run) -> list[dict]:
    return [case for case in layers_of(run).cases.values() if "predicted" in case]


def gains(case, way) -> tuple[float, float]:
    """Return the gain of FP8 for a layer: predicted, and measured."""
    middle = {name: statistics.median(ms) for name, ms in case["ms"].items()}
    guess = case["predicted"]
    return guess["wide"] / guess[way], middle["wide"] / middle[way]


def plot_break_even(run, axes=None):
    """Draw the measured gain of FP8 by the predicted one, for each layer, and both by its rows."""
    cases, speeds = _layers(run), _speeds(run)
    with drawing.axes(axes, (10, 4.6), "both", shape=(1, 2)) as axes:
        left, right = axes
        for way, colour in CASTS.items():
            found = [gains(case, way) for case in cases if way in case["ms"]]
            if found:
                left.plot(*np.transpose(found), "o", color=colour, label=way, ms=5, alpha=0.8)
        ends = [0.9 * min(left.axis()[::2]), 1.1 * max(left.axis()[1::2])]
        left.plot(ends, ends, "k--", lw=1, label="as predicted")
        left.set(xscale="log", yscale="log", xlabel="predicted gain", ylabel="measured gain")
        for axis in (left.xaxis, left.yaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_minor_formatter(NullFormatter())
        for ax in (left, right):
            ax.axhline(1, color=PALETTE["limit"], lw=1)
        kinds = dict.fromkeys((case["part"], *case["shape"][1:]) for case in cases)
        for number, (part, n, k) in enumerate(kinds):
            mine = [c for c in cases if (c["part"], *c["shape"][1:]) == (part, n, k)]
            found = np.array([gains(case, "current") for case in mine])
            look = {"color": SERIES[number % len(SERIES)], "marker": "o", "ms": 4}
            rows = [case["shape"][0] for case in mine]
            right.plot(rows, found[:, 1], label=f"{k:,} to {n:,}", **look)
            right.plot(rows, found[:, 0], color=look["color"], ls=":")
        right.set(xlabel="rows (tokens of a batch)", ylabel="gain, current scales")
        right.set(xscale="log", ylim=(0, None))
        drawing.legend(left, 4)
        drawing.legend(right, 3)
        entitle(left, _even(cases, speeds), f"dotted: predicted; {drawing.where(run)}")
    return axes


def _even(cases, speeds) -> str:
    """Return the number of layers that are faster in FP8, predicted and measured, in words."""
    found = [gains(case, "current") for case in cases]
    guessed, true = (sum(pair[at] > 1 for pair in found) for at in (0, 1))
    product = speeds["product in 8 bits"] / speeds["matrix product"]
    return (
        f"FP8 with current scales: predicted to be faster for {guessed} of {len(found)} layers, "
        f"faster for {true}; the best is x {max(m for _, m in found):.2f}, where a large product "
        f"without casts is x {product:.2f}"
    )


def sizes(run) -> Table:
    """Return a table of products in 8 bits, with a size that is not a multiple of 16."""
    cases = layers_of(run).cases
    rows = [(name, c["result"][:110]) for name, c in cases.items() if c["part"] == "size"]
    return Table(("(M, K) times (K, N)", "result"), rows, "<<")
