"""The order of the entries, from results alone: who is ahead, who ties, and who is out.

A challenger and the best so far are compared with the same seeds, in the same rounds. It goes
ahead only if (mean - best) * sqrt(n) clears the gate: t * sqrt(2) * sd, where sd is that of all
recorded runs of the best so far around their round's mean, and t is Student's for the rules' level
and the runs behind this sd. With many runs t is 1.65, as in the rules of the speedruns; both means
are noisy, hence the square root of 2.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dlojz.race.results import Round, read
from dlojz.race.rules import open_race
from dlojz.runs.stats import half_width

AHEAD, TIE, BEHIND = "ahead", "tie", "behind"
BEST, WAITS, OUT = "best so far", "waits for a run", "out"


@dataclass(frozen=True)
class Margin:
    """A challenger's comparison with the best so far, by pairs of the same seed."""

    challenger: str
    best: str
    points: tuple[float, ...]  # the differences of accuracy, in percentage points, by pair
    gate: float  # which the mean must clear, in percentage points
    sd: float  # of a single run of the best so far, in percentage points
    freedom: int  # degrees of freedom of this sd

    @property
    def mean(self) -> float:
        return statistics.fmean(self.points)

    @property
    def word(self) -> str:
        if abs(self.mean) < self.gate:
            return TIE
        return AHEAD if self.mean > 0 else BEHIND


@dataclass(frozen=True)
class Standing:
    """An entry's place, with the results of its last round. An unmeasured one is None."""

    name: str
    word: str  # BEST, TIE, BEHIND, WAITS or OUT
    why: str = ""  # it is out
    against: str = ""  # the best when it was judged, or that took its place; "" for the first
    margin: Margin | None = None
    accuracies: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()
    joules: tuple[float, ...] | None = None
    disturbed: str = ""  # what slowed one of its runs down, perhaps
    cut: int = 0  # of its runs: they were ended at the budget
    floor_s: float | None = None  # the least time that its updates need: the largest of its runs

    def ties_with(self, best: str) -> bool:
        """Return whether no difference from the best so far was shown."""
        return self.word == TIE and self.against == best

    @property
    def accuracy(self) -> float | None:
        return statistics.fmean(self.accuracies) if self.accuracies else None

    @property
    def half(self) -> float | None:
        """Return half the width of the 95 % interval of its accuracy."""
        return half_width(self.accuracies) if len(self.accuracies) > 1 else None


def standings(race, names=()) -> list[Standing]:
    """Return the entries' places, the best first; those that wait, and those that are out, last.

    names: entries that may not have run yet.
    """
    found, best, before = {}, "", []
    for one in (one for one in read(open_race(race)) if one.done):
        before.append(one)
        if best and (why := one.failure(best)):  # all have to run again
            found = {name: place for name, place in found.items() if place.word == OUT}
            found[best], best = _out(one, best, f"run again, it failed: {why}"), ""
        for name in one.entries:
            if name == best:  # its newer results are shown
                found[name] = replace(found[name], **_results(one, name))
            elif name not in found or found[name].word == TIE:
                found[name] = _challenge(before, name, best)
                if found[name].word == BEST:
                    if best:
                        found[best] = replace(found[best], word=BEHIND, margin=None, against=name)
                    best = name
    for name in names:
        found.setdefault(name, Standing(name, WAITS))

    def order(place):
        ties = place.ties_with(best)
        known = (WAITS, OUT).index(place.word) + 3 if not place.accuracies else 2 - ties
        return known * (place.word != BEST), -(place.accuracy or 0)

    return sorted(found.values(), key=order)


def _challenge(rounds, name, best) -> Standing:
    """Return the place of an entry after the last of these rounds, against the best so far."""
    one = rounds[-1]
    if why := one.failure(name):
        return _out(one, name, why)
    found = margin(rounds, name, best) if best else None
    word = found.word if found and found.word != AHEAD else BEST
    return Standing(name, word, "", best, found, **_results(one, name))


def _out(one: Round, name, why) -> Standing:
    return Standing(name, OUT, why, **_ran([r for (n, _), r in one.runs.items() if n == name]))


