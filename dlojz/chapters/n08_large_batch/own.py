"""Numbers and figures of the runs of a trainee in notebook 08: finder, updates, learning rates."""

import math
from functools import partial

from dlojz.chapters.n08_large_batch import figures
from dlojz.course import UserError
from dlojz.figures import drawing
from dlojz.figures.look import PALETTE, SERIES, entitle
from dlojz.runs import log

lengths_of = partial(drawing.of_experiment, field="ratios", experiment="experiments/layers.py")


def plot_rates(run, ax=None):
    """Draw the losses that the trainer's finder found, against the learning rate."""
    run = log.read(run)
    table = [*zip(run.rates.rates, run.rates.losses, strict=True)]
    if not table:
        raise UserError(f"{run.path}: no rate was tried in it; give the trainer --find-lr 40")
    finite = [(rate, loss) for rate, loss in table if math.isfinite(loss)]
    if not finite:
        raise UserError(f"{run.path}: no loss of its finder is a number; look at train_step")
    low = min(loss for _, loss in finite)
    with drawing.axes(ax, (8, 3.8), "both") as ax:
        ax.plot(*zip(*finite, strict=True), "o-", ms=4, color=SERIES[0])
        lowest = next(rate for rate, loss in finite if loss == low)
        ax.axvline(lowest, color=PALETTE["limit"], ls="--", lw=1)
        ax.text(lowest, ax.get_ylim()[1], f" lowest loss: at {lowest:.2g}", va="top", fontsize=9)
        ax.set(xscale="log", xlabel="learning rate", ylabel="loss before the update")
        setting = f"{len(table)} updates, one at each rate; {drawing.where(run)}"
        entitle(ax, f"The loss is lowest at a rate of {lowest:.2g}", setting)
    return ax


def plot_layers(run, ax=None):
    """Draw the length of each layer's update, relative to its weights, with SGD and LAMB."""
    run = lengths_of(run)
    names = list(next(iter(run.cases.values()))["ratios"])
    with drawing.axes(ax, (10, 4.4), "both") as ax:
        for (name, case), colour in zip(run.cases.items(), (SERIES[1], SERIES[0]), strict=True):
            found = [case["ratios"].get(layer, math.nan) for layer in names]
            label = f"{name}, rate {case['rate']:g}"
            ax.plot(range(len(names)), found, "o-", lw=1, ms=5, color=colour, label=label)
        ax.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=7)
        ax.set(yscale="log", ylabel="length of the update / of the weights")
        updates = run.start["arguments"]["updates"]
        drawing.legend(ax, 2)
        setting = f"update {updates}, weights of two and more dimensions; {drawing.where(run)}"
        entitle(ax, _spread_text(run), setting)
    return ax


def _spread_text(run):
    """Return the ratio of the layers' largest relative update to the smallest, by optimizer."""
    told = []
    for name, case in run.cases.items():
        ratios = [ratio for ratio in case["ratios"].values() if ratio > 0]
        told.append(f"{name} {max(ratios) / min(ratios):.3g} times")
    return f"Relative updates of the layers lie apart: {', '.join(told)}"


def rate_ratio(run, optimizer: str = "sgd") -> float:
    """Return the best learning rate of the large batch, as a multiple of the smallest batch's."""
    found = {s.batch: s.rate for s in figures.by_optimizer(run)[optimizer]}
    return found[figures.large(run)] / found[min(found)]
