"""02_amp: matrix products and convolutions in a low precision, weights and loss in float32."""

import math

from dlojz.check.exercises import MECHANISM, Exercise, Extra, Finding, Runs
from dlojz.check.exercises.common import (
    flag,
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


def mechanism(runs: Runs) -> list[Finding]:
    """Return what was computed in which dtype."""
    mine, reference = runs.mine, runs.reference
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
        flag(mine, "--precision", lambda p: p != "fp32", "tf32, fp16 or bf16", "which"),
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
    """Return findings: was the loss scaled in fp16, and were gradients unscaled to be clipped?"""
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
            *(_number(norm), f"{_number(expected)} ± 10 %", "unscale"),
        ),
    ]


def _number(value):
    return "unknown" if value is None else f"{value:.4g}"


def extras(on_gpu: bool) -> list[Extra]:
    """Return a short run in fp16 with clipping, on small images: is the loss scaled?

    Eight steps, because the scaler skips the first ones until its scale is small enough.
    """
    return [Extra(FP16, (*SMALL.split(), "--precision", "fp16", "--clip-norm", str(CLIP_NORM)))]


EXERCISE = Exercise(
    step="02_amp",
    own_flags={"--precision": 1},
    mechanism=mechanism,
    extras=extras,
    errors=(
        (r"unrecognized arguments: .*--precision", "flag"),
        (r"unscale FP16|Half.*Float|Float.*Half|BFloat16.*[Ff]loat|same dtype", "half-weights"),
    ),
    recorded=("h100/03-resnet50-fp32-nchw-b0256.jsonl", "h100/03-resnet50-fp16-nchw-b0256.jsonl"),
)
