"""03_channels_last: weights, images and activations have their channels next to each other."""

from dlojz.check.exercises import MECHANISM, SAME, WORK_FIRST, Exercise, Extra, Finding, Runs
from dlojz.check.exercises.common import flag, inputs, like, no_brake, words

WANTED = "channels_last"
DETERMINISTIC = "deterministic"
SMALL = "--test --data synthetic --model shufflenet_v2_x0_5 --image-size 32 -b 8 --test-nsteps 2"


def mechanism(runs: Runs) -> list[Finding]:
    """Return the layouts, by strides; "any" if a tensor's shape leaves no choice."""
    mine, reference = runs.mine, runs.reference
    weights = mine.probe.parameters.layouts
    images = [i["layout"] for mode in ("train", "val") for i in inputs(mine, mode)]
    layers = [entry["out_layout"] for entry in mine.probe.layers]
    layouts = (
        ("layout of the images", images, "images-layout"),
        ("layout of the weights", weights, "weights-layout"),
        ("layout of the activations", layers, "undone"),
    )
    return [
        _multiple_of_8(mine, reference),
        flag(mine, "--channels-last", bool, "True", "which"),
        *(
            Finding(MECHANISM, what, _choices(found) == WANTED, _choices(found), WANTED, hint)
            for what, found, hint in layouts
        ),
        like(MECHANISM, "cuDNN's autotuner", mine, reference, _autotuner, "autotuner"),
        *(_promised(*runs.extras[DETERMINISTIC]) if DETERMINISTIC in runs.extras else []),
        *no_brake(mine, reference),
    ]


def _promised(mine, reference):
    return [like(MECHANISM, "autotuner, --deterministic", mine, reference, _autotuner, "autotuner")]


def _autotuner(run):
    return {True: "on", False: "off"}.get(run.probe.numerics.cudnn_benchmark)


def extras(on_gpu: bool) -> list[Extra]:
    """Return a short run with --deterministic: the autotuner would break its promise."""
    return [Extra(DETERMINISTIC, (*SMALL.split(), "--deterministic"))]


def _multiple_of_8(mine, reference):
    odd = [{i["shape"][0] % 8 for i in inputs(r, "train")} - {0} for r in (mine, reference)]
    batches = words(i["shape"][0] for i in inputs(mine, "train"))
    return Finding(SAME, "batches", bool(odd[1]) or not odd[0], batches, "multiples of 8", "eights")


def _choices(layouts):
    return words(layout for layout in layouts if layout != "any")


EXERCISE = Exercise(
    step="03_channels_last",
    own_flags={"--channels-last": 0, "--no-channels-last": 0},
    mechanism=mechanism,
    extras=extras,
    first_hints=("eights", *WORK_FIRST),
    errors=((r"unrecognized arguments: .*--(no-)?channels-last", "flag"),),
    recorded=("h100/03-resnet50-fp16-nchw-b0256.jsonl", "h100/03-resnet50-fp16-nhwc-b0256.jsonl"),
)
