"""Figures of notebook 13: a search's price, the trials that it stops, its winner's worth."""

import math
import statistics
import warnings
from contextlib import contextmanager
from functools import partial

import matplotlib as mpl
import numpy as np
from matplotlib.ticker import MaxNLocator, PercentFormatter

from dlojz.chapters.n13_search import kept
from dlojz.chapters.n13_search.recorded import (
    PRUNERS,
    SAMPLERS,
    TOP,
    as_optuna,
    cases,
    is_complete,
    kinds,
    last,
    lost,
    parameters,
    searches,
    stopped,
    unpruned,
    winning,
)
from dlojz.chapters.n13_search.study import find
from dlojz.figures import drawing, paired
from dlojz.figures.look import PALETTE, SERIES, entitle, percent
from dlojz.runs.stats import half_width, summary
from dlojz.table import Table

COLOURS = dict(zip(PRUNERS, SERIES, strict=False))
GREY, RED = PALETTE["limit"], PALETTE["failure"]
CENTRED = {"ha": "center", "va": "center", "fontsize": 9}
SEVERAL = 3  # values, from which on an interval says something

transfer_of = partial(drawing.of_experiment, field="model", experiment="experiments/transfer.py")


def spread(values, sign: str = "") -> str:
    """Return a mean with its 95 % interval, if there are several values: "88.4 ± 0.9"."""
    values = list(values)
    half = f" ± {half_width(values):.1f}" if len(values) >= SEVERAL else ""
    return f"{statistics.fmean(values):{sign}.1f}{half}".replace("-", "\N{MINUS SIGN}")


def winners(run) -> Table:
    """Return a table of the winners: means over the repeats, with 95 % intervals of three or more.

    Its second column has a number for each repeat: equal ones are the same trial.
    """
    rows, numbers = [], {every[0].winner: n for n, every in enumerate(winning(run), 1)}
    for found in kinds(run).values():
        counts = [len(search.trials) for search in found]
        trials = " to ".join(map(str, sorted({min(counts), max(counts)})))
        fresh = (spread(search.fresh(what) for search in found) for what in ("accuracy", "unseen"))
        selected = spread(last(search.best) for search in found)
        won = ", ".join(str(numbers[search.winner]) for search in found)
        rows.append((found[0].title, won, trials, selected, *fresh))
    head = ("study", "winners", "trials", "selected (%)", "fresh seeds (%)", "unseen images (%)")
    return Table(head, rows, "<>>>>>")


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
        marks = f"Bands: {repeats} repeats; diamonds: fresh seeds, unseen images; bars: 95 %. "
        text = f"{_ahead(found)} shown to be better than random search ({repeats} repeats)\n"
        text += f"Winners with fresh seeds on unseen images, {_budgets_text(found)}"
        entitle(axes[0], text, _setting(run, marks))
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
    look = {"color": colour, "marker": "D", "ms": 6, "mec": "white", "capsize": 3, "ls": ""}
    x = (1.05 + 0.06 * shift) * end
    look["label"] = f"{label}: winner again"
    ax.errorbar(x, statistics.fmean(again), _interval(again), **look)


def _beside_random(found, name):
    """Return the difference of a sampler's winners from random search's, in words."""
    difference = name != "random" and _difference(found, name)
    return f"winners beside random search's:\n{paired.words(difference)}" if difference else "\n"


def _difference(found, name):
    """Return the difference of a sampler's winners from random search's; None without both."""
    clean, own = (
        {s.repeat: s.fresh("unseen") for s in found.get((n, "none"), [])} for n in ("random", name)
    )
    return paired.difference(clean, own)


def _ahead(found):
    """Return the samplers that are better than random search, in words: "TPE is"."""
    shown = {name: _difference(found, name) for name in SAMPLERS}
    ahead = [SAMPLERS[name] for name, each in shown.items() if each and each.word == paired.BETTER]
    return f"{' and '.join(ahead) or 'No sampler'} {'are' if len(ahead) > 1 else 'is'}"


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
        lines.append(f"{title}: {told}")
    return "\n".join(lines)


# The stopped trials ------------------------------------------------------------------------------


