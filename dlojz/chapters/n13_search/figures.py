"""Figures of notebook 13: a search's price, the trials that it stops, its winner's worth."""

import math
import statistics
from functools import partial

import numpy as np

from dlojz.chapters.n13_search.recorded import (
    PRUNERS,
    SAMPLERS,
    TOP,
    cases,
    is_complete,
    kinds,
    last,
    lost,
    searches,
    stopped,
    unpruned,
)
from dlojz.figures import drawing, paired
from dlojz.figures.drawing import entitle
from dlojz.figures.report import PALETTE, SERIES
from dlojz.runs.stats import half_width, summary
from dlojz.table import Table

COLOURS = dict(zip(PRUNERS, SERIES, strict=False))
GREY, RED = PALETTE["limit"], PALETTE["failure"]
SEVERAL = 3  # values, from which on an interval says something

transfer_of = partial(drawing.of_experiment, field="model", experiment="experiments/transfer.py")


def spread(values, sign: str = "") -> str:
    """Return a mean with its 95 % interval, if there are several values: "88.4 ± 0.9"."""
    values = list(values)
    half = f" ± {half_width(values):.1f}" if len(values) >= SEVERAL else ""
    return f"{statistics.fmean(values):{sign}.1f}{half}".replace("-", "\N{MINUS SIGN}")


def winners(run) -> Table:
    """Return a table of the winners: means over the repeats, with their 95 % intervals."""
    rows = []
    for found in kinds(run).values():
        trials = statistics.fmean(len(search.trials) for search in found)
        fresh = (spread(search.fresh(what) for search in found) for what in ("accuracy", "unseen"))
        selected = spread(last(search.best) for search in found)
        rows.append((found[0].title, f"{trials:.0f}", selected, *fresh))
    head = ("study", "trials", "selected (%)", "fresh seeds (%)", "unseen images (%)")
    return Table(head, rows, "<>>>>")


def _setting(run, marks="") -> str:
    """Return the task and the hardware, in two lines."""
    given = summary(run).arguments
    images, val = (given["classes"] * given[f"{part}_per_class"] for part in ("images", "val"))
    task = f"{marks}{given['model']}, {given['image_size']} px, {images:,} images, validated on "
    return f"{task}{val:,}; {given['epochs']} epochs\n{drawing.where(run)}"


def _clock(run):
    return "GPU-seconds" if summary(run).on_gpu else "CPU-seconds"


# The budget --------------------------------------------------------------------------------------


def plot_budgets(run, axes=None):
    """Draw the best accuracy so far against the seconds of training, with and without pruning.

    Line: mean over the repeats; band: lowest to highest; diamond: the winner with fresh seeds, on
    unseen images.
    """
    found = kinds(run)
    names = [name for name in SAMPLERS if any(name == key[0] for key in found)]
    end = max(search.progress()[0][-1] for every in found.values() for search in every)
    with drawing.axes(axes, (11, 4.4), shape=(1, len(names)), sharey=True) as axes:
        for ax, name in zip(axes, names, strict=True):
            for shift, pruner in enumerate(PRUNERS):
                if every := found.get((name, pruner)):
                    _plot_budget(ax, every, end, shift)
            drawing.caption(ax, f"{SAMPLERS[name]}\n{_beside_random(found, name)}")
            ax.set(xlabel=f"{_clock(run)} of trials", xlim=(0, 1.16 * end))
        axes[0].set_ylabel("best accuracy so far (%)")
        low, high = axes[0].get_ylim()
        axes[0].set_ylim(bottom=low - 0.4 * (high - low))  # room for the legend
        drawing.legend(axes[-1], 1, (1, 0), loc="lower right", fontsize=8)
        repeats = len({search.repeat for search in searches(run)})
        marks = f"Bands: {repeats} repeats; diamonds: fresh seeds, unseen images. "
        entitle(axes[0], _budgets_text(found), _setting(run, marks))
    return axes


def _plot_budget(ax, every, end, shift):
    colour, label = COLOURS[every[0].pruner], PRUNERS[every[0].pruner]
    at = np.linspace(0, end, 400)
    lines = []
    for search in every:
        seconds, best = search.progress()
        lines.append(np.r_[math.nan, best][np.searchsorted(seconds, at, "right")])
    begun = np.isfinite(lines).all(0)  # from the first end of a trial in every repeat on
    at, lines = at[begun], np.array(lines)[:, begun]
    ax.fill_between(at, lines.min(0), lines.max(0), color=colour, alpha=0.15, lw=0)
    ax.plot(at, lines.mean(0), color=colour, label=f"{label}: best so far")
    again = [search.fresh("unseen") for search in every]
    half = half_width(again) if len(again) >= SEVERAL else 0
    look = {"color": colour, "marker": "D", "ms": 6, "mec": "white", "capsize": 3, "ls": ""}
    x = (1.05 + 0.06 * shift) * end
    ax.errorbar(x, statistics.fmean(again), half, label=f"{label}: winner again", **look)


