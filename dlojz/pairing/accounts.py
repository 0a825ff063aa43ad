"""Two programs' accounts of their first steps, compared: the same work, and the same losses?

An account is a log with the cases of `dlojz.watch.account`. Nothing here says "same training": it
says what was compared, and for how many steps.
"""

from dataclasses import dataclass

from dlojz.course import UserError
from dlojz.runs import log

COUNTS = ("forwards", "backwards", "updates")
ROUNDING, BAND = 1e-6, 4  # a loss may be so far off, and as many times what a rounding makes
OF_16_BITS = {"bfloat16": 2**-8, "float16": 2**-11}  # a rounding


@dataclass(frozen=True)
class Comparison:
    """The differences of two accounts."""

    steps: int
    work: tuple[str, ...]  # differences; () for the same work
    unseeded: bool  # before is not like itself
    apart: int | None  # the first step whose losses differ by more than a rounding makes
    off: float  # the largest relative difference of two losses, up to there
    band: float  # that of before and itself with weights off by a rounding
    format: str = ""  # of 16 bits, if only one of the two computes in it
    by_hand: bool = False  # no optimizer of torch was seen

    @property
    def lines(self) -> list[str]:
        """Return the findings in words."""
        steps = f"the first {self.steps} steps"
        if self.unseeded:
            found = [
                "losses: not compared, as before is not like itself when run again: seed Python's, "
                "NumPy's and torch's generators, and the loader's order"
            ]
        elif self.apart is None:
            found = [f"losses: the same within rounding for {steps} (off by {self.off:.1e}; "]
            found[0] += f"before, with weights off by a rounding, by {self.band:.1e})"
        else:
            found = [f"losses: apart from step {self.apart} on, by {self.off:.1e}, where "]
            found[0] += f"a rounding of the weights makes {self.band:.1e}"
            if self.format and self.off <= OF_16_BITS[self.format]:
                found[0] += f", and one in {self.format} {OF_16_BITS[self.format]:.1e}"
        same = "images, passes, updates and settings"
        if self.by_hand:
            same = "images and passes, and no optimizer of torch, whose settings would be seen,"
        if not self.work:
            return [f"work: the same {same} in {steps}", *found]
        return [*(f"work differs: {difference}" for difference in self.work), *found]


def compared(before, after, nudged=None, again=None) -> Comparison:
    """Return the comparison of two accounts.

    nudged: before, with weights off by a rounding. again: before, run again as it is.
    """
    mine, theirs = _steps(before), _steps(after)
    count = min(len(mine), len(theirs))
    pairs = list(zip(mine, theirs, strict=False))
    unseeded = again is not None and any(
        _inputs(a) != _inputs(b) or a["loss"] != b["loss"]
        for a, b in zip(mine, _steps(again), strict=False)
    )
    work = _work(pairs, unseeded)
    bands = [_off(a, b) for a, b in zip(mine, _steps(nudged), strict=False)] if nudged else []
    apart, off, band = None, 0.0, max(bands[:count], default=0.0)
    for step, (a, b) in enumerate(pairs):
        off = max(off, _off(a, b))
        allowed = max(ROUNDING, BAND * max(bands[: step + 1], default=0.0))
        if off > allowed and not unseeded:
            apart, band = step, max(bands[: step + 1], default=0.0)
            break
    by_hand = not any(step["settings"] for step in (*mine, *theirs))
    form = _format(*pairs[0])
    return Comparison(count, tuple(work), unseeded, apart, off, band, form, by_hand)


def _format(a, b) -> str:
    """Return a format of 16 bits that only one of two steps has."""
    used = [{side["autocast"], *side["formats"]} & OF_16_BITS.keys() for side in (a, b)]
    return next(iter(used[0] ^ used[1]), "")


def _steps(run) -> list[dict]:
    cases = log.read(run).cases
    found = [case for name, case in cases.items() if name.startswith(log.ACCOUNTED)]
    if not found:
        raise UserError(
            f"{run}: no training step was seen: expected backward passes and an optimizer of torch"
        )
    return found


def _off(a, b) -> float:
    first, second = a["loss"], b["loss"]
    if first is None or second is None or first == second:
        return 0.0
    return abs(first - second) / max(abs(first), 1e-30)


def _inputs(step) -> list:
    return step["batch"] or step["inputs"]


def _work(pairs, unseeded):
    """Yield each difference once, with the first step that has it."""
    yield from _first(pairs, _sizes_differ)
    if not unseeded:
        yield from _first(pairs, _values_differ)
    for name in COUNTS:
        yield from _first(pairs, lambda a, b, n=name: a[n] != b[n] and f"{a[n]} {n}, then {b[n]}")
    yield from _first(pairs, _settings_differ)
    first, second = pairs[0]
    if first["autocast"] != second["autocast"]:
        yield f"autocast: {first['autocast']}, then {second['autocast']}"
    for name in ("parameters", "trained parameters", "formats", "layouts"):
        if name in first and first[name] != second[name]:
            told = [_plain(side[name]) for side in (first, second)]
            yield f"{name} of the model's weights: {told[0]}, then {told[1]}"


def _plain(value):
    if isinstance(value, dict):
        return " and ".join(f"{count} of {name}" for name, count in value.items())
    return f"{value:,}"


def _first(pairs, differ):
    for step, (a, b) in enumerate(pairs):
        if why := differ(a, b):
            yield f"{why} (step {step})"
            return


def _sizes_differ(a, b):
    mine, theirs = ([(shape, kind) for shape, kind, _ in _inputs(each)] for each in (a, b))
    if mine == theirs:
        return ""
    texts = [", ".join(f"{kind} {shape}" for shape, kind in side) for side in (mine, theirs)]
    return f"the batch: {texts[0] or 'nothing'}, then {texts[1] or 'nothing'}"


def _values_differ(a, b):
    if _sizes_differ(a, b):
        return ""
    same = [x[2] == y[2] for x, y in zip(_inputs(a), _inputs(b), strict=True)]
    if all(same):
        return ""
    if any(same[1:]):
        return "the images have other values, and their labels the same"
    return "the batch has other images, or another order"


def _settings_differ(a, b):
    mine, theirs = a["settings"], b["settings"]
    names = [[key.split()[0] for key in side] for side in (mine, theirs)]
    if names[0] != names[1]:
        told = [" and ".join(side) or "none of torch" for side in names]
        return f"the optimizer: {told[0]}, then {told[1]}"
    for groups, others in zip(mine.values(), theirs.values(), strict=True):
        if len(groups) != len(others):
            return f"{len(groups)} groups of weights, then {len(others)}"
        for group, other in zip(groups, others, strict=True):
            for name in dict.fromkeys((*group, *other)):
                first, second = group.get(name), other.get(name)
                if first != second and not _close(first, second):
                    return f"{name} of {names[0][0]}: {first}, then {second}"
    return ""


def _close(first, second):
    numbers = isinstance(first, float) and isinstance(second, float)
    return numbers and abs(first - second) <= 1e-9 * max(abs(first), abs(second))
