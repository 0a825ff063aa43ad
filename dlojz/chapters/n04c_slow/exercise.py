"""04_slow: a slow program, repaired fault by fault, does its work in the clean program's time."""

import math

from dlojz.chapters.n04c_slow import cases as slow
from dlojz.check.exercise import Finding, Prepared, State
from dlojz.check.wording import share

SAME, REPAIRED, FAST = "same work", "six repairs", "as fast"
CLOSE = 1e-2  # a share: right repairs differ by rounding, up to 3e-4, wrong ones by a tenth
FLIPS = 2  # answers that rounding may turn
ONCE = 0.5  # times a step: work done once in an epoch is not done in each step
NOT_LIKE = "a model that can be compared"


def findings(cases: dict[str, dict]) -> list[Finding]:
    """Return findings on the log of `dlojz.chapters.n04c_slow.job`."""
    file, times = cases["file"], cases["times"]
    unlike = file["unlike"]
    text = unlike or "as it was"
    model = Finding(
        SAME, "model", "weights of the model", not unlike, text, "as they were", "model"
    )
    if unlike:
        parts = (REPAIRED, FAST)
        return [model, *(_missing(part, "not compared", NOT_LIKE) for part in parts)]
    sides = Side(cases["mine"], file["size"]), Side(cases["clean"], file["size"])
    return [
        model,
        *_same_work(file, sides[0].seen, cases["values"]["off"]),
        _each_run(times),
        *_repaired(*sides),
        _fast(times),
    ]


def _missing(part, yours, expected):
    return Finding(part, "evidence", "evidence", State.UNMEASURED, yours, expected)


class Side:
    """The counts of one of the two programs."""

    def __init__(self, seen, size):
        self.seen, self.size = seen, size
        given = seen["given"]
        # Functions are counted by call, everything outside of them by step or batch.
        self._times = {"loop": given["train"] / size, "evaluate": given["validation"] / size}

    def per(self, place, what) -> float:
        """Return the count of something for each time that the program was at this place."""
        times = self._times.get(place) or self.seen["calls"].get(place, 1)
        return self.seen["places"].get(place, {}).get(what, 0) / times

    def images(self, what) -> int:
        """Return the number of images with this property, such as "passed in train"."""
        return self.seen["images"].get(what, 0)


# The same work -----------------------------------------------------------------------------------


def _same_work(file, seen, off):
    """Yield findings on the images, the values, and work outside of the timed calls."""
    same, left = file["same_data"], file["threads"]
    text = "as they were" if same else "changed"
    what = "images that make_data draws"
    yield Finding(SAME, "drawn", what, same, text, "as they were", "outside")
    text, what = f"{left} at work" if left > 0 else "none", "threads that go on afterwards"
    yield Finding(SAME, "threads", what, left <= 0, text, "none", "outside")
    trained, given = seen["images"].get("back in train", 0), seen["given"]
    expected = str(given["train"])
    ok = trained == given["train"]
    yield Finding(SAME, "batches", "images trained with", ok, str(trained), expected, "batches")
    known, expected = seen["images"].get("passed in validation", 0), given["validation"]
    ok = known == expected
    yield Finding(
        SAME, "validated", "images validated", ok, str(known), str(expected), "validation"
    )
    trained = _close("change", off["change"])
    for name, error in off.items():
        what, hint, counted = slow.RESULTS[name]
        ok = _close(name, error)
        text = f"{error:g} differ" if counted else f"off by {share(error)}"
        text = text if math.isfinite(error) else "other shapes, or not a number"
        # Another model has another loss in the validation.
        hint = hint if trained or name != "val_loss" else "values"
        yield Finding(SAME, what, what, ok, "equal" if ok else text, "equal", hint)


def _close(name, error):
    return error <= (FLIPS if slow.RESULTS[name].counted else CLOSE)


def _each_run(times):
    which = SAME, "timed", "values in the timed runs"
    differ = times["differ"]
    if not differ:
        todo = "submit without --pairs 0"
        return Finding(*which, State.UNMEASURED, "not timed", todo, "unmeasured")
    off = [{name for name, error in run.items() if not _close(name, error)} for run in differ]
    wrong = [names for names in off if names]
    counts = wrong and all(slow.RESULTS[name].counted for names in wrong for name in names)
    text = f"wrong in {len(wrong)} of {len(differ)}" if wrong else "equal"
    return Finding(*which, not wrong, text, "equal", "counts" if counts else "cached")


# The six repairs ---------------------------------------------------------------------------------


