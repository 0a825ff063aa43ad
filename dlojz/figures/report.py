"""Tables and figures of runs, for the notebook, the terminal and the slide.

Figures take runs and axes, and return the axes; every number comes from `dlojz.runs.stats.summary`.
"""

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import FuncFormatter, PercentFormatter

from dlojz.runs import log, stats
from dlojz.runs.log import PHASES
from dlojz.runs.stats import Summary, summary
from dlojz.table import Table, harmless

# Okabe and Ito's colours, which colour-blind readers can tell apart.
PALETTE = {
    "data": "#D55E00",
    "transfer": "#E69F00",
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "update": "#009E73",
    "speed": "#0072B2",
    "model": "#5B5B66",
    "activations": "#CC79A7",
    "power": "#E69F00",
    "limit": "#8A8A94",
    "failure": "#B3261E",
}
SERIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
STYLE = {
    "figure.dpi": 110,
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E3E3E8",
    "legend.frameon": False,
    "savefig.bbox": "tight",
}


@contextmanager
def style(grid="y"):
    """The context to draw in."""
    with plt.rc_context({**STYLE, "axes.grid.axis": grid}):
        yield
        interactive = mpl.is_interactive()
    # A notebook's first figure loads its backend, which switches this on: leave it on.
    mpl.interactive(interactive)


# Words ---------------------------------------------------------------------------------------


def bytes_text(count: float | None) -> str:
    """1_234_567_890 as "1.23 GB" (10^9 bytes); "not measured" for None."""
    if count is None:
        return "not measured"
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= 0.9995 * size:  # rounded to three digits, it is one
            return f"{count / size:.3g} {unit}"
    return f"{count:.3g} bytes"


def duration_text(seconds: float | None) -> str:
    """Seconds in the unit that a person would use."""
    if seconds is None:
        return "not measured"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:.3g} h"


def plain(text: str) -> str:
    """Return what matplotlib shows as this text: between two dollars it expects a formula."""
    return text.replace("$", r"\$")


def setting_text(s: Summary) -> str:
    """What ran on what, in one line."""
    processes = f" x {s.size} processes" if s.size > 1 else ""
    data = ", synthetic data" if s.synthetic else ""
    where = f"; {hardware_text(s)}" if s.device != "?" else ""  # it failed before it had a device
    return f"{s.model}, {s.image_size} px, batch {s.batch_size}{processes}{data}{where}"


def hardware_text(s: Summary) -> str:
    """The device that computed, and its kind; a recording says so, and when it was made."""
    text = f"{s.device_name} ({s.device})"
    return f"recorded on {text}, torch {s.versions.get('torch')}, {s.date}" if s.recorded else text


# One run: the roadworthiness test -------------------------------------------------------------


@dataclass(frozen=True)
class Inspection:
    """The roadworthiness test of a run: what it is, how fast, where its time goes, its cost."""

    summary: Summary
    tail: str = ""  # of a run that failed

    def lines(self) -> list[tuple[str, str]]:
        """(what, figure) for each thing that was measured."""
        s = self.summary
        lines = [("what", setting_text(s))] if s.model != "?" else []
        if s.images_per_s:
            lines += _speed_lines(s)
        if s.peak_memory_bytes:
            lines.append(("peak memory", _memory_text(s)))
        if s.images_per_s:
            lines.append(("energy", _energy_text(s)))
        if s.epoch_s:
            text = f"{duration_text(s.epoch_s)} for {s.train_images:,} images, extrapolated"
            lines.append(("epoch", text))
        if s.validation_s:
            lines.append(("validation", duration_text(s.validation_s)))
        if s.epochs and not s.synthetic:  # a few batches again and again are soon known by heart
            lines.append(("accuracy", f"{s.epochs[-1]['val_accuracy']:.1%} in validation"))
        return lines + [("note", n) for n in s.notes]

    def __repr__(self):
        s = self.summary
        head = f"run {s.name}: {s.state}" + (f" ({s.reason})" if s.reason else "")
        body = [f"  {what:<12} {text}" for what, text in self.lines()]
        bars = [
            f"  {phase:<12} {share:6.1%} {'█' * round(40 * share)}"
            for phase, share in s.shares.items()
        ]
        text = "\n".join([head, *body, *bars, *(["", self.tail] if self.tail else [])])
        return harmless(text, keep="\n\t")

    def _repr_html_(self):
        s = self.summary
        colour = PALETTE["update"] if s.completed else PALETTE["failure"]
        reason = f" {escape(str(s.reason))}" if s.reason else ""
        rows = "".join(
            f'<tr><td style="text-align:left"><b>{escape(what)}</b></td>'
            f'<td style="text-align:left">{escape(text)}</td></tr>'
            for what, text in self.lines()
        )
        tail = f"<pre>{escape(self.tail)}</pre>" if self.tail else ""
        return (
            f'<div><b>Run {escape(s.name)}</b> <span style="color:white;background:{colour};'
            f'padding:1px 8px;border-radius:8px">{escape(s.state)}</span>{reason}'
            f"<table>{rows}</table>{_bar_html(s)}{tail}</div>"
        )


