"""The losses, the accuracy and the learning rates in the log, against those that were observed.

The auditor computes losses and accuracy itself, where the criterion is called: see
`dlojz.watch.auditor`.
"""

import math
from array import array
from collections.abc import Sequence

from dlojz.check.exercise import SAME, Finding, State
from dlojz.check.wording import both, number, share
from dlojz.runs import log

WHICH, HINT = (SAME, "told", "losses and accuracy in the log"), "told"
RATES, RATE = (
    (SAME, "rates", "learning rates in the log"),
    1e-12,
)  # a share: a long schedule moves 1e-9 a step
LOSSES, ROUNDING = "losses", 1e-6  # the key, and the hint; a share that is shown
LOSS = 1e-3  # a share: sums in float32
ACCURACY = 0.002  # plus one image: two classes may be equally likely


def finding(ranks: Sequence[log.Run], first: bool = False) -> Finding:
    """Return a finding on the losses and the accuracy in the logs of all processes of a run.

    Those of a function are not seen. first: the first epoch only.
    """
    met = [rank.audit.met for rank in ranks]
    if not ranks[0].epochs:
        return Finding(*WHICH, False, "no epoch", "`run.epoch(...)` after each", HINT)
    if not all(m.get("train") for m in met):
        return Finding(*WHICH, State.NOT_ASKED, "not seen", "a call of the criterion")
    for logged, expected, what, epoch in [*_steps(ranks), *_epochs(ranks[0].epochs, met)]:
        if (epoch == 0 or not first) and (logged is None or not _near(logged, *expected)):
            text, asked = both(math.nan if logged is None else logged, expected[0])
            text = f"{what}: {'nothing' if logged is None else text}"
            return Finding(*WHICH, False, text, f"{asked}, which is what the check saw", HINT)
    return Finding(*WHICH, True, "what the check saw", "the same")


def rates(mine: log.Run, reference: log.Run) -> Finding:
    """Return a finding on the learning rates in the log, against the solution's."""
    pairs = zip(mine.steps.lr, reference.steps.lr, strict=False)
    for step, (logged, usual) in enumerate(pairs):
        if not (abs(logged - usual) <= RATE * usual or logged == _rounded(usual)):
            text, asked = both(logged, usual)
            return Finding(*RATES, False, f"{text} in step {step}", asked, HINT)
    return Finding(*RATES, True, "the solution's", "the same")


def _rounded(rate):
    """Return a learning rate, rounded to float32."""
    return array("f", [rate])[0]


def _near(logged, observed, tolerance):
    return abs(logged - observed) <= tolerance or math.isnan(observed) or logged == observed


def _steps(ranks):
    """Yield the loss and the images of each step: logged, (observed, tolerance), name, epoch."""
    for rank in ranks:
        observed = rank.audit.met["train"]
        each = max(1, len(observed) // max(1, len(ranks[0].epochs)))
        told = zip(rank.steps.loss, rank.steps.images, observed, strict=False)
        for step, (logged, images, (loss, count, _)) in enumerate(told):
            yield logged, (loss, LOSS * abs(loss)), f"loss of step {step}", step // each
            yield images, (count, 0), f"images of step {step}", step // each


def _epochs(epochs, met):
    """Yield such tuples for the metrics of each epoch, over all processes."""
    for mode in ("train", "val"):
        batches = [_by_epoch(m.get(mode, []), len(epochs)) for m in met]
        for epoch, parts in enumerate(zip(*batches, strict=False)):
            observed = [batch for part in parts for batch in part]
            images = sum(n for _, n, _ in observed)
            loss = sum(loss * n for loss, n, _ in observed) / images
            accuracy = sum(right for _, _, right in observed) / images
            for name, value, most in (
                ("loss", loss, LOSS * abs(loss)),
                ("accuracy", accuracy, ACCURACY + 1 / images),
            ):
                logged = epochs[epoch].get(f"{mode}_{name}")
                yield logged, (value, most), f"{mode} {name}", epoch


def _by_epoch(batches, epochs):
    """Return the batches, divided evenly among the epochs."""
    each = len(batches) // max(1, epochs)
    return [batches[i * each : (i + 1) * each] for i in range(epochs)] if each else []


def losses(mine: log.Run, reference: log.Run) -> Finding:
    """Return a finding that shows how far the losses of all steps are from the solution's.

    It fails for NaN alone: from equal updates, the losses of small batches drift apart by rounding.
    """
    pairs = list(zip(_losses(mine), _losses(reference), strict=False))
    which, shown = (SAME, LOSSES, f"losses of all {len(pairs)} steps"), "the updates are judged"
    if not pairs:
        return Finding(*which, State.UNMEASURED, "no loss was seen", "see the hint", "audit")
    for step, (loss, usual) in enumerate(pairs):
        if not math.isfinite(loss) and math.isfinite(usual):
            return Finding(*which, False, f"{number(loss)} in step {step}", number(usual), LOSSES)
    off = [_away(*pair) for pair in pairs]
    step = max(range(len(off)), key=off.__getitem__)
    text = "the same, up to rounding"
    if off[step] > ROUNDING:
        text = f"up to {share(off[step])} apart, in step {step}"
    return Finding(*which, State.NOT_ASKED, text, f"{shown}, not these")


def _losses(run):
    """Return the losses that the criterion gave; without them, those that the trainer logged."""
    seen = run.audit.losses
    return seen if seen and None not in seen else list(run.steps.loss)


def _away(loss, expected):
    away = abs(loss - expected) / abs(expected)
    return math.inf if math.isnan(away) else away
