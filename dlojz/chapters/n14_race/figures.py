"""The figures of notebook 14: what the steps of the course buy, and where the seconds go."""

import math
import statistics
from dataclasses import dataclass
from functools import partial

import numpy as np
from matplotlib.ticker import MaxNLocator

from dlojz import race
from dlojz.chapters.n14_race.oneself import SPARE
from dlojz.course import UserError
from dlojz.figures import drawing, paired
from dlojz.figures.look import LINE, PALETTE, SERIES, entitle
from dlojz.figures.report import measured
from dlojz.race import ranking
from dlojz.race.ranking import quantile
from dlojz.runs.stats import half_width, summary
from dlojz.table import QUIET, Table

COLOURS = {  # of the parts of a run's seconds
    "imports": PALETTE["limit"],
    "data and model": LINE,
    "compiling": PALETTE["activations"],
    "waiting for images": PALETTE["data"],
    "training": PALETTE["speed"],
    "validation": PALETTE["forward"],
    "saving": PALETTE["transfer"],
    "ending": QUIET,
}
RUNS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)  # of each entry
BOX = {"frameon": True, "facecolor": "white", "edgecolor": "none", "framealpha": 1}
BOX |= {"loc": "upper right"}  # of a legend inside the axes
NO_SENSOR = "joules: not measured, as no sensor of this machine reports them"

of_experiment = partial(drawing.of_experiment, field="rung", experiment="experiments/bought.py")


@dataclass(frozen=True)
class Rung:
    """A step of the course: its pilot, and its trainings within the budget, one for each seed."""

    title: str
    pilot: dict
    trainings: tuple[dict, ...]

    @property
    def epochs(self) -> float:
        """Return the mean number of epochs that fitted in the budget; 0 if none did."""
        return statistics.fmean([t["epochs"] for t in self.trainings] or [0])

    @property
    def by_seed(self) -> dict[int, float]:
        """Return the accuracies in percent, by seed."""
        return {t["seed"]: 100 * t["accuracy"] for t in self.trainings}

    def mean(self, what: str) -> float | None:
        """Return the mean of a number of its trainings; None if it was not measured."""
        values = [t[what] for t in self.trainings if what in t]
        return statistics.fmean(values) if values else None

    @property
    def fixed_s(self) -> float:
        """Return the seconds of the pilot without its epochs."""
        return self.pilot["seconds"] - self.pilot["epochs"] * self.pilot["epoch_s"]

    def fitting(self, seconds):
        """Return the whole epochs that fit in a budget of seconds, some spared, by the pilot."""
        return np.maximum(
            0, np.floor(((1 - SPARE) * seconds - self.fixed_s) / self.pilot["epoch_s"])
        )


def rungs(run) -> list[Rung]:
    """Return the rungs of a recording, in the order in which they were run."""
    found = {}
    for case in of_experiment(run).cases.values():
        found.setdefault(case["rung"], []).append(case)
    return [
        Rung(title, cases[0], tuple(c for c in cases if c["phase"] == "training"))
        for title, cases in found.items()
    ]


def _timed(run) -> list[Rung]:
    """Return the rungs whose pilot came to its end. Raises UserError if there are none."""
    if found := [rung for rung in rungs(run) if "epoch_s" in rung.pilot]:
        return found
    raise UserError(
        f"{measured(run).path}: no rung's first, short training came to its end: "
        "give more --seconds, or repeat it when the machine is quiet"
    )


def epochs_ratio(run) -> float | None:
    """Return the epochs of the last rung in the budget, over those of the first one, if any."""
    first, *_, last = rungs(run)
    return last.epochs / first.epochs if first.epochs else None


def _setting(run) -> str:
    given = summary(run).arguments
    train, val = (given["classes"] * given[f"{name}_per_class"] for name in ("images", "val"))
    task = f"{given['model']}, {given['image_size']} px, batch {given['batch_size']}, "
    task += f"{given['classes']} classes, {train:,} images and {val:,} to validate on; "
    task += f"judged on {given['classes'] * given['judged']:,} others, {given['seeds']} seeds"
    return f"{task}\n{drawing.where(run)}"


def _budget(run) -> float:
    return summary(run).arguments["seconds"]


# The ladder ---------------------------------------------------------------------------------------


