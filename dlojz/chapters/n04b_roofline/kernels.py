"""The table and the figure of single kernels, as NVIDIA Nsight Compute measured them.

Its file is ncu's: `ncu --csv --log-file ncu.csv --metrics ... python trainer.py` writes a line for
each metric of each kernel, between messages that begin with "==". A recording begins
with lines "# hardware, versions, date" and "# command":

"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","void at::native::batch_norm_backward_kernel<...>","gpu__time_duration.sum","ns","102,752"
"""

import csv
import gzip
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.lines import Line2D

from dlojz.course import course_root
from dlojz.figures.look import KINDS, PALETTE, entitle, legend, percent, style
from dlojz.table import Table
from dlojz.traces import kinds

# By ncu's name; shares are in percent of the device's peak.
METRICS = {
    "gpu__time_duration.sum": "us",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "sm",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": "tensor",
}
UNITS_PER_US = {"ns": 1e3, "nsecond": 1e3, "us": 1.0, "usecond": 1.0, "ms": 1e-3, "msecond": 1e-3}
IDLE = 5  # percent of a kernel's time with tensor cores at work, below which they idle
LONG = 0.05  # share of the measured time from which the figure names a kernel
WORDS = {
    "max_pool_backward": "max pooling, backward",
    "fprop": "convolution, forward",
    "dgrad": "convolution, gradient of its input",
    "wgrad": "convolution, gradient of its weights",
}


class NsightError(ValueError):
    """A file that ncu did not write or that lacks a metric, with the reason."""


@dataclass(frozen=True)
class Kernel:
    """One kernel, measured alone."""

    name: str
    us: float
    memory: float  # percent of the peak throughput of the device's memory
    sm: float  # percent of the peak throughput of the multiprocessors
    tensor: float  # percent of their active time with a tensor core at work

    @property
    def kind(self) -> str:
        """Return the kind of work that it does: one of kinds.KINDS."""
        return kinds.kind(self.name)


@dataclass(frozen=True)
class Kernels:
    """The kernels that ncu measured, in the order in which they ran."""

    all: list[Kernel]
    about: str  # hardware, versions, date; "" unless this is a recording

    @property
    def us(self) -> float:
        """Return the total time of the kernels."""
        return sum(k.us for k in self.all)


def read(path) -> Kernels:
    """Return the kernels of ncu's CSV log, gzipped or not. Raises NsightError."""
    path = Path(path)
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        lines = [line for line in file if not line.startswith("==")]
    comments = [line[1:].strip() for line in lines if line.startswith("#")]
    found = defaultdict(dict)
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        if (name := METRICS.get(row.get("Metric Name"))) is not None:
            found[row["ID"]] |= {"name": row["Kernel Name"], name: _number(row)}
    if not found:
        raise NsightError(
            f"{path}: no kernel in it; expected what ncu --csv --log-file wrote, with "
            f"--metrics {','.join(METRICS)}"
        )
    try:
        kernels = [Kernel(**values) for values in found.values()]
    except TypeError as error:  # a metric was not asked for
        wanted = ",".join(METRICS)
        raise NsightError(f"{path}: a metric is missing; run ncu --metrics {wanted}") from error
    return Kernels(kernels, comments[0] if comments else "")


def _number(row):
    try:
        value = float(row["Metric Value"].replace(",", ""))
    except ValueError as error:
        raise NsightError(f"{row['Metric Name']}: {row['Metric Value']!r}, not a number") from error
    return value / UNITS_PER_US.get(row["Metric Unit"], 1.0)


def recorded() -> Path:
    """Return the log of the command that notebook 04 shows, recorded on an H100."""
    return course_root() / "reference/h100/04-nsight-compute.csv.gz"


def by_kind(path=None) -> Table:
    """Return a table of the time of each kind of kernel, and its mean use of the device.

    path: ncu's log; None: the recorded one.
    """
    found = read(path or recorded())
    rows = []
    for kind, mine in _by_kind(found):
        us = sum(k.us for k in mine)
        means = [sum(k.us * getattr(k, n) for k in mine) / us for n in ("memory", "sm", "tensor")]
        shares = [f"{mean:.0f} %" for mean in means]
        rows.append((kind, str(len(mine)), f"{us / 1000:.2f}", f"{us / found.us:.0%}", *shares))
    head = ("", "kernels", "ms", "share", "memory", "multiprocessors", "tensor cores")
    return Table(head, rows, "<>>>>>>")


def _by_kind(found):
    """Return [(kind, its kernels)], the kind that takes the most time first."""
    mine = defaultdict(list)
    for kernel in found.all:
        mine[kernel.kind].append(kernel)
    return sorted(mine.items(), key=lambda item: -sum(k.us for k in item[1]))


def plot_kernels(path=None, ax=None):
    """Draw each kernel by its use of tensor cores and of memory; larger ones took longer.

    path: ncu's log; None: the recorded one.
    """
    found = read(path or recorded())
    with style(grid="both"):
        ax = ax or plt.subplots(figsize=(11, 5))[1]
        for kind, mine in _by_kind(found):
            share = sum(k.us for k in mine) / found.us
            ax.scatter(
                [k.tensor for k in mine],
                [k.memory for k in mine],
                s=[10 + 6000 * k.us / found.us for k in mine],
                **{"color": KINDS[kind], "alpha": 0.65, "lw": 0.5, "ec": "white"},
                label=f"{kind}: {share:.1%}",
            )
        for kernel in (k for k in found.all if k.us > LONG * found.us):
            text = f"{short(kernel.name)}, {kernel.us:,.0f} µs"
            at = (kernel.tensor, kernel.memory)
            ax.annotate(text, at, (12, 10), textcoords="offset points", fontsize=9)
        ax.set(xlim=(-3, 103), ylim=(-3, 103))
        ax.set(xlabel="tensor cores at work (% of the time)", ylabel="memory (% of its peak)")
        _draw_legends(ax, found)
        entitle(ax, _idle_text(found), found.about)
    return ax


def _draw_legends(ax, found):
    """Draw the legends of the kinds and of the sizes beside the figure."""
    place, wide = {"loc": "upper left"}, {"labelspacing": 1.6, "handletextpad": 1.2}
    long = {f"{us:,} µs": _dot(us, found) for us in (10, 100, 1000)}
    sizes = legend(ax, long, title="time of a kernel", bbox_to_anchor=(1, 0.55), **wide, **place)
    ax.add_artist(sizes)
    drawn = ax.legend(title="share of the measured time", bbox_to_anchor=(1, 1), **place)
    for handle in drawn.legend_handles:
        handle.set_sizes([60])


def _idle_text(found):
    """Return the share of the time in which the tensor cores idle, and memory's use then."""
    idle = [k for k in found.all if k.tensor < IDLE]
    if not idle:
        return f"In all kernels the tensor cores work for {IDLE} % of the time or more"
    us = sum(k.us for k in idle)
    memory = sum(k.us * k.memory for k in idle) / us
    text = f"{percent(us / found.us)} of the time the tensor cores idle"
    return f"{text}, with memory at {memory:.0f} % of its peak"


def _dot(us, found):
    """Return a dot as large as that of a kernel of this time."""
    size = 10 + 6000 * us / found.us
    look = {"mfc": PALETTE["limit"], "mec": "white", "alpha": 0.65}
    return Line2D([], [], marker="o", ls="", ms=size**0.5, **look)


def short(name: str) -> str:
    """Return a kernel's purpose in words where its name shows it, else its name without types."""
    for part, words in WORDS.items():
        if part in name:
            return words
    return re.sub(r"^void |<unnamed>::|[<(].*", "", name).split("::")[-1]
