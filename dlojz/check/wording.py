"""Numbers in a verdict, as a person would write them."""

import math


def number(value: float) -> str:
    """Return a number with four digits at most, or all before the point: "0.7", "65,536"."""
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else "infinite"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def both(mine: float, expected: float) -> tuple[str, str]:
    """Return two numbers as text, with as many digits as show their difference."""
    if not (math.isfinite(mine) and math.isfinite(expected)):
        return number(mine), number(expected)
    for digits in (3, 4, 5, 6, 9, 12, 17):
        texts = f"{mine:.{digits}g}", f"{expected:.{digits}g}"
        if texts[0] != texts[1]:
            break
    return texts


def share(value: float, of: str = "") -> str:
    """Return a share: "0.15 % of the step", above twice "5.4 times the step"."""
    if not math.isfinite(value):
        return number(value)
    if value > 2:
        text = f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
        return f"{text} times {of}".rstrip()
    percent = 100 * value
    if 0 < percent < 1e-4:
        text = "less than 0.0001 %"
    else:
        text = f"{percent:.0f} %" if percent >= 10 else f"{percent:.2g} %"
    return f"{text} of {of}" if of else text


def times(count: int) -> str:
    """Return a number of times: "once", "3 times"."""
    return "once" if count == 1 else f"{count:,} times"