def plot_bought(run, axes=None):
    """Draw the epochs that fit in the budget, and the accuracy that they reach, by rung."""
    found = rungs(run)
    size = (10, 1.9 + 0.5 * len(found))
    with drawing.axes(axes, size, "x", (1, 2), sharey=True) as axes:
        for row, rung in enumerate(found):
            axes[0].barh(row, rung.epochs, 0.6, color=PALETTE["speed"])
            axes[0].text(rung.epochs, row, _epochs_text(rung), va="center", fontsize=9)
            if rung.trainings:
                _plot_accuracy(axes[1], row, [*rung.by_seed.values()])
            else:
                axes[1].text(0, row, " not judged", va="center", fontsize=9, color=QUIET)
        drawing.rows(axes[0], [rung.title for rung in found])
        most = max(rung.epochs for rung in found)
        axes[0].set(xlabel=f"epochs in {_budget(run):g} s", xlim=(0, 1.5 * most or 1))
        axes[1].set(xlabel="accuracy (%): seeds, mean, 95 % interval", xlim=(0, 108))
        entitle(axes[0], bought_text(run), _setting(run))
    return axes


def _epochs_text(rung):
    if rung.trainings:
        return f"  {rung.epochs:.3g}"
    if "epoch_s" not in rung.pilot:
        return f"  none: not ended after {rung.pilot['seconds']:.0f} s"
    return f"  none: one takes {rung.fixed_s + rung.pilot['epoch_s']:.0f} s"


def _plot_accuracy(ax, row, values):
    mean, half = statistics.fmean(values), half_width(values) if len(values) > 1 else 0
    ax.plot(values, [row] * len(values), "o", ms=4, color=PALETTE["speed"], alpha=0.4, mew=0)
    ends = max(0, mean - half), min(100, mean + half)
    ax.plot(ends, (row, row), color=PALETTE["speed"], lw=4, alpha=0.5, solid_capstyle="butt")
    ax.plot(mean, row, "D", ms=6, color=PALETTE["speed"], mec="white")
    ax.text(max(*ends, *values), row, f"  {mean:.4g}", va="center", fontsize=9)


def bought_text(run) -> str:
    """Return the gain of the last rung over the first that was judged, in epochs and points."""
    judged = [rung for rung in rungs(run) if rung.trainings]
    if len(judged) < 2:
        return f"In {_budget(run):g} s too few rungs complete an epoch: give more seconds"
    first, best = judged[0], max(judged, key=lambda r: r.epochs)
    told = paired.difference(first.by_seed, best.by_seed)
    epochs = f"{best.epochs:.3g} epochs in {_budget(run):g} s instead of {first.epochs:.3g}"
    return f"{best.title}, beside {first.title}: {epochs}\n{_points(told)}"


def _points(told):
    if told.half is None:
        return f"{told.mean:+.0f} points with one seed, which shows nothing yet"
    return f"Accuracy: {paired.words(told)}, by pairs of {told.seeds} seeds"


def bought(run) -> Table:
    """Return a table of all rungs: start, seconds per epoch, epochs, accuracy, joules."""
    rows = []
    for rung in rungs(run):
        known = "epoch_s" in rung.pilot
        start = (f"{rung.fixed_s:.1f}", f"{rung.pilot['epoch_s']:.2f}") if known else ("", "")
        accuracy = f"{statistics.fmean(rung.by_seed.values()):.2f}" if rung.trainings else ""
        joules = rung.mean("joules")
        told = "not measured" if joules is None else f"{joules:,.0f}"
        rows.append((rung.title, *start, f"{rung.epochs:.3g}", accuracy, told))
    head = ("rung", "start and end (s)", "epoch (s)", "epochs", "accuracy (%)", "joules")
    return Table(head, rows, "<>>>>>")


# Epochs and points --------------------------------------------------------------------------------


def plot_epochs(run, axes=None):
    """Draw the epochs against the budget, rung by rung, and the accuracy against the epochs."""
    found = _timed(run)
    with drawing.axes(axes, (10, 4.4), "both", (1, 2)) as axes:
        longest = max(_budget(run), *(r.fixed_s + r.pilot["epoch_s"] for r in found))
        seconds = np.linspace(0, 1.6 * longest, 600)
        for at, rung in enumerate(found):
            look = {"color": SERIES[at % len(SERIES)], "ls": "-" if at < len(SERIES) else ":"}
            axes[0].plot(seconds, rung.fitting(seconds), label=rung.title, **look)
            x = [t["epochs"] for t in (rung.pilot, *rung.trainings)]
            y = [100 * t["accuracy"] for t in (rung.pilot, *rung.trainings)]
            axes[1].plot(x, y, "o", color=look["color"], mec="white", ms=6, label=rung.title)
        axes[0].axvline(_budget(run), color=PALETTE["failure"], ls="--", lw=1)
        axes[0].set(
            xlabel="budget (s), from start to end",
            ylabel=f"epochs, with {SPARE:.0%} to spare".replace("%", " %"),
        )
        axes[0].yaxis.set_major_locator(MaxNLocator(integer=True))
        axes[1].set(xlabel="epochs", ylabel="accuracy (%)", ylim=(0, 100))
        drawing.legend(axes[0], 1, (0, 1), **BOX | {"loc": "upper left", "fontsize": 8})
        entitle(axes[0], epochs_text(run), _setting(run))
    return axes


