"""The picture of two programs that were compared by seed."""

import numpy as np

from dlojz.figures.drawing import axes, legend
from dlojz.figures.look import PALETTE, entitle
from dlojz.pairing.differences import Pairs

COLOURS = {side: PALETTE[side] for side in ("before", "after")}


def plot_pairs(found: Pairs, ax=None):
    """Draw both numbers of each seed, and beside them the differences with their interval."""
    seeds, numbers = list(found.values), zip(*found.values.values(), strict=True)
    with axes(ax, (8.5, 3.8), shape=(1, 2), width_ratios=(3, 2)) as (left, right):
        for side, column in zip(COLOURS, numbers, strict=True):
            left.plot(range(len(seeds)), column, "o", color=COLOURS[side], label=side, zorder=3)
        for place, pair in enumerate(found.values.values()):
            left.plot((place, place), pair, color=PALETTE["limit"], lw=1)
        left.set_xticks(range(len(seeds)), seeds)
        left.set(xlabel="seed", ylabel="%" if found.unit else "number read from the output")
        legend(left)
        right.axhline(0, color=PALETTE["limit"], lw=1)
        places = np.linspace(-0.25, 0.25, len(seeds))
        right.plot(places, found.differences, "o", ms=4, color=COLOURS["after"], alpha=0.5, mew=0)
        look = {"fmt": "D", "color": COLOURS["after"], "capsize": 5, "lw": 2}
        right.errorbar([1], [found.mean], found.half and [found.half], **look)
        right.set_xticks((0, 1), ("each seed", "mean"))
        right.set(xlim=(-0.5, 1.5), ylabel=f"after \N{MINUS SIGN} before {found.unit}")
        title = found.finding[0].upper() + found.finding[1:]
        entitle(left, title, f"before: {found.before}\nafter: {found.after}\n{found.times_text}")
    return left
