"""Figures of matrix products in 8 bits: their errors, and the sizes for which they are faster.

Each takes a run of `experiments/float8.py`, or a recording.
"""

from collections import defaultdict

from dlojz.course import UserError
from dlojz.figures import drawing, report
from dlojz.figures.look import SERIES, entitle
from dlojz.table import Table

BF16 = "bf16"
COLOURS = dict(zip((BF16, "tensorwise", "rowwise", "rowwise_with_gw_hp"), SERIES, strict=False))


def _cases(run, field) -> list[dict]:
    """Return the cases of a run that have this field. Raises UserError if there are none."""
    found = report.measured(run)
    if cases := [case | {"name": n} for n, case in found.cases.items() if field in case]:
        return cases
    size = " with --sizes, on a GPU" if field == "step_ms" else ""
    raise UserError(f"{found.path}: nothing of this in it; expected a run of float8.py{size}")


def lost(run) -> Table:
    """Return a table of each recipe's distance from float32, without outliers."""
    cases = _cases(run, "away")
    first = [case for case in cases if case["outlier"] == cases[0]["outlier"]]
    rows = [(case["recipe"], *(f"{v:.2%}" for v in case["away"].values())) for case in first]
    return Table(("", *cases[0]["away"]), rows, "<>>>")


def plot_outliers(run, ax=None):
    """Draw the distance of a product's other rows from float32, by the size of one value."""
    found = defaultdict(dict)
    for case in _cases(run, "away"):
        found[case["recipe"]][case["outlier"]] = 100 * case["away"]["output"]
    with drawing.axes(ax, (7.5, 3.6), "both") as ax:
        for recipe, away in found.items():
            look = {"color": COLOURS[recipe], "ls": "--" if recipe.endswith("hp") else "-"}
            ax.plot([*away], [*away.values()], "o", ms=4, label=recipe, **look)
        ax.set(xscale="log", yscale="log", ylabel="distance from float32 (%)")
        ax.set_xlabel("largest value of the input (the others: about 1)")
        ax.legend()
        largest = max(max(away) for away in found.values())
        at = {recipe: away[largest] for recipe, away in found.items() if largest in away}
        worst = max(at, key=at.get)
        rest = max((value for recipe, value in at.items() if recipe != worst), default=0)
        text = f"One value of {largest:,.0f}: {worst} is {at[worst]:.3g} % off, the others at most "
        entitle(ax, f"{text}{rest:.2g} %", drawing.where(run))
    return ax


def break_even(run) -> Table:
    """Return a table of the time of a layer by its sizes, in bf16 and in 8 bits."""
    cases = _cases(run, "step_ms")
    rows = []
    for case in cases:
        ms = case["step_ms"]
        gains = [_gain(ms[BF16] / spent) for recipe, spent in ms.items() if recipe != BF16]
        rows.append((case["name"].replace("x", " x "), f"{ms[BF16]:.3f} ms", *gains))
    head = ("rows x inputs x outputs", "bf16", *list(cases[0]["step_ms"])[1:])
    return Table(head, rows, "<" + ">" * (len(head) - 1))


def _gain(ratio):
    """Return a speed-up in words, with "slower" for a slow-down."""
    return f"x {ratio:.2f}" + " slower" * (ratio < 1)