def inspect_run(run) -> Inspection:
    """The roadworthiness test of a job, a run's folder or a recording."""
    s = summary(run)
    failed = hasattr(run, "explain") and s.state not in ("COMPLETED", "RUNNING", "QUEUED")
    # Without explain's first line: the state, which is said already.
    return Inspection(s, run.explain().partition("\n")[2] if failed else "")


def _speed_lines(s):
    low, high = s.step_ms_spread
    device = ""
    if s.device_images_per_s:
        device = f" ({s.device_images_per_s:,.0f} by the device's clock)"
    lines = [
        ("throughput", f"{s.images_per_s:,.0f} images/s{device}"),
        (
            "step",
            f"{s.step_ms:,.1f} ms (median of {s.steps}; 80 % within {low:,.1f} to {high:,.1f}; "
            f"{s.clock} clock)",
        ),
    ]
    if s.ahead_ms is not None:
        lines.append(("host", f"{s.ahead_ms:,.0f} ms ahead of the device (median)"))
    return [*lines, ("optimizer", s.optimizer)]


def _memory_text(s):
    of = "of the device" if s.memory_of == "device" else "of the process, on the host"
    limit = f" of {bytes_text(s.memory_limit_bytes)}" if s.memory_limit_bytes else ""
    return f"{bytes_text(s.peak_memory_bytes)}{limit}, {of}"


def _energy_text(s):
    if s.energy_per_image_j is None:
        return "no sensor here"
    return f"{s.energy_per_image_j:.3g} J per image, {s.power_w:.0f} W"


def _bar_html(s):
    """The shares of a step as one bar, with its legend."""
    bar = "".join(
        f'<div title="{p} {share:.1%}" style="width:{100 * share:.2f}%;background:{PALETTE[p]}">'
        "</div>"
        for p, share in s.shares.items()
    )
    legend = " ".join(
        f'<span style="white-space:nowrap"><span style="color:{PALETTE[p]}">■</span> '
        f"{p} {share:.1%}</span>"
        for p, share in s.shares.items()
    )
    if not bar:
        return ""
    return (
        '<div style="display:flex;width:100%;max-width:640px;height:16px;margin:4px 0">'
        f"{bar}</div><div>{legend}</div>"
    )


# Several runs: a table ------------------------------------------------------------------------


def compare_runs(runs: Sequence) -> Table:
    """The runs' figures side by side, one row each."""
    head = ("run", "model", "batch", "images/s", "step", "peak memory", "J/image", "state")
    return Table(head, [_row(summary(r)) for r in runs], "<<>>>>><", "no runs")


def _row(s):
    return (
        s.name,
        s.model if s.model != "?" else "-",
        f"{s.batch_size} x {s.size}" if s.size > 1 else str(s.batch_size or "-"),
        f"{s.images_per_s:,.0f}" if s.images_per_s else "-",
        f"{s.step_ms:,.1f} ms" if s.step_ms else "-",
        bytes_text(s.peak_memory_bytes) if s.completed else "-",
        f"{s.energy_per_image_j:.3g}" if s.energy_per_image_j else "-",
        s.state,
    )


# Figures --------------------------------------------------------------------------------------


