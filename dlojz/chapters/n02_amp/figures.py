"""Figures of notebook 02: the range and precision of number formats, their gain and cost.

A format is described by its bits; the fate of a value in it is computed, not looked up.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from matplotlib.ticker import PercentFormatter

from dlojz.course import UserError
from dlojz.figures import batch_sweep, drawing
from dlojz.figures.look import MEMORY, OWN, PALE, PALETTE, SERIES, entitle, percent
from dlojz.figures.report import disturbed_text, hardware_text, measured
from dlojz.runs import log
from dlojz.runs.stats import summary
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
        """Return the exponent of the smallest number that keeps all its bits."""
        return 1 - self.largest_exponent

    @property
    def subnormal(self) -> int:
        """Return the exponent of the smallest number of all, which has one bit left."""
        return self.normal - self.mantissa_bits

    @property
    def largest(self) -> float:
        return (2 - self.spacing) * 2.0**self.largest_exponent

    @property
    def spacing(self) -> float:
        """Return the distance from 1 to the next number."""
        return 2.0**-self.mantissa_bits


FORMATS = {
    "fp32": Format(8, 23, 4),
    "tf32": Format(8, 10, 4),
    "bf16": Format(8, 7, 2),
    "fp16": Format(5, 10, 2),
}


def points(run, unit: str) -> dict[str, tuple[list, list]]:
    """Return the measures of an experiment in `unit`, by name: the x and the values."""
    read, found = log.read(run), defaultdict(lambda: ([], []))
    for measure in read.measures:
        if measure.unit == unit:
            found[measure.name][0].append(measure.x)
            found[measure.name][1].append(measure.value)
    if not found:
        units = sorted({m.unit for m in read.measures})
        raise UserError(f"{read.path}: no {unit!r} among {units}: see the job's stderr.txt")
    return dict(found)


@dataclass(frozen=True)
class Fate:
    """The fate of numbers in a format, as shares of the nonzero ones."""

    zero: float
    subnormal: float  # they keep some of their bits
    infinite: float


def fate(counts: Mapping[int, int], number_format: Format, scale_exponent: int = 0) -> Fate:
    """Return the fate of numbers scaled by 2^scale_exponent and then stored in a format.

    counts: the count of numbers in [2^e, 2^(e+1)), by e.
    """
    total = sum(counts.values())

    def share(low, high):
        return sum(n for e, n in counts.items() if low <= e + scale_exponent < high) / total

    # Numbers from half the smallest one are rounded up to it; below that they become zero.
    edge = number_format.subnormal - 1
    return Fate(
        share(-inf, edge),
        share(edge, number_format.normal),
        share(number_format.largest_exponent + 1, inf),
    )


def skipped(scales: Sequence[float]) -> list[int]:
    """Return the steps whose gradients were not finite: the scale drops after them."""
    return [i for i, (a, b) in enumerate(itertools.pairwise(scales)) if b < a]


def dtypes(run) -> Table:
    """Return a table of dtypes in a run's first step: layers' inputs and outputs, and stored."""
    try:
        seen = log.read(run).probe
    except log.LogError:
        seen = None
    if not seen or not seen.loss:
        return Table(("what",), [], "<", "nothing was seen: the run ended before its first step")
    layers = Counter()
    for row in seen.layers:
        layers[row["layer"], row["in"], row["out"]] += row["count"]
    rows = [(f"{count} x {layer}", a, b) for (layer, a, b), count in layers.items()]
    rows.append(("the loss", seen.logits.dtype, seen.loss.dtype))
    kept = {
        "weights": seen.parameters.dtypes,
        "gradients of the weights": seen.gradients.dtypes,
        "optimizer's state": seen.optimizer_state,
    }
    rows += [(what, "", ", ".join(found)) for what, found in kept.items()]
    return Table(("what", "in", "out, or kept in"), rows, "<<<")


# Formats ----------------------------------------------------------------------------


def plot_formats(ax=None):
    """Draw the bits of each format, with its range and its precision."""
    parts = {"sign": PALETTE["limit"], "exponent: the range": SERIES[1]}
    parts |= {"mantissa: the steps": SERIES[5], "not used": PALE}
    with drawing.axes(ax, (9, 2.6), "x") as ax:
        for row, f in enumerate(FORMATS.values()):
            used = 1 + f.exponent_bits + f.mantissa_bits
            widths = (1, f.exponent_bits, f.mantissa_bits, 8 * f.bytes - used)
            drawing.stack(ax, row, dict(zip(parts, widths, strict=True)), parts, ec="white")
            largest = f"{f.largest:,.0f}" if f.largest < 1e6 else f"{f.largest:.0e}"
            text = f"{2.0**f.normal:.0e} to {largest}; after 1 comes {1 + f.spacing:.7f}"
            ax.text(33, row, text, va="center", fontsize=9)
        drawing.write_widths(ax, "{:.0f}", 4)
        drawing.rows(ax, FORMATS)
        ax.set(xlim=(0, 58), xticks=(0, 8, 16, 24, 32), xlabel="bits in memory")
        drawing.legend(ax, 4)
        half, brain = FORMATS["fp16"], FORMATS["bf16"]
        text = f"fp16 ends at {half.largest:,.0f}, bf16 at {brain.largest:.0e} like fp32, with "
        entitle(ax, f"{text}{brain.spacing / half.spacing:.0f} times coarser steps than fp16's")
    return ax


def plot_underflow(run, scale_exponent: int = 16, axes=None):
    """Draw the sizes of a step's gradients, plain and scaled, above the formats' ranges."""
    run = log.read(run)
    found, layout = points(run, "gradients"), {"sharex": True, "height_ratios": (2, 2, 1.3)}
    with drawing.axes(axes, (9, 6.4), "x", shape=(3, 1), **layout) as axes:
        for ax, shift in zip(axes, (0, scale_exponent), strict=False):
            for colour, (name, seen) in zip(SERIES[1::2], found.items(), strict=False):
                exponents, counts = np.array(seen)
                lost = fate(dict(zip(*seen, strict=True)), FORMATS["fp16"], shift)
                text = f"of {name}: {lost.zero:.2%} become zero, {lost.subnormal:.0%} lose bits"
                text += f", {lost.infinite:.1%} are infinite" if lost.infinite else ""
                at, shares = exponents + shift + 0.5, counts / counts.sum()
                ax.bar(at, shares, 1.0, color=colour, alpha=0.65, label=text)
            ax.axvspan(-99, FORMATS["fp16"].subnormal - 1, color=PALETTE["failure"], alpha=0.12)
            what = f"times $2^{{{shift}}}$" if shift else "as they are"
            ax.set(ylabel="share", title=f"gradients {what}, in fp16")
            ax.yaxis.set_major_formatter(PercentFormatter(1, 0))
            ax.legend(loc="lower right", bbox_to_anchor=(1, 0.97), fontsize=8)
        axes[0].set_xlim(-52, 40)
        _plot_ranges(axes[2])
        entitle(axes, _underflow_text(found, scale_exponent), drawing.where(run))
    return axes


def _underflow_text(found, shift):
    """Return the largest share of gradients that fp16 makes zero, plain and scaled."""
    lost = {
        name: [fate(dict(zip(*seen, strict=True)), FORMATS["fp16"], at).zero for at in (0, shift)]
        for name, seen in found.items()
    }
    name, (plain, scaled) = max(lost.items(), key=lambda each: each[1][0])
    told = f"fp16 makes {percent(plain)} of the gradients of {name} zero"
    return f"{told}; scaled by {2**shift:,}: {percent(scaled)}"


def _plot_ranges(ax):
    for row, (name, f) in enumerate(FORMATS.items()):
        ax.barh(row, f.normal - f.subnormal, 0.6, f.subnormal, color=OWN[name], alpha=0.35)
        ax.barh(row, f.largest_exponent + 1 - f.normal, 0.6, f.normal, color=OWN[name])
    drawing.rows(ax, FORMATS)
    ticks = range(-48, 41, 8)
    ax.set_xticks(ticks, [f"$2^{{{t}}}$" for t in ticks])
    ax.set_xlabel("size of a number, with the range of each format (pale: bits get lost)")


def plot_scale(run, ax=None):
    """Draw the loss scale from step to step, and the skipped steps."""
    run = log.read(run)
    scales = points(run, "loss scale")["scale"][1]
    lost = skipped(scales)
    with drawing.axes(ax, (9, 3)) as ax:
        used = np.log2(scales[:-1])  # the last one is the next step's
        ax.step(range(len(used)), used, where="mid", color=OWN["fp16"])
        ax.plot(range(len(used)), used, ".", color=OWN["fp16"], label="taken")
        label = "skipped: a gradient was infinite"
        ax.plot(lost, used[lost], "X", color=PALETTE["failure"], label=label)
        ax.set(xlabel="step", ylabel="loss scale (power of two)")
        entitle(ax, f"{len(lost)} of {len(used)} steps skipped", drawing.where(run))
        ax.yaxis.get_major_locator().set_params(integer=True)
        ax.legend()
    return ax


def plot_ways(run, ax=None):
    """Draw the time of an update on host and device, for each way of experiments/updates.py.

    The device's part is the time that the update added to its earlier work.
    """
    run, s = measured(run), summary(run)
    host = [case["host_ms"] for case in run.cases.values()]
    device = [np.subtract(case["whole_ms"], case["work_ms"]) for case in run.cases.values()]
    shown = {"time of an update": (host, PALETTE["update"])}
    if s.on_gpu:
        shown = {"until the host goes on": (host, PALETTE["model"])}
        shown |= {"on the GPU": (device, PALETTE["update"])}
    height, ends = 0.8 / len(shown), []
    with drawing.axes(ax, (9, 3.6), "x") as ax:
        for i, (label, (ms, colour)) in enumerate(shown.items()):
            low, middle, high = np.quantile(ms, (0.25, 0.5, 0.75), axis=1)
            at = np.arange(len(ms)) + (i - (len(shown) - 1) / 2) * height
            spread = (middle - low, high - middle)
            ax.barh(at, middle, height, xerr=spread, color=colour, label=label)
            ends.append(high)
        for at, case in enumerate(run.cases.values()):
            text = f"  {_counted(case, s.on_gpu)}"
            ax.text(np.max(ends, 0)[at], at, text, va="center", fontsize=8)
        drawing.rows(ax, run.cases)
        ax.set_xlim(0, 1.4 * ax.dataLim.xmax)  # room for the words
        ax.set_xlabel("an update (ms, median and quartiles)")
        drawing.legend(ax, len(shown))
        medians = {name: np.median(ms) for name, ms in zip(run.cases, host, strict=True)}
        slow, fast = (f(medians, key=medians.get) for f in (max, min))
        text = f"{slow}: the host goes on after {medians[slow]:.3g} ms; {fast}: after "
        entitle(ax, f"{text}{medians[fast]:.2g} ms", f"{s.arguments['model']}, {hardware_text(s)}")
    return ax


def _counted(case, on_gpu) -> str:
    """Return the launches of an update, in words; reading a number makes the host of a GPU wait."""
    kind = "kernel" if on_gpu else "operation"
    waits = ("the host waits" if on_gpu else "a number is read") if case["reads"] else ""
    count = f"{case['launches']:,} {kind}{'s' * (case['launches'] != 1)}"
    return ", ".join(filter(None, (count, waits)))


def _plot_lines(run, unit, ax):
    """Draw one line for each name, in the colour of its format."""
    measures = {m.name: m for m in run.measures}
    for name, (xs, values) in points(run, unit).items():
        colour = OWN[measures[name].what]
        # Around the points of another line, so that equal values do not hide it.
        around = {"ms": 9, "mfc": "none", "ls": ""} if measures[name].variant == "refused" else {}
        shown = np.where(np.array(values) > 0, values, np.nan)  # zero has no logarithm
        look = {"marker": "o", "ms": 3, "color": colour, "label": name} | around
        ax.plot(np.array(xs, float), shown, **look)
    ax.set_ylabel(unit)
    ax.legend()


def plot_sums(run, axes=None):
    """Draw long sums in each format: a sum of ones, and the error of a dot product."""
    run = log.read(run)
    with drawing.axes(axes, (10, 3.4), shape=(1, 2)) as axes:
        for ax, unit in zip(axes, ("sum of ones", "relative error of a dot product"), strict=True):
            _plot_lines(run, unit, ax)
            ax.set_xscale("log", base=2)
            ax.set(xlabel="terms", yscale="log")
        axes[1].set_xlabel("terms; an error of zero is not drawn")
        axes[0].set_yscale("log", base=2)
        axes[0].lines[0].set_linewidth(5)  # wide, so that lines on top of it do not hide it
        entitle(axes, _sums_text(points(run, "sum of ones")), drawing.where(run))
    return axes


def _sums_text(found):
    """Return the ends of those sums of ones that end before their terms do."""
    ends = {
        name: max(values) for name, (terms, values) in found.items() if max(values) < max(terms)
    }
    told = ", ".join(f"{name} at {end:,.0f}" for name, end in ends.items())
    return f"A sum of ones ends: {told}" if told else "No sum of ones ends"


def plot_reductions(run, ax=None):
    """Draw the error of a GPU's long dot products, with 16-bit reductions allowed and refused."""
    run = log.read(run)
    with drawing.axes(ax, (6, 3.4)) as ax:
        _plot_lines(run, "relative error of a matrix product", ax)
        ax.set_xscale("log", base=2)
        ax.set(xlabel="terms", yscale="log")
        entitle(ax, _reductions_text(run), drawing.where(run))
    return ax


