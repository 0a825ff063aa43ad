"""Figures of notebook 01b: the memory of a step, by part, and the allocator's reserve.

They take runs of experiments (alive, accumulated, snapshot), and recorded training.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np

from dlojz.course import UserError
from dlojz.figures import drawing, report
from dlojz.figures.look import DARK, GREY, INK, LINE, MEMORY, PALETTE, entitle, legend, percent
from dlojz.figures.plans import PAPER
from dlojz.figures.report import bytes_text
from dlojz.runs import log
from dlojz.runs.memory import PARTS
from dlojz.runs.stats import summary
from dlojz.table import Table

NAMED = 7  # parts in a legend
WITHIN = 0.08  # share of an update: a narrower phase has no name in the drawing
LOW = 0.2  # share of the common scale: a lower panel is also drawn enlarged


# An update, moment by moment ---------------------------------------------------------------------


def plot_update(run, axes=None):
    """Draw the parts of the memory during an update, moment by moment, a panel for each case.

    run: of alive.py. The dashed line is the allocator's reserve.
    """
    cases, drawn = drawing.of_experiment(run, "at", "alive.py").cases, {}
    count = len(cases)
    with drawing.axes(axes, (5.6 + 2.1 * count, 4.4), shape=(1, count), sharey=True) as axes:
        for ax, (name, case) in zip(axes, cases.items(), strict=True):
            for part, seen in _plot_moments(ax, case["at"], case["events"]).items():
                drawn[part] = max(seen, drawn.get(part, seen), key=lambda area: area[1])
            ax.set_title(f"{name}, {case['precision']}".replace(": ", "\n"))
            ax.set(xlabel="tensors that come and go, in order", xticks=[])
        top = 1.16 * max(line.get_ydata().max() for ax in axes for line in ax.lines)
        axes[0].set(ylabel="memory (GB)", ylim=(0, top))
        for ax, case in zip(axes, cases.values(), strict=True):
            _name_phases(ax, case["at"], case["events"])
            _enlarge(ax, case["at"], case["events"], top)
        thickest = sorted(drawn, key=lambda part: -drawn[part][1])[:NAMED]
        named = {part: area for part, (area, _) in drawn.items() if part in thickest}
        named["held by the allocator"] = axes[0].lines[0]
        place = {"loc": "outside right upper", "fontsize": 9}
        legend(axes[0].figure, dict(reversed(named.items())), **place)
        entitle(axes, _peaks_text(cases), drawing.where(run))
    return axes


def _peaks_text(cases):
    """Return the first case's peak with its largest part, and the lowest of the others."""
    peaks = {}
    for name, case in cases.items():
        parts = max((moment["parts"] for moment in case["at"]), key=lambda p: sum(p.values()))
        peaks[name.partition(":")[0]] = sum(parts.values()), max(parts, key=parts.get), parts
    (name, (most, part, parts)), *others = peaks.items()
    text = f"{name}: {bytes_text(most)} at the peak, {percent(parts[part] / most)} of it {part}"
    if others:
        other, (least, *_) = min(others, key=lambda peak: peak[1][0])
        text += f"\n{other}: {bytes_text(least)}"
    return text


def _plot_moments(ax, moments, events):
    """Draw stacked areas and the allocator's line; mark the peak. Return {part: (area, share)}."""
    x, areas, total = _plot_areas(ax, moments, events)
    held = [moment["reserved"] / 1e9 for moment in moments]
    ax.plot(x, held, color=INK, lw=1.1, ls="--")
    at = int(total.argmax())
    ax.plot(x[at], total[at], "v", color="black", ms=6)
    most = bytes_text(sum(moments[at]["parts"].values()))
    look = {"ha": "center", "fontsize": 9.5, "fontweight": "bold"}
    above = {"xytext": (0, 14), "textcoords": "offset points", "bbox": PAPER | {"pad": 0}}
    ax.annotate(f"peak: {most}", (min(0.85, max(0.15, x[at])), total[at]), **above, **look)
    ax.set(xlim=(0, 1))
    ax.grid(False, axis="x")
    return areas


