"""06_ddp: several processes share the images and hold the same weights."""

import math
from collections import Counter

from dlojz.check.bars import CPU, HOPPER, LARGE, Bar
from dlojz.check.common import alike, no_brake, words
from dlojz.check.ending import Role
from dlojz.check.exercise import MECHANISM, SAME, WORK_FIRST, Exercise, Extra, Finding, Runs, Unseen
from dlojz.check.wording import share
from dlojz.runs.folder import group_file

# Another seed than 0, a sampler's default.
SMALL = "--test --data synthetic --model shufflenet_v2_x0_5 --image-size 32 -b 8 --seed 1 "
SMALL += "--precision fp32 --deterministic"
ACCUMULATES = "accumulates"
FEW_BYTES = 16  # a loss, or some counts: no layer has so few weights
IN_GROUP = "processes still in their group at the end"
NO_HOOK = (None, "allreduce_hook")  # torch's, which does what DDP does without one
FIRST_STEPS, NEAR = 4, 1e-3  # the losses of the run that accumulates, against the solution's


def mechanism(runs: Runs) -> list[Finding]:
    """Return findings on the processes: their images, their exchanges, and their checkpoints."""
    pair = runs.mine.ranks, runs.reference.ranks
    count = len(pair[0])
    # If the job's own images differ already, those of its extra runs have the same cause.
    dealt = _drawn(pair[0]) == _drawn(pair[1])
    return [
        Finding(MECHANISM, "processes", "processes", count > 1, str(count), "2 or more", "alone"),
        *alike(
            *pair,
            (SAME, "shares", "processes with images of their own", _shares, "share"),
            (SAME, "val-shares", "processes that validate images of their own", _val, "val-share"),
            (MECHANISM, "reduced", "gradients reduced in a step", _reduced, _why_others(*pair)),
            (MECHANISM, "hooks", "hooks on the exchange", _hooks, "narrow"),
            (MECHANISM, "weights", "processes with the same weights", _weights, "wrap"),
            (MECHANISM, "model", "processes that evaluate the same model", _buffers, "statistics"),
            (MECHANISM, "sent", "buffers sent in each forward pass", _broadcast, "buffers"),
            (MECHANISM, "devices", "devices", _devices, "device"),
            (MECHANISM, "unused", "search for unused parameters", _unused, "unused"),
        ),
        _others(*pair),
        *alike(*pair, (MECHANISM, "group", IN_GROUP, _still_there, "leave")),
        *(_two_epochs(*runs.extras[Role.EPOCHS], dealt) if Role.EPOCHS in runs.extras else []),
        *(_accumulates(*runs.extras[ACCUMULATES], dealt) if ACCUMULATES in runs.extras else []),
        *no_brake(runs.mine, runs.reference),
    ]


def _why_others(mine, reference):
    yours, usual = sum(_bytes(mine)), sum(_bytes(reference))
    if not yours or _weights(mine) != _weights(reference):
        return "wrap"
    return "narrow" if yours < usual else "barrier"


def _two_epochs(mine, reference, dealt):
    return alike(
        *(mine.ranks, reference.ranks),
        (SAME, "later-drawn", "images in two epochs", _drawn, "epoch" if dealt else None),
        (SAME, "later-weights", "processes with the same weights, after two", _weights, "wrap"),
        (MECHANISM, "writers", "processes that wrote the checkpoint", _writers, "one-writer"),
        (MECHANISM, "states", "processes whose state is in it", _states, "gather"),
        (MECHANISM, "names", "weights by the names of your model", _named, "names"),
    )


def _accumulates(mine, reference, dealt):
    pair = mine.ranks, reference.ranks
    away = _away(*pair)
    # Only up to the first updates, before rounding grows.
    near = f"at most {share(NEAR)} away in {FIRST_STEPS} batches"
    updates, images, rate, reduced = alike(
        *pair,
        (SAME, "accumulate", "updates of 7 batches, 2 each", _updates, "accumulate"),
        (SAME, "deal", "images of batches that accumulate", _drawn, "deal" if dealt else None),
        (MECHANISM, "last-rate", "learning rate at the end", _last_rate, "schedule"),
        (MECHANISM, "no-sync", "reduced where no update follows", _reduced, "no-sync"),
    )
    # If gradients are not exchanged, the losses differ for that reason.
    hint = "mean" if dealt and not reduced.fails else None
    what = "losses of an update's batches"
    text = f"fewer than {FIRST_STEPS}" if math.isinf(away) else f"{share(away)} away"
    losses = Finding(SAME, "mean", what, away < NEAR, text, near, hint)
    return [updates, images, losses, rate, reduced]


def _shares(ranks):
    found = [run.whole.drawn for run in ranks]
    return Unseen.UNKNOWN if None in found else len(set(map(tuple, found)))