def _reductions_text(run):
    """Return the largest ratio of an error with reductions in 16 bits to that without."""
    found = points(run, "relative error of a matrix product")
    pairs = [
        (name, f"{name.removesuffix('allowed')}refused")
        for name in found
        if name.endswith("allowed")
    ]
    ratios = [
        allowed / refused
        for one, other in pairs
        if other in found
        for allowed, refused in zip(found[one][1], found[other][1], strict=True)
        if refused
    ]
    if not ratios:
        return "Errors of long sums, with reductions in 16 bits"
    most = max(ratios, key=lambda ratio: abs(np.log(ratio)))
    if abs(most - 1) < 0.01:
        return "Allowing reductions in 16 bits changes no error here"
    return f"Allowing reductions in 16 bits changes an error by up to {most:.3g} times"


def plot_updates(formats_run, gradients_run, axes=None):
    """Draw the effect of small updates on one weight over steps, and on a model in one step."""
    gradients_run = log.read(gradients_run)
    shares = points(gradients_run, "share of weights that a step does not change")
    with drawing.axes(axes, (10, 3.4), shape=(1, 2)) as axes:
        _plot_lines(log.read(formats_run), "weight, 0.001 less each step", axes[0])
        axes[0].set(xlabel="step", ylim=(0, 1.05))
        axes[0].lines[0].set_linewidth(5)  # wide, so that lines on top of it do not hide it
        for i, (name, (rates, values)) in enumerate(shares.items()):
            at = np.arange(len(rates)) + 0.27 * (i - 1)
            bars = axes[1].bar(at, values, 0.25, color=OWN[name], label=name)
            axes[1].bar_label(bars, [f"{v:.0%}" for v in values], fontsize=8)
        axes[1].set_xticks(range(len(rates)), rates)
        axes[1].set(xlabel="learning rate", ylabel="weights left unchanged")
        axes[1].yaxis.set_major_formatter(PercentFormatter(1))
        axes[1].legend(ncols=3, loc="lower right", bbox_to_anchor=(1, 1))
        rate, most = rates[0], {name: values[0] for name, (_, values) in shares.items()}
        worst = max(most, key=most.get)
        text = f"With a rate of {rate:g}, a step leaves {percent(most[worst])} of the weights in "
        entitle(axes, f"{text}{worst} unchanged", drawing.where(gradients_run))
    return axes


