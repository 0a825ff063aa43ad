"""Figure of notebook 08: the updates, seconds and joules that each batch needs."""

from functools import partial

from matplotlib.ticker import FuncFormatter, LogLocator

from dlojz.chapters.n08_large_batch.figures import (
    MARKS,
    Mean,
    Setting,
    settings,
    task_of,
    trained,
)
from dlojz.figures import drawing
from dlojz.figures.look import PALETTE, SERIES, entitle
from dlojz.runs.stats import summary
from dlojz.table import Table

longer_of = partial(trained, experiment="experiments/lengths.py")
SPENT = {"updates": "updates", "images": "images", "seconds": "s", "joules": "J"}
DRAWN = {"updates": "updates", "seconds": "seconds of a training", "joules": "joules of its GPU"}


def lengths(run) -> dict[int, list[Setting]]:
    """Return the trainings of each batch, the shortest first."""
    found = {}
    for setting in settings(longer_of(run)):
        found.setdefault(setting.batch, []).append(setting)
    return {batch: sorted(s, key=lambda s: s.mean("updates")) for batch, s in sorted(found.items())}


def target(run) -> float:
    """Return the mean accuracy in percent of the smallest batch after the usual epochs.

    If it was not trained for as many, that of its longest training.
    """
    small, given = next(iter(lengths(run).values())), summary(run).arguments
    images = given["classes"] * given["images_per_class"]
    usual = given["epochs"] * (images // small[0].batch)
    same = [s for s in small if round(s.mean("updates")) == usual]
    return (same or small)[-1].accuracy().mean


def needed(line: list[Setting], what: str, percent: float) -> Mean | None:
    """Return the updates, images, seconds or joules that a batch needs for an accuracy.

    Interpolated between two lengths, over the logarithm; the interval, if each seed gets there,
    is that of the seeds. None if the mean does not get there, or nothing was measured.
    """
    spent = [s.mean(what) for s in line]
    if None in spent:
        return None
    middle = crossing(spent, [s.accuracy().mean for s in line], percent)
    curves = [s.by_seed() for s in line]
    found = [crossing(spent, [c[seed] for c in curves], percent) for seed in curves[0]]
    return middle and Mean(middle, None if None in found else Mean.of(found).half)


def crossing(spent: list[float], reached: list[float], percent: float) -> float | None:
    """Return the point at which a curve first reaches a percentage; None if it begins above."""
    for n in range(1, len(spent)):
        low, high = reached[n - 1 : n + 1]
        if low < percent <= high:
            share = (percent - low) / (high - low)
            return float(spent[n - 1] * (spent[n] / spent[n - 1]) ** share)
    return None


def needs(run) -> Table:
    """Return a table of what each batch needs for the accuracy of the smallest."""
    percent, rows = target(run), []
    for batch, line in lengths(run).items():
        found = [needed(line, what, percent) for what in SPENT]
        told = ["-" if m is None else _interval(m) for m in found]
        rows.append((f"{batch:,}", *told))
    return Table((f"batch, until {percent:.1f} %", *SPENT.values()), rows, "<>>>>")


def _interval(mean):
    half = "" if mean.half is None else f" ± {_amount(mean.half)}"
    return _amount(mean.mean) + half


def _amount(value):
    """Return a number with three digits, or all of its whole ones."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def plot_paying(run, axes=None):
    """Draw the accuracy of each batch against updates, seconds and joules, by its lengths."""
    lines, percent = lengths(run), target(run)
    measured = [w for w in DRAWN if all(s.mean(w) for line in lines.values() for s in line)]
    shape = (1, len(measured))
    with drawing.axes(axes, (4 * len(measured), 5.2), shape=shape, sharey=True) as axes:
        for ax, what in zip(axes, measured, strict=True):
            for colour, (batch, line) in zip(SERIES, lines.items(), strict=False):
                _plot_line(ax, line, what, f"batch {batch:,}", colour)
            ax.axhline(percent, color=PALETTE["limit"], ls="--", lw=1)
            ax.set(xscale="log", xlabel=DRAWN[what])
            ax.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
            ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))
            ax.minorticks_off()
        axes[0].set_ylabel("accuracy (%)")
        drawing.legend(axes[-1], 1, (1, 0), loc="lower right")
        entitle(axes[0], paying_text(lines, percent), _setting(run))
    return axes


def _plot_line(ax, line, what, label, colour):
    """Draw the lengths of a batch; beside the points of the first panel stand their rates."""
    means = [s.accuracy() for s in line]
    x, y = [s.mean(what) for s in line], [m.mean for m in means]
    halves = [m.half or 0 for m in means]
    ax.errorbar(x, y, halves, marker="o", ms=4, capsize=3, color=colour, label=label)
    if what == "updates":
        look = {"textcoords": "offset points", "xytext": (5, -11), "fontsize": 9, "color": colour}
        for s, *at in zip(line, x, y, strict=True):
            ax.annotate(f"{s.rate:g}", at, **look)


def paying_text(lines: dict[int, list[Setting]], percent: float) -> str:
    """Return the batches that reach the accuracy soonest, and with the least energy."""
    told = []
    for what, how in (("updates", "fewest updates"), ("seconds", "soonest"), ("joules", "least J")):
        found = {b: needed(line, what, percent) for b, line in lines.items()}
        found = {batch: mean.mean for batch, mean in found.items() if mean}
        if found:
            least = min(found, key=found.get)
            unit = "" if what == "updates" else f" {SPENT[what]}"
            told.append(f"{how}: {least:,} ({_amount(found[least])}{unit})")
    first = f"SGD, {percent:.1f} %: which batch gets there?"
    return f"{first}\n{', '.join(told) or 'none of several lengths'}"


def _setting(run) -> str:
    """Return the task and the hardware, in two lines."""
    given = summary(run).arguments
    task = f"{task_of(given)}; {given['seeds']} seeds: {MARKS}; dashed: the smallest batch after "
    task += f"{given['epochs']} epochs; numbers: best rate of {given['rates']}"
    return f"{task}\n{drawing.where(run)}"
