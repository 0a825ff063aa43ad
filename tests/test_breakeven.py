"""What was paid once is won back after some steps, or never."""

import math

import pytest

from dlojz.chapters.n09_compile.breakeven import BreakEven


@pytest.mark.parametrize(
    ("low", "high", "steps", "ends", "text"),
    [
        (1.1, 2.0, 2000, (800, 4400), "2,000 steps (800 to 4,400)"),
        (1.1, math.inf, 2000, (400, 4400), "2,000 steps (400 to 4,400)"),
        (1.0, 2.0, math.inf, (math.inf, math.inf), "none seen"),
        (0.0, math.inf, math.inf, (math.inf, math.inf), "none seen"),  # too few values
        (0.5, 0.9, math.inf, (math.inf, math.inf), "never"),
    ],
)
def test_a_gain_pays_only_if_all_of_its_interval_is_one(low, high, steps, ends, text):
    """40 s for 20 ms less in a step of 100 ms."""
    found = BreakEven(paid_s=40, step_ms=100, gain=1.25, low=low, high=high)
    assert found.steps == pytest.approx(steps)
    assert found.ends == pytest.approx(ends)
    assert str(found) == text
