"""The comparison with the solution's training, step by step, from audited runs and replays.

`dlojz.watch.auditor` records a run, `dlojz.watch.replay` repeats its updates with the solution.
Both log numbers; here they meet their tolerances.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from dlojz.check.audited import MOST_STATE, Audited, state_of
from dlojz.check.exercise import SAME, Finding, State
from dlojz.check.wording import both, share
from dlojz.runs import log, records

NEARLY = 1.25  # times the solution's state, which a right trainer may take

# with 32 px, batch 8, 12 steps, two cores of an AMD EPYC, torch 2.11.
PIXELS = 0.02  # of an image's standard deviation: one level of a pixel is 0.017
# Gradient of the loss: no label smoothing in place of 0.1 is 7e-3 in float32. In bf16 it changes
# the direction by 2e-3 to 8e-3, which is missed, but the size by 0.11, for which there is SCALE.
CRITERION = {"fp32": 1e-4, "tf32": 1e-4, "fp16": 4e-3, "bf16": 1e-2}
SCALE = {"fp32": 1e-4, "tf32": 1e-4, "fp16": 5e-3, "bf16": 1e-2}  # bf16 rounds by up to 0.4 %
RATE = 1e-12  # a forgotten schedule is 3e-6 after eleven updates of a long one
# In float32. A learning rate 0.1 % off is 8,000, a forgotten schedule 26; right answers of another
# make (foreach, fused) are 0. A GPU's fused AdamW is up to 80 from a processor's, so it is replayed
# on the device of the run.
ROUNDINGS = 8
LAST = 0.02  # of the last bias's gradient: bf16 rounds by 4e-3; those of two updates are 0.3 apart
BUFFERS = 1e-5  # statistics that were not updated are 5e-2, the mean of two processes' 2e-3
EVALUATION = "evaluation"  # the hint

LABELS = {  # of the findings, by key
    "audit": "audit",
    "touched": "weights, momenta, statistics between updates",
    "memory": "memory of the job",
    "images": "images with a gradient",
    "pixels": "pixels of the images",
    "criterion": "gradient of the loss",
    "rate": "learning rate",
    "settings": "optimizer's settings",
    "frozen": "weights without a gradient, layers not in training",
    "random": "random numbers",
    "gradients": "gradients",
    "outputs": "outputs of the model",
    "last": "gradient of the last bias",
    "missing": "gradients there or not",
    "tensors": "gradient of each weight",
    "buffers": "batch statistics",
    "optimizer": "update of all weights",
    "val-losses": "criterion of the validation",
    "val-weights": "weights of the validation",
    "val-buffers": "batch statistics of the validation",
    "val-labels": "labels of the validation",
    "val-pixels": "pixels of the validation",
}


def as_large(mine: log.Run, solution: log.Run, epochs: log.Run) -> list[Finding]:
    """Return a finding if a job was audited with a small model, and the solution is not as large.

    Then the trainer itself takes the memory, which the plan of its check could not know. epochs:
    the run of two epochs.
    """
    small = epochs.start["arguments"].get("model") != solution.start["arguments"].get("model")
    near = state_of(mine) <= NEARLY * state_of(solution)
    if not small or near or NEARLY * state_of(solution) > MOST_STATE:
        return []
    text, asked = (f"{state_of(run) / 1e9:.1f} GB of state" for run in (mine, solution))
    return [_finding("memory", False, text, f"as the solution: {asked}")]


def findings(runs: Sequence[Audited]) -> list[Finding]:
    """Return the findings on all runs of the trainee's trainer, one for each link.

    They fail if nothing could be replayed.
    """
    every = [r for r in runs if r.every]
    if not every:
        return [_unmeasured("audit", "no step could be replayed")]
    looks = (_images, _pixels, _rate, _settings, _frozen, _criterion, _random, _touched)
    return [*(look(every) for look in looks), *_updates(runs), *validated(runs)]


def _images(runs):
    """Compare the number of images with a gradient in each step."""
    for run in runs:
        counts, steps = run.every.images, run.every.steps
        wrong = [k for k, (mine, usual) in enumerate(counts) if mine != usual]
        if wrong or steps[0] != steps[1]:
            text, hint = f"{steps[0]} steps", "images"
            if wrong:
                mine, usual = counts[wrong[0]]
                text = f"{mine} of {usual} in step {wrong[0]}, {len(wrong)} steps differ"
                hint = "images" if mine else "backward"
            asked = f"all, in {steps[1]} steps"
            return _finding("images", False, text, asked, hint)
    total = sum(sum(mine for mine, _ in run.every.images) for run in runs)
    return _finding("images", True, f"{total:,}, in every step", "all")


def _pixels(runs):
    worst, step = _worst([run.every.pixels for run in runs])
    asked = f"by at most {PIXELS:g} of one, in every step"
    return _finding("pixels", worst <= PIXELS, _other_pixels(worst, "step", step), asked, "pixels")


def _other_pixels(worst, word, place):
    """Return the largest difference of an image's pixels in words."""
    if math.isinf(worst):
        return f"of another shape, or not a number, in {word} {place}"
    return f"differ by {worst:.2g} standard deviations in {word} {place}" if worst else "the same"