def _plot_areas(ax, moments, events):
    """Draw stacked areas; return the places, {part: (area, its share of the peak)}, and the sum."""
    x = [moment["event"] / events for moment in moments]
    there = [p for p in PARTS if any(m["parts"].get(p, 0) for m in moments) and p != "unsplit"]
    heights = np.array([[m["parts"].get(part, 0) / 1e9 for m in moments] for part in there])
    share = heights.max(1) / heights.sum(0).max()
    areas = ax.stackplot(x, heights, colors=[MEMORY[part] for part in there], lw=0)
    return x, dict(zip(there, zip(areas, share, strict=True), strict=True)), heights.sum(axis=0)


def _name_phases(ax, moments, events):
    """Draw a line at the begin of each phase, and its name if there is room."""
    for phase, run in groupby(moments, key=lambda moment: moment["phase"]):
        begin, *_, end = [moment["event"] / events for moment in run] * 2
        if begin:
            ax.axvline(begin, color=GREY, lw=0.7)
        if end - begin > WITHIN:
            top = ax.get_ylim()[1]
            look = {"ha": "center", "va": "top", "fontsize": 9, "color": DARK}
            ax.text((begin + end) / 2, 0.985 * top, phase, **look)


def _enlarge(ax, moments, events, top):
    """Draw a low panel again in the room above it, on a scale of its own."""
    most = max(sum(moment["parts"].values()) for moment in moments) / 1e9
    if most > LOW * top:
        return
    inset = ax.inset_axes((0.14, 0.33, 0.83, 0.46))
    _plot_areas(inset, moments, events)
    inset.set(xlim=(0, 1), ylim=(0, 1.05 * most), xticks=[])
    drawing.caption(inset, "the same, enlarged (GB)")
    inset.grid(False, axis="x")


def by_size(runs: Sequence) -> Table:
    """Return a table of the activations of an image, by its size. runs: of alive.py, one case each.

    The bytes of an image are those of uint8, in three colours.
    """
    rows = []
    for run in runs:
        read = drawing.of_experiment(run, "at", "alive.py")
        [case], asked = read.cases.values(), read.start["arguments"]
        pixels, images = asked["image_size"], asked["batch_size"]
        kept = max(moment["parts"].get("activations", 0) for moment in case["at"]) / images
        image = 3 * pixels**2
        rows.append((f"{pixels} px", *map(bytes_text, (image, kept)), f"{kept / image:,.0f}"))
    return Table(("an image of", "its bytes", "its activations", "times as much"), rows, "<>>>")


# Counted, recorded, held -------------------------------------------------------------------------


def plot_held(counted, recorded: Mapping, ax=None):
    """Draw the memory of recorded runs: the counted tensors, the rest, and the reserve.

    counted: a run of alive.py with one case, of the same model and batch; None: without that part
    """
    tensors = 0
    if counted is not None:
        [case] = drawing.of_experiment(counted, "at", "alive.py").cases.values()
        tensors = max(sum(moment["parts"].values()) for moment in case["at"]) / 1e9
    with drawing.axes(ax, (9.5, 1.5 + 0.55 * len(recorded)), "x") as ax:
        shown = {}
        for row, run in enumerate(recorded.values()):
            peak, held, limit = _held(run)
            low = min(tensors, peak)
            if counted is not None:
                bar = ax.barh(row, low, 0.62, color=MEMORY["activations"])
                shown["tensors of the step, counted"] = bar
            name = "beyond: cuDNN's workspaces" if low else "tensors at the peak"
            colour = MEMORY["temporaries"] if low else PALETTE["activations"]
            shown[name] = ax.barh(row, peak - low, 0.62, low, color=colour)
            look = {"color": "white", "ec": LINE, "hatch": "////", "lw": 0.8}
            shown["held, not in use"] = ax.barh(row, held - peak, 0.62, peak, **look)
            text = f"  {bytes_text(1e9 * peak)} of {bytes_text(1e9 * held)} held"
            ax.text(held, row, text, va="center", fontsize=9, bbox=PAPER | {"pad": 1})
        drawing.rows(ax, recorded)
        most = max(_held(run)[1] for run in recorded.values())
        if most > 0.5 * limit:
            line = {"color": PALETTE["limit"], "ls": "--", "lw": 1}
            shown["the GPU's memory"] = ax.axvline(limit, **line)
        ax.set(xlabel="memory (GB)", xlim=(0, 1.3 * most))
        drawing.legend(ax, 4, named=shown)
        entitle(ax, _held_text(recorded), drawing.where(next(iter(recorded.values()))))
    return ax