def plot_stopped(run, axes=None):
    """Draw the curves of Hyperband's trials: stopped ones grey, dotted as they would have gone on.

    Red: a stopped trial that would have ended among the best three.
    """
    found = stopped(run)
    ended = {}  # by parameters: two samplers can begin with the same trial
    for trial in (t for trials in found.values() for t in trials if not is_complete(t)):
        ended[parameters(trial)] = trial["top"] or ended.get(parameters(trial), False)
    chance = 100 / summary(run).arguments["classes"]
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
            ax.axhline(chance, color=GREY, ls="--", lw=1, label=f"chance: {chance:.0f} %")
            ax.set(xlabel="epoch", xticks=range(1, len(trials[0]["whole"]) + 1))
        axes[0].set_ylabel("validation accuracy (%)")
        named = {}
        for ax in axes:
            named |= dict(zip(*ax.get_legend_handles_labels()[::-1], strict=True))
        drawing.legend(axes[0], 1, (0, 1), named, loc="upper left", fontsize=8)
        text = f"Hyperband stopped {len(ended)} trials of the first repeat: {sum(ended.values())} "
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
    """Draw the accuracies of one trial with several seeds beside those of different trials.

    Bar: the mean, and one standard deviation of a single training on each side.
    """
    winner = max(unpruned(run), key=lambda search: last(search.best))
    rows = {
        "the defaults, {} seeds": [100 * case["accuracy"] for case in cases(run, "default")],
        "a winner, {} fresh seeds": [100 * case["accuracy"] for case in winner.again],
        "its study, {} trials": [last(trial) for trial in winner.trials],
    }
    with drawing.axes(ax, (9, 3.4), "x") as ax:
        for at, (values, colour) in enumerate(zip(rows.values(), SERIES, strict=False)):
            sd = statistics.stdev(values)
            _plot_mean(ax, at, values, colour, sd)
            right = max(*values, statistics.fmean(values) + sd)
            ax.text(right, at, f"   sd {sd:.1f}", va="center", color=colour, fontsize=9)
        drawing.rows(ax, [title.format(len(values)) for title, values in rows.items()])
        ax.set(xlabel="validation accuracy (%)", ylim=(2.5, -0.5))
        ax.margins(x=0.12)
        _, seeds, trials = rows.values()
        sd, (best, second) = statistics.stdev(seeds), sorted(trials)[:-3:-1]
        text = f"One trial, {len(seeds)} seeds: sd {sd:.1f} points, of a difference "
        text += f"{2**0.5 * sd:.1f}\nThe best two of {len(trials)} trials are "
        text += f"{best - second:.1f} points apart"
        entitle(ax, text, _setting(run, "Dots: trainings; bars: mean ± one sd. "))
    return ax


def plot_curse(run, ax=None):
    """Draw the accuracy of winners with fresh seeds over that with which they won.

    Diamond: a trial that won, in one search or in several; dots: its seeds.
    """
    found = winning(run)
    default = statistics.fmean(100 * case["accuracy"] for case in cases(run, "default"))
    with drawing.axes(ax, (9, 4.4), "both") as ax:
        for every in found:
            _plot_winner(ax, every)
        at = statistics.fmean(last(search.best) for search, *_ in found)
        ax.axline((at, at), slope=1, color=GREY, ls="--", lw=1, label="as it won")
        ax.axhline(default, color=RED, ls="--", lw=1, label="the defaults")
        ax.set(xlabel="accuracy as it won (%)", ylabel="with fresh seeds (%)")
        ax.margins(x=0.15)
        drawing.legend(ax, 4, (0, 1))
        gain = statistics.fmean(search.fresh() for search, *_ in found) - default
        gained = spread((-points for points in lost(run)), "+")
        text = f"{_winners_text(run)}\nTrained again, on average: {gained} points; "
        text += f"{gain:.1f} above the defaults"
        entitle(ax, text, _setting(run, "± 95 % interval over the winners. "))
    return ax


def _plot_winner(ax, searches):
    search, x = searches[0], last(searches[0].best)
    seeds = [100 * case["accuracy"] for case in search.again]
    ax.plot([x] * len(seeds), seeds, "o", ms=4, color=SERIES[0], alpha=0.4, mew=0, label="a seed")
    look = {"color": SERIES[0], "mec": "white", "label": "a winner's mean"}
    ax.plot(x, search.fresh(), "D", ms=7, **look)
    if len(searches) > 1:
        place = {"xytext": (8, 0), "textcoords": "offset points", "va": "center", "fontsize": 9}
        ax.annotate(f"won {len(searches)} searches", (x, search.fresh()), **place)


def _winners_text(run):
    """Return the numbers of searches and of different winners, in words."""
    return f"{len(searches(run))} searches chose {len(winning(run))} different trials"


