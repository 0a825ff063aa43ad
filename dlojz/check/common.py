"""The findings of every exercise: the same training as the solution's, and no hidden brake."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from dlojz.check.exercise import MECHANISM, SAME, Finding, State, Unseen, shown
from dlojz.runs import log


def inputs(run: log.Run, mode: str) -> list[dict]:
    """Return the model's inputs in training ("train") or validation ("val"), with counts."""
    return [i for i in run.whole.inputs if i["mode"] == mode]


def losses(run: log.Run, mode: str) -> list[dict]:
    """Return the criterion's inputs and losses in this mode, with counts."""
    return [i for i in run.whole.losses if i["mode"] == mode]


def shapes(run: log.Run, mode: str) -> str:
    """Return the model's batches in words, such as "12 x [32, 3, 64, 64]"."""
    counts = Counter()
    for entry in inputs(run, mode):
        counts[tuple(entry["shape"])] += entry["count"]
    return ", ".join(f"{n} x {list(s)}" for s, n in counts.items()) or "nothing"


def words(values) -> str:
    """Return the distinct values in words: "bfloat16, float32"."""
    distinct = set(values)
    if distinct <= {None}:
        return Unseen.NULL if distinct else Unseen.NONE
    return ", ".join(sorted(map(shown, distinct)))


def like(part, key, what, mine, reference, get, hint) -> Finding:
    """Return a finding that fails unless `get(run)` is equal for both runs."""
    yours, expected = get(mine), get(reference)
    return Finding(part, key, what, yours == expected, shown(yours), shown(expected), hint)


def alike(mine, reference, *looks) -> list[Finding]:
    """Return a finding of `like` for each look: part, key, label, `get` and hint."""
    return [like(*which, mine, reference, get, hint) for *which, get, hint in looks]


def flag(mine: log.Run, name: str, ok: Callable, expected: str, hint, unknown="flag") -> Finding:
    """Return a finding that fails if the trainer has no flag `name`, or one with a wrong value.

    unknown: the hint for a trainer without that flag. mine is the trainee's run, because the
    solution has a default for the flag.
    """
    arguments = mine.start.get("arguments", {})
    argument = name.removeprefix("--").replace("-", "_")
    if argument not in arguments:
        return Finding(MECHANISM, name, f"flag {name}", False, "not known", expected, unknown)
    value = arguments[argument]
    return Finding(MECHANISM, name, f"flag {name}", ok(value), shown(value), expected, hint)


def like_if_seen(part, key, what, mine, reference, get, hint) -> Finding:
    """Return a finding of `like`, but NOT_ASKED if the criterion's hook saw nothing.

    A loss computed by a function has no hook; the audit judges it by its gradient.
    """
    found = like(part, key, what, mine, reference, get, hint)
    if found.reached:
        return found
    return Finding(part, key, what, State.NOT_ASKED, "not seen", "the audit judges the loss")


def same_work(mine: log.Run, reference: log.Run) -> list[Finding]:
    """Return findings on the images, passes and updates of each step."""
    mode = _wrong_mode(mine, reference)
    called = "images" if inputs(mine, "train") or mode else "called"
    unseen = losses(mine, "val") and not inputs(mine, "val")
    val = "called" if unseen else "validation"
    counts = [(r.whole.backward, r.whole.optimizer_steps) for r in (mine, reference)]
    still = "unmoved" if counts[0] == counts[1] else "backward"
    looks = (
        ("images", "images in training", lambda r: shapes(r, "train"), mode or called),
        ("val-images", "images in validation", lambda r: shapes(r, "val"), mode or val),
        ("backward", "backward passes", lambda r: r.whole.backward, "backward"),
        ("changed", "weights changed", lambda r: r.whole.weights_changed, still),
        ("drawn", "images drawn, by index", _drawn, "images"),
    )
    return [
        *alike(mine, reference, *((SAME, *look) for look in looks)),
        _in_words(
            like(
                *(SAME, "weights", "initial weights", mine, reference),
                *(lambda r: r.probe.weights, "weights"),
            )
        ),
        _in_words(
            like_if_seen(
                *(SAME, "labels", "labels of the first batch", mine, reference),
                *(lambda r: r.probe.labels, "images"),
            )
        ),
        _updates_made(mine, reference),
        *schedule_goes_on(mine),
        finite_momenta(mine),
        _as_fine("loss-dtype", "dtype of the loss", mine, reference, _loss_dtypes),
        _as_fine("val-dtype", "dtype of the outputs in validation", mine, reference, _val_dtypes),
    ]