# Memory and speed -------------------------------------------------------------------


def plot_footprint(run, axes=None):
    """Draw bytes per parameter and bytes per image by precision, as counted."""
    run = log.read(run)
    colours = (MEMORY[part] for part in ("parameters", "gradients", "optimizer", "casts"))
    images = points(run, "activations (bytes per image)")
    with drawing.axes(axes, (10, 3), "x", shape=(1, 2), width_ratios=(1.6, 1)) as axes:
        left = 0
        found = points(run, "bytes per parameter")
        for colour, (part, (recipes, values)) in zip(colours, found.items(), strict=True):
            axes[0].barh(recipes, values, 0.6, left, color=colour, label=part)
            left = left + np.array(values)
        for row, total in enumerate(left):
            axes[0].text(total, row, f" {total:.1f}", va="center", fontsize=9)
        axes[0].set(xlabel="bytes per parameter")
        drawing.legend(axes[0], 2, (-0.2, 1), fontsize=8)
        sizes = [values[0] / 1e6 for _, values in images.values()]
        bars = axes[1].barh(list(images), sizes, 0.6, color=PALETTE["activations"])
        axes[1].bar_label(bars, fmt=" %.1f", fontsize=9)
        axes[1].set(xlabel="activations (MB per image)")
        for ax in axes:
            ax.invert_yaxis()
            ax.margins(x=0.15)
        s = summary(run)
        totals = dict(zip(recipes, left, strict=True))
        entitle(axes, _footprint_text(totals, images), f"counted: {s.model}, {s.image_size} px")
    return axes


