"""Who holds up the loader: the table and figure of notebooks/experiments/loader_profile.py."""

import re
import textwrap
from collections import Counter

import matplotlib.pyplot as plt
from matplotlib.ticker import PercentFormatter

from dlojz import report
from dlojz.runs import log
from dlojz.runs.folder import path_of
from dlojz.table import Table

REST = "the rest"
# What a function is for, by its name or by that of one that called it; the first that fits.
TASKS = {
    "decode": r"ImagingDecoder|ImageFile\.py: |JpegImagePlugin",
    "resize": r"\bresize\b|'resize'",
    "make a tensor, normalize": r"to_tensor|ToTensor|[Nn]ormalize|__array_interface__|numpy\.array"
    r"|ImagingEncoder|TensorBase|as_tensor",
    "make a batch": r"collate|torch\.stack|storage\.py",
    REST: r"",
}
COLOURS = dict(zip(TASKS, [*report.SERIES[:4], report.PALETTE["limit"]], strict=True))


def task(names) -> str:
    """What a function is for: one of TASKS. names: its own, and who called it."""
    for name in names:
        for found, words in TASKS.items():
            if found != REST and re.search(words, name):
                return found
    return REST


def functions(run, most: int = 10) -> Table:
    """The functions that take the most time of a loader without workers, as cProfile tells it."""
    seen = _evidence(run, "cProfile")
    rows = [
        (
            name,
            f"{calls / seen['images']:.3g}",
            f"{1000 * own_s / seen['images']:.3f}",
            f"{own_s / seen['seconds']:.0%}",
        )
        for name, calls, own_s in seen["functions"][:most]
    ]
    head = ("function", "calls per image", "own ms per image", "share")
    return Table(head, rows, "<>>>", "nothing was recorded")


def shares(run) -> dict[str, dict[str, float]]:
    """What the time of loading goes to, {by whom it was seen: {task: share}}."""
    inside, outside = _evidence(run, "cProfile"), _evidence(run, "py-spy")
    own, seen = Counter(), Counter()
    for name, _, own_s in inside["functions"]:
        own[task([name])] += own_s
    own[REST] += inside["seconds"] - own.total()  # functions that were not kept
    for names, count in outside.get("seen", []):
        seen[task(names)] += count
    found = {"cProfile: no workers": own, "py-spy: the workers": seen}
    return {
        who: {t: counts[t] / counts.total() for t in TASKS}
        for who, counts in found.items()
        if counts
    }


def plot_tasks(run, ax=None):
    """What the time of loading an image goes to, seen from inside and from outside."""
    found, trouble = shares(run), _evidence(run, "py-spy").get("trouble", "")
    with report.style(grid="x"):
        ax = ax or plt.subplots(figsize=(10, 1.5 + 0.6 * len(found)))[1]
        for row, parts in enumerate(found.values()):
            left = 0.0
            for name, share in parts.items():
                ax.barh(row, share, 0.65, left, label=name, color=COLOURS[name])
                if share > 0.04:  # else there is no room
                    text = {"color": "white", "ha": "center", "va": "center", "fontsize": 9}
                    ax.text(left + share / 2, row, f"{share:.0%}", **text)
                left += share
        ax.set(yticks=range(len(found)), yticklabels=found, ylim=(len(found) - 0.5, -0.5))
        ax.set(xlim=(0, 1), xlabel="\n".join(["share of the time", *textwrap.wrap(trouble, 100)]))
        ax.xaxis.set_major_formatter(PercentFormatter(1))
        handles, labels = ax.get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        ax.legend(unique.values(), unique, ncols=5, loc="lower left", bbox_to_anchor=(0, 1))
    return ax


def _evidence(run, who):
    path = path_of(run)
    seen = log.read(path).evidence
    if who not in seen:
        raise ValueError(
            f"{path}: nothing by {who} in it; expected a run of loader_profile.py that has ended "
            "well: job.explain() says why"
        )
    return seen[who]