def _ran(runs) -> dict:
    """Return the disturbance and the cuts of an entry's runs, also of those that failed."""
    disturbed = next(filter(None, (run.get("disturbed") for run in runs)), "")
    return {"disturbed": disturbed, "cut": sum(bool(run.get("cut")) for run in runs)}


def _results(one: Round, name) -> dict:
    """Return the results of an entry in a round that it has passed."""
    runs, told = ([of[name, seed] for seed in one.seeds] for of in (one.runs, one.judged))
    joules = [run["joules"] for run in runs]
    floors = [judged["floor_s"] for judged in told if judged["floor_s"] is not None]
    return {
        "accuracies": tuple(judged["accuracy"] for judged in told),
        "seconds": tuple(run["seconds"] for run in runs),
        "joules": None if None in joules else tuple(joules),
        "floor_s": max(floors, default=None),
    } | _ran(runs)


def margin(rounds: list[Round], name: str, best: str) -> Margin:
    """Return the comparison of two entries, over all rounds that both have passed."""
    points, images = [], []
    for one in rounds:
        if {name, best} <= one.entries.keys() and not (one.failure(name) or one.failure(best)):
            for seed in one.seeds:
                mine, theirs = one.judged[name, seed], one.judged[best, seed]
                points.append(100 * (mine["accuracy"] - theirs["accuracy"]))
                images.append(theirs["of"])
    sd, freedom = spread(rounds, best)
    sd = max(sd, 1 / min(images))  # one image of those that judge
    gate = quantile(rounds[-1].rules["level"], freedom) * math.sqrt(2 / len(points)) * sd
    return Margin(name, best, tuple(points), 100 * gate, 100 * sd, freedom)


def spread(rounds: list[Round], name: str) -> tuple[float, int]:
    """Return the sd of an entry's accuracy over seeds, pooled over its rounds, and its freedom."""
    squares, freedom = 0.0, 0
    for one in rounds:
        told = [j["accuracy"] for (n, _), j in one.judged.items() if n == name and not j["why"]]
        if len(told) > 1 and not one.failure(name):
            squares += statistics.variance(told) * (len(told) - 1)
            freedom += len(told) - 1
    return math.sqrt(squares / freedom), freedom


def quantile(level: float, freedom: int) -> float:
    """Return Student's t that is exceeded by chance with this risk, on one side."""
    from scipy.special import stdtrit  # here: its import takes 0.4 s

    return float(stdtrit(freedom, 1 - level))


# The floor ----------------------------------------------------------------------------------------


def floor_s(run: Mapping, model: Mapping) -> float:
    """Return the least seconds that a run's updates need on its device.

    run: its images and updates. model: from `judging`: the operations for an image, forward and
    backward, and the bytes of the parameters; the most FLOP/s and bytes/s of the device.
    """
    compute = run["images"] * model["flops_per_image"] / model["flops_per_s"]
    # An update reads weights and gradients and writes weights, unless they stay in the cache.
    moved = 3 * model["parameter_bytes"]
    if not model["bytes_per_s"] or moved < 4 * (model["cache_bytes"] or math.inf):
        return compute
    return max(compute, run["updates"] * moved / model["bytes_per_s"])


def impossible(run: Mapping, model: Mapping, accuracy: float, idle_w: float | None) -> str:
    """Return the reason why a run cannot have done what its log says; "" if it can.

    idle_w: the least power that the idle device had in this round; None: not measured.
    """
    floor, chance = floor_s(run, model), 1 / model["classes"]
    if run["seconds"] < floor:
        return (
            f"too fast: the {run['images']:,} images in its log need at least {floor:.1f} s on "
            f"this device ({model['peak']}), and the run took {run['seconds']:.1f} s"
        )
    if not run["images"] and accuracy > 2 * chance:
        return f"its log has no image, and yet {accuracy:.0%} are right: the weights came with it"
    if idle_w and run["joules"] is not None and run["joules"] < 0.8 * idle_w * run["seconds"]:
        return (
            f"too few joules: {run['joules']:.0f} J in {run['seconds']:.1f} s, and the idle device "
            f"takes {idle_w:.0f} W: it was not the device that was measured"
        )
    return ""