def _footprint_text(totals, images):
    """Return the bytes of the second precision beside the first's, per parameter and per image."""
    first, other = ([*images] * 2)[:2]
    per_image = [images[name][1][0] for name in (first, other)]
    text = f"{other} takes {percent(per_image[1] / per_image[0])} of the bytes per image of {first}"
    pairs = [(f"{first}{end}", f"{other}{end}") for end in (", Adam", ", SGD")]
    for one, two in pairs:
        if one in totals and two in totals:
            text += f", and {percent(totals[two] / totals[one])} per parameter"
            return text + one.removeprefix(first).replace(", ", " (") + ")"
    return text


def plot_memory(runs_of: Mapping[str, Sequence], batch_size: int = 256, ax=None):
    """Draw peak memory by precision: the fixed part and the batch's, fitted over batch sizes."""
    colours, ends = {"fixed": PALETTE["model"], f"{batch_size} images": PALETTE["activations"]}, []
    with drawing.axes(ax, (9, 0.9 + 0.5 * len(runs_of)), "x") as ax:
        for row, (name, runs) in enumerate(runs_of.items()):
            found = [summary(r) for r in runs]
            fit = batch_sweep.fit_memory(found)
            if fit is None:
                raise UserError(f"{name}: expected completed runs of two batch sizes or more")
            fixed, images = fit.fixed_bytes / 1e9, fit.per_image_bytes * batch_size / 1e9
            end = drawing.stack(ax, row, dict(zip(colours, (fixed, images), strict=True)), colours)
            ends.append((name, fixed + images))
            text = f" {fixed:.2f} + {images:.1f} GB; {1000 * images / batch_size:.1f} MB an image"
            ax.text(end, row, text, va="center", fontsize=9)
        drawing.rows(ax, runs_of)
        ax.margins(x=0.45)
        ax.set(xlabel="peak memory (GB)")
        drawing.legend(ax, 2)
        told = f"{found[0].model}; {hardware_text(found[0])}"
        (first, most), (last, least) = ends[0], ends[-1]
        entitle(ax, f"{last}: {percent(least / most)} of the memory of {first}", told)
    return ax