def _repaired(mine, clean):
    """Return a finding for each of the functions with a fault, and one for all other places."""
    yield _operators(mine, clean, "augmented", mine.size / 2, "images")
    yield _host(mine, clean)
    # A loop over the classes would need 32 more, and as many in the backward pass.
    yield _operators(mine, clean, "balanced_loss", 16, "classes")
    yield _waits(mine, "clip", "norm")
    passed, trained = mine.images("passed in train"), max(1, mine.images("back in train"))
    ok = passed <= trained
    text = f"{passed / trained:.3g} times"
    what = "each image passes the model, in training"
    yield Finding(REPAIRED, "passes", what, ok, text, "once", "passes")
    kept = mine.seen["kept_bytes"]
    ok = not kept and not mine.images("graph in validation")
    text = f"{kept / 1e6:.3g} MB" if not ok else "nothing"
    what = "kept in the validation for a backward pass"
    yield Finding(REPAIRED, "graph", what, ok, text, "nothing", "graph")
    yield _elsewhere(mine, clean)


def _operators(mine, clean, place, more, hint):
    """Return a finding on a function's operators and waits, against the clean one's."""
    found, wanted = (side.per(place, "operators") for side in (mine, clean))
    waits = mine.per(place, "waits")
    ok = found <= wanted + more and waits < ONCE
    text = f"{found:.4g}" + (f", and {waits:.3g} waits" if waits else "")
    expected = f"about {wanted:.3g}, and no wait"
    return Finding(REPAIRED, place, f"operators in {place}", ok, text, expected, hint)


def _host(mine, clean):
    """Return a finding on `normalised`: it stays on the device, in float32."""
    place = "normalised"
    left, made, wide = (mine.per(place, what) for what in ("left", "made", "float64"))
    many = mine.per(place, "operators") > clean.per(place, "operators") + mine.size / 2
    ok = max(left, made, wide, mine.per(place, "waits")) < ONCE and not many
    text = f"{left:.3g} leave the device, {made:.3g} made in Python, {wide:.3g} in float64"
    text += f", {mine.per(place, 'operators'):.4g} operators" if many else ""
    hint = "arrays" if left >= ONCE or many else "constants"
    return Finding(REPAIRED, place, f"tensors in {place}", ok, text, "none of these", hint)


def _waits(mine, place, hint):
    """Return a finding on a function's reads: it moves no numbers between host and device."""
    waits, left, made = (mine.per(place, what) for what in ("waits", "left", "made"))
    ok = max(waits, left, made) < ONCE
    text = f"{waits:.3g} waits, {left:.3g} copies to the host, {made:.3g} numbers from Python"
    return Finding(REPAIRED, place, f"numbers read in {place}", ok, text, "none", hint)


def _elsewhere(mine, clean):
    found = []
    for place in ("train_step", "loop", "evaluate", "model", "optimizer"):
        more = mine.per(place, "operators") - clean.per(place, "operators")
        if more > mine.size / 4:
            found.append(f"{more:.4g} operators more in {place}")
        for what, text in (("waits", "waits"), ("left", "copies to the host"), ("made", "made")):
            if mine.per(place, what) >= ONCE + clean.per(place, what):
                found.append(f"{mine.per(place, what):.3g} {text} in {place}")
    text = "; ".join(found) or "nothing more"
    expected = "nothing more than in the clean program"
    what = "in all other places"
    return Finding(REPAIRED, "elsewhere", what, not found, text, expected, "elsewhere")


# The time ----------------------------------------------------------------------------------------


def _fast(times):
    mine, clean = times["mine_s"], times["clean_s"]
    which = FAST, "time", "time of a run"
    expected = f"at most {1 + slow.MARGIN:g} times the clean program's"
    if len(mine) < slow.LOOK:
        todo = f"at least {slow.LOOK} pairs: submit without --pairs"
        return Finding(*which, State.UNMEASURED, f"{len(mine)} pairs", todo, "unmeasured")
    mean, low, high = slow.ratio(mine, clean)
    text = f"{mean:.3f} times (95 % interval {low:.3f} to {high:.3f}, {len(mine)} pairs)"
    ok = slow.as_fast(low, high)
    if ok is None:
        expected += "; the runs differ too much to tell: submit again when nothing else runs"
        which = *which, State.UNMEASURED, f"not measured; {text}"
        return Finding(*which, expected, "unmeasured", open=True)
    return Finding(*which, ok, text, expected, "time")


EXERCISE = Prepared("04_slow", (SAME, REPAIRED, FAST), findings, last="times")
