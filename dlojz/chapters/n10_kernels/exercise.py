"""10_kernels: a kernel of one's own normalizes the images in one pass.

The kernel is judged, with images of our own, and not the step, of which it is a few thousandths.
"""

import math
import re
from statistics import median

from dlojz.check.bars import Bar
from dlojz.check.common import flag, like, no_brake, words
from dlojz.check.exercise import MECHANISM, SAME, WORK_FIRST, Exercise, Finding, Runs, State

UNITS = 1  # in the last place: a processor may cut digits off where a GPU rounds
FAR = 1e3  # of them, beyond which their number says nothing
# A copy reads and writes as many bytes as this kernel must. Recorded copies reach 0.9 of the
# memory's own rate, so nothing that moves all of these bytes is faster than this.
AT_MOST = 1.25
FORMATS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
# The mistakes that a probe names by their output, in words.
LIKE = {
    "unwritten": "a part was not written",
    "rounded": "right to three digits",
    "channels": "each channel with another one's mean",
    "reversed": "red and blue exchanged",
    "one-channel": "all channels with the first one's mean",
    "std": "not divided by the deviations",
    "mean": "without the means",
    "levels": "the means of numbers up to 1, of levels up to 255",
    "plain": "not normalized",
}
CHANNELS, FORMULA = {"channels", "reversed", "one-channel"}, {"std", "mean", "levels", "plain"}
VIEWS = {"NCHW", "a view", "every second image"}
AS_GIVEN = {"channels_last", "fewer than a program has", "whole programs"}  # no copy is needed
COPIES = {"clone", "copy_"}
# Errors of the kernel, as it is compiled or interpreted, by their hint.
ERRORS = (
    (r"TODO 10a", "todo"),
    (r"power of 2", "power"),
    (r"outside of the scope of a kernel", "interpreter"),
    (r"0 active drivers", "tuner"),
    (r"cpu tensor\?", "device"),
    (r"expected torch\.uint8", "uint8"),
    (r"SIG(SEGV|ABRT|BUS)|illegal memory access|misaligned address", "crashed"),
)


def mechanism(runs: Runs) -> list[Finding]:
    """Return findings on the kernel, and on the trainer that calls it."""
    mine, reference = runs.mine, runs.reference
    seen = mine.normalized
    return [
        flag(mine, "--normalize", lambda how: how == "triton", "triton", "asked"),
        *_error(seen),
        *_outputs(seen.cases),
        *(_memory(seen.cases) if seen.cases else []),
        *_calls(seen),
        *(_timed(seen.timed) if seen.timed else []),
        *_trainer(seen.forward),
        *_in_training(mine, reference),
        *no_brake(mine, reference),
    ]


def _error(seen):
    """Return a finding on the error with which the probe's calls ended, or on their absence."""
    which = MECHANISM, "made", "kernels.normalize"
    if seen.error:
        known = (hint for pattern, hint in ERRORS if re.search(pattern, seen.error))
        hint = next(known, "error")
        return [Finding(*which, False, seen.error, "no error", hint)]
    return [] if seen.cases else [Finding(*which, State.NOT_ASKED, "not seen", "a kernel")]


# The output --------------------------------------------------------------------------------------


def _outputs(cases):
    """Yield a finding on the output of each call."""
    as_given = all(c["units"] <= UNITS for c in cases if c["images"] in AS_GIVEN)
    for case in cases:
        units, mistake = case["units"], case["like"]
        what = f"values, {case['dtype']}, {case['images']}"
        which = MECHANISM, f"values-{case['images']}-{case['dtype']}", what
        if case["form"] != case["expected"]:
            yield Finding(*which, False, case["form"], case["expected"], "form")
            continue
        text = "far off" if units > FAR else f"{units:.2g} units in the last place"
        text += f": {LIKE[mistake]}" if mistake in LIKE else ""
        hint = _why_values(case, as_given)
        yield Finding(*which, units <= UNITS, text, f"at most {UNITS} unit in the last place", hint)