def _in_words(found):
    """Return a finding that compares checksums with words in their place."""
    if found.state == State.NOT_ASKED or not found.reached:
        return found
    yours = "others" if found.fails else "the solution's"
    return replace(found, yours=yours, expected="the solution's")


def _updates_made(mine, reference):
    """Return a finding on the updates of the weights: their number, and that of all optimizers."""
    made, usual = (r.whole.optimizer_steps for r in (mine, reference))
    # A gradient scaler skips an update now and then, depending on rounding, and more of them or
    # fewer if it begins with another factor.
    tried = [len(run.whole.rates) for run in (mine, reference)]  # with those that were skipped
    scaled = mine.whole.scale is not None and tried[0] == tried[1]
    close = None not in (made, usual) and (scaled or abs(made - usual) <= 1)
    hint = "skipped" if _keeps_what_is_skipped(mine, reference) else "backward"
    text, of_all = str(made), mine.audit.updates or 0
    if of_all > (made or 0):
        close, hint, text = False, "optimizers", f"{made}, and {of_all} by all optimizers"
    return Finding(SAME, "updates", "updates of the weights", close, text, str(usual), hint)


def _as_fine(key, what, mine, reference, get):
    """Return a finding that fails if a value is in 16 bits where the solution keeps float32."""
    yours, expected = get(mine), get(reference)
    coarser = {"float16", "bfloat16"} & yours - expected
    return Finding(SAME, key, what, not coarser, words(yours), words(expected), key)


def _loss_dtypes(run):
    return {entry["dtype"] for mode in ("train", "val") for entry in losses(run, mode)}


def _val_dtypes(run):
    return set(run.whole.val_dtypes)


def _wrong_mode(mine, reference):
    """Return the hint if the same images enter the model in the other mode, else None."""
    (train, val), (usual, usual_val) = (
        [sum(i["count"] for i in inputs(r, mode)) for mode in ("train", "val")]
        for r in (mine, reference)
    )
    if train == usual or train + val != usual + usual_val:
        return None
    return "eval-mode" if train > usual else "train-mode"


def finite_momenta(mine: log.Run, which: str = "", precision: str = "") -> Finding:
    """Return a finding that fails if the optimizer used momenta that it had not written.

    Gradients that are not finite are another mistake, and spoil the momenta as well.
    """
    norm = mine.probe.gradients.norm
    spoilt = norm is not None and not math.isfinite(norm)
    finite = spoilt or mine.probe.states_finite is not False  # unknown without values
    what = f"momenta after the first update{which}"
    text = "finite" if finite else "not a number"
    key = "momenta"
    return Finding(SAME, key, what, finite, text, "finite", "momentum", precision=precision)


def schedule_goes_on(mine: log.Run, which: str = "") -> list[Finding]:
    """Return a finding that fails if the schedule waits for the gradient scaler.

    [] if no update was skipped. A fused optimizer is called for those, too. The run is short.
    """
    skipped = len(mine.whole.rates) - (mine.whole.optimizer_steps or 0)
    if skipped <= 0:
        return []
    waits = sum(a == b is not None for a, b in pairwise(mine.whole.rates))
    ok = not 0 < waits <= skipped  # if more, it stands still for another reason
    what = f"learning rate after a skipped update{which}"
    text, asked = "as before" if waits else "the next", "the next of the schedule"
    return [Finding(SAME, "goes-on", what, ok, text, asked, "waits")]


