"""The colours of all figures: named in one place, told apart by everyone, and in print."""

import re
from itertools import combinations, pairwise
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest

import dlojz
from dlojz.figures import look

ROOT = Path(dlojz.__file__).parent
# Black and white are ink and paper.
NAMED = set(mpl.colors.CSS4_COLORS) - {"black", "white"} | {f"C{n}" for n in range(10)}
DRAWS = re.compile(r"^(?:import matplotlib|from dlojz\.figures)", re.MULTILINE)
# In linear RGB: what a reader without red or green cones sees (Viénot, Brettel and Mollon, 1999).
SEEN_WITHOUT = {
    "red": [[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]],
    "green": [[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]],
    "nothing": np.eye(3),
}
# What is drawn in one figure, side by side.
FAMILIES = {
    "phases": look.PHASES,
    "kinds": look.KINDS,
    "memory": {p: c for p, c in look.MEMORY.items() if p not in ("unsplit", "cublas", "buffers")},
    "formats": look.FORMATS,
    "collectives": look.COLLECTIVES,
    "before and after": {side: look.PALETTE[side] for side in ("before", "after")},
    "a series": dict(enumerate(look.SERIES)),
}
# Parts of a bar touch, in this order.
STACKED = {
    "phases": [*look.PHASES],
    "kinds": [*look.KINDS][:4],
    "memory": ["parameters", "gradients", "optimizer", "casts", "activations"],
}


def linear(colour):
    """Return a colour's linear RGB."""
    rgb = np.array(mpl.colors.to_rgb(colour))
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    """Return the CIE L*a*b* of a linear RGB, in which distances are about as they are seen."""
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    x, y, z = np.cbrt(np.maximum(to_xyz @ rgb, 1e-4) / [0.9505, 1, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("eyes", SEEN_WITHOUT)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_colours_of_a_family_can_be_told_apart(family, eyes):
    seen = {
        name: lab(np.clip(SEEN_WITHOUT[eyes] @ linear(colour), 0, 1))
        for name, colour in FAMILIES[family].items()
    }
    near = {
        (one, other): np.linalg.norm(seen[one] - seen[other])
        for one, other in combinations(seen, 2)
    }
    assert min(near.values()) > 9, min(near, key=near.get)


@pytest.mark.parametrize("family", STACKED)
def test_parts_that_touch_differ_in_lightness(family):
    light = {name: lab(linear(FAMILIES[family][name]))[0] for name in STACKED[family]}
    near = {pair: abs(light[pair[0]] - light[pair[1]]) for pair in pairwise(light)}
    assert min(near.values()) > 5, near


def test_no_other_module_names_a_colour():
    found = {}
    for path in ROOT.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if path.stem in ("look", "table") or not DRAWS.search(source):
            continue
        words = re.findall(r"\"(#[0-9A-Fa-f]{6}|\w+)\"", source)
        if named := {word for word in words if word[0] == "#" or word in NAMED}:
            found[path.relative_to(ROOT)] = named
    assert not found
