"""Figures of notebook 08: what a large batch costs, and what wins it back."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from dlojz.course import UserError
from dlojz.figures import drawing, paired
from dlojz.figures.look import PALETTE, SERIES, entitle
from dlojz.figures.paired import BETTER, WORSE
from dlojz.figures.report import measured
from dlojz.runs.stats import half_width, summary
from dlojz.table import Table

TITLES = {"sgd": "SGD", "adamw": "AdamW", "lamb": "LAMB", "lars": "LARS"}
TITLES |= {"lion": "Lion", "muon": "Muon"}
COLOURS = dict(zip(TITLES, SERIES, strict=True))
AGAIN = "accuracy_again"
HOW = {"accuracy": "as it is", AGAIN: "statistics computed again"}
PARTS = {"accuracy": SERIES[0], AGAIN: SERIES[1]}
MARKS = "mean and its 95 % interval"

trained = partial(drawing.of_experiment, field="optimizer")
batches_of = partial(trained, experiment="experiments/batches.py")
variants_of = partial(trained, experiment="experiments/variants.py")


# Trainings ---------------------------------------------------------------------------------------


class Mean(NamedTuple):
    """A mean, and half the width of its 95 % interval, if there are two values or more."""

    mean: float
    half: float | None

    @classmethod
    def of(cls, values: Iterable[float]) -> "Mean":
        """Return the mean of these values."""
        values = list(values)
        return cls(statistics.fmean(values), half_width(values) if len(values) > 1 else None)

    def text(self, form: str = ".1f", unit: str = "") -> str:
        """Return the mean with its interval: "88.4 ± 0.9"."""
        half = "" if self.half is None else f" ± {self.half:{form}}"
        return f"{self.mean:{form}}{half}{unit}"


@dataclass(frozen=True)
class Setting:
    """The trainings of one optimizer with one batch and one learning rate, over their seeds."""

    optimizer: str
    batch: int
    rate: float
    rule: str
    cases: tuple[dict, ...]

    @property
    def title(self) -> str:
        """Return the optimizer's name as people write it."""
        return TITLES[self.optimizer]

    def by_seed(self, what: str = "accuracy") -> dict[int, float]:
        """Return the accuracies in percent, by seed."""
        return {case["seed"]: 100 * case[what] for case in self.cases}

    def accuracy(self, what: str = "accuracy") -> Mean:
        """Return the mean accuracy, in percent."""
        return Mean.of(self.by_seed(what).values())

    def mean(self, what: str) -> float | None:
        """Return the mean of updates, images, seconds or joules; None if it was not measured."""
        values = [case[what] for case in self.cases if what in case]
        return statistics.fmean(values) if values else None


def settings(run, phase: str = "fresh") -> list[Setting]:
    """Return the trainings of a phase: "tuning", "fresh", "rule" or "as many updates"."""
    found = {}
    for case in paired.trainings(run):
        if case["phase"] == phase:
            key = case["optimizer"], case["batch"], case["rate"], case.get("rule", "")
            found.setdefault((*key, case["updates"]), []).append(case)
    if not found:
        raise UserError(f"{measured(run).path}: no training of the phase {phase!r} in it yet")
    return [Setting(*key[:4], tuple(cases)) for key, cases in sorted(found.items())]


def fresh(run) -> dict[tuple[str, int], Setting]:
    """Return the trainings with the chosen learning rates, by optimizer and batch."""
    return {(s.optimizer, s.batch): s for s in settings(batches_of(run))}


def large(run) -> int:
    """Return the large batch, which all optimizers were trained with."""
    return summary(run).arguments["at"]


def difference(small: Setting, other: Setting, what: str = "accuracy") -> paired.Difference:
    """Return the difference of accuracies in percentage points, by pairs of seeds."""
    return paired.difference(small.by_seed(what), other.by_seed(what))


