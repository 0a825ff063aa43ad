"""02_amp: matrix products and convolutions in a low precision, weights and loss in float32."""

import math

from dlojz.check.exercises import MECHANISM, Exercise, Extra, Finding, Hint, Runs
from dlojz.check.exercises.common import (
    DOCS,
    hints,
    inputs,
    like,
    losses,
    no_brake,
    words,
)

FP16 = "fp16-clipped"
CLIP_NORM = 1.0
SMALL = "--test --data synthetic --model shufflenet_v2_x0_5 --image-size 32 -b 8 --test-nsteps 8"
DTYPES = {"fp16": "float16", "bf16": "bfloat16"}
AMP = DOCS + "amp.html"
EXAMPLES = DOCS + "notes/amp_examples.html"

OWN_HINTS = {
    "flag": Hint(
        "The trainer does not know the flag --precision yet.",
        'In `parse_args`: `flag("--precision", choices=..., default=..., help=...)`.',
        "https://docs.python.org/3/library/argparse.html#choices",
    ),
    "half-weights": Hint(
        "The weights themselves are in a low precision: small updates are lost. Autocast does not "
        "need that.",
        "Leave the model in float32: no `model.half()`, no `.to(torch.bfloat16)`. Autocast casts a "
        "copy for each operation.",
        AMP + "#autocasting",
    ),
    "autocast": Hint(
        "The convolutions still compute in float32. What must be inside the context?",
        "`with torch.autocast(device_type, dtype):` around the forward pass and the loss, where "
        "`images` meets `training.model`. The backward pass follows by itself.",
        AMP + "#autocasting",
    ),
    "loss-dtype": Hint(
        "The loss is computed in a low precision. Its exponentials and sums are the part that can "
        "least afford it.",
        "Compute the criterion under autocast, from the model's logits as they are: autocast takes "
        "cross_entropy to float32.",
        AMP + "#cuda-ops-that-autocast-to-float32",
    ),
    "validation-autocast": Hint(
        "The training runs in a low precision, the validation does not.",
        "Both go through `forward`: the context belongs there.",
        AMP + "#autocasting",
    ),
    "scaler": Hint(
        "In fp16 the smallest gradients become zero. Nothing prevents that here.",
        "`torch.amp.GradScaler`: `scaler.scale(loss).backward()`, `scaler.step(optimizer)`, "
        "`scaler.update()`; only for fp16.",
        AMP + "#gradient-scaling",
    ),
    "unscale": Hint(
        "The gradients are clipped while they are still multiplied by the scale.",
        "`scaler.unscale_(optimizer)` before `clip_grad_norm_`.",
        EXAMPLES + "#gradient-clipping",
    ),
    "tf32": Hint(
        "What autocast leaves in float32 does not use TF32, or fp32 does.",
        "`torch.backends.cuda.matmul.fp32_precision` and "
        '`torch.backends.cudnn.conv.fp32_precision`: "ieee" for fp32, "tf32" otherwise.',
        DOCS + "notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices",
    ),
    "which": Hint(
        "This run asked for fp32: there is nothing to prove.",
        "Submit it with `--precision bf16`, or `--precision fp16`.",
        AMP,
    ),
}


def mechanism(runs: Runs) -> list[Finding]:
    """What was computed in which dtype."""
    mine, reference, precision = runs.mine, runs.reference, runs.arguments["precision"]
    asked = f"--precision {precision}"

    looks = (
        ("dtype of the weights", lambda r: words(r.probe.parameters.dtypes), "half-weights"),
        ("dtype of the gradients", lambda r: words(r.probe.gradients.dtypes), "half-weights"),
        ("convolutions and linear layers, outputs", _outputs, "autocast"),
        ("matrix operations of the last step", _matrix_ops, "autocast"),
        ("dtype of the loss", _loss_dtypes, "loss-dtype"),
        ("autocast in validation", _autocast_in_validation, "validation-autocast"),
        ("float32 matrix products", lambda r: r.probe.numerics.matmul_fp32, "tf32"),
        ("float32 convolutions", lambda r: r.probe.numerics.conv_fp32, "tf32"),
    )
    return [
        Finding(MECHANISM, "flag", precision != "fp32", asked, "tf32, fp16 or bf16", "which"),
        *(like(MECHANISM, what, mine, reference, get, hint) for what, get, hint in looks),
        *(_scaled(*runs.extras[FP16]) if FP16 in runs.extras else []),
        *no_brake(mine, reference),
    ]


def _outputs(run):
    return words(
        entry["out"]
        for entry in run.probe.layers
        if entry["layer"].startswith("Conv") or entry["layer"] == "Linear"
    )


def _matrix_ops(run):
    return words(op["dtype"] for op in run.last.matrix_ops)


def _loss_dtypes(run):
    return words(entry["dtype"] for mode in ("train", "val") for entry in losses(run, mode))


def _autocast_in_validation(run):
    return words(entry["autocast"] for entry in inputs(run, "val"))


def _scaled(mine, reference):
    """In fp16 with clipping: was the loss scaled, and were the gradients clipped as they are?"""
    scale, usual = (r.probe.loss_gradient for r in (mine, reference))
    norm, expected = (r.probe.gradients.norm for r in (mine, reference))
    clipped = None not in (norm, expected) and abs(norm - expected) <= 0.1 * expected
    return [
        Finding(
            *(MECHANISM, "factor on the loss in fp16", scale is not None and 1 < scale < math.inf),
            *(_number(scale), f"above 1, such as {_number(usual)}", "scaler"),
        ),
        Finding(
            *(MECHANISM, f"norm of the gradients, fp16, clipped at {CLIP_NORM:g}", clipped),
            *(_number(norm), f"{_number(expected)} +- 10 %", "unscale"),
        ),
    ]


def _number(value):
    return "unknown" if value is None else f"{value:.4g}"


def extras(on_gpu: bool) -> list[Extra]:
    """A short run in fp16 with clipping, on small images: it shows whether gradients are scaled.

    Eight steps, because the scaler skips the first ones until its scale is small enough.
    """
    return [Extra(FP16, (*SMALL.split(), "--precision", "fp16", "--clip-norm", str(CLIP_NORM)))]


EXERCISE = Exercise(
    step="02_amp",
    own_flags={"--precision": 1},
    mechanism=mechanism,
    extras=extras,
    hints=hints(OWN_HINTS),
    errors=(
        (r"unrecognized arguments: .*--precision", "flag"),
        (r"unscale FP16|Half.*Float|Float.*Half|BFloat16.*[Ff]loat|same dtype", "half-weights"),
    ),
    recorded=("h100/03-resnet50-fp32-nchw-b0256.jsonl", "h100/03-resnet50-fp16-nchw-b0256.jsonl"),
)