def _beside_random(found, name):
    """Return the difference of a sampler's winners from random search's, in words."""
    clean, own = (
        {s.repeat: s.fresh("unseen") for s in found.get((n, "none"), [])} for n in ("random", name)
    )
    difference = paired.difference(clean, own)
    return paired.words(difference) if name != "random" and difference else ""


def _budgets_text(found):
    """Return the accuracy of the winners, without and with Hyperband."""
    lines = []
    for pruner, title in PRUNERS.items():
        again = {
            every[0].sampler: statistics.fmean(s.fresh("unseen") for s in every)
            for key, every in found.items()
            if key[1] == pruner
        }
        told = ", ".join(f"{SAMPLERS[name]} {percent:.1f} %" for name, percent in again.items())
        lines.append(f"Winners of the same budget, {title}: {told}")
    return "\n".join(lines)


# The stopped trials ------------------------------------------------------------------------------


def plot_stopped(run, axes=None):
    """Draw the curves of Hyperband's trials: stopped ones grey, dotted as they would have gone on.

    Red: a stopped trial that would have ended among the best three.
    """
    found = stopped(run)
    ended = [t for trials in found.values() for t in trials if not is_complete(t)]
    with drawing.axes(axes, (11, 4.4), shape=(1, len(found)), sharey=True) as axes:
        for ax, (name, trials) in zip(axes, found.items(), strict=True):
            for trial in sorted(trials, key=lambda trial: (trial["top"], is_complete(trial))):
                _plot_curve(ax, trial)
            own = [trial for trial in trials if not is_complete(trial)]
            good = sum(trial["top"] for trial in own)
            text = (
                f"{SAMPLERS[name]}: {len(own)} of {len(trials)} stopped, {good} of the best {TOP}"
            )
            drawing.caption(ax, text)
            ax.set(xlabel="epoch", xticks=range(1, len(trials[0]["whole"]) + 1))
        axes[0].set_ylabel("validation accuracy (%)")
        named = {}
        for ax in axes:
            named |= dict(zip(*ax.get_legend_handles_labels()[::-1], strict=True))
        drawing.legend(axes[0], 1, (0, 1), named, loc="upper left", fontsize=8)
        text = f"Hyperband stopped {len(ended)} trials of a repeat: {sum(t['top'] for t in ended)} "
        entitle(axes[0], f"{text}would have ended in the best {TOP} of a study", _setting(run))
    return axes


def _plot_curve(ax, trial):
    percent, n = [100 * a for a in trial["whole"]], len(trial["accuracies"])
    epochs = range(1, len(percent) + 1)
    if is_complete(trial):
        ax.plot(epochs, percent, color=SERIES[0], lw=1.2, label="trained to its end")
        return
    colour, label = (RED, f"stopped, one of the best {TOP}") if trial["top"] else (GREY, "stopped")
    ax.plot(epochs[:n], percent[:n], "x-", markevery=[-1], color=colour, lw=1.2, label=label)
    ax.plot(epochs[n - 1 :], percent[n - 1 :], ":", color=colour, lw=1)


# The noise, and the winner's curse ---------------------------------------------------------------


def plot_noise(run, ax=None):
    """Draw the accuracies of one trial with several seeds beside those of different trials."""
    winner = max(unpruned(run), key=lambda search: last(search.best))
    rows = {
        "the defaults, {} seeds": [100 * case["accuracy"] for case in cases(run, "default")],
        "a winner, {} fresh seeds": [100 * case["accuracy"] for case in winner.again],
        "its study, {} trials": [last(trial) for trial in winner.trials],
    }
    with drawing.axes(ax, (9, 3.4), "x") as ax:
        for at, (values, colour) in enumerate(zip(rows.values(), SERIES, strict=False)):
            _plot_mean(ax, at, values, colour)
            text = f"sd {statistics.stdev(values):.1f}"
            ax.text(max(values), at - 0.2, text, ha="right", color=colour, fontsize=9)
        drawing.rows(ax, [title.format(len(values)) for title, values in rows.items()])
        ax.set(xlabel="validation accuracy (%)", ylim=(2.5, -0.5))
        _, seeds, trials = rows.values()
        best, second = sorted(trials)[:-3:-1]
        text = f"One trial, {len(seeds)} seeds: sd {statistics.stdev(seeds):.1f} points\nThe best "
        text += f"two of {len(trials)} trials are {best - second:.1f} points apart"
        entitle(ax, text, _setting(run))
    return ax