def by_optimizer(run) -> dict[str, list[Setting]]:
    """Return the optimizers that were trained with several batches, the smallest first."""
    found = {}
    for setting in fresh(run).values():
        found.setdefault(setting.optimizer, []).append(setting)
    several = {name: sorted(s, key=lambda s: s.batch) for name, s in found.items() if len(s) > 1}
    return {name: several[name] for name in TITLES if name in several}


def _setting(run) -> str:
    """Return the task and the hardware, in two lines."""
    given = summary(run).arguments
    task = f"{task_of(given)}, {given['epochs']} epochs; {given['seeds']} seeds: {MARKS}"
    return f"{task}\n{drawing.where(run)}"


def task_of(given: dict) -> str:
    """Return the model and the images of a job's arguments."""
    images = given["classes"] * given["images_per_class"]
    val = given["classes"] * given["val_per_class"]
    model = f"{given['model']}, {given['image_size']} px"
    return f"{model}, {images:,} images, validated on {val:,}"


# The batch ---------------------------------------------------------------------------------------


def plot_batches(run, ax=None):
    """Draw the accuracy against the batch, as it is and with the statistics computed again."""
    swept, at = by_optimizer(run), large(run)
    with drawing.axes(ax, (9, 4.8)) as ax:
        for name, line in swept.items():
            for what, dashes in (("accuracy", "-"), (AGAIN, ":")):
                means = [s.accuracy(what) for s in line]
                x = [s.batch * (1.0 if what == "accuracy" else 1.06) for s in line]
                mark = {"marker": "o", "mfc": COLOURS[name] if dashes == "-" else "white"}
                look = {"color": COLOURS[name], "ls": dashes, "capsize": 3, **mark}
                label = f"{TITLES[name]}, {HOW[what]}"
                halves = [m.half or 0 for m in means]
                ax.errorbar(x, [m.mean for m in means], halves, label=label, **look)
        sizes = sorted({s.batch for line in swept.values() for s in line})
        _logarithmic(ax, sizes)
        ax.set(xlabel="images in a batch, after as many epochs", ylabel="accuracy (%)")
        drawing.legend(ax, 1, (0, 0))
        lines = [_loss_text(line, at) for line in swept.values()]
        entitle(ax, "\n".join(lines), _setting(run))
    return ax


def _loss_text(line, at):
    """Return the difference between the small and the large batch, in a sentence."""
    small, other = line[0], next((s for s in line if s.batch == at), line[-1])
    told, again = (paired.words(difference(small, other, what)) for what in HOW)
    names = f"{small.title}, {other.batch:,} instead of {small.batch:,}"
    return f"{names}: {told}; statistics again: {again}"


def _logarithmic(ax, sizes):
    ax.set_xscale("log")
    ax.set_xticks(sizes, [f"{size:,}" for size in sizes])
    ax.minorticks_off()


# The optimizers ----------------------------------------------------------------------------------


def plot_optimizers(run, ax=None):
    """Draw the accuracy of each optimizer with the large batch: while tuned, and afterwards.

    Grey: the trainings of the tuning, all its rates. In colour: the chosen rate on fresh seeds.
    """
    at, order = large(run), _ranked(run)
    tuning = [s for s in settings(run, "tuning") if s.batch == at]
    with drawing.axes(ax, (9, 1.9 + 0.62 * len(order)), "x") as ax:
        least = 100.0
        for row, s in enumerate(order):
            own = [t for t in tuning if t.optimizer == s.optimizer]
            x = [a for t in own for a in t.by_seed().values()]
            look = {"color": PALETTE["limit"], "alpha": 0.6, "mew": 0}
            ax.plot(x, [row - 0.2] * len(x), "o", ms=3.5, label="tuning, all rates", **look)
            least = min(least, *(s.accuracy(what).mean for what in HOW))
            chosen = [t.accuracy().mean for t in own if t.rate == s.rate]
            ax.plot(chosen, [row - 0.2], "|", ms=11, color="black", label="tuning, chosen rate")
            for what, shift in (("accuracy", 0.05), (AGAIN, 0.25)):
                label = f"fresh seeds, {HOW[what]}"
                _plot_mean(ax, row + shift, s.accuracy(what), PARTS[what], label)
        small = by_optimizer(run).get("sgd", [None])[0]
        if small:
            label = f"SGD, batches of {small.batch:,}"
            ax.axvline(small.accuracy().mean, color=PALETTE["failure"], ls="--", label=label)
        drawing.rows(ax, [f"{s.title}, {s.rate:g}" for s in order])
        _zoom(ax, least - 20)
        ax.set(xlabel=f"accuracy with batches of {at:,} (%)")
        drawing.legend(ax, 3, (0, 1), fontsize=8)
        entitle(ax, optimizers_text(order, small), _setting(run))
    return ax


