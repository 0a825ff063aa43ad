"""The searches of a recording: their trials, their winners, and the trials that were stopped."""

import math
import statistics
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np

from dlojz.course import UserError
from dlojz.figures import drawing, paired

SAMPLERS = {"random": "random", "tpe": "TPE", "gp": "GP"}
PRUNERS = {"none": "no pruning", "hyperband": "Hyperband"}
TOP = 3  # trials that a search should not have stopped
PARAMETERS = ("lr", "mom", "wd")

studies_of = partial(drawing.of_experiment, field="phase", experiment="experiments/studies.py")


@dataclass(frozen=True)
class Search:
    """A study of a recording: its trials in order, and its winner with fresh seeds."""

    sampler: str
    pruner: str
    repeat: int
    trials: tuple[dict, ...]
    again: tuple[dict, ...]

    @property
    def title(self) -> str:
        """Return the names of the sampler and, if there is one, of the pruner."""
        return SAMPLERS[self.sampler] + (" + Hyperband" if self.pruner == "hyperband" else "")

    @property
    def best(self) -> dict:
        """Return the complete trial with the highest accuracy; of equal ones the first."""
        return max(filter(is_complete, self.trials), key=last)

    @property
    def winner(self) -> tuple:
        """Return the identity of the best trial: all of a repeat have one seed."""
        return self.repeat, *parameters(self.best)

    def fresh(self, what: str = "accuracy") -> float:
        """Return the winner's mean accuracy in percent, with fresh seeds.

        what: "accuracy" on the images of the search, "unseen" on others.
        """
        return 100 * statistics.fmean(case[what] for case in self.again)

    def progress(self) -> tuple[list[float], list[float]]:
        """Return the seconds that were used as each trial ended, and the best percentage so far."""
        reached = (last(trial) if is_complete(trial) else math.nan for trial in self.trials)
        seconds = accumulate(trial["seconds"] for trial in self.trials)
        return [*seconds], [*accumulate(reached, np.fmax)]


def parameters(trial: dict) -> tuple[float, ...]:
    """Return the parameters of a trial."""
    return tuple(trial[name] for name in PARAMETERS)


def is_complete(trial: dict) -> bool:
    """Return whether a trial was trained to its end."""
    return trial["state"] == "COMPLETE"


def last(case: dict) -> float:
    """Return the accuracy after the last epoch, in percent."""
    return 100 * case["accuracies"][-1]


def cases(run, phase: str) -> list[dict]:
    """Return the results of a phase: "study", "rest", "winner" or "default"."""
    read = studies_of(run)
    found = [case for case in paired.trainings(read) if case["phase"] == phase]
    if not found:
        raise UserError(f"{read.path}: no {phase!r} in it; expected a run of studies.py")
    return found


def searches(run) -> list[Search]:
    """Return all studies that have trained their winner again, by sampler, pruner and repeat."""
    found = {"study": {}, "winner": {}}
    for phase, own in found.items():
        for case in cases(run, phase):
            own.setdefault((case["sampler"], case["pruner"], case["repeat"]), []).append(case)
    trials, again = found.values()
    order = [(sampler, pruner) for sampler in SAMPLERS for pruner in PRUNERS]
    keys = sorted(trials.keys() & again.keys(), key=lambda key: (order.index(key[:2]), key[2]))
    in_order = {key: tuple(sorted(trials[key], key=lambda t: t["trial"])) for key in keys}
    return [Search(*key, in_order[key], tuple(again[key])) for key in keys]


def kinds(run) -> dict[tuple[str, str], list[Search]]:
    """Return the repeats of each study, by (sampler, pruner)."""
    found = {}
    for search in searches(run):
        found.setdefault((search.sampler, search.pruner), []).append(search)
    return found


def winning(run) -> list[list[Search]]:
    """Return the searches by their winners: several can choose the same trial, which counts once.

    The searches of a repeat begin with the same random trials.
    """
    found = {}
    for search in searches(run):
        found.setdefault(search.winner, []).append(search)
    return [*found.values()]


def lost(run) -> list[float]:
    """Return the percentage points that each different winner loses with fresh seeds."""
    return [last(search.best) - search.fresh() for search, *_ in winning(run)]


def lost_points(run) -> float:
    """Return the mean of `lost`: below zero, winners gain."""
    return statistics.fmean(lost(run))


def best_rate(run) -> float:
    """Return the geometric mean of the different winners' learning rates."""
    return statistics.geometric_mean(search.best["lr"] for search, *_ in winning(run))


def unpruned(run) -> list[Search]:
    """Return the studies without a pruner."""
    return [search for search in searches(run) if search.pruner == "none"]


def stopped(run) -> dict[str, list[dict]]:
    """Return the trials of the first repeat with Hyperband, by sampler, with two more fields.

    whole: the accuracies to the end; a stopped trial was trained to it afterwards. top: whether it
    ends among the best three of its study.
    """
    rest = {(case["sampler"], case["trial"]): case["accuracies"] for case in cases(run, "rest")}
    found = {}
    for search in searches(run):
        if search.pruner == "hyperband" and search.repeat == 0:
            curves = [
                rest.get((search.sampler, t["trial"]), t["accuracies"]) for t in search.trials
            ]
            least = sorted(curve[-1] for curve in curves)[-TOP:][0]
            found[search.sampler] = [
                trial | {"whole": curve, "top": curve[-1] >= least}
                for trial, curve in zip(search.trials, curves, strict=True)
            ]
    return found


def as_optuna(run):
    """Return the different trials without pruning, of all repeats, as a study of Optuna's.

    Their values are accuracies in percent.
    """
    import optuna

    from dlojz.chapters.n13_search import curves

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize")
    every = {(s.repeat, *parameters(t)): t for s in unpruned(run) for t in s.trials}
    for trial in every.values():
        fixed = optuna.trial.FixedTrial(trial)
        params, value = curves.space(fixed), last(trial)
        made = optuna.trial.create_trial(
            params=params, distributions=fixed.distributions, value=value
        )
        study.add_trial(made)
    return study
