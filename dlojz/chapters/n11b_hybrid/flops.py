"""The share of its peak speed that a training reached on a GPU: model FLOPs utilization, MFU.

As the PaLM paper defines it (https://arxiv.org/abs/2204.02311, appendix B): the operations that the
model needs for an image, forward and backward, times images per second, over the specified peak of
its GPUs. Recomputation does not count. With it, the share is called hardware FLOPs utilization,
HFU; here only checkpointing recomputes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from dlojz.machine import hardware
from dlojz.runs import stats


@dataclass(frozen=True)
class Utilization:
    """The TFLOP/s of each GPU of a run."""

    tflops: float  # of the model's own operations
    again_tflops: float  # of recomputation by checkpointing
    peak_tflops: float | None  # as specified: dense, in the run's precision; None if unknown

    @property
    def mfu(self) -> float | None:
        return self.peak_tflops and self.tflops / self.peak_tflops

    @property
    def hfu(self) -> float | None:
        return self.peak_tflops and (self.tflops + self.again_tflops) / self.peak_tflops


def utilization(run, operations: Mapping[str, float]) -> Utilization | None:
    """Return the TFLOP/s of each GPU of a run of the trainer; None if it has no speed.

    operations: those of an image, counted by chapters/n11_fsdp/operations.py.
    """
    s = stats.summary(run)
    if not s.images_per_s:
        return None
    model, again = (operations["forward"] + operations["backward"], operations["again"])
    each = s.images_per_s / s.size / 1e12
    return Utilization(each * model, each * again, peak_tflops(s))


def peak_tflops(run) -> float | None:
    """Return the specified TFLOP/s of each GPU of a run; None if no table has it."""
    s = stats.summary(run)
    row = hardware.same_as(s.device_name, hardware.sold())
    speed = row and row.speed(s.arguments.get("precision", "fp32"))
    return speed and speed / row.devices
