"""The bars of the verdict: the speed-up that each step must reach, by hardware.

A bar is well below the recorded speed: it asks for the gain, not for our machine. Where no gain is
expected there is no bar, and the verdict says why. The first row that fits counts.
"""

import re
from dataclasses import dataclass

from dlojz.runs.stats import Comparison

RECORDED, FUSED = "reference/h100", "reference/h200"
SURF = "SURF's course, ResNet-50 on an A100: fp32 456, TF32 751, fp16 1,088 images/s"
HOPPER, AMPERE = r"H100|H200|GH200", r"A100"
CPU = r"^cpu: "
BF16 = (
    "a processor gains from bf16 only with AVX512_BF16 or AMX: 1.3 times as fast was measured on "
    "an AMD EPYC that has the first. Without them bf16 was 2 to 2.8 times slower (AVX-512), 20 to "
    "30 times (AVX2). It depends on the model and its size, too, so none is asked. This processor "
    "has {instructions}"
)


@dataclass(frozen=True)
class Bar:
    """One row: the runs that it is for, the speed-up to reach, and the source of that number."""

    step: str
    hardware: str  # a regular expression on "cuda: NVIDIA H100 80GB HBM3", "cpu: AMD EPYC"
    at_least: float | None  # times as fast; None: no gain is asked for
    source: str
    model: str = ""  # regular expressions; "" fits all
    precision: str = ""
    image_size: int = 0  # pixels, at least
    batch_size: int = 0  # images per process, at least
    not_slower: bool = False  # asks for no gain, but for no loss beyond the margin either

    def least(self, margin: float) -> float:
        """Return the speed-up that clears this bar.

        Equal runs give intervals that include 1, so a bar that refuses only a loss lies a margin
        below it.
        """
        return 1 / (1 + margin) if self.not_slower else self.at_least

    def is_cleared(self, found: Comparison) -> bool | None:
        """Return whether an interval of the speed-up clears this bar; None if it includes it."""
        least = self.least(found.margin)
        if found.low >= least:
            return True
        return False if found.high < least else None


RESNETS = {"model": r"resnet\d+$|vgg", "image_size": 160, "batch_size": 64}

LIGHT = {"model": r"shufflenet", "image_size": 64, "batch_size": 32}

VGGS = {"model": r"vgg", "image_size": 160, "batch_size": 64}

# Smaller steps are launch-bound.
LARGE = {"model": r"resnet(50|101|152)$", "image_size": 224, "batch_size": 256}

BARS = (
    Bar("01_gpu", HOPPER, 8.0, f"{RECORDED}/00-* and 01-*", image_size=160, batch_size=16),
    Bar("01_gpu", AMPERE, 5.0, f"{SURF}; 16 CPU cores: {RECORDED}/00-*", **RESNETS),
    Bar("01_gpu", CPU, None, "both sides compute on this processor"),
    Bar(
        "02_amp",
        HOPPER,
        1.5,
        f"{FUSED}/03-*-nchw-*; VGG-19: {RECORDED}",
        precision="tf32|16",
        **RESNETS,
    ),
    Bar("02_amp", AMPERE, 1.3, SURF, precision="tf32|16", **RESNETS),
    Bar("02_amp", CPU, None, BF16, precision="bf16"),
    Bar("02_amp", CPU, None, "a processor has no tensor cores", precision="fp16|tf32|fp32"),
    Bar("03_channels_last", HOPPER, 1.15, f"{FUSED}/03-*", precision="16", **LARGE),
    Bar(
        "03_channels_last",
        HOPPER,
        None,
        "with fewer than 256 images of 224 px a step may be launch-bound: 1.30 to 1.85 times as "
        f"fast was recorded with 64 and 128, {FUSED}/03-*",
        precision="16",
        model=r"resnet",
    ),
    Bar("03_channels_last", HOPPER, 1.15, f"{RECORDED}/03-vgg19*, unfused", precision="16", **VGGS),
    Bar(
        "03_channels_last",
        CPU,
        1.0,
        "at 128 px and above a processor may get faster; it must not get slower",
        precision="fp32",
        image_size=128,
        not_slower=True,
    ),
    Bar("04_profiler", "", None, "a profiler makes nothing faster"),
    Bar(
        "05_dataloader",
        CPU,
        1.0,
        "a processor that also loads gains less than its loader; it must not get slower",
        not_slower=True,
        **LIGHT,
    ),
    Bar("11_fsdp", "", None, "sharding sends more, and makes nothing faster"),
    Bar("06_ddp", HOPPER, 0.9, "reference/h200/06-*; GPUs of one node", **LARGE),
    Bar("06_ddp", CPU, None, "the processes share one processor"),
    Bar(
        "09_compile",
        HOPPER,
        1.2,
        f"{FUSED}/09-ladder-*: 1.43 times as fast",
        precision="bf16",
        **LARGE | {"model": "resnet50$"},
    ),
    Bar(
        "09_compile", CPU, None, "on a processor a compiler gains little; the notebook measures it"
    ),
    Bar(
        "03_channels_last",
        CPU,
        None,
        "below 128 px a processor gains little: 0.93 to 1.09 times as fast at 64 px",
    ),
)


def bar(step: str, hardware: str, arguments: dict) -> Bar:
    """Return the bar for a run on this hardware ("cpu: AMD EPYC") with these arguments."""
    for row in BARS:
        if (
            row.step == step
            and re.search(row.hardware, hardware)
            and re.search(row.model, arguments["model"])
            and re.search(row.precision, arguments.get("precision", ""))
            and arguments["image_size"] >= row.image_size
            and arguments["batch_size"] >= row.batch_size
        ):
            return row
    _, name = hardware.split(": ", 1)
    if any(row.step == step and re.search(row.hardware, hardware) for row in BARS):
        return Bar(
            step, hardware, None, f"no run with this model and these sizes is recorded on {name}"
        )
    return Bar(step, hardware, None, f"no bar is known for {name}")


def hardware(setup):
    return f"{setup['device'].split(':')[0]}: {setup['device_name']}"
