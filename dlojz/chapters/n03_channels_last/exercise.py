"""03_channels_last: weights, images and activations in channels_last."""

from dlojz.check.bars import CPU, FUSED, HOPPER, LARGE, RECORDED, Bar
from dlojz.check.common import alike, flag, inputs, like, no_brake, words
from dlojz.check.ending import Role
from dlojz.check.exercise import MECHANISM, SAME, WORK_FIRST, Exercise, Finding, Runs

WANTED = "channels_last"
OTHERWISE = Role.EPOCHS


def mechanism(runs: Runs) -> list[Finding]:
    """Return findings on the layouts, by strides; "any" if a tensor's shape leaves no choice."""
    mine, reference = runs.mine, runs.reference
    images, weights = _images(mine, "train"), _weights(mine)
    neither = WANTED not in (images, weights)
    hints = dict.fromkeys(("images-layout", "weights-layout"), "neither") if neither else {}
    layouts = (
        ("images-layout", "layout of the images", images),
        ("val-layout", "layout of the validation's images", _images(mine, "val")),
        ("weights-layout", "layout of the weights", weights),
        ("undone", "layout of the activations", _activations(mine)),
    )
    return [
        _multiple_of_8(mine, reference),
        flag(mine, "--channels-last", bool, "yes", "which"),
        *(
            Finding(MECHANISM, key, what, found == WANTED, found, WANTED, hints.get(key, key))
            for key, what, found in layouts
        ),
        like(MECHANISM, "autotuner", "cuDNN's autotuner", mine, reference, _autotuner, "autotuner"),
        *(_otherwise(*runs.extras[OTHERWISE]) if OTHERWISE in runs.extras else []),
        *no_brake(mine, reference),
    ]


def _otherwise(mine, reference):
    """Return findings of the run with --no-channels-last --deterministic."""
    no = "--no-channels-last"
    return alike(
        *(mine, reference),
        (MECHANISM, "images-otherwise", f"layout of the images, {no}", _all_images, "not-asked"),
        (MECHANISM, "weights-otherwise", f"layout of the weights, {no}", _weights, "not-asked"),
        (MECHANISM, "deterministic", "autotuner, --deterministic", _autotuner, "autotuner"),
    )


def _images(run, *modes):
    return _choices(i["layout"] for mode in modes for i in inputs(run, mode))


def _all_images(run):
    return _images(run, "train", "val")


def _weights(run):
    return _choices(run.probe.parameters.layouts)


def _activations(run):
    every = *run.probe.layers, *run.whole.layers
    return _choices(entry["out_layout"] for entry in every)


def _autotuner(run):
    return {True: "on", False: "off"}.get(run.probe.numerics.cudnn_benchmark)


def _multiple_of_8(mine, reference):
    odd = [{i["shape"][0] % 8 for i in inputs(r, "train")} - {0} for r in (mine, reference)]
    batches = words(i["shape"][0] for i in inputs(mine, "train"))
    even = bool(odd[1]) or not odd[0]
    return Finding(SAME, "batches", "batches", even, batches, "multiples of 8", "eights")


def _choices(layouts):
    return words(layout for layout in layouts if layout != "any")


EXERCISE = Exercise(
    step="03_channels_last",
    own_flags={"--channels-last": 0, "--no-channels-last": 0},
    mechanism=mechanism,
    follows=("images-otherwise",),
    bars=(
        Bar(HOPPER, 1.15, f"{FUSED}/03-*", precision="16", **LARGE),
        Bar(
            *(HOPPER, None),
            "with fewer than 256 images of 224 px a step may be launch-bound: 1.30 to 1.85 times "
            f"as fast was recorded with 64 and 128, {FUSED}/03-*",
            **{"precision": "16", "model": "resnet"},
        ),
        Bar(
            *(HOPPER, 1.15, f"{RECORDED}/03-vgg19*, unfused"),
            **{"precision": "16", "model": "vgg", "image_size": 160, "batch_size": 64},
        ),
        Bar(
            *(CPU, 1.0),
            "at 128 px and above a processor may get faster; it must not get slower",
            **{"precision": "fp32", "image_size": 128, "not_slower": True},
        ),
        Bar(
            *(CPU, None),
            "below 128 px a processor gains little: 0.93 to 1.09 times as fast at 64 px",
        ),
    ),
    # The autotuner breaks its determinism.
    epochs="--precision fp32 --no-channels-last",
    first_hints=("eights", *WORK_FIRST),
    errors=(
        (r"unrecognized arguments: .*--(no-)?channels-last", "flag"),
        (r"to have 3 channels, but got|\(3\) must match the size of tensor", "permuted"),
    ),
    recorded=("h200/03-resnet50-fp16-nchw-b0256.jsonl", "h200/03-resnet50-fp16-nhwc-b0256.jsonl"),
)