def _plot_mean(ax, at, values, colour, half):
    """Draw values as dots, and their mean, with a bar of this length on each side."""
    mean = statistics.fmean(values)
    ax.plot((mean - half, mean + half), (at, at), color=colour, lw=4, alpha=0.3)
    ax.plot(values, [at] * len(values), "o", ms=4, color=colour, alpha=0.5, mew=0)
    ax.plot(mean, at, "D", ms=5, color=colour, mec="white")


# Optuna's own figures ----------------------------------------------------------------------------


@contextmanager
def _optunas():
    """Yield Optuna's plots, and undo the style that they set for all figures."""
    import optuna
    from optuna.visualization import matplotlib as plots

    with mpl.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield plots


def plot_study(study=None):
    """Draw the trials of a study over time, and their curves; return both axes.

    study: itself, or its name; by default the newest.
    """
    found = find(study).optuna
    with _optunas() as plots:
        axes = plots.plot_timeline(found), plots.plot_intermediate_values(found)
        axes[1].set(xlabel="epochs", ylabel="validation accuracy (%)")
        axes[1].xaxis.set_major_locator(MaxNLocator(integer=True))
        axes[1].yaxis.set_major_formatter(PercentFormatter(1, symbol=""))
    return axes


def plot_mattered(run):
    """Draw the importance of each parameter, and all trials over each of them; return all axes."""
    known, name = as_optuna(run), "accuracy (%)"
    with _optunas() as plots:
        importances = plots.plot_param_importances(known, target_name=name)
        bars = {label.get_text(): bar.get_width() for label, bar in _bars(importances)}
        most = max(bars, key=bars.get)
        importances.set_title("", loc="left")
        importances.set(xlabel="importance (share of the variance)", ylabel="")
        importances.get_legend().remove()
        entitle(importances, f"{most}: {percent(bars[most])} of the accuracy's variance")
        slices = plots.plot_slice(known, target_name=name)
        entitle(slices, _best_quarter_text(known.trials, most))
        return importances, *slices


