"""03_channels_last: weights, images and activations have their channels next to each other."""

from dlojz.check.exercises import MECHANISM, SAME, Exercise, Extra, Finding, Hint, Runs
from dlojz.check.exercises.common import DOCS, hints, inputs, like, no_brake, words

TUTORIAL = "https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html"
WANTED = "channels_last"
DETERMINISTIC = "deterministic"
SMALL = "--test --data synthetic --model shufflenet_v2_x0_5 --image-size 32 -b 8 --test-nsteps 2"

OWN_HINTS = {
    "flag": Hint(
        "The trainer does not know the flag --channels-last yet.",
        'In `parse_args`: `flag("--channels-last", action=switch, default=True, help=...)`.',
        "https://docs.python.org/3/library/argparse.html#argparse.BooleanOptionalAction",
    ),
    "which": Hint(
        "This run was told --no-channels-last: there is nothing to prove.",
        "Submit it without that flag.",
        TUTORIAL,
    ),
    "weights-layout": Hint(
        "The images have their channels last, the weights have not: each convolution converts its "
        "weights, in every step.",
        "`model = model.to(memory_format=torch.channels_last)`, before the optimizer is built.",
        TUTORIAL,
    ),
    "images-layout": Hint(
        "The weights have their channels last, the images have not: the first convolution converts "
        "them.",
        "`images = images.to(memory_format=torch.channels_last)`: it returns the copy.",
        TUTORIAL,
    ),
    "undone": Hint(
        "Weights and images are right, and on the way through the model the layout is lost.",
        "`.contiguous()` without a memory format means NCHW; so do some `view`s and `reshape`s.",
        DOCS + "tensor_attributes.html#torch.memory_format",
    ),
    "autotuner": Hint(
        "cuDNN has several algorithms for a convolution. Who chooses?",
        "`torch.backends.cudnn.benchmark = True`: the first step tries them; not with "
        "`--deterministic`.",
        DOCS + "backends.html#torch.backends.cudnn.torch.backends.cudnn.benchmark",
    ),
}


def mechanism(runs: Runs) -> list[Finding]:
    """The layouts, by strides; "any" where a tensor's shape leaves no choice."""
    mine, reference = runs.mine, runs.reference
    wanted = runs.arguments["channels_last"]
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
        Finding(MECHANISM, "flag", wanted, f"--channels-last: {wanted}", "True", "which"),
        *(
            Finding(MECHANISM, what, _choices(found) == WANTED, _choices(found), WANTED, hint)
            for what, found, hint in layouts
        ),
        like(MECHANISM, "cuDNN's autotuner", mine, reference, _autotuner, "autotuner"),
        *(_promised(*runs.extras[DETERMINISTIC]) if DETERMINISTIC in runs.extras else []),
        *no_brake(mine, reference),
    ]


def _promised(mine, reference):
    return [
        like(MECHANISM, "the same with --deterministic", mine, reference, _autotuner, "autotuner")
    ]


def _autotuner(run):
    return {True: "on", False: "off"}.get(run.probe.numerics.cudnn_benchmark)


def extras(on_gpu: bool) -> list[Extra]:
    """A short run with --deterministic: an autotuner that chooses anew would break its promise."""
    return [Extra(DETERMINISTIC, (*SMALL.split(), "--deterministic"))]


def _multiple_of_8(mine, reference):
    odd = [{i["shape"][0] % 8 for i in inputs(r, "train")} - {0} for r in (mine, reference)]
    batches = words(i["shape"][0] for i in inputs(mine, "train"))
    return Finding(SAME, "batches", bool(odd[1]) or not odd[0], batches, "multiples of 8", "eights")


def _choices(layouts):
    return words(layout for layout in layouts if layout != "any")


EIGHTS = Hint(
    "Not the batch that the flags say: images are missing. Another batch is another experiment, "
    "and no gain.",
    "Leave the batch as the loader gives it; its size is `-b`. (Multiples of 8 matter to tensor "
    "cores for channels and classes; measured, hardly for batches.)",
    "https://docs.nvidia.com/deeplearning/performance/dl-performance-convolutional/index.html",
)

EXERCISE = Exercise(
    step="03_channels_last",
    own_flags={"--channels-last": 0, "--no-channels-last": 0},
    mechanism=mechanism,
    extras=extras,
    hints={"eights": EIGHTS} | hints(OWN_HINTS),
    errors=((r"unrecognized arguments: .*--(no-)?channels-last", "flag"),),
    recorded=("h100/03-resnet50-fp16-nchw-b0256.jsonl", "h100/03-resnet50-fp16-nhwc-b0256.jsonl"),
)