def breaks_even(run, rung: str, other: str) -> float | None:
    """Return the budget in seconds from which a rung fits more epochs than another; None: never."""
    known = {r.title: r for r in _timed(run)}
    if missing := [name for name in (rung, other) if name not in known]:
        raise UserError(f"no pilot of {missing[0]!r}: expected two of {', '.join(known)}")
    mine, theirs = known[rung], known[other]
    a, b = mine.pilot["epoch_s"], theirs.pilot["epoch_s"]
    if a >= b:
        return None if mine.fixed_s >= theirs.fixed_s else 0.0
    return max(0.0, (mine.fixed_s * b - theirs.fixed_s * a) / (b - a) / (1 - SPARE))


def epochs_text(run) -> str:
    """Return two sentences: on the budget in which compiling pays, and on more epochs."""
    known = {rung.title: rung.pilot["epoch_s"] for rung in _timed(run)}
    first, best = next(iter(known)), min(known, key=known.get)
    told = [f"Left: {best}, {known[best]:.2f} s for an epoch; {first}, {known[first]:.2f} s"]
    if {"09 compile", "05 loader"} <= {*known}:
        when = breaks_even(run, "09 compile", "05 loader")
        pays = "never pays here" if when is None else f"pays in budgets above {when:.0f} s"
        told[0] += f"; compiling {pays}"
    runs = [t for r in rungs(run) for t in (r.pilot, *r.trainings) if "accuracy" in t]
    few, many = (pick(runs, key=lambda t: t["epochs"])["epochs"] for pick in (min, max))
    means = [
        statistics.fmean(100 * t["accuracy"] for t in runs if t["epochs"] == n) for n in (few, many)
    ]
    told.append(f"Right: {few} epochs have {means[0]:.0f} %, and {many} have {means[1]:.0f} %")
    return "\n".join(told)


# Seconds and joules -------------------------------------------------------------------------------


def plot_seconds(run, ax=None):
    """Draw the parts of a run's seconds, from the start of its process to its end."""
    found = _timed(run)
    with drawing.axes(ax, (10, 2.2 + 0.5 * len(found)), "x") as ax:
        for row, rung in enumerate(found):
            drawing.stack(ax, row, parts(rung), COLOURS)
        drawing.write_widths(ax, "{:.1f}", 0.035 * ax.get_xlim()[1], fontsize=8, color="white")
        marks = ["" if rung.trainings else f", {rung.pilot['epochs']} epochs" for rung in found]
        names = [r.title + mark for r, mark in zip(found, marks, strict=True)]
        drawing.rows(ax, names)
        ax.axvline(_budget(run), color=PALETTE["failure"], ls="--", lw=1)
        ax.set(xlabel="seconds")
        drawing.legend(ax, 8, (0, 1), fontsize=8, columnspacing=1.0, handlelength=1.2)
        entitle(ax, seconds_text(run), _setting(run))
    return ax


def parts(rung: Rung) -> dict[str, float]:
    """Return the mean seconds of each part, of its trainings or else of its pilot."""
    told = [t["parts"] for t in rung.trainings or (rung.pilot,)]
    return {name: statistics.fmean(t[name] for t in told) for name in COLOURS}


def seconds_text(run) -> str:
    """Return the shares of a run's seconds in which it trains: the least and the most."""
    shares = []
    for rung in (r for r in rungs(run) if r.trainings):
        found = parts(rung)
        shares.append((found["training"] / sum(found.values()), rung.title))
    if not shares:
        return "No rung completes an epoch in this budget"
    least, most = (f"{share:.0%} ({title})" for share, title in (min(shares), max(shares)))
    return f"Training is {least} to {most} of a run's seconds".replace("%", " %")