def _why_values(case, as_given):
    """Return the hint for wrong values. as_given: they are right for images in channels_last."""
    mistake = case["like"]
    if mistake in ("unwritten", "rounded"):
        return mistake
    if as_given and case["images"] in VIEWS:
        return "views"
    if mistake in CHANNELS:
        return "channels"
    return "formula" if mistake in FORMULA else "values"


def _memory(cases):
    """Yield findings on the memory that the calls read and wrote."""
    outside = sum(case["outside"] for case in cases)
    rows = [("outside", "written outside of the output", outside, "mask")]
    if any(case["launches"] is not None for case in cases):  # the interpreter knows
        of_images, of_lines = map(sum, zip(*(case["read"] for case in cases), strict=True))
        rows.append(("read", "read outside of the images", of_images, "load-mask"))
        rows.append(("read-lines", "read outside of shift and scale", of_lines, "three"))
    for key, what, count, hint in rows:
        text = f"{count:,}" if count else "none"
        yield Finding(MECHANISM, key, f"values {what}", not count, text, "none", hint)
    changed = any(case["changed"] for case in cases)
    text, what = ("changed" if changed else "unchanged"), "images after the call"
    yield Finding(MECHANISM, "changed", what, not changed, text, "unchanged", "in-place")


# The calls ---------------------------------------------------------------------------------------


def _calls(seen):
    """Yield findings on the launches, on torch's part in a call, and on later calls."""
    given = [case for case in seen.cases if case["images"] in AS_GIVEN]
    launches = {case["launches"] for case in given if case["launches"] is not None}
    if launches:
        text, what = ", ".join(map(str, sorted(launches))), "kernels of Triton in a call"
        hint = "launches" if any(launches) else "torch"
        yield Finding(MECHANISM, "launches", what, launches == {1}, text, "1", hint)
    if given:
        passes = sorted({op for case in given for op in case["passes"]})
        hint = "copies" if {*passes} <= COPIES else "torch"
        text, what = ", ".join(passes) or "none", "passes of torch over the images in a call"
        yield Finding(MECHANISM, "passes", what, not passes, text, "none", hint)
    asked = "its own"
    if seen.again is not None:
        text = "the former images'" if seen.again else asked
        what = "output of other images in the same memory"
        yield Finding(MECHANISM, "again", what, not seen.again, text, asked, "cached")
    if seen.stream is not None:
        text = "the former images'" if seen.stream else asked
        what = "output of images that the GPU still computes"
        yield Finding(MECHANISM, "stream", what, not seen.stream, text, asked, "stream")


