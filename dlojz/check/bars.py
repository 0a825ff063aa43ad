"""The bars of the verdict: the speed-up that a step must reach, by hardware.

Those of a step stand in its chapter's exercise. A bar is well below the recorded speed: it asks for
the gain, not for our machine. Where no gain is expected there is no bar, and the verdict says why.
The first row that fits counts.
"""

import re
from dataclasses import dataclass

from dlojz.runs.stats import Comparison

RECORDED, FUSED = "reference/h100", "reference/h200"
SURF = "SURF's course, ResNet-50 on an A100: fp32 456, TF32 751, fp16 1,088 images/s"
HOPPER, AMPERE = r"H100|H200|GH200", r"A100"
CPU = r"^cpu: "


@dataclass(frozen=True)
class Bar:
    """One row: the runs that it is for, the speed-up to reach, and the source of that number."""

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

# Smaller steps are launch-bound.
LARGE = {"model": r"resnet(50|101|152)$", "image_size": 224, "batch_size": 256}


def bar(exercise, hardware: str, arguments: dict) -> Bar:
    """Return the bar for a run on this hardware ("cpu: AMD EPYC") with these arguments."""
    here = [row for row in exercise.bars if re.search(row.hardware, hardware)]
    for row in here:
        if (
            re.search(row.model, arguments["model"])
            and re.search(row.precision, arguments.get("precision", ""))
            and arguments["image_size"] >= row.image_size
            and arguments["batch_size"] >= row.batch_size
        ):
            return row
    _, name = hardware.split(": ", 1)
    if here:
        return Bar(hardware, None, f"no run with this model and these sizes is recorded on {name}")
    return Bar(hardware, None, f"no bar is known for {name}")


def hardware(setup):
    return f"{setup['device'].split(':')[0]}: {setup['device_name']}"