def _criterion(runs):
    found = []
    for run in runs:
        tolerance = CRITERION[run.precision]
        worst, step = _worst([run.every.criterion])
        found.append((worst / tolerance, worst, step, tolerance))
    most, worst, step, tolerance = max(found)
    ok = most <= 1
    if ok and (scaled := next(filter(None, map(_scaled, runs)), None)):
        return _finding("criterion", False, *scaled, "criterion")
    text = f"off by {share(worst)} in step {step}" if worst else "the same"
    if math.isinf(worst):
        text = f"of another shape, or not a number, in step {step}"
    asked = f"the solution's, within {share(tolerance)}, in every step"
    return _finding("criterion", ok, text, asked, "criterion")


def _scaled(run):
    """Return the size of the loss's gradient and the solution's, in words; None if they are equal.

    A trainer may divide by the accumulated steps or by the processes elsewhere, or have a scaler
    where none is needed.
    """
    start = run.mine.start
    steps, processes = start.get("arguments", {}).get("accumulate", 1), start.get("size", 1)
    usual = {steps**i * processes**j for i in (-1, 0, 1) for j in (-1, 0, 1)}
    for step, scale in enumerate(run.every.scales):
        if scale is None or not math.isfinite(scale):
            continue  # another finding
        near = min(usual, key=lambda one: abs(_without_scaler(scale / one, run.precision) - 1))
        if abs(_without_scaler(scale / near, run.precision) - 1) > SCALE[run.precision]:
            text, asked = both(scale, near)
            asked = "as large" if near == 1 else f"{asked} times as large"
            within = f"within {share(SCALE[run.precision])}"
            return f"{text} times as large as the solution's in step {step}", f"{asked}, {within}"
    return None


def _without_scaler(share, precision):
    """Return a share without the factor of a scaler: a power of two, 65536 at first."""
    scaled = share > 2**8 or (share > 0 and precision == "fp16")
    return share / 2 ** round(math.log2(share)) if scaled else share


def _rate(runs):
    for run in runs:
        for mine, usual in zip(run.every.updates, run.every.usual, strict=False):
            if mine.update >= 0 and not mine.lr_off <= RATE:  # else no forward pass was seen
                text, asked = both(*_unlike(mine.lr, usual.lr))
                return _finding("rate", False, f"{text} in update {mine.update}", asked, "rate")
    return _finding("rate", True, "the solution's", "the solution's")


def _unlike(rates, usual) -> tuple[float, float]:
    """Return the rate that is furthest from any of the other run's, and the nearest of these."""
    pairs = [(a, min(usual, key=lambda b: abs(a - b))) for a in rates]
    pairs += [(min(rates, key=lambda a: abs(a - b)), b) for b in usual]
    return max(pairs, key=lambda pair: abs(pair[0] - pair[1]))


def _settings(runs):
    if others := sum(run.mine.audit.foreign for run in runs):
        text = f"{others} updates of weights that are not the model's"
        return _finding("settings", False, text, "none", "settings")
    for run in runs:
        usual = _as_one(run.every.usual[0])
        for update in map(_as_one, run.every.updates):
            for name in ("optimizer", "settings"):
                mine, expected = getattr(update, name), getattr(usual, name)
                if mine != expected:
                    yours = f"{_in_words(mine)} in update {update.update}"
                    return _finding("settings", False, yours, _in_words(expected), "settings")
    return _finding("settings", True, _in_words(usual.settings), "the solution's")


def _as_one(update):
    """Return an update with groups of equal settings merged: trainers may split the weights."""
    groups = update.settings
    groups = [g for i, g in enumerate(groups) if g not in groups[:i]]
    return replace(update, settings=sorted(groups, key=str))


def _in_words(value):
    if not isinstance(value, list):
        return str(value)
    return "; ".join(", ".join(_setting(*kv) for kv in group.items() if kv[1]) for group in value)