def _zoom(ax, low):
    """Let the axis begin here, and write beside each row the points that lie further left."""
    for line in ax.lines:
        left = sum(x < low for x in line.get_xdata())
        if left and line.get_color() == PALETTE["limit"]:
            ax.text(low, line.get_ydata()[0], f"◂ {left} below", va="center", fontsize=8)
    ax.set_xlim(left=low)


def _ranked(run):
    """Return the trainings with the large batch, the most accurate optimizer first."""
    found = [s for s in fresh(run).values() if s.batch == large(run)]
    return sorted(found, key=lambda s: -s.accuracy().mean)


def _plot_mean(ax, at, mean, colour, label):
    half = mean.half or 0
    ends = (mean.mean - half, mean.mean + half)
    ax.plot(ends, (at, at), color=colour, lw=4, solid_capstyle="butt", alpha=0.55)
    ax.plot(mean.mean, at, "D", ms=5, color=colour, mec="white", label=label)
    ax.text(ends[1], at, f"  {mean.text()}", va="center", fontsize=8, color=colour)


def optimizers_text(order: list[Setting], small: Setting | None) -> str:
    """Return the gap of the best optimizer to the next, and to SGD on small batches."""
    best, *others = order
    told = [f"Batches of {best.batch:,}: {best.title} is first"]
    told += [_beside(best, other) for other in others[:1]]
    text = ", ".join(told)
    return text + (f"\nSGD, batches of {small.batch:,}: {_beside(small, best)}" if small else "")


def _beside(one, other):
    """Return the difference of one from another, in words."""
    told = difference(other, one)
    if told.word in (BETTER, WORSE):
        return f"{paired.words(told)} than {other.title}"
    return f"beside {other.title} {paired.words(told)}"


def optimizers(run) -> Table:
    """Return a table of all optimizers with the large batch: chosen rate, tuning, fresh seeds."""
    at, rows = large(run), []
    tuning = [s for s in settings(run, "tuning") if s.batch == at]
    for s in _ranked(run):
        grid = sorted(t.rate for t in tuning if t.optimizer == s.optimizer)
        chosen = next(t for t in tuning if (t.optimizer, t.rate) == (s.optimizer, s.rate))
        edge = ", at the grid's end" if s.rate in (grid[0], grid[-1]) else ""
        row = f"{s.rate:g} of {grid[0]:g} to {grid[-1]:g}{edge}", f"{chosen.accuracy().mean:.1f}"
        rows.append((s.title, *row, *(s.accuracy(what).text() for what in HOW)))
    head = (f"batch {at:,}", "rate", "tuning (%)", "fresh seeds (%)", "statistics again (%)")
    return Table(head, rows, "<<>>>")


# The rules of the rate ---------------------------------------------------------------------------


def _ruled(run):
    """Return SGD with the small batch, and [(title, setting), ...] with the large one."""
    small = by_optimizer(run)["sgd"][0]
    tuned = fresh(run)["sgd", large(run)]
    found = [(f"tuned rate, {tuned.rate:g}", tuned)]
    for phase in ("rule", "as many updates"):
        for s in sorted(settings(run, phase), key=lambda s: s.rate):
            found.append((f"{s.rule}, {s.rate:g}: {s.mean('updates'):,.0f} updates", s))
    return small, found