def plot_precisions(runs: Sequence, axes=None):
    """Draw throughput and energy per image by model and precision.

    A run that ran out of memory has no bar.
    """
    found = [summary(r) for r in runs]
    models = list(dict.fromkeys(s.model for s in found))
    names = [n for n in FORMATS if any(s.arguments["precision"] == n for s in found)]
    shown = {"throughput (images/s)": "images_per_s"}
    shown |= {"energy (J per image)": "energy_per_image_j"}
    with drawing.axes(axes, (11, 3.6), shape=(1, 2)) as axes:
        for ax, (label, of) in zip(axes, shown.items(), strict=True):
            for i, name in enumerate(names):
                chosen = [s for s in found if s.arguments["precision"] == name and getattr(s, of)]
                at = [models.index(s.model) + 0.21 * (i - 1.5) for s in chosen]
                values = [getattr(s, of) for s in chosen]
                bars = ax.bar(at, values, 0.2, color=OWN[name], label=name)
                short = [f"{v:,.0f}" if v >= 100 else f"{v:.2g}" for v in values]
                ax.bar_label(bars, short, fontsize=7, rotation=90, padding=2)
            ax.set_xticks(range(len(models)), models)
            ax.set(ylabel=label)
            ax.margins(y=0.2)
        drawing.legend(axes[0], 4)
        sizes = f"batch {found[0].batch_size}, {found[0].image_size} px"
        setting = f"{sizes}; {hardware_text(found[0])}{disturbed_text(found)}"
        entitle(axes, _precisions_text(found, names), setting)
    return axes


