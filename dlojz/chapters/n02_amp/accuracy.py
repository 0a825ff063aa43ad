"""The accuracy that a change costs: whole trainings, compared by pairs of the same seed."""

import statistics
from textwrap import fill

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.transforms import blended_transform_factory

from dlojz.figures.look import PALETTE, SERIES, entitle, style
from dlojz.figures.paired import BETTER, WORSE, rows, words
from dlojz.figures.report import hardware_text
from dlojz.runs.stats import summary
from dlojz.table import QUIET

COLOURS = {WORSE: PALETTE["failure"], BETTER: SERIES[0]}
WIDE = 38  # characters of a title in a line
LINEAR = 10.0  # points up to which the scale is linear: a collapse must not hide the rest
USEFUL = (0.6, 0.9)  # accuracies of the clean training at which a loss or a gain can be seen
TICKS = (-100, -80, -40, -20, -10, -5, 0, 5, 10, 20, 40, 80)


def plot_accuracy(run, only=None, ax=None):
    """Draw the difference of each variant's accuracy from the clean run's, by pairs of seeds.

    Points are seeds; the bar is the 95 % interval of their mean. only: some names of variants.
    """
    clean, *others = rows(run, only)
    with style(grid="x"):
        titles = [fill(row.title, WIDE) for row in others]
        lines = sum(1 + title.count("\n") / 2 for title in titles)
        ax = ax or plt.subplots(figsize=(10, 1.9 + 0.34 * lines))[1]
        ax.axvline(0, color=PALETTE["limit"], lw=1)
        for at, row in enumerate(others):
            if at % 2 == 0:
                ax.axhspan(at - 0.5, at + 0.5, color=PALETTE["limit"], alpha=0.07, lw=0)
            _plot_row(ax, at, row)
        ax.set_yticks(range(len(others)), titles)
        ax.set_ylim(len(others) - 0.5, -0.5)
        ax.set_xlabel("difference in accuracy from the clean run (percentage points)")
        _scale(ax, [p for row in others for p in row.points])
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
        entitle(ax, _finding(others), f"{_clean_text(clean)}\n{_caption(run)}")
    return ax


def _plot_row(ax, at, row):
    told = row.difference
    colour = COLOURS.get(told.word, QUIET)
    # Points of equal accuracy would coincide: each seed has its own height.
    heights = at + np.linspace(-0.16, 0.16, len(row.points)) if len(row.points) > 1 else [at]
    ax.plot(row.points, heights, "o", ms=3.5, color=colour, alpha=0.4, mew=0)
    if told.half is not None:
        ends = (told.mean - told.half, told.mean + told.half)
        ax.plot(ends, (at, at), color=colour, lw=4, solid_capstyle="butt", alpha=0.55)
    ax.plot(told.mean, at, "D", ms=6, color=colour, mec="white")
    beside = blended_transform_factory(ax.transAxes, ax.transData)
    ax.text(1.02, at, words(told), transform=beside, va="center", fontsize=9, color=colour)


def _scale(ax, points):
    """Make the scale linear near zero and logarithmic beyond, if a variant lost that much."""
    low, high = min([-1.0, *points]), max([1.0, *points])
    if max(-low, high) <= 2 * LINEAR:
        return
    ax.set_xscale("symlog", linthresh=LINEAR, linscale=1.2)
    left = next((t for t in reversed(TICKS) if t <= low), 1.25 * low)  # a tick beyond all points
    ax.set_xlim(1.1 * left, 1.5 * high)
    ticks = [t for t in TICKS if left <= t <= high]
    ax.set_xticks(ticks, [f"{t}".replace("-", "\N{MINUS SIGN}") for t in ticks])
    ax.minorticks_off()
    ax.set_xlabel(f"{ax.get_xlabel()}, logarithmic beyond {LINEAR:.0f}")
    ax.axvspan(1.1 * left, -LINEAR, color=PALETTE["limit"], alpha=0.1, lw=0)  # the other scale


def _finding(others):
    """Return the largest loss that was shown, the largest gain, or that there was none."""
    by_word = {BETTER: [], WORSE: []}
    for row in others:
        by_word.get(row.difference.word, []).append(row)
    told = []
    for word, shown in by_word.items():
        if shown:
            most = max(shown, key=lambda row: abs(row.difference.mean))
            points = f"{abs(most.difference.mean):.1f} points"
            told.append(
                f'{len(shown)} of {len(others)} {word}, most of all "{most.title}": {points}'
            )
    return "; ".join(told) or "No difference in accuracy is shown"


def _clean_text(clean):
    values = clean.accuracies.values()
    spread = f" ({len(values)} seeds: {min(values):.1%} to {max(values):.1%})"
    mean = statistics.fmean(values)
    text = f"Clean training, {clean.title}: {mean:.1%}" + (spread if len(values) > 1 else "")
    if USEFUL[0] <= mean <= USEFUL[1]:
        return text
    return f"{text}\noutside {USEFUL[0]:.0%} to {USEFUL[1]:.0%}, where a difference can be seen"


def _caption(run):
    """Return the sizes and the hardware, with how to read the marks."""
    s = summary(run)
    given = s.arguments
    several = f" in {s.size} processes together" if s.size > 1 else ""
    sizes = (
        f"{s.model}, {s.image_size} px, batch {s.batch_size}{several}, {given['epochs']} epochs of "
        f"{given['classes']} x {given['images_per_class']:,} images, validated on "
        f"{given['classes'] * given['val_per_class']:,}"
    )
    how = (
        "Diamond and bar: mean and its 95 % interval; by chance, 1 in 20 leaves out 0. Dots: seeds."
    )
    return f"{how}\n{sizes}\n{hardware_text(s)}"
