"""The parts that figures of several chapters share: their axes, rows, captions and legends."""

from collections.abc import Iterable, Mapping
from contextlib import contextmanager

import matplotlib.pyplot as plt

from dlojz.course import UserError
from dlojz.figures import report
from dlojz.figures.look import legend as draw_legend
from dlojz.figures.look import style
from dlojz.runs import log
from dlojz.runs.stats import summary


def where(run) -> str:
    """Return the hardware of a run; for a recording, also when it was made."""
    return report.hardware_text(summary(run))


def of_experiment(run, field: str, experiment: str) -> log.Run:
    """Return the log of a run. Raises UserError if it is of another experiment.

    field: in each case of the expected one.
    """
    found = report.measured(run)
    if not found.cases or not all(field in case for case in found.cases.values()):
        raise UserError(f"{found.path}: nothing of this in it; expected a run of {experiment}")
    return found


@contextmanager
def axes(given, size: tuple[float, float], grid="y", shape=None, **layout):
    """Yield axes in the course's style: the given ones, or new ones of this size in inches.

    shape: of several axes, (rows, columns); those of one row or column come as a flat array.
    """
    with style(grid):
        if given is None:
            given = plt.subplots(*shape or (1, 1), figsize=size, squeeze=False, **layout)[1]
            given = given if shape and 1 not in shape else given.ravel()
            given = given if shape else given[0]
        yield given


def caption(ax, text: str):
    """Write the content of a panel above it, smaller than a title."""
    ax.set_title(text, fontsize=9, fontweight="normal")


def rows(ax, names: Iterable[str]):
    """Name the rows of a figure, the first on top."""
    names = list(names)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()


def stack(ax, row: int, parts: Mapping[str, float], colours: Mapping[str, str], height=0.6, **look):
    """Draw these parts of a row one after the other, and return the end of the last."""
    left = 0.0
    for name, width in parts.items():
        ax.barh(row, width, height, left, color=colours[name], label=name, **look)
        left += width
    return left


def write_widths(ax, form: str, least: float, **look):
    """Write the width of each bar so far into it; one up to `least` has no room for text."""
    for bar in ax.patches:
        if (width := bar.get_width()) > least:
            ax.text(*bar.get_center(), form.format(width), ha="center", va="center", **look)


def legend(ax, ncols=4, at=(0, 1), named: Mapping | None = None, **look):
    """Draw a legend above the axes: of {label: handle}, by default with each label once."""
    if named is None:
        handles, labels = ax.get_legend_handles_labels()
        named = dict(zip(labels, handles, strict=True))
    look = {"loc": "lower left", "fontsize": 9} | look
    draw_legend(ax, named, ncols=ncols, bbox_to_anchor=at, **look)


def swatches(colours: Mapping[str, str]) -> dict:
    """Return handles of a legend, by label."""
    return {name: plt.Rectangle((0, 0), 1, 1, color=colour) for name, colour in colours.items()}
