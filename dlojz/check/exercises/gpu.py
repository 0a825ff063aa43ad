"""01_gpu: model, batches and metrics are on the device.

Without a GPU this is proven by a rehearsal on the meta device, whose tensors have a place and a
shape but no values: what was left behind on the processor is seen there as well as on a GPU.
"""

from dlojz.check.exercises import MECHANISM, Exercise, Extra, Finding, Hint, Runs
from dlojz.check.exercises.common import DOCS, hints, inputs, losses, no_brake, words

REHEARSAL = "rehearsal"
SMALL = "--test --data synthetic --model shufflenet_v2_x0_5 --image-size 32 -b 8 --test-nsteps 4"

OWN_HINTS = {
    "device": Hint(
        "The training still runs where it began. Which line of `main` decides that?",
        "`idr_torch.device()` gives the device that belongs to this process.",
        DOCS + "tensor_attributes.html#torch.device",
    ),
    "model": Hint(
        "The batch is on the device, and the weights are not.",
        "`model.to(device)` moves all parameters and buffers; do it before the optimizer is built.",
        DOCS + "generated/torch.nn.Module.html#torch.nn.Module.to",
    ),
    "batch": Hint(
        "The weights are on the device, and a batch of the training is not.",
        "`images = images.to(device, non_blocking=args.non_blocking)`: `Tensor.to` returns the "
        "copy, it does not move the tensor itself. The labels need it too.",
        DOCS + "generated/torch.Tensor.to.html",
    ),
    "validation-device": Hint(
        "The training is on the device. Is the validation, with its images and its labels?",
        "`evaluate` needs the same two copies as `train_one_epoch`.",
        DOCS + "generated/torch.Tensor.to.html",
    ),
    "metrics": Hint(
        "The metrics add up what the model gives. Where do they keep their sums?",
        "They are a module, with their sums as buffers: `.to(device)` moves those.",
        DOCS + "generated/torch.nn.Module.html#torch.nn.Module.to",
    ),
}


def mechanism(runs: Runs) -> list[Finding]:
    """Where everything was: on the GPU, or in the rehearsal on meta."""
    mine, reference = runs.extras.get(REHEARSAL, (runs.mine, runs.reference))
    kind = reference.setup["device"].split(":")[0]
    where = f" (rehearsed on {kind})" if kind == "meta" else ""

    def finding(what, devices, hint):
        kinds = words(str(d).split(":")[0] for d in devices)
        return Finding(MECHANISM, what + where, kinds == kind, kinds, kind, hint)

    train, val = (inputs(mine, mode) for mode in ("train", "val"))
    labels = [[e["labels_device"] for e in losses(mine, mode)] for mode in ("train", "val")]
    return [
        finding("device", [mine.setup.get("device")], "device"),
        finding("weights", mine.probe.parameters.devices, "model"),
        finding("images in training", [i["device"] for i in train], "batch"),
        finding("labels in training", labels[0], "batch"),
        finding("images in validation", [i["device"] for i in val], "validation-device"),
        finding("labels in validation", labels[1], "validation-device"),
        finding("metrics", mine.probe.metrics_devices, "metrics"),
        *no_brake(runs.mine, runs.reference),
    ]


def extras(on_gpu: bool) -> list[Extra]:
    """Without a GPU: the rehearsal."""
    return [] if on_gpu else [Extra(REHEARSAL, tuple(SMALL.split()), rehearse=True)]


EXERCISE = Exercise(
    step="01_gpu",
    own_flags={},
    mechanism=mechanism,
    extras=extras,
    hints=hints(OWN_HINTS),
    errors=(
        (r"Tensor\.item\(\) cannot be called on meta", "item"),
        (r"in evaluate\n", "validation-device"),
        (r"[Cc]annot copy out of meta", "item"),
        (r"expected device|same device|should be the same", "batch"),
    ),
    before_flags=("--test-nsteps", "8"),
    same_hardware=False,
    recorded=("h100/00-resnet50-cpu-b0032.jsonl", "h100/01-resnet50-fp32-b0032.jsonl"),
)