def plot_joules(run, ax=None):
    """Draw accuracy over joules by rung, and the energy of an idle GPU in the same seconds."""
    found = [r for r in rungs(run) if r.trainings and r.mean("joules") is not None]
    with drawing.axes(ax, (10, 2.2 + 0.5 * len(found) if found else 0.8), "x") as ax:
        if not found:
            ax.text(0, 0.5, NO_SENSOR, transform=ax.transAxes, color=QUIET)
            ax.set_axis_off()
            return ax
        watts = next((m.value for m in measured(run).measures if m.what == "idle"), 0.0)
        for row, rung in enumerate(found):
            idle, whole = watts * rung.mean("seconds"), rung.mean("joules")
            split = {"idle": min(idle, whole), "work": max(0.0, whole - idle)}
            drawing.stack(ax, row, split, {"idle": PALETTE["limit"], "work": PALETTE["power"]})
            per = 1000 * rung.epochs / whole
            ax.text(whole, row, f"  {per:.1f} epochs per kJ", va="center", fontsize=9)
        drawing.rows(ax, [rung.title for rung in found])
        ax.set(xlabel="joules of the GPU, from start to end")
        ax.set_xlim(right=1.3 * max(rung.mean("joules") for rung in found))
        drawing.legend(ax, 2)
        entitle(ax, joules_text(found, watts), _setting(run))
    return ax


def joules_text(found: list[Rung], watts: float) -> str:
    """Return the share of the energy that an idle GPU would have taken, and the best rung."""
    best = max(found, key=lambda r: r.epochs / r.mean("joules"))
    shares = [watts * r.mean("seconds") / r.mean("joules") for r in found]
    told = f"{best.title} gets most epochs from a joule"
    idle = f"Idle, the GPU takes {watts:.0f} W: {min(shares):.0%} to {max(shares):.0%} of a run"
    return f"{told}\n{idle}".replace("%", " %")


# Runs ---------------------------------------------------------------------------------------------


def gates(margin, level: float) -> dict[int, float]:
    """Return the smallest difference that is shown, in points, by the runs of each of two entries.

    margin: their comparison, a ranking.Margin, which gives the spread of a run. For its own number
    of runs this is its gate. level: the risk that luck alone passes the gate.
    """
    own = len(margin.points)
    share = margin.freedom / (own - 1)  # the best so far may have run in other rounds, too
    return {
        n: quantile(level, share * (n - 1)) * math.sqrt(2 / n) * margin.sd
        for n in sorted({*RUNS, own})
    }


def plot_gate(of_race, ax=None):
    """Draw the gate of each comparison against the runs of each entry, and the difference found.

    A dot is a comparison: above its curve the difference is shown, below it is a tie.
    """
    of_race = race.open_race(of_race)
    found = [(p.name, p.margin) for p in race.standings(of_race) if p.margin][: len(SERIES)]
    if not found:
        raise UserError(f"{of_race.folder}: no entry has been compared with the best so far yet")
    with drawing.axes(ax, (9, 4)) as ax:
        for colour, (_, margin) in zip(SERIES, found, strict=False):
            gate, own, size = gates(margin, of_race.level), len(margin.points), abs(margin.mean)
            ax.plot(gate.keys(), gate.values(), ".-", color=colour, label=_compared(margin))
            ax.plot((own, max(gate)), (size, size), color=colour, ls="--", lw=1)
            ax.plot(own, size, "o", ms=8, color=colour, mec="white")
        ax.set(xscale="log", xlabel="runs of each entry", ylabel="gate (points of accuracy)")
        ax.set_xticks(RUNS, map(str, RUNS))
        ax.minorticks_off()
        ax.set_ylim(0, 1.3 * max(max(m.gate, abs(m.mean)) for _, m in found))
        drawing.legend(ax, 1, (1, 1), **BOX)
        setting = f"Dots: the differences found, by pairs; risk {of_race.level:.0%}"
        entitle(ax, gate_text([m for _, m in found], of_race.level), setting.replace("%", " %"))
    return ax


def _compared(margin):
    side = "ahead of" if margin.mean > 0 else "behind"
    told = f"{margin.challenger}: {abs(margin.mean):.1f} points {side} {margin.best}"
    return f"{told}, one run of which varies by {margin.sd:.1f}"


def gate_text(margins, level: float) -> str:
    """Return a sentence on the first tie, or on the first comparison if none is a tie."""
    one = next((m for m in margins if m.word == ranking.TIE), margins[0])
    told = f"{one.challenger}, beside {one.best}: {len(one.points)} runs of each show a difference"
    told += f" of {one.gate:.1f} points"
    if one.word != ranking.TIE:
        return told
    more = next((n for n, gate in gates(one, level).items() if gate <= abs(one.mean)), None)
    return f"{told};\n{more or f'more than {RUNS[-1]}'} would show the {abs(one.mean):.1f} found"
