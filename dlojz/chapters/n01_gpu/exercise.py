"""01_gpu: model, batches and metrics are on the device.

Without a GPU this is proven by a rehearsal on the meta device, whose tensors have a device and a
shape but no values: a tensor left on the processor shows there just as on a GPU. The rehearsal, or
on a GPU a short run, has --no-non-blocking as well, which the copies must follow.
"""

from dataclasses import replace

from dlojz.check.bars import AMPERE, CPU, HOPPER, RECORDED, RESNETS, SURF, Bar
from dlojz.check.common import inputs, like, losses, no_brake, words
from dlojz.check.exercise import (
    MECHANISM,
    Exercise,
    Extra,
    Finding,
    Runs,
    State,
    Unseen,
    shown,
)

REHEARSAL, WAITS = "rehearsal", "no-non-blocking"
# On meta batch normalization takes most of the time; of small models resnet18 has the fewest.
SMALL = "--test --data synthetic --model resnet18 --image-size 32 -b 8 --test-nsteps 2 -e 2 "
SMALL += "--deterministic"


def mechanism(runs: Runs) -> list[Finding]:
    """Return findings on the device of everything: the GPU, or meta in the rehearsal."""
    mine, reference = runs.extras.get(REHEARSAL, (runs.mine, runs.reference))
    kind = reference.setup["device"].split(":")[0]
    where = f" (rehearsed on {kind})" if kind == "meta" else ""

    def finding(key, what, devices, hint):
        kinds = words(d and str(d).split(":")[0] for d in devices)
        return Finding(MECHANISM, key, what + where, kinds == kind, kinds, kind, hint)

    left = "validation-device"
    train, val = (inputs(mine, mode) for mode in ("train", "val"))
    labels = [[e["labels_device"] for e in losses(mine, mode)] for mode in ("train", "val")]
    return [
        finding("device", "device", [mine.setup.get("device")], "device"),
        finding("weights", "weights", mine.probe.parameters.devices, _why(mine, kind)),
        _moves(runs, mine, reference, where),
        finding("images", "images in training", [i["device"] for i in train], "batch"),
        _if_seen(finding("labels", "labels in training", labels[0], "batch")),
        finding("val-images", "images in validation", [i["device"] for i in val], left),
        _if_seen(finding("val-labels", "labels in validation", labels[1], left)),
        finding("metrics", "metrics", mine.probe.metrics_devices, "metrics"),
        *_copies(runs),
        *no_brake(runs.mine, runs.reference),
    ]


def _why(mine, kind) -> str:
    """Return the hint for weights left behind, with everything else or alone."""
    moved = [i["device"] for i in inputs(mine, "train")] + list(mine.probe.metrics_devices)
    return "model" if any(str(device).startswith(kind) for device in moved) else "nothing-moved"


def _moves(runs, mine, reference, where):
    """Return a finding on the weights with a momentum: a copy on the meta device has others.

    An optimizer without momenta, whose weights change, is another mistake.
    """
    without = runs.mine.whole.weights_changed and not runs.mine.probe.optimizer_state
    yours, usual = (sum(run.probe.optimizer_state.values()) for run in (mine, reference))
    crashed = not mine.whole.optimizer_steps
    text, asked = Unseen.UNKNOWN if crashed else str(yours), f"at least {usual}"
    ok = not crashed and (without or yours >= usual)
    return Finding(MECHANISM, "moved", f"weights that move{where}", ok, text, asked, "unmoved")


def _if_seen(found: Finding) -> Finding:
    """Return the finding, NOT_ASKED if the criterion's hook saw no labels.

    A loss computed by a function has no hook, and fails on a wrong device.
    """
    if found.reached:
        return found
    return replace(found, state=State.NOT_ASKED, yours="not seen", hint=None)


def _copies(runs):
    """Return findings on the copies of a step: they wait exactly if the flag says so."""
    extra = runs.extras.get(WAITS) or runs.extras.get(REHEARSAL)
    if extra and not extra[0].last:
        return []  # it crashed: something was left behind, which comes first
    on, enough = (run.last.non_blocking for run in (runs.mine, runs.reference))
    if on is not None:  # a trainer that copies ahead has no copy in the last step
        on = max(on, runs.mine.middle.non_blocking or 0)
    ok, least = None not in (on, enough) and on >= enough, f"at least {enough}"
    what, hint = "copies that do not wait", "non-blocking"
    found = [Finding(MECHANISM, "copies", what, ok, shown(on), least, hint)]
    if extra:
        which = "copies-otherwise", f"{what}, with --no-non-blocking"
        found.append(like(MECHANISM, *which, *extra, lambda r: r.last.non_blocking, hint))
    return found


def extras(on_gpu: bool) -> list[Extra]:
    """Return a short run whose copies must wait, without a GPU on the meta device."""
    flags = (*SMALL.split(), "--no-non-blocking")
    return [Extra(WAITS, flags) if on_gpu else Extra(REHEARSAL, flags, rehearse=True)]


EXERCISE = Exercise(
    step="01_gpu",
    own_flags={},
    mechanism=mechanism,
    bars=(
        Bar(HOPPER, 8.0, f"{RECORDED}/00-* and 01-*", image_size=160, batch_size=16),
        Bar(AMPERE, 5.0, f"{SURF}; 16 CPU cores: {RECORDED}/00-*", **RESNETS),
        Bar(CPU, None, "both sides compute on this processor"),
    ),
    extras=extras,
    epochs="",
    errors=(
        (r"no NVIDIA driver|not compiled with CUDA|CUDA is not available", "by-name"),
        (r"target tensor expected|class probabilities", "labels"),
        (r"(?s)cross_entropy.*(expected device|same device|should be the same)", "labels-behind"),
        # By a loader, on the meta device and on a GPU.
        (r"utils/data/(?s:.*)Tensor\.item\(\)|Expected a '\w+' device type for gen", "default"),
        (r"Tensor\.item\(\) cannot be called on meta", "item"),
        (r"in evaluate\n", "validation-device"),
        (r"[Cc]annot copy out of meta", "item"),
        (r"expected device|same device|should be the same", "batch"),
    ),
    before_flags=("--test-nsteps", "8"),
    same_hardware=False,
    recorded=("h100/00-resnet50-cpu-b0032.jsonl", "h100/01-resnet50-fp32-b0032.jsonl"),
)
