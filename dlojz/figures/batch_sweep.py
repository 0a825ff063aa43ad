"""The figure of runs of several batch sizes: throughput, memory and energy against batch size."""

from collections.abc import Mapping
from dataclasses import dataclass

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import FuncFormatter

from dlojz.course import UserError
from dlojz.figures import report
from dlojz.figures.look import PALETTE, colours, entitle, legend, style
from dlojz.runs.stats import summary


@dataclass(frozen=True)
class MemoryFit:
    """A straight line of peak memory over batch size: bytes = fixed + per_image * images."""

    fixed_bytes: float  # the model, its gradients, its optimizer and, on a CPU, the process
    per_image_bytes: float  # what the forward pass keeps for the backward pass


def fit_memory(summaries) -> MemoryFit | None:
    """Return a least-squares fit of the completed runs; None with fewer than two batch sizes."""
    points = {s.batch_size: s.peak_memory_bytes for s in summaries if s.completed}
    points = {b: m for b, m in points.items() if m}
    if len(points) < 2:
        return None
    # Weighted by 1/batch: it is the small batches that determine the fixed part.
    batches = np.array(list(points), float)
    slope, fixed = np.polyfit(batches, np.array(list(points.values()), float), 1, w=1 / batches)
    return MemoryFit(max(0.0, fixed), slope)


def plot_sweep(runs, axes=None):
    """Draw throughput, memory and (where known) energy against batch size; return the axes.

    runs: those of one model, one for each batch size; or several such sweeps, as {label: runs}.
        Runs out of memory are marked.
    """
    sweeps = _sweeps(runs)
    everything = [s for found in sweeps.values() for s in found]
    energy = any(s.energy_per_image_j for s in everything)
    with style():
        if axes is None:
            _, axes = plt.subplots(1, 2 + energy, figsize=(4.0 * (2 + energy), 4.2))
            entitle(axes, _finding(sweeps), _setting(everything))
        place = {"ncols": 2, "loc": "lower left", "bbox_to_anchor": (0, 1), "fontsize": 9}
        legend(axes[0], _plot_speeds(sweeps, axes[0]), **place)
        legend(axes[1], _plot_memory(sweeps, axes[1]), **place)
        if energy and len(axes) > 2:
            _plot_energy(sweeps, axes[2])
    return axes


def _sweeps(runs):
    """Return {label: summaries by batch size}, without the runs that have no log."""
    several = isinstance(runs, Mapping)
    found = {}
    for label, some in runs.items() if several else [(None, runs)]:
        known = sorted((s for s in map(summary, some) if s.batch_size), key=lambda s: s.batch_size)
        if not known:
            of = f" of {label}" if several else ""
            raise UserError(
                f"no runs{of} to draw: give the list that submit() returned, once they ran"
            )
        found[label if several else known[0].model] = known
    return found


def _finding(sweeps):
    """Return the gain of the last sweep over the first, or that of a larger batch."""
    done = {name: {s.batch_size: s for s in of if s.images_per_s} for name, of in sweeps.items()}
    (name, first), *_, (other, last) = [*done.items()] * 2
    if not first:
        return f"{name}: no batch was measured"
    if common := first.keys() & last.keys() if len(done) > 1 else ():
        at = max(common)
        gain = last[at].images_per_s / first[at].images_per_s
        return f"Batch {at:,}: {other} is {gain:.3g} times as fast as {name}"
    small, large = min(first), max(first)
    gain = first[large].images_per_s / first[small].images_per_s
    if small == large:
        return f"{name}: {report.speed_text(first[small].images_per_s)} images/s"
    if not all(first[at].peak_memory_bytes for at in (small, large)):
        return f"{name}: batch {large:,} is {gain:.3g} times as fast as batch {small:,}"
    more = first[large].peak_memory_bytes / first[small].peak_memory_bytes
    return (
        f"{name}: batch {large:,} is {gain:.3g} times as fast as batch {small:,}, with {more:.3g} "
        "times its memory"
    )


def _setting(found):
    s = next((s for s in found if s.completed), found[0])
    data = ", synthetic data" if s.synthetic else ""
    processes = f", {s.size} processes" if s.size > 1 else ""
    what = f"{s.image_size} px{data}{processes}"
    how = "Band: 80 % of the steps. Dark: the memory that does not grow with the batch"
    return f"{how}\n{what}; {report.hardware_text(s)}{report.disturbed_text(found)}"


