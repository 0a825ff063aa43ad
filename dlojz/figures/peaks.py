"""The best speeds that an experiment measured: of matrix products, and of the memory."""

from collections.abc import Mapping
from dataclasses import dataclass

from dlojz.figures import report
from dlojz.runs import stats

FORMATS = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8")


@dataclass(frozen=True)
class Measured:
    """The speed that a run reached on its device."""

    device: str
    recorded: bool
    tflops: Mapping[str, float]
    memory_gb_per_s: float | None

    @property
    def label(self) -> str:
        return f"{self.device}, {'recorded' if self.recorded else 'measured here'}"


def measured(run) -> Measured:
    """Return the best speeds in the log of experiments/roofline.py or sizes.py."""
    found, best = report.measured(run), {}
    memory = [m.value for m in found.measures if m.unit == "GB/s"]
    for m in (m for m in found.measures if m.unit == "TFLOP/s"):
        name = m.variant or (m.what if m.what in FORMATS else found.start["arguments"]["precision"])
        best[name] = max(m.value, best.get(name, 0))
    s = stats.summary(found)
    return Measured(s.device_name, s.recorded, best, max(memory, default=None))