def _timed(timed):
    """Yield findings on the calls that were timed on a GPU."""
    rates = {way: [timed["bytes"] / s for s in timed[way] if s] for way in ("kernel", "copy")}
    worst, calls, kernels = timed["worst"], timed["calls"], timed["kernels"]
    text = f"{worst:.2g} units in the last place" if math.isfinite(worst) else "far off"
    yield Finding(
        *(MECHANISM, "timed", "outputs of the timed calls", worst <= UNITS, text),
        *(f"at most {UNITS} unit in the last place", "timed"),
    )
    others = any("at::native" in name for name in kernels)
    text, hint = f"{len(kernels) / calls:.3g}", "torch" if others else "launches"
    what = "kernels in a timed call"
    yield Finding(MECHANISM, "kernels", what, len(kernels) == calls, text, "1", hint)
    first, usual = len(timed["fewer"]), -(-len(kernels) // calls)
    what, most = "kernels in the first call with other images", f"at most {usual}"
    yield Finding(MECHANISM, "tuned", what, first <= usual, f"{first}", most, "tuned")
    if not all(rates.values()):
        return
    mine, copy = (median(rates[way]) for way in ("kernel", "copy"))
    text = f"{_giga(rates['kernel'])}, {mine / copy:.0%} of a copy's"
    which = MECHANISM, "rate", "bytes per second of the kernel"
    asked = f"at most {AT_MOST} times a copy's, {_giga(rates['copy'])}"
    yield Finding(*which, mine <= AT_MOST * copy, text, asked, "too-fast")
    seconds = [median(timed[way]) for way in ("kernel", "torch")]
    text, asked = (f"{1e3 * s:.3g} ms" for s in seconds)
    what = "time of a call, against torch's"
    yield Finding(
        MECHANISM, "time", what, seconds[0] <= seconds[1], text, f"at most {asked}", "slow"
    )


def _giga(rates):
    return f"{min(rates) / 1e9:.4g} to {max(rates) / 1e9:.4g} GB/s"


# The trainer -------------------------------------------------------------------------------------


def _trainer(forward):
    """Yield findings on the calls by the trainer's `forward`."""
    ways = {how: forward[how] for how in FORMATS if how in forward}
    if not any(way["calls"] for way in ways.values()):
        text, asked = "not by `forward`", "the training is compared"
        yield Finding(MECHANISM, "forward", "calls", State.NOT_ASKED, text, asked)
        return
    for how, way in ways.items():
        text, what = way["dtype"] or "none", f"images in the model, --precision {how}"
        ok = text == FORMATS[how]
        hint = "not-called" if way["asked"] == FORMATS[how] else "autocast"
        yield Finding(MECHANISM, f"format-{how}", what, ok, text, FORMATS[how], hint)
    for how, asked, what, hint in (
        ("bf16", 1, "calls of the kernel in a step", "twice"),
        ("validation", 1, "calls in a batch of the validation", "validation-too"),
        ("torch", 0, "calls with --normalize torch", "always"),
    ):
        calls = forward[how]["calls"]
        yield Finding(MECHANISM, f"calls-{how}", what, calls == asked, f"{calls}", f"{asked}", hint)


def _in_training(mine, reference):
    """Yield findings on the run: its images, and the kernels before the first convolution."""
    for mode, what in (("train", "in training"), ("val", "in validation")):

        def formats(run, mode=mode):
            return words(i["dtype"] for i in run.whole.inputs if i["mode"] == mode)

        what = f"format of the images {what}"
        yield like(SAME, f"format-{mode}", what, mine, reference, formats, "not-called")
    launches, usual = mine.last.launches, reference.last.launches
    if usual and mine.last:
        hint = "twice" if launches > usual else "not-called"
        what = "kernels of Triton in the last step"
        yield Finding(
            MECHANISM, "launched", what, launches == usual, f"{launches}", f"{usual}", hint
        )
    before, most = (run.last.before_convolution for run in (mine, reference))
    if before is None or most is None:
        return
    what, text = "kernels before the first convolution", f"{len(before)}"
    few = len(before) <= len(most)
    yield Finding(MECHANISM, "before", what, few, text, f"at most {len(most)}", "between")
    if own := mine.normalized.timed.get("kernels"):
        called = any(each.startswith(tuple(before)) for each in own)  # their names are cut there
        text, what = ("yes" if called else "no"), "your kernel among them"
        yield Finding(MECHANISM, "called", what, called, text, "yes", "not-called")


EXERCISE = Exercise(
    step="10_kernels",
    own_flags={"--normalize": 1},
    epochs="--precision fp32 --compile off",  # a compiled model has updates of its own
    mechanism=mechanism,
    bars=(Bar("", None, "the kernel is a few thousandths of a step, and is timed alone"),),
    hint_of={"pixels": "values"},
    first_hints=("asked", *WORK_FIRST),
    causes=((r"wrote \d+ values outside", "mask"),),
    errors=(
        (r"unrecognized arguments: .*--normalize", "flag"),
        (r"has no attribute 'normalize'", "flag"),
        *ERRORS,
        (r"Input type .* bias type|have the same dtype|expected scalar type", "autocast"),
    ),
)