def _val(ranks):
    """Return the number of processes that begin their validation with images of their own."""
    found = [run.whole.pixels.get("val") for run in ranks]
    return Unseen.UNKNOWN if None in found else len(set(map(str, found)))


def _drawn(ranks):
    found = (run.whole.drawn or [] for run in ranks)
    return "; ".join(f"{len(d)} batches, checksum {sum(d) % 2**32:08x}" for d in found)


def _reduced(ranks):
    if not all(run.last for run in ranks):
        return Unseen.UNKNOWN
    return ", ".join(f"{size / 1e6:.4g} MB" for size in _bytes(ranks))


def _bytes(ranks):
    each = ((c["bytes"] for c in r.last.collectives or () if _is_of_gradients(c)) for r in ranks)
    return [sum(sizes) for sizes in each]


def _is_of_gradients(collective):
    return collective["op"] == "all_reduce" and "float" in collective["dtype"]


def _hooks(ranks):
    """Return DDP's communication hooks, in place of a sum, perhaps only in some steps."""
    hooks = (run.last.comm_hook for run in ranks)
    return words("none" if hook in NO_HOOK else f"hook {hook}" for hook in hooks)


def _weights(ranks):
    return _agree(run.whole.weights_after for run in ranks)


def _buffers(ranks):
    return _agree(run.whole.buffers_after for run in ranks)


def _agree(found):
    found = list(found)
    return Unseen.UNKNOWN if None in found else Counter(found).most_common(1)[0][1]


def _away(mine, reference):
    pairs = zip(mine, reference, strict=False)
    losses = [(list(a.steps.loss), list(b.steps.loss)) for a, b in pairs]
    if any(len(a) < FIRST_STEPS or len(b) < FIRST_STEPS for a, b in losses):
        return math.inf
    return max(abs(a[i] / b[i] - 1) for a, b in losses for i in range(FIRST_STEPS))


def _last_rate(ranks):
    return ", ".join(f"{run.steps.lr[-1]:.7g}" if len(run.steps) else "none" for run in ranks)


def _updates(ranks):
    return ", ".join(str(run.whole.optimizer_steps) for run in ranks)


def _devices(ranks):
    return words(run.setup.get("device") for run in ranks)


def _broadcast(ranks):
    return words(bool(run.last.broadcast_buffers) for run in ranks)


def _unused(ranks):
    return words(bool(run.last.find_unused_parameters) for run in ranks)


def _others(mine, reference):
    """Return a finding on exchanges in a step other than gradients and buffers."""
    yours, usual = (
        max(sum(map(_is_small, run.last.collectives or ())) for run in ranks)
        for ranks in (mine, reference)
    )
    asked = f"at most {usual}" if usual else "none"
    what = "barriers and numbers exchanged in a step"
    return Finding(MECHANISM, "others", what, yours <= usual, str(yours), asked, "barrier")


def _is_small(collective):
    return collective["op"] == "barrier" or collective["bytes"] <= FEW_BYTES


def _still_there(ranks):
    folder = ranks[0].path.parent
    return sum(group_file(folder, rank).exists() for rank in range(len(ranks))) or Unseen.NONE


def _writers(ranks):
    return sum(bool(run.whole.saves) for run in ranks)


def _states(ranks):
    """Return the number of processes whose state is at its place in the checkpoint."""
    saved = next((run.whole.saved_states for run in ranks if run.whole.saved_states), [])
    return sum(a == run.whole.own_state for a, run in zip(saved, ranks, strict=False))


def _named(ranks):
    return words(run.whole.saved_names for run in ranks if run.whole.saved_names is not None)


def extras(on_gpu: bool) -> list[Extra]:
    """Return a run of seven batches, the last without an update."""
    return [Extra(ACCUMULATES, tuple(f"{SMALL} --test-nsteps 7 --accumulate 2".split()))]


EXERCISE = Exercise(
    step="06_ddp",
    own_flags={},
    processes=2,
    mechanism=mechanism,
    follows=("mean", "last-rate"),
    bars=(
        Bar(HOPPER, 0.9, "reference/h200/06-*; GPUs of one node", **LARGE),
        Bar(CPU, None, "the processes share one CPU"),
    ),
    extras=extras,
    # It saves in the middle of an epoch, where each process has its own statistics.
    epochs="--precision fp32 --seed 1 --checkpoint {run}/checkpoint.pt --checkpoint-every 1",
    recorded=("h200/06-resnet50-bf16-x1-1.jsonl", "h200/06-resnet50-bf16-x2-1"),
    # The division of the images comes before their order.
    first_hints=("share", *WORK_FIRST),
    waited="together",
    errors=(
        (r"Duplicate GPU detected", "device"),  # NCCL's
        (r"process group has not been initialized", "connect"),
        (r"only supported with GPUs|requires at least one CUDA device", "backend"),
        (r"Invalid rank \d+, rank should be|(?<!attribute ')num_replicas", "rank"),
    ),
)
