"""The share of its peak at which a GPU has trained: model FLOPs utilization, MFU.

As the PaLM paper defines it (https://arxiv.org/abs/2204.02311, appendix B): the operations that the
model needs for an image, forward and backward, times images per second, over what its GPUs are sold
with. What is computed again does not count, for it trains nothing. With it, the share is called
hardware FLOPs utilization, HFU; here that is what checkpointing repeats, and nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from dlojz.machine import hardware
from dlojz.runs import stats


@dataclass(frozen=True)
class Utilization:
    """The TFLOP/s that each GPU of a run has computed."""

    tflops: float  # of the model's own operations
    again_tflops: float  # of those that checkpointing repeats
    peak_tflops: float | None  # as sold: dense, in the run's precision; None if not known

    @property
    def mfu(self) -> float | None:
        return self.peak_tflops and self.tflops / self.peak_tflops

    @property
    def hfu(self) -> float | None:
        return self.peak_tflops and (self.tflops + self.again_tflops) / self.peak_tflops


def utilization(run, operations: Mapping[str, float]) -> Utilization | None:
    """Return the TFLOP/s of each GPU of a run of the trainer; None if it has no speed.

    operations: of an image, as `dlojz.estimate.operations` counts them.
    """
    s = stats.summary(run)
    if not s.images_per_s:
        return None
    model, again = (operations["forward"] + operations["backward"], operations["again"])
    each = s.images_per_s / s.size / 1e12
    return Utilization(each * model, each * again, peak_tflops(s))


def peak_tflops(run) -> float | None:
    """Return the TFLOP/s that each GPU of a run is sold with; None if no table has it."""
    s = stats.summary(run)
    row = hardware.same_as(s.device_name, hardware.sold())
    speed = row and row.speed(s.arguments.get("precision", "fp32"))
    return speed and speed / row.devices
