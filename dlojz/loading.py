"""How images come to a training, and what that costs: tables and figures of notebook 05.

They take runs (jobs, folders or recordings) and axes, and return the axes, as in `dlojz.report`.
"""

from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np

from dlojz import log, stats
from dlojz.report import PALETTE, SERIES, hardware_text, style
from dlojz.stats import summary
from dlojz.table import Table

# Decoding ----------------------------------------------------------------------------

KINDS = {"decoder": "decoded only", "road": "to a crop that a batch takes", "nvJPEG": "on the GPU"}


class Way(NamedTuple):
    """A way from the bytes of a JPEG file to an image, and its speeds, one of each round."""

    kind: str  # one of KINDS
    name: str
    speeds: list[float]  # images per CPU-second; on the GPU per second of the clock on the wall

    @property
    def median(self) -> float:
        return float(np.median(self.speeds))

    @property
    def text(self) -> str:
        """The name, in words."""
        if self.kind != "nvJPEG":
            return self.name
        return "nvJPEG, one by one" if self.name == "1" else f"nvJPEG, {self.name} in a batch"


def ways(run) -> list[Way]:
    """What a run of experiments/decoders.py has timed, in its order."""
    found = log.read(log.path_of(run))
    ways = []
    for what, case in found.evidence.items():
        kind, _, name = what.partition(": ")
        if kind in KINDS:
            ways.append(Way(kind, name, case.get("images_per_cpu_s") or case["images_per_s"]))
    if not ways:
        raise ValueError(f"{found.path}: no decoder was timed; job.explain() says why")
    return ways


def ratio(run, name: str, to: str) -> tuple[float, float, float]:
    """How many times as fast one way is as another, and the ends of the 95 % interval.

    name, to: as in the table: "torchvision, v2, uint8", "PIL, v1, float32".
    """
    found = {way.text: way.speeds for way in ways(run)}
    for asked in (name, to):
        if asked not in found:
            raise ValueError(f"{asked!r} was not timed: expected one of {', '.join(found)}")
    return stats.interval([a / b for a, b in zip(found[name], found[to], strict=True)])


def decoders(run) -> Table:
    """Each way to decode: its speed, the spread of its rounds, and how it does beside the first."""
    rows, first = [], {}
    found = ways(run)
    for way in found:
        base = first.setdefault(way.kind, way.median)
        spread = f"{min(way.speeds):,.0f} to {max(way.speeds):,.0f}"
        times = f"{way.median / base:.2f}"
        rows.append((KINDS[way.kind], way.text, f"{way.median:,.0f}", spread, times))
    if not any(way.name == "simplejpeg" for way in found):
        rows.append((KINDS["decoder"], "simplejpeg", "-", "not installed there", "-"))
    unit = "images per CPU-second" + ("; of the GPU: per second" if "nvJPEG" in first else "")
    return Table(("", "way", unit, "rounds", "times the first"), rows, "<<>>>")


def plot_decoders(run, ax=None):
    """Bars of each way on the processor, with the spread of its rounds."""
    found = [way for way in ways(run) if way.kind != "nvJPEG"]
    colours = {"decoder": PALETTE["limit"], "road": PALETTE["speed"]}
    with style(grid="x"):
        ax = ax or plt.subplots(figsize=(9, 1.2 + 0.36 * len(found)))[1]
        rows = np.arange(len(found)) + 0.5 * np.array([way.kind == "road" for way in found])
        labels = set()
        for row, way in zip(rows, found, strict=True):
            label = KINDS[way.kind] if way.kind not in labels else None
            labels.add(way.kind)
            ax.barh(row, way.median, 0.7, color=colours[way.kind], label=label)
            reach = [[way.median - min(way.speeds)], [max(way.speeds) - way.median]]
            ax.errorbar(way.median, row, xerr=reach, color="black", lw=1, capsize=2.5)
            ax.text(max(way.speeds), row, f"  {way.median:,.0f}", va="center", fontsize=9)
        ax.set_yticks(rows, [way.name for way in found])
        ax.invert_yaxis()
        ax.margins(x=0.1)
        ax.set(xlabel="images per CPU-second (median; the line: all rounds)", xlim=(0, None))
        ax.set_title(f"one core of {_processor(run)}", fontsize=9, fontweight="normal")
        ax.legend(ncols=2, loc="lower left", bbox_to_anchor=(0, 1.08), fontsize=9)
    return ax


def plot_nvjpeg(run, ax=None):
    """Images per second of the GPU's decoder, against how many it is given at once."""
    found = {int(way.name): way.speeds for way in ways(run) if way.kind == "nvJPEG"}
    if not found:
        raise ValueError(f"no nvJPEG in {log.path_of(run)}: it needs an NVIDIA GPU")
    with style():
        ax = ax or plt.subplots(figsize=(6, 3.4))[1]
        median = [np.median(speeds) for speeds in found.values()]
        ax.plot(list(found), median, "o-", color=SERIES[2])
        ends = ([min(s) for s in found.values()], [max(s) for s in found.values()])
        ax.fill_between(list(found), *ends, color=SERIES[2], alpha=0.2)
        ax.set_xscale("log", base=2)
        ax.set_xticks(list(found), list(found))
        ax.set(xlabel="images in a batch", ylabel="nvJPEG (images/s)", ylim=(0, None))
        ax.set_title(hardware_text(summary(run)), fontsize=9, fontweight="normal")
    return ax


def _processor(run):
    """The processor's name; of a recording its date, too."""
    s = summary(run)
    name = log.read(log.path_of(run)).start.get("cpu", s.device_name)
    return f"{name}, recorded {s.date}" if s.recorded else name