def _plot_speeds(sweeps, ax):
    """Draw the throughput with the spread of the steps; return {label: handle}."""
    shown = {}
    for (label, found), colour in zip(sweeps.items(), colours(sweeps).values(), strict=True):
        done = [s for s in found if s.completed and s.images_per_s]
        batches = [s.batch_size for s in done]
        rates = np.array([s.images_per_s for s in done])
        (shown[label],) = ax.plot(batches, rates, "o-", color=colour)
        low, high = np.array([s.step_ms_spread for s in done]).reshape(-1, 2).T
        ends = (rates * np.array([s.step_ms for s in done]) / end for end in (high, low))
        ax.fill_between(batches, *ends, color=colour, alpha=0.2, lw=0)
    _batch_axis(ax, sweeps, "throughput (images/s)")
    return shown


def _plot_memory(sweeps, ax):
    """Draw bars of peak memory: the fitted part that does not grow with the batch, and the rest."""
    shown, lines, width, own = {}, [], 0.76 / len(sweeps), colours(sweeps)
    for i, (label, found) in enumerate(sweeps.items()):
        fit = fit_memory(found)
        for s in found:
            at = np.log2(s.batch_size) + (i - (len(sweeps) - 1) / 2) * width
            shown |= _plot_peak(ax, s, at, width, fit, own[label])
        if fit:
            lines.append(f"{label}: {_fit_text(fit)}")
    everything = [s for found in sweeps.values() for s in found]
    if limit := next((s.memory_limit_bytes for s in everything if s.memory_limit_bytes), None):
        line = {"color": PALETTE["limit"], "linestyle": "--", "linewidth": 1}
        shown["the device's memory"] = ax.axhline(limit / 1e9, **line)
    batches = sorted({s.batch_size for s in everything})
    ax.set_xticks(np.log2(batches), batches)
    ax.set_xlim(np.log2(batches[0]) - 0.6, np.log2(batches[-1]) + 0.6)
    of = "on the device" if any(s.memory_of == "device" for s in everything) else "of the process"
    label = ax.set_xlabel("\n".join(["batch size (images)", *lines]))
    label.set_parse_math(False)
    ax.set(ylabel=f"peak memory {of} (GB)", ylim=(0, 1.1 * max(ax.get_ylim()[1], 1e-3)))
    return shown


def _plot_peak(ax, s, at, width, fit, colour):
    """Draw the bar of one run, or a mark if it was out of memory; return {label: mark}."""
    if s.state == "OUT_OF_MEMORY":
        look = {"marker": "X", "ms": 8, "mec": "white", "ls": "", "color": PALETTE["failure"]}
        # Above the axis by a constant distance, whatever its scale.
        mark = ax.plot(at, 0.03, transform=ax.get_xaxis_transform(), **look)
        return {"out of memory": mark[0]}
    if s.completed and s.peak_memory_bytes:
        total = s.peak_memory_bytes / 1e9
        fixed = min(fit.fixed_bytes / 1e9 if fit else 0, total)
        ax.bar(at, fixed, 0.95 * width, color=PALETTE["model"])
        ax.bar(at, total - fixed, 0.95 * width, fixed, color=colour)
    return {}


def _fit_text(fit):
    sizes = fit.fixed_bytes, max(0, round(fit.per_image_bytes))
    return "{} + {} an image".format(*map(report.bytes_text, sizes))


def _plot_energy(sweeps, ax):
    for found, colour in zip(sweeps.values(), colours(sweeps).values(), strict=True):
        done = [s for s in found if s.energy_per_image_j]
        batches = [s.batch_size for s in done]
        ax.plot(batches, [s.energy_per_image_j for s in done], "o-", color=colour)
        for s in done[:: max(1, -(-len(done) // 4))]:
            at = (s.batch_size, s.energy_per_image_j)
            look = {"xytext": (1, 6), "fontsize": 8.5}
            ax.annotate(f"{s.power_w:.0f} W", at, textcoords="offset points", **look)
    _batch_axis(ax, sweeps, "energy (J per image)")


def _batch_axis(ax, sweeps, ylabel):
    batches = sorted({s.batch_size for found in sweeps.values() for s in found})
    ax.set_xscale("log", base=2)
    ax.set_xticks(batches, batches)
    ax.minorticks_off()
    ax.set(xlabel="batch size (images)", ylabel=ylabel, ylim=(0, 1.1 * ax.get_ylim()[1]))
    ax.set_xlim(batches[0] / 1.5, batches[-1] * 1.5)
    ax.yaxis.set_major_formatter(
        FuncFormatter(lambda v, _: f"{v:,.3g}" if v < 100 else f"{v:,.0f}")
    )
