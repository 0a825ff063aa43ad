"""02_amp: matrix products and convolutions in a low precision, weights and loss in float32."""

import math
from operator import attrgetter

from dlojz.check.bars import AMPERE, CPU, FUSED, HOPPER, RECORDED, RESNETS, SURF, Bar
from dlojz.check.common import (
    alike,
    finite_momenta,
    flag,
    like,
    no_brake,
    schedule_goes_on,
    words,
)
from dlojz.check.ending import Role
from dlojz.check.exercise import MECHANISM, SAME, Exercise, Extra, Finding, Runs, Unseen
from dlojz.check.wording import number

FP16, BF16, TF32, FP32 = "fp16-clipped", "bf16", "tf32", Role.EPOCHS
CLIP_NORM = 0.7  # unlikely to be written into a trainer
SMALLER = 2**7  # factor below the solution's: a scaler's factor changes by 2 at a time
SMALL = "--test --data synthetic --model shufflenet_v2_x0_5 --image-size 32 -b 8"
FORMATS = {"fp16": "float16", "bf16": "bfloat16"}
LAYERS = "convolutions and linear layers, outputs"
STALE = attrgetter("whole.stale_casts")
MATMUL, CONV = (attrgetter(f"probe.numerics.{name}_fp32") for name in ("matmul", "conv"))


def mechanism(runs: Runs) -> list[Finding]:
    """Return the findings on the dtypes of the computation."""
    mine, reference, precision = runs.mine, runs.reference, runs.arguments["precision"]
    layers, expected = _outputs(mine), FORMATS.get(precision, "float32")
    looks = (
        ("weights", "dtype of the weights", _dtypes("parameters"), "half-weights"),
        ("gradients", "dtype of the gradients", _dtypes("gradients"), "half-weights"),
        ("matrix-ops", "matrix operations of the last step", _matrix_ops, _why(_matrix_ops(mine))),
        ("stale", "steps with old casts of the weights", STALE, "old-casts"),
        ("val-autocast", "autocast in validation", _autocast_in_validation, "validation-autocast"),
        ("matmul-fp32", "float32 matrix products", MATMUL, "tf32"),
        ("conv-fp32", "float32 convolutions", CONV, "tf32"),
        ("fused", "fused update in the last step", lambda r: bool(r.last.fused_updates), "fused"),
    )
    return [
        flag(mine, "--precision", lambda p: p != "fp32", "tf32, fp16 or bf16", "which"),
        # Without the solution's, which a failed job lacks.
        Finding(MECHANISM, "layers", LAYERS, layers == expected, layers, expected, _why(layers)),
        *alike(mine, reference, *((MECHANISM, *look) for look in looks)),
        *(_scaled(*runs.extras[FP16]) if FP16 in runs.extras else []),
        *(_in_float32(*runs.extras[FP32]) if FP32 in runs.extras else []),
        *(_in_bfloat16(*runs.extras[BF16]) if BF16 in runs.extras else []),
        *(_in_tf32(*runs.extras[TF32]) if TF32 in runs.extras else []),
        *no_brake(mine, reference),
    ]


def _why(found):
    """Return the hint for layers or operations that are not in the requested format."""
    return "format" if found in FORMATS.values() else "autocast"


def _outputs(run):
    return words(
        entry["out"]
        for entry in (*run.probe.layers, *run.whole.layers)
        if entry["layer"].startswith("Conv") or entry["layer"] == "Linear"
    )


def _matrix_ops(run):
    return words(op["dtype"] for op in run.last.matrix_ops)


def _dtypes(part):
    return lambda run: words(getattr(run.probe, part).dtypes)


def _autocast_in_validation(run):
    return words(run.whole.val_dtypes)


def _on_cpu(run):
    return words(run.probe.numerics.cpu_fp32)


def _scaled(mine, reference):
    """Return findings on fp16: the loss is scaled, and gradients are unscaled before clipping."""
    scale, usual = _factor(mine, reference), reference.probe.loss_gradient
    # A smaller factor saves few gradients from underflow.
    least = max(1, (usual or 1) / SMALLER)
    scaled = scale is not None and least < scale < math.inf
    why = "loss-dtype" if scale == math.inf else "scaler"  # fp16 ends at 65504, and it is 65536
    norm, expected = (r.probe.gradients.norm for r in (mine, reference))
    hint = "unscale" if norm is None or math.isfinite(norm) else "scaler-step"
    if norm and expected and expected < norm < math.inf:  # scaled ones are clipped to far less
        hint = "clip"
    clipped = _near(norm, expected)
    return [
        like(MECHANISM, "layers-fp16", f"{LAYERS}, in fp16", mine, reference, _outputs, "format"),
        Finding(
            *(MECHANISM, "factor-fp16", "factor on the loss in fp16", scaled),
            *(_number(scale), f"above {_number(least)}, such as {_number(usual)}", why),
        ),
        Finding(
            *(MECHANISM, "norm-fp16", f"norm of the gradients, fp16, clipped at {CLIP_NORM:g}"),
            *(clipped, _number(norm), f"{_number(expected)} ± 10 %", hint),
        ),
        finite_momenta(mine, ", in fp16", "fp16"),
        *schedule_goes_on(mine, ", in fp16"),
    ]