def _setting(name, value):
    return f"{name} {value:g}" if isinstance(value, int | float) else f"{name} {value}"


def _frozen(runs):
    """Compare the weights without a gradient and the layers not in training, in each update."""
    for run in runs:
        usual = run.every.usual[0]
        for update in run.every.updates:
            if (update.missing, update.evaluating) != (usual.missing, usual.evaluating):
                first = f" (first {update.missing[0]})" if update.missing else ""
                text = (
                    f"{len(update.missing)} weights{first}, {update.evaluating} layers in update "
                    f"{update.update}"
                )
                asked = f"{len(usual.missing)} weights, {usual.evaluating} layers"
                early = update.update < 0  # the optimizer began before the model
                return _finding("frozen", False, text, asked, "closure" if early else "frozen")
    return _finding("frozen", True, "none", "none")


def _random(runs):
    """Find updates that reuse the random generators of an earlier one, where the solution does not.

    Dropout would hide the same features again.
    """
    for run in runs:
        both = zip(run.every.updates, run.every.usual, strict=False)
        seen = {}  # by the state of the generators: the first update that began with it
        for mine, usual in both:
            first = seen.setdefault(str(mine.random), (mine.update, usual.random))
            if first[0] != mine.update and first[1] != usual.random:
                text = f"update {mine.update} begins with those of update {first[0]}"
                return _finding("random", False, text, "new ones in each", "random")
    return _finding("random", True, "as new as the solution's", "as the solution's")


def _touched(runs):
    """Return a finding on what changed between two updates: only the optimizer may change it."""
    names = [name for run in runs for name in run.every.touched]
    first = (run.mine for run in runs if run.mine.start.get("rank", 0) == 0)  # others get its own
    if any(mine.audit.kept_buffers is False for mine in first):
        names.append("batch statistics, as an epoch begins")
    text = f"{len(names)} changed, such as {names[0]}" if names else "left alone"
    return _finding("touched", not names, text, "left alone", "touched")


def _updates(runs):
    updates = [u for r in runs for u in r.updates]
    solved = [u for u in updates if u.solved]
    optimizer = [*_last(updates), _optimizer(updates)] if updates else []
    if not solved:
        return [*optimizer, _unmeasured("audit", "no update could be replayed")]
    count = len({(r.folder, u.update) for r in runs for u in r.updates if u.solved})
    text = f"{count} updates done again with the solution"
    return [
        *_link(solved, "gradients"),
        *_link(solved, "outputs"),
        _tensors(solved),
        _buffers(solved),
        *optimizer,
        _finding("audit", True, text, "all"),
    ]


def _link(updates, key):
    """Return a finding on a noisy link, by its median over the updates; [] if it was not seen."""
    these = [u for u in updates if getattr(u, key) is not None]
    noises = [n for u in these if (n := getattr(u, f"{key}_noise")) is not None]
    if not these:
        return []
    off = [getattr(u, key) for u in these]
    off = [math.inf if math.isnan(distance) else distance for distance in off]
    noise = statistics.median(noises) if noises else 0.0
    middle, worst = statistics.median(off), max(off)
    most = records.NOISES * max(noise, records.SAME_LINK)
    single = max(records.ONE_UPDATE, records.ONE_UPDATE_NOISES * noise)
    text = f"off by {share(middle, 'their size')} in the median, {share(worst)} at worst"
    text = "not a number" if math.isinf(worst) else text
    asked = f"at most {share(most)} in the median: by rounding alone it is {share(noise)}"
    if middle <= most:
        asked = f"at most {share(single)} at worst: by rounding alone it is {share(noise)}"
    return [_finding(key, middle <= most and worst <= single, text, asked, key)]


def _tensors(updates):
    missing = sorted({name for u in updates for name in (*u.missing, *u.unexpected)})
    if missing:
        text = f"{len(missing)} weights, such as {missing[0]}"
        return _finding("missing", False, text, "as the solution's", "frozen")
    noise = max(u.gradients_tensor_noise or 0 for u in updates)
    worst = max(updates, key=lambda u: u.gradients_tensor)
    most = max(records.ONE_WEIGHT, records.ONE_WEIGHT_NOISES * noise)
    text, asked = both(_factor(worst.gradients_tensor), _factor(most))
    text = f"{text} times as large or small"
    text = "zero, or not a number" if math.isinf(worst.gradients_tensor) else text
    text += f" ({worst.gradients_worst})" if worst.gradients_worst else ""
    ok = worst.gradients_tensor <= most
    return _finding("tensors", ok, text, f"at most {asked} times", "gradients")