def _best_quarter_text(trials, name):
    """Return the range of a parameter in the best quarter of some trials of Optuna's."""
    best = sorted(trials, key=lambda trial: -trial.value)[: max(1, len(trials) // 4)]
    values = [trial.params[name] for trial in best]
    text = f"The best quarter of {len(trials)} trials has {name} from {min(values):.2g}"
    return f"{text} to {max(values):.2g}"


def _bars(ax):
    """Return the rows of a figure of Optuna's with their bars."""
    return zip(ax.get_yticklabels(), ax.patches, strict=True)


# A study whose trials are jobs --------------------------------------------------------------------


def plot_jobs(run, axes=None):
    """Draw the trials of a kept study over time, by worker, and the seconds that they used.

    Grey: stopped. A number in a bar on the left: the accuracy of a complete trial, in percent.
    """
    study, log = kept.read(run), kept.of_study(run)
    with drawing.axes(axes, (11, 3.6), "x", (1, 2), width_ratios=(2.6, 1)) as axes:
        for trial in study.trials:
            _plot_job(axes[0], trial, SERIES[2] if trial is study.best else SERIES[0])
        workers = sorted({trial["worker"] for trial in study.trials})
        drawing.rows(axes[0], [f"worker {worker}" for worker in workers])
        axes[0].set_xlabel("seconds")
        drawing.stack(axes[1], 0, study.seconds, {"complete": SERIES[0], "stopped": GREY})
        drawing.write_widths(axes[1], "{:.0f}", 0, color="white", fontsize=9)
        axes[1].barh(1, study.unstopped_s, 0.6, color="none", edgecolor=SERIES[0], ls="--")
        axes[1].text(study.unstopped_s / 2, 1, f"{study.unstopped_s:.0f}", **CENTRED)
        drawing.rows(axes[1], ["used", f"{len(study.trials)} whole"])
        axes[1].set_xlabel(_clock(run))
        drawing.legend(axes[1])
        images = "{train_images:,} images, validated on {val_images:,}".format(**log.setup)
        task = "{model}, {image_size} px, {}; {epochs} epochs".format(
            images, **summary(run).arguments
        )
        setting = f"Each of {len(workers)} workers has one job at a time. {task}\n"
        entitle(axes[0], _jobs_text(study, _clock(run)), setting + drawing.where(run))
    return axes


def _plot_job(ax, trial, colour):
    """Draw a trial's job, with its accuracy if it is complete."""
    row, begin, seconds = (trial[name] for name in ("worker", "begin_s", "seconds"))
    colour = colour if is_complete(trial) else GREY
    ax.barh(row, seconds, 0.7, begin, color=colour, edgecolor="white")
    if is_complete(trial):
        ax.text(begin + seconds / 2, row, f"{last(trial):.1f}", color="white", **CENTRED)


def _jobs_text(study, clock):
    """Return the savings of stopping, and the accuracy of the best trial again, in words."""
    n, again = len(study.trials), spread(last(case) for case in study.again)
    saved = f"{study.saved_epochs:.0%} of their epochs, and {study.saved_s:.0%} of their {clock}"
    text = f"Stopping {n - len(study.complete)} of {n} trials saved {saved}".replace("%", " %")
    text += f"\nThe best (green) had {last(study.best):.1f} %; again, with fresh seeds on unseen "
    return f"{text}images: {again} %"


# The larger model --------------------------------------------------------------------------------


def plot_transfer(run, axes=None):
    """Draw the same trials with both models, and the larger one with the best flags of each."""
    read = transfer_of(run)
    every, of = [*read.cases.values()], read.start["arguments"]
    models = small, larger = of["model"], of["larger"]
    trials = [[c for c in every if (c["phase"], c["model"]) == ("trial", m)] for m in models]
    x, y = ([last(case) for case in own] for own in trials)
    best, again = x.index(max(x)), _again(every, small, larger)
    with drawing.axes(axes, (11, 4.2), "both", (1, 2), width_ratios=(1, 1.2)) as axes:
        left, right = axes
        left.plot(x, y, "o", color=SERIES[0], alpha=0.7)
        left.plot(x[best], y[best], "o", ms=11, mfc="none", mec=SERIES[1], mew=1.5)
        place = {"xytext": (-9, 0), "textcoords": "offset points", "ha": "right", "va": "center"}
        left.annotate(f"best of {small}", (x[best], y[best]), color=SERIES[1], fontsize=9, **place)
        left.set(xlabel=f"{small}: accuracy (%)", ylabel=f"{larger}: accuracy (%)")
        for at, (own, colour) in enumerate(zip(again.values(), SERIES[1:], strict=False)):
            values = [*own.values()]
            _plot_mean(right, at, values, colour, _interval(values))
            right.text(max(values), at - 0.2, spread(values), ha="right", color=colour, fontsize=9)
        drawing.rows(right, again)
        right.set(xlabel=f"{larger} with fresh seeds: accuracy (%)", ylim=(len(again) - 0.5, -0.5))
        cost = [statistics.median(case["seconds"] for case in own) for own in trials]
        text = f"{small}'s trials take {100 * cost[0] / cost[1]:.0f} % of {larger}'s seconds; the "
        text += f"ranks of {len(x)} trials correlate by {_alike(x, y):.2f}\n{_transfer_text(again)}"
        entitle(left, text, _setting(run, "± and bars: 95 % interval of a mean. "))
    return axes


def _again(every, small, larger) -> dict[str, dict[int, float]]:
    """Return the larger model's accuracies in percent, by origin of its flags and by seed."""
    found = {}
    for case in every:
        if case["phase"] == "winner":
            found.setdefault(case["of"], {})[case["seed"]] = case
    chosen = [{parameters(case) for case in found[model].values()} for model in (small, larger)]
    origins = {f"best of {small}": small, "its own best": larger, "the defaults": "default"}
    if chosen[0] == chosen[1]:
        origins = {"best of both": small, "the defaults": "default"}
    return {
        title: {seed: last(case) for seed, case in found[of].items()}
        for title, of in origins.items()
    }


def _transfer_text(again):
    """Return the difference between the best flags of both models; of the same ones, its gain."""
    first, second, *more = again.values()
    if more:
        told = paired.words(paired.difference(second, first))
        return f"Its best flags for the larger model, beside that model's own: {told}"
    told = paired.words(paired.difference(second, first))
    return f"Both chose the same trial; beside the defaults, with fresh seeds: {told}"


def _interval(values):
    """Return half the width of the 95 % interval of a mean; 0 for too few values."""
    return half_width(values) if len(values) >= SEVERAL else 0.0


def _alike(x, y):
    """Return the correlation of the ranks of two lists."""
    return np.corrcoef(*(np.argsort(np.argsort(values)) for values in (x, y)))[0, 1]
