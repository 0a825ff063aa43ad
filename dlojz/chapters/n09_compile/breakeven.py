"""Break-even: the number of steps after which a price paid once has paid for itself."""

import math
from dataclasses import dataclass


def steps(paid_s: float, step_ms: float, gain: float) -> float:
    """Return the number of steps that pay for `paid_s`; infinity without a gain."""
    return 1000 * paid_s / (step_ms * (1 - 1 / gain)) if gain > 1 else math.inf


@dataclass(frozen=True)
class BreakEven:
    """A price paid once, such as a compilation, against the gain in each step."""

    paid_s: float
    step_ms: float  # of a step without it
    gain: float  # times as fast with it
    low: float  # of the gain's interval
    high: float

    @property
    def steps(self) -> float:
        """Return the number of steps that pay for it; infinity without a gain."""
        return self._after(self.gain)

    @property
    def ends(self) -> tuple[float, float]:
        """Return the least and the most steps, at the ends of the gain's interval."""
        return self._after(self.high), self._after(self.low)

    def _after(self, gain):
        return steps(self.paid_s, self.step_ms, gain) if self.low > 1 else math.inf

    def __str__(self):
        if self.low > 1:
            least, most = (f"{n:,.0f}" for n in self.ends)
            return f"{self.steps:,.0f} steps ({least} to {most})"
        return "never" if self.high < 1 else "none seen"