def plot_batch_sweep(runs: Sequence, axes=None, label: str | None = None):
    """Throughput, memory and (where known) energy against batch size; returns the axes.

    runs: of one model, one for each batch size; those out of memory are marked.
    axes: as many as were returned before, to draw a second sweep into the same figure.
    label: of this sweep in the legend; by default the model.
    """
    found = [s for s in map(summary, runs) if s.batch_size]  # without a log there is no point
    found.sort(key=lambda s: s.batch_size)
    if not found:
        raise ValueError("no runs to draw: give the list that submit() returned, once they ran")
    energy = any(s.energy_per_image_j for s in found)
    with style():
        if axes is None:
            _, axes = plt.subplots(1, 2 + energy, figsize=(4.0 * (2 + energy), 3.6))
            axes[0].figure.suptitle(_sweep_title(found), fontsize=10, x=0.01, ha="left")
        series = len([line for line in axes[0].lines if not line.get_label().startswith("_")])
        _plot_speed(found, axes[0], plain(label or found[0].model), SERIES[series % len(SERIES)])
        _plot_memory(found, axes[1], series)
        if energy and len(axes) > 2:
            _plot_energy(found, axes[2], SERIES[series % len(SERIES)])
    return axes


def _sweep_title(found):
    s = next((s for s in found if s.completed), found[0])
    data = ", synthetic data" if s.synthetic else ""
    processes = f", {s.size} processes" if s.size > 1 else ""
    return f"{s.image_size} px{data}{processes}; {hardware_text(s)}"


def _plot_speed(found, ax, label, colour):
    done = [s for s in found if s.completed and s.images_per_s]
    batches = [s.batch_size for s in done]
    rates = np.array([s.images_per_s for s in done])
    ax.plot(batches, rates, "o-", color=colour, label=label)
    if done:
        # The spread of the steps, on the scale of the throughput.
        low, high = np.array([s.step_ms_spread for s in done]).T
        median = np.array([s.step_ms for s in done])
        ax.fill_between(
            batches, rates * median / high, rates * median / low, color=colour, alpha=0.2
        )
    _batch_axis(ax, found, "throughput (images/s)")
    ax.legend(loc="upper left")


def _plot_memory(found, ax, series):
    """Bars of peak memory: the fitted part that does not grow with the batch, and the rest."""
    fit = stats.fit_memory(found)
    for bar in ax.patches:  # of earlier sweeps: they make room
        bar.set_x(bar.get_x() - 0.2)
    for text in ax.texts:
        text.set_x(text.get_position()[0] - 0.2)
    for s in found:
        at = np.log2(s.batch_size) + 0.2 * series
        if s.state == "OUT_OF_MEMORY":
            style = {"rotation": 90, "ha": "center", "va": "bottom", "fontsize": 8}
            ax.text(at, 0, " out of memory", color=PALETTE["failure"], **style)
        if s.completed and s.peak_memory_bytes:
            total = s.peak_memory_bytes / 1e9
            fixed = min(fit.fixed_bytes / 1e9 if fit else 0, total)
            ax.bar(at, fixed, 0.38, color=PALETTE["model"])
            ax.bar(at, total - fixed, 0.38, fixed, color=SERIES[series % len(SERIES)])
    limit = next((s.memory_limit_bytes for s in found if s.memory_limit_bytes), None)
    if limit and not series:
        line = {"color": PALETTE["limit"], "linestyle": "--", "linewidth": 1}
        ax.axhline(limit / 1e9, label="the device's memory", **line)
        ax.legend(loc="center left", fontsize=8)
    batches = sorted(
        {s.batch_size for s in found} | {round(2**t) for t in ax.get_xticks() if series}
    )
    ax.set_xticks(np.log2(batches), batches)
    ax.set_xlim(np.log2(batches[0]) - 0.6, np.log2(batches[-1]) + 0.6)
    ax.set(xlabel="batch size (images)", ylabel="peak memory (GB)")
    if fit:
        device = any(s.memory_of == "device" for s in found)
        what = "model, gradients, optimizer" if device else "process, model, optimizer"
        grey = " (grey)" if fit.fixed_bytes / 1e9 > 0.02 * ax.get_ylim()[1] else ""  # to be seen
        lines = [ax.get_title(loc="left")] if series else []
        lines.append(
            f"{found[0].model}: {bytes_text(fit.fixed_bytes)} {what}{grey} "
            f"+ {bytes_text(fit.per_image_bytes)} an image"
        )
        ax.set_title("\n".join(lines), fontsize=7.5, fontweight="normal")