def _precisions_text(found, names):
    """Return the range of the gains of the last precision over the first, over the models."""
    speed = {(s.model, s.arguments["precision"]): s.images_per_s for s in found}
    gains = {
        model: speed[model, names[-1]] / speed[model, names[0]]
        for model, precision in speed
        if precision == names[0] and speed[model, precision] and speed.get((model, names[-1]))
    }
    if not gains:
        return "No model was timed in two precisions"
    (low, least), (high, most) = (f(gains.items(), key=lambda g: g[1]) for f in (min, max))
    text = f"{names[-1]}: {least:.2g} ({low}) to {most:.2g} times ({high}) as fast as {names[0]}"
    return (
        text if len(gains) > 1 else f"{names[-1]}: {most:.2g} times as fast as {names[0]} ({high})"
    )


def _sizes_text(run):
    """Return the best and the worst speed of the fastest format, with their sizes."""
    found = points(run, "TFLOP/s")
    name = max(found, key=lambda name: max(found[name][1]))
    (best, at), (worst, other) = (f(zip(*found[name][::-1], strict=True)) for f in (max, min))
    text = f"{name}: {best:,.3g} TFLOP/s with {at:,} rows and columns"
    return text if at == other else f"{text}, {worst:,.3g} with {other:,}"


def plot_sizes(runs: Sequence, axes=None):
    """Draw the speed of matrix products against their size, one panel for each run."""
    with drawing.axes(axes, (5.5 * len(runs), 3.4), shape=(1, len(runs))) as axes:
        for ax, run in zip(axes, map(log.read, runs), strict=True):
            _plot_lines(run, "TFLOP/s", ax)
            for line in ax.lines:
                if line.get_label() == "bf16":  # wide, so that fp16 does not hide it
                    line.set(linewidth=6, alpha=0.45)
            sizes = sorted({x for xs, _ in points(run, "TFLOP/s").values() for x in xs})
            ax.set_xticks([n for n in sizes if n % 8 == 0])
            ax.set(xlabel="rows and columns; ticks at multiples of 8", ylim=(0, None))
            ax.get_legend().remove()
        drawing.legend(axes[0], 4)
        settings = dict.fromkeys(map(drawing.where, runs))
        entitle(axes, _sizes_text(runs[0]), "; ".join(settings))
    return axes