def _last(updates):
    """Return a finding on the last gradient of a run in any precision; [] if it was not seen."""
    off = [u.last for u in updates if u.last is not None]
    if not off:
        return []
    worst, place = _worst([off])
    text = f"off by {share(worst)} in its direction, in update {place}" if worst else "the same"
    asked = f"the sum of those of the outputs, within {share(LAST)}, in each update"
    return [_finding("last", worst <= LAST, text, asked, "gradients")]


def _factor(logarithm):
    return math.exp(min(logarithm, 700.0))  # the largest float has 709


def _buffers(updates):
    noise = max(u.buffers_noise or 0 for u in updates)
    most, worst = max(BUFFERS, 10 * noise), max(u.buffers for u in updates)
    text = f"off by {share(worst)}" if worst else "the same"
    return _finding("buffers", worst <= most, text, f"off by at most {share(most)}", "batch-norm")


def _optimizer(updates):
    worst = max(updates, key=lambda u: u.optimizer_roundings)
    roundings, away = worst.optimizer_roundings, worst.optimizer_share
    name = f" ({worst.optimizer_worst})" if worst.optimizer_worst else ""
    ok = roundings <= ROUNDINGS
    off = f"off by {share(away, 'the step')}" if away else "the weights right, a momentum not"
    off = f"{roundings:.3g} roundings" if ok else off
    text = f"{off} in update {worst.update}{name}" if roundings else "the same"
    asked = f"the solution's, within {ROUNDINGS} roundings"
    return _finding("optimizer", ok, text, asked, "update")


def validation(mine: Sequence[log.Run], solution: Sequence[log.Run]) -> Finding:
    """Return a finding on the validated model and its criterion, in each process."""
    if other := another_model(mine):
        return other
    for run, usual in zip(mine, solution, strict=True):
        train, val = (run.audit.met.get(mode) for mode in ("train", "val"))
        if train and not val and usual.audit.met.get("val"):
            asked = "`training.criterion`, as in the training"
            return _finding("val-losses", False, "another one", asked, "unseen")
    return _finding("val-losses", True, "the training's", "the training's")


def validated(runs: Sequence[Audited]) -> list[Finding]:
    """Return findings on the validations: the same images, with the trained statistics."""
    kept = [(r, r.every.validation) for r in runs if r.every]
    found, asked = [], "the solution's"
    apart, _ = _worst([[v.buffers or 0.0] for _, v in kept])
    if apart > BUFFERS:
        text, most = f"off by {share(apart, 'process 0')}'s", f"off by at most {share(BUFFERS)}"
        found.append(_finding("val-buffers", False, text, most, EVALUATION))
    if labels := [v.labels.index(False) for _, v in kept if False in v.labels]:
        text = f"others in batch {labels[0]}"
        found.append(_finding("val-labels", False, text, asked, EVALUATION))
    worst, batch = _worst([v.pixels for _, v in kept])
    if worst > PIXELS:
        text, most = _other_pixels(worst, "batch", batch), f"by at most {PIXELS:g} of one"
        found.append(_finding("val-pixels", False, text, most, EVALUATION))
    return found


def another_model(mine: Sequence[log.Run]) -> Finding | None:
    """Return a failed finding if the validated model is not the trained one, else None."""
    if any(run.audit.same_weights is False for run in mine):
        text, asked = "not those of the last update", "as they were trained"
        return _finding("val-weights", False, text, asked, EVALUATION)
    if mine[0].audit.same_buffers is False:
        text, asked = "changed since the last step", "as process 0 trained them"
        return _finding("val-buffers", False, text, asked, EVALUATION)
    return None


def _finding(key, ok, yours, expected, hint=None, **words):
    """Return a finding. ok: True, False or a State; words: those that its label needs."""
    hint = hint if ok in (False, State.UNMEASURED) else None
    return Finding(SAME, key, LABELS[key].format(**words), ok, yours, expected, hint)


def _unmeasured(key, text, **words):
    asked = "updates that the solution can do again"
    return _finding(key, State.UNMEASURED, text, asked, "audit", **words)


def _worst(lists):
    """Return the largest value of these lists and its place; a missing value is infinite."""
    found = (0.0, 0)
    for values in lists:
        for place, value in enumerate(values):
            value = math.inf if value is None or math.isnan(value) else value
            if value > found[0]:
                found = (value, place)
    return found