def plot_rules(run, ax=None):
    """Draw the loss of SGD with the large batch, by the rule of its rate and by its updates."""
    small, others = _ruled(run)
    with drawing.axes(ax, (9, 1.9 + 0.55 * len(others)), "x") as ax:
        _plot_pairs(ax, [(title, small, s) for title, s in others])
        text = f"accuracy minus that of batches of {small.batch:,} (percentage points)"
        ax.set_xlabel(text)
        lost, kept = (_worst(small, others, many) for many in (False, True))
        entitle(ax, f"SGD, batches of {large(run):,}\n{lost}\n{kept}", _setting(run))
    return ax


def _worst(small, others, many):
    """Return the loss of the linear rule in as many epochs, or in as many updates."""
    updates = "As many updates" if many else "As many epochs"
    for _, s in others:
        same = round(s.mean("updates")) == round(small.mean("updates"))
        if s.rule == "linear" and same == many:
            return f"{updates}, linear rule: {paired.words(difference(small, s))}"
    return ""


def _plot_pairs(ax, pairs):
    """Draw the differences of (title, clean, other), as they are and with statistics again."""
    ax.axvline(0, color=PALETTE["limit"], lw=1)
    for at, (title, clean, other) in enumerate(pairs):
        for what, shift in (("accuracy", -0.17), (AGAIN, 0.17)):
            row = paired.row(title, clean.by_seed(what), other.by_seed(what))
            paired.plot_row(ax, at + shift, row, PARTS[what], hollow=what == AGAIN)
    for what, colour in PARTS.items():
        mark = {"mfc": "white", "mec": colour} if what == AGAIN else {"mec": "white"}
        ax.plot([], [], "D", color=colour, label=HOW[what], **mark)
    drawing.rows(ax, [title for title, *_ in pairs])
    ax.margins(x=0.1)
    drawing.legend(ax, 2, (0, 1))


# The changes -------------------------------------------------------------------------------------


def changes(run, optimizer: str) -> tuple[Setting, dict[str, Setting]]:
    """Return the clean trainings of an optimizer, and those with a change, by title."""
    found = {}
    for case in paired.trainings(variants_of(run)):
        if case["optimizer"] == optimizer and case["phase"] == "fresh":
            found.setdefault(case["title"], []).append(case)
    if not found:
        raise UserError(f"{variants_of(run).path}: no change of {optimizer!r} was trained")
    made = {
        title: Setting(optimizer, cases[0]["batch"], cases[0]["rate"], "", tuple(cases))
        for title, cases in found.items()
    }
    clean, *others = made
    return made[clean], {title: made[title] for title in others}


def plot_variants(run, optimizer: str = "sgd", ax=None):
    """Draw the difference that each change makes with the large batch, by pairs of seeds.

    optimizer: "sgd" or "adamw".
    """
    clean, others = changes(run, optimizer)
    with drawing.axes(ax, (9, 1.9 + 0.55 * len(others)), "x") as ax:
        _plot_pairs(ax, [(title, clean, other) for title, other in others.items()])
        at = f"{clean.title}, batch {clean.batch:,}, rate {clean.rate:g}"
        ax.set_xlabel(f"accuracy minus that of {at} (percentage points)")
        entitle(ax, variants_text(clean, others), _setting(run))
    return ax


def variants_text(clean: Setting, others: dict[str, Setting]) -> str:
    """Return the changes that are shown better than the clean training, and the number of worse."""
    words = {title: difference(clean, other).word for title, other in others.items()}
    better = [title for title, word in words.items() if word == BETTER]
    worse = sum(word == WORSE for word in words.values())
    told = ", ".join(better) or "none of them"
    at = f"{clean.title} has {clean.accuracy().text(unit=' %')}"
    return f"{at}. Shown worse: {worse} of {len(words)} changes\nShown better: {told}"
