"""01_gpu: model, batches and metrics are on the device.

Without a GPU this is proven by a rehearsal on the meta device, whose tensors have a device and a
shape but no values: what was left behind on the processor shows there just as on a GPU.
"""

from dlojz.check.exercises import MECHANISM, Exercise, Extra, Finding, Runs
from dlojz.check.exercises.common import inputs, losses, no_brake, words

REHEARSAL = "rehearsal"
SMALL = "--test --data synthetic --model shufflenet_v2_x0_5 --image-size 32 -b 8 --test-nsteps 4"


def mechanism(runs: Runs) -> list[Finding]:
    """Return where everything was: on the GPU, or on meta in the rehearsal."""
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
    """Return the rehearsal, if there is no GPU."""
    return [] if on_gpu else [Extra(REHEARSAL, tuple(SMALL.split()), rehearse=True)]


EXERCISE = Exercise(
    step="01_gpu",
    own_flags={},
    mechanism=mechanism,
    extras=extras,
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