def _held_text(recorded):
    """Return the run with the largest reserve that is not in use."""
    found = {name: _held(run)[:2] for name, run in recorded.items()}
    name, (peak, held) = max(found.items(), key=lambda each: 1 - each[1][0] / each[1][1])
    idle = percent(1 - peak / held)
    return f"{name}: of {bytes_text(1e9 * held)} held, {idle} are not in use at the peak"


def _held(run):
    """Return the peaks of the tensors and of the reserve, and the device's memory, in GB."""
    kept = log.read(run).memory
    if "device_reserved_bytes" not in kept:
        raise UserError(f"{log.read(run).path}: no memory of a GPU in it; give a run on a GPU")
    names = ("device_peak_bytes", "device_reserved_bytes", "device_total_bytes")
    return tuple(kept[name] / 1e9 for name in names)


def what_cuda_said(run) -> str:
    """Return the error of a run that was out of memory, one sentence per line."""
    end = log.read(run).end
    if end.get("outcome") != "out_of_memory":
        raise UserError(f"{log.read(run).path}: it was not out of memory; give a run that was")
    return end["error"].split("  See")[0].replace(". ", ".\n")


# Accumulation ------------------------------------------------------------------------------------


def distances(run) -> Table:
    """Return a table of the distances of accumulated parts from one batch: loss, gradient."""
    found = {}
    for measure in report.measured(run).measures:
        found.setdefault(measure.what, {})[measure.variant] = f"{measure.value:.1g}"
    rows = [(what, each["loss"], each["gradient"]) for what, each in found.items()]
    return Table(("relative distance", "loss", "gradient"), rows, "<>>")


def _most_text(allocated, reserved):
    """Return the most that tensors take, and the allocator holds, in words."""
    text = f"{bytes_text(1e9 * allocated.max())} are tensors"
    if reserved.max() > 0:
        text += f", {bytes_text(1e9 * reserved.max())} are held"
    return text


# A snapshot --------------------------------------------------------------------------------------


def plot_snapshot(run, ax=None):
    """Draw the memory of a snapshot, entry by entry: the tensors, and the allocator's reserve."""
    [(how, case)] = drawing.of_experiment(run, "allocated", "snapshot.py").cases.items()
    allocated, reserved = np.array([case["allocated"], case["reserved"]]) / 1e9
    x, s = np.linspace(0, case["entries"], len(allocated)), summary(run)
    with drawing.axes(ax, (9, 3.4)) as ax:
        area = ax.fill_between(x, allocated, color=PALETTE["activations"], lw=0)
        (line,) = ax.plot(x, reserved, color=INK, lw=1.1, ls="--")
        sizes = f"{s.model}, {s.image_size} px, batch {s.batch_size}"
        where = how if how == "counted" else report.hardware_text(s)
        entitle(ax, f"At most {_most_text(allocated, reserved)}", f"{sizes}: {where}")
        ax.set(xlabel="entries of the snapshot", ylabel="memory (GB)", ylim=(0, None))
        ax.margins(x=0)
        legend(ax, {"tensors": area, "held": line}, loc="upper left", ncols=2)
    return ax