def _keeps_what_is_skipped(mine, reference):
    """Return whether updates were made that the solution's gradient scaler skipped."""
    passes, usual = mine.whole.backward, reference.whole.backward
    skips = reference.start.get("arguments", {}).get("precision") == "fp16"
    updates = [r.whole.optimizer_steps or 0 for r in (reference, mine)]
    return skips and passes == usual and updates[0] < updates[1] <= passes


LOCALS = 3  # losses and logits that a loop may hold until its next step


def still_trains(name: str, mine: log.Run, reference: log.Run) -> list[Finding]:
    """Return findings on the passes of another run than the job's, against the solution's."""
    mode = _wrong_mode(mine, reference)
    looks = (
        ("training-mode", "steps in training mode", _passes, mode or "frozen"),
        ("validated", "images in validation", lambda r: shapes(r, "val"), mode or "validation"),
    )
    found = ((SAME, key, f"{what}, run {name}", get, hint) for key, what, get, hint in looks)
    return alike(mine, reference, *found)


def same_images(*runs: log.Run) -> bool:
    """Return whether these runs drew the same images, by index, in each step of all epochs."""
    return len({_drawn(run) for run in runs}) <= 1


def _passes(run):
    return sum(i["count"] for i in inputs(run, "train"))


def _drawn(run):
    drawn = run.whole.drawn
    return f"{len(drawn)} batches, checksum {sum(drawn) % 2**32:08x}" if drawn else Unseen.UNKNOWN


def no_brake(mine: log.Run, reference: log.Run) -> list[Finding]:
    """Return findings on losses of speed or memory that do not show in the result."""
    waits = [_waits(r) for r in (mine, reference)]
    items = [r.last.calls.get("item", 0) for r in (mine, reference)]
    graphs, usual = (r.last.graphs_alive for r in (mine, reference))
    most = None if usual is None else usual + LOCALS
    return [
        _in_phases(mine, reference),
        like(
            MECHANISM, "threads", "threads of the processor", mine, reference, _threads, "threads"
        ),
        _at_most("items", "numbers read from the device in a step", *items, "item"),
        _at_most("waits", "waits for the device in a step", *waits, "item"),
        _at_most("graphs", "tensors that keep a graph alive", graphs, most, "kept"),
        _piled_up(mine, reference),
        like(
            *(MECHANISM, "val-grad", "gradients recorded in validation", mine, reference),
            lambda r: words(i["grad"] for i in inputs(r, "val")),
            "no-grad",
        ),
    ]


def _in_phases(mine, reference):
    """Return a finding on the phase of each pass; other findings tell whether it was made."""
    seen = mine.whole.phases
    yours, expected = (
        ", ".join(f"{work} in {' and '.join(phases.get(work, ['none']))}" for work in seen)
        for phases in (seen, reference.whole.phases)
    )
    same = yours == expected
    yours = yours or Unseen.UNKNOWN
    return Finding(SAME, "phases", "work in the phases", same, yours, expected, "phases")


def _threads(run):
    return run.whole.threads


def _piled_up(mine, reference):
    """Return a finding that fails if batches are alive that neither step nor loader needs."""
    found, usual = (r.last.batches_alive for r in (mine, reference))
    loader = mine.probe.loader
    ready = (loader.num_workers or 0) * (loader.prefetch_factor or 0)
    most = None if usual is None else usual + LOCALS + ready
    what = "batches of images in memory after the last step"
    return _at_most("piled", what, found, most, "piled")


def _waits(run):
    return sum(n for call, n in run.last.calls.items() if call != "item")


def _at_most(key, what, yours, expected, hint):
    ok = None not in (yours, expected) and yours <= expected
    most = f"at most {expected}" if expected else "none"
    text = Unseen.UNKNOWN if yours is None else str(yours)
    return Finding(MECHANISM, key, what, ok, text, most, hint)