def _plot_energy(found, ax, colour):
    done = [s for s in found if s.energy_per_image_j]
    batches = [s.batch_size for s in done]
    ax.plot(batches, [s.energy_per_image_j for s in done], "o-", color=colour)
    for s in done[:: max(1, len(done) // 4)]:
        ax.annotate(
            f"{s.power_w:.0f} W",
            (s.batch_size, s.energy_per_image_j),
            textcoords="offset points",
            xytext=(4, 5),
            fontsize=8,
        )
    _batch_axis(ax, found, "energy (J per image)")


def _batch_axis(ax, found, ylabel):
    batches = sorted({s.batch_size for s in found})
    ax.set_xscale("log", base=2)
    ax.set_xticks(batches, batches)
    ax.minorticks_off()
    ax.set(xlabel="batch size (images)", ylabel=ylabel)
    ax.autoscale(axis="y")  # a second sweep may be higher than the first
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter(
        FuncFormatter(lambda v, _: f"{v:,.3g}" if v < 100 else f"{v:,.0f}")
    )


def plot_steps(run, ax=None):
    """Each step as a bar of its phases: does the model wait for its data?"""
    read = log.read(run)
    clock, times = stats.step_times(read)
    warmup = read.setup.get("warmup_steps", 0)
    with style():
        ax = ax or plt.subplots(figsize=(9, 3.2))[1]
        bottom = np.zeros(len(read.steps))
        at = np.arange(len(bottom))
        for phase in PHASES:
            look = {"color": PALETTE[phase], "label": phase}
            if len(at) <= 200:
                ax.bar(at, times[phase], 0.9, bottom, **look)
            else:  # thousands of bars would take minutes
                ax.fill_between(at, bottom, bottom + times[phase], step="mid", lw=0, **look)
            bottom = bottom + times[phase]
        if 0 < warmup < len(bottom):
            ax.axvspan(-0.5, warmup - 0.5, color="#EDEDF0", zorder=0)
            # The first step is many times as long as the others, which are what one looks at.
            ax.set_ylim(0, 1.5 * np.percentile(bottom[warmup:], 95))
            ax.text(-0.4, ax.get_ylim()[1], "warm-up", va="top", fontsize=8)
        ax.set(xlabel="step", ylabel=f"time of the step (ms, {clock} clock)", xlim=(-0.5, None))
        ax.set_title(setting_text(summary(read)), fontsize=8, fontweight="normal")
        ax.legend(ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.18), fontsize=9)
    return ax


def plot_phases(runs: Sequence, ax=None, labels: Sequence[str] | None = None):
    """The mean step of each run as one bar, by phase, with its throughput at the end."""
    found = [summary(r) for r in runs]
    labels = labels or [f"{s.name}\n{s.model}, batch {s.batch_size}" for s in found]
    shown = [(s, label) for s, label in zip(found, labels, strict=True) if s.shares]
    if not shown:
        states = ", ".join(f"{s.name} {s.state}" for s in found)
        raise ValueError(f"no run with a measured step: {states}; job.explain() says why")
    with style(grid="x"):
        ax = ax or plt.subplots(figsize=(9, 1.3 + 0.6 * len(shown)))[1]
        for row, (s, _) in enumerate(shown):
            left = 0.0
            for phase, width in s.phase_ms.items():
                ax.barh(row, width, 0.6, left, color=PALETTE[phase], label=phase if not row else "")
                left += width
            ax.text(left, row, f"  {s.images_per_s:,.0f} images/s", va="center")
        ax.set_yticks(range(len(shown)), [plain(label) for _, label in shown])
        ax.invert_yaxis()
        ax.margins(x=0.22)
        hardware = {hardware_text(s) for s, _ in shown}
        ax.set(xlabel="\n".join(["mean step (ms)", *sorted(hardware)]), xlim=(0, None))
        ax.legend(ncols=5, loc="lower left", bbox_to_anchor=(0, 1), fontsize=9)
    return ax


def plot_clocks(run, ax=None):
    """One run by its two clocks: what a stopwatch on the host says, and what the device did."""
    read = log.read(run)
    chosen = stats.measured(read)
    clocks = {"host: Python passed the mark": read.steps.host_ms}
    if len(read.steps.device_ms["data"]) == len(read.steps):
        clocks["device: the GPU passed it"] = read.steps.device_ms
    with style(grid="x"):
        ax = ax or plt.subplots(figsize=(9, 1.3 + 0.6 * len(clocks)))[1]
        for row, times in enumerate(clocks.values()):
            left = 0.0
            for phase in PHASES:
                width = np.asarray(times[phase])[chosen].mean()
                label = phase if not row else None
                ax.barh(row, width, 0.6, left, color=PALETTE[phase], label=label)
                left += width
        what = setting_text(summary(read)).split("; ")  # too long for one line
        ax.set_yticks(range(len(clocks)), list(clocks))
        ax.invert_yaxis()
        ax.set(xlabel="\n".join(["mean step (ms)", *what]), xlim=(0, None))
        ax.legend(ncols=5, loc="lower left", bbox_to_anchor=(0, 1), fontsize=9)
    return ax


def plot_measures(run, ax=None):
    """The figures of a small experiment as bars, in the order in which they were measured."""
    read = log.read(run)
    if not read.measures:
        raise ValueError(f"{read.path}: nothing was measured; see the job's stderr.txt")
    values = np.array([m.value for m in read.measures])
    unit = read.measures[0].unit
    scale, name = 1, unit
    if unit == "bytes":
        scale, name = (1e9, "GB") if values.max() >= 1e9 else (1e6, "MB")
    with style(grid="x"):
        ax = ax or plt.subplots(figsize=(9, 0.9 + 0.42 * len(values)))[1]
        rows = np.arange(len(values))
        ax.barh(rows, values / scale, 0.6, color=PALETTE["speed"])
        for row, value in zip(rows, values / scale, strict=True):
            ax.text(value, row, f"  {value:,.3g}", va="center", fontsize=9)
        ax.set_yticks(rows, [_measure_text(m) for m in read.measures])
        ax.invert_yaxis()
        ax.margins(x=0.15)
        ax.set(xlabel=f"{name}; {hardware_text(summary(read))}", xlim=(0, None))
    return ax


def _measure_text(measure):
    return measure.name if measure.x is None else f"{measure.name} / {measure.x}"


def plot_images(folder, classes: int = 6, per_class: int = 2, axes=None):
    """Some training images of each of the first classes, with their sizes and weights."""
    from PIL import Image

    found = sorted(p for p in (Path(folder) / "train").iterdir() if p.is_dir())[:classes]
    with style():
        if axes is None:
            size = (1.9 * len(found), 1.75 * per_class)
            _, axes = plt.subplots(per_class, len(found), figsize=size, squeeze=False)
        for column, directory in enumerate(found):
            for row, file in enumerate(sorted(directory.iterdir())[:per_class]):
                ax = axes[row][column]
                with Image.open(file) as image:
                    size = f"{image.width} x {image.height}"
                    ax.imshow(image.convert("RGB"))
                ax.set_title(
                    f"{size}, {file.stat().st_size / 1e3:.0f} kB", fontsize=7, loc="center"
                )
                ax.set_axis_off()
    return axes


def plot_accuracy(runs, ax=None):
    """Accuracy after each epoch, of validation and of training."""
    runs = runs if isinstance(runs, Sequence) and not isinstance(runs, str) else [runs]
    with style():
        ax = ax or plt.subplots(figsize=(6, 3.6))[1]
        for run, colour in zip(runs, SERIES * len(runs), strict=False):
            s = summary(run)
            epochs = [e["epoch"] + 1 for e in s.epochs]
            ax.plot(
                epochs,
                [e["val_accuracy"] for e in s.epochs],
                "o-",
                color=colour,
                label=f"{s.name}: {s.model}, batch {s.batch_size}, {duration_text(s.seconds)}",
            )
            ax.plot(epochs, [e["train_accuracy"] for e in s.epochs], ":", color=colour)
        ax.set(xlabel="epoch", ylabel="accuracy (dotted: of training)", ylim=(0, 1))
        ax.yaxis.set_major_formatter(PercentFormatter(1))
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.legend()
    return ax


def save_figure(runs: Sequence, path) -> Path:
    """Write the figure that fits the runs to `path`: a sweep, the phases, or one run's steps."""
    path = Path(path)
    found = [summary(r) for r in runs] if len(runs) > 1 else []
    if len(runs) == 1:
        ax = plot_steps(runs[0])
    elif len({s.batch_size for s in found}) == len(found):
        ax = plot_batch_sweep(found)[0]
    else:
        ax = plot_phases(found)
    figure = ax.figure
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