def _factor(mine, reference):
    """Return the factor on the loss; if a function computed the loss, from the logits.

    Both runs begin with the same weights and images, so only it differs in the logits' gradients.
    """
    if mine.probe.loss_gradient is not None:
        return mine.probe.loss_gradient
    norms = [r.probe.logits_gradient for r in (mine, reference)]
    return None if None in norms else reference.probe.loss_gradient * norms[0] / norms[1]


def _in_float32(mine, reference):
    """Return findings on fp32: nothing is in another format, and an update averages its batches."""
    factor = _factor(mine, reference)
    plain = factor is not None and factor <= 1.01
    norms = [r.probe.gradients.norm for r in (mine, reference)]
    near = f"{_number(norms[1])} ± 10 %"
    # A sum is twice the mean; anything else is no mistake in dividing.
    summed = None not in norms and abs(norms[0] - 2 * norms[1]) <= 0.1 * norms[1]
    looks = (
        ("layers-fp32", f"{LAYERS}, in fp32", _outputs, "enabled"),
        ("matmul-in-fp32", "float32 matrix products, in fp32", MATMUL, "tf32"),
        ("conv-in-fp32", "float32 convolutions, in fp32", CONV, "tf32"),
        ("cpu-in-fp32", "float32 on the processor, in fp32", _on_cpu, "tf32"),
    )
    return [
        *alike(mine, reference, *((MECHANISM, *look) for look in looks)),
        Finding(
            *(MECHANISM, "factor-fp32", "factor on the loss, in fp32", plain, _number(factor)),
            *("at most 1", "scaler-always"),
        ),
        Finding(
            *(SAME, "norm-fp32", "norm of the gradients of 2 batches, in fp32", _near(*norms)),
            *(_number(norms[0]), near, "mean" if summed else "gradients"),
        ),
    ]


def _in_bfloat16(mine, reference):
    return [
        like(MECHANISM, "layers-bf16", f"{LAYERS}, in bf16", mine, reference, _outputs, "format")
    ]


def _in_tf32(mine, reference):
    return alike(
        *(mine, reference),
        (MECHANISM, "layers-tf32", f"{LAYERS}, in tf32", _outputs, "enabled"),
        (MECHANISM, "matmul-in-tf32", "float32 matrix products, in tf32", MATMUL, "tf32"),
        (MECHANISM, "conv-in-tf32", "float32 convolutions, in tf32", CONV, "tf32"),
    )


def _near(norm, expected):
    return None not in (norm, expected) and abs(norm - expected) <= 0.1 * expected


def _number(value):
    return Unseen.UNKNOWN if value is None else number(value)


def extras(on_gpu: bool) -> list[Extra]:
    """Return a short run on small images in fp16, with clipping.

    It has eight steps, because the scaler skips the first ones until its scale is small enough. On
    a GPU there is also one in bf16, because fp16 is autocast's default there, as bf16 is on a
    processor. The one in tf32 asks whether autocast stays off: what a trainer does with neither
    fp32 nor 16 bits shows in no other run.
    """
    kinds = {
        FP16: f"--test-nsteps 8 --precision fp16 --clip-norm {CLIP_NORM}",
        BF16: "--test-nsteps 2 --precision bf16",
        TF32: "--test-nsteps 2 --precision tf32",
    }
    wanted = (FP16, TF32, BF16) if on_gpu else (FP16, TF32)
    return [Extra(name, tuple(f"{SMALL} {kinds[name]}".split())) for name in wanted]


SLOW_BF16 = (
    "a processor gains from bf16 only with AVX512_BF16 or AMX: 1.3 times as fast was measured on "
    "an AMD EPYC that has the first. Without them bf16 was 2 to 2.8 times slower (AVX-512), 20 to "
    "30 times (AVX2). It depends on the model and its size, too, so none is asked. This processor "
    "has {instructions}"
)

EXERCISE = Exercise(
    step="02_amp",
    own_flags={"--precision": 1},
    mechanism=mechanism,
    follows=("norm-fp16",),
    bars=(
        Bar(
            *(HOPPER, 1.5, f"{FUSED}/03-*-nchw-*; VGG-19: {RECORDED}"),
            **{"precision": "tf32|16"} | RESNETS,
        ),
        Bar(AMPERE, 1.3, SURF, precision="tf32|16", **RESNETS),
        Bar(CPU, None, SLOW_BF16, precision="bf16"),
        Bar(CPU, None, "a processor has no tensor cores", precision="fp16|tf32|fp32"),
    ),
    extras=extras,
    epochs="--precision fp32 --accumulate 2",
    errors=(
        (r"unrecognized arguments: .*--precision", "flag"),
        (r"since the last update\(\)|called after step\(\)", "scaler-update"),
        (r"No inf checks were recorded prior to update", "scaler-step"),
        (r"_scale is None|has no attribute 'scaler'", "scaler"),
        (r"unscale FP16|Half.*Float|Float.*Half|BFloat16.*[Ff]loat|same dtype", "half-weights"),
    ),
    recorded=("h200/09-ladder-resnet50-1-fp32.jsonl", "h200/09-ladder-resnet50-3-fp16.jsonl"),
)