def plot_curse(run, ax=None):
    """Draw the accuracy with which winners won beside that of their fresh seeds."""
    found = kinds(run)
    default = statistics.fmean(100 * case["accuracy"] for case in cases(run, "default"))
    with drawing.axes(ax, (9, 1.9 + 0.5 * len(found)), "x") as ax:
        for at, every in enumerate(found.values()):
            _plot_mean(ax, at - 0.15, [last(s.best) for s in every], GREY, "as it won")
            fresh = [search.fresh() for search in every]
            _plot_mean(ax, at + 0.15, fresh, SERIES[0], "again, with fresh seeds")
        ax.axvline(default, color=RED, ls="--", lw=1, label="the defaults")
        drawing.rows(ax, [every[0].title for every in found.values()])
        ax.set_xlabel("validation accuracy (%)")
        drawing.legend(ax, 3, (0, 1))
        gain = statistics.fmean(search.fresh() for search in searches(run)) - default
        text = f"Winners, trained again: {spread((-points for points in lost(run)), '+')} points"
        text += f"; still {gain:.1f} above the defaults"
        entitle(ax, text, _setting(run, "Dots: repeats; bars: 95 % interval. "))
    return ax


def _plot_mean(ax, at, values, colour, label=None):
    mean = statistics.fmean(values)
    if len(values) >= SEVERAL:
        half = half_width(values)
        ax.plot((mean - half, mean + half), (at, at), color=colour, lw=4, alpha=0.3)
    ax.plot(values, [at] * len(values), "o", ms=4, color=colour, alpha=0.5, mew=0)
    ax.plot(mean, at, "D", ms=5, color=colour, mec="white", label=label)


# The larger model --------------------------------------------------------------------------------


def plot_transfer(run, axes=None):
    """Draw the same trials with both models, and the larger one with the best flags of each."""
    read = transfer_of(run)
    every, of = [*read.cases.values()], read.start["arguments"]
    models = small, larger = of["model"], of["larger"]
    trials = [[c for c in every if (c["phase"], c["model"]) == ("trial", m)] for m in models]
    x, y = ([last(case) for case in own] for own in trials)
    origins = {f"best of {small}": small, "its own best": larger, "the defaults": "default"}
    again = [[c for c in every if c.get("of") == origin] for origin in origins.values()]
    with drawing.axes(axes, (11, 4.2), "both", (1, 2), width_ratios=(1, 1.2)) as axes:
        left, right = axes
        left.plot(x, y, "o", color=SERIES[0], alpha=0.7)
        best = x.index(max(x))
        left.plot(x[best], y[best], "D", ms=8, color=SERIES[1], label=f"best of {small}")
        left.set(xlabel=f"{small}: accuracy (%)", ylabel=f"{larger}: accuracy (%)")
        drawing.legend(left, 1, (0, 1), loc="upper left", fontsize=8)
        for at, (own, colour) in enumerate(zip(again, SERIES[1:], strict=False)):
            values = [last(case) for case in own]
            _plot_mean(right, at, values, colour)
            right.text(max(values), at - 0.2, spread(values), ha="right", color=colour, fontsize=9)
        drawing.rows(right, origins)
        right.set(xlabel=f"{larger} with fresh seeds: accuracy (%)", ylim=(2.5, -0.5))
        cost = [statistics.median(case["seconds"] for case in own) for own in trials]
        told = paired.difference(*({c["seed"]: last(c) for c in again[n]} for n in (1, 0)))
        text = f"{small}'s trials take {100 * cost[0] / cost[1]:.0f} % of {larger}'s seconds; the "
        text += (
            f"ranks of both correlate by {_alike(x, y):.2f}\nIts best flags for {larger}, beside "
        )
        text += f"that model's own: {paired.words(told)}"
        entitle(left, text, _setting(run))
    return axes


def _alike(x, y):
    """Return the correlation of the ranks of two lists."""
    return np.corrcoef(*(np.argsort(np.argsort(values)) for values in (x, y)))[0, 1]
