"""The losses, the accuracy and the learning rates in the log, against those that were observed.

The auditor computes losses and accuracy itself, where the criterion is called: see
`dlojz.watch.auditor`.
"""

import math
from array import array
from collections.abc import Sequence

from dlojz.check.exercise import SAME, Finding, State
from dlojz.runs import log, records

WHICH, HINT = (SAME, "told", "losses and accuracy in the log"), "told"
RATES, RATE = (
    (SAME, "rates", "learning rates in the log"),
    1e-12,
)  # a share: a long schedule moves 1e-9 a step
LOSS = 1e-3  # a share: sums in float32
ACCURACY = 0.002  # plus one image: two classes may be equally likely


def finding(
    ranks: Sequence[log.Run], every: Sequence[records.Every] = (), first: bool = False
) -> Finding:
    """Return a finding on the losses and the accuracy in the logs of all processes of a run.

    every: the replay's record of every step, for each process, if a function computes the losses;
    they are then the solution's criterion's, for the trainee's logits. first: the first epoch only.
    """
    met = [rank.audit.met for rank in ranks]
    seen = all(m.get("train") for m in met)
    if not seen and not (every and all(every)):
        return Finding(*WHICH, State.NOT_ASKED, "not seen", "a call of the criterion")
    if not ranks[0].epochs:
        return Finding(*WHICH, False, "no epoch", "`run.epoch(...)` after each", HINT)
    looks = [*_steps(ranks), *_epochs(ranks[0].epochs, met)] if seen else _replayed(ranks, every)
    for told, seen, what in [(t, s, w) for t, s, w, epoch in looks if epoch == 0 or not first]:
        if told is None or not _near(told, *seen):
            asked = f"{seen[0]:.5g}, which is what the auditor saw"
            text = f"{what}: {'nothing' if told is None else f'{told:.5g}'}"
            return Finding(*WHICH, False, text, asked, HINT)
    return Finding(*WHICH, True, "what the auditor saw", "the same")


def rates(mine: log.Run, reference: log.Run) -> Finding:
    """Return a finding on the learning rates in the log, against the solution's."""
    pairs = zip(mine.steps.lr, reference.steps.lr, strict=False)
    for step, (told, usual) in enumerate(pairs):
        if not (abs(told - usual) <= RATE * usual or told == _rounded(usual)):
            text = f"{told:.12g} in step {step}"
            return Finding(*RATES, False, text, f"{usual:.12g}", HINT)
    return Finding(*RATES, True, "the solution's", "the same")


def _rounded(rate):
    """Return a learning rate, rounded to float32."""
    return array("f", [rate])[0]


def _near(told, seen, tolerance):
    return abs(told - seen) <= tolerance or math.isnan(seen) or told == seen


def _steps(ranks):
    """Yield each step's loss: logged, (observed, tolerance), its name, the epoch."""
    for rank in ranks:
        seen = rank.audit.met["train"]
        each = max(1, len(seen) // max(1, len(ranks[0].epochs)))
        for step, (told, (loss, *_)) in enumerate(zip(rank.steps.loss, seen, strict=False)):
            yield told, (loss, LOSS * abs(loss)), f"loss of step {step}", step // each


def _epochs(epochs, met):
    """Yield such tuples for the metrics of each epoch, over all processes."""
    for mode in ("train", "val"):
        batches = [_by_epoch(m.get(mode, []), len(epochs)) for m in met]
        for number, parts in enumerate(zip(*batches, strict=False)):
            seen = [batch for part in parts for batch in part]
            images = sum(n for _, n, _ in seen)
            loss = sum(loss * n for loss, n, _ in seen) / images
            accuracy = sum(right for _, _, right in seen) / images
            for name, value, most in (
                ("loss", loss, LOSS * abs(loss)),
                ("accuracy", accuracy, ACCURACY + 1 / images),
            ):
                told = epochs[number].get(f"{mode}_{name}")
                yield told, (value, most), f"{mode} {name}", number


def _replayed(ranks, every):
    """Yield such tuples from replays: the known losses, and the accuracy."""
    epochs = ranks[0].epochs
    for rank, found in zip(ranks, every, strict=True):
        each = max(1, len(found.losses) // len(epochs))
        for step, (told, loss) in enumerate(zip(rank.steps.loss, found.losses, strict=False)):
            if loss is not None:
                yield told, (loss, LOSS * abs(loss)), f"loss of step {step}", step // each
    train = [_by_epoch(found.right, len(epochs)) for found in every]
    parts = [
        ("train", number, [batch for own in each for batch in own])
        for number, each in enumerate(zip(*train, strict=True))
    ]
    last = [batch for found in every for batch in found.validation.right]
    for mode, number, batches in [*parts, ("val", len(epochs) - 1, last)]:
        if batches and None not in batches:
            images = sum(count for _, count in batches)
            seen = sum(right for right, _ in batches) / images, ACCURACY + 1 / images
            yield epochs[number].get(f"{mode}_accuracy"), seen, f"{mode} accuracy", number


def _by_epoch(batches, epochs):
    """Return the batches, divided evenly among the epochs."""
    each = len(batches) // max(1, epochs)
    return [batches[i * each : (i + 1) * each] for i in range(epochs)] if each else []
