"""The look of all figures: colours that everyone can tell apart, titles, and short legends."""

import ast
import re
from itertools import combinations, pairwise
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest

import dlojz
from dlojz import runs
from dlojz.chapters import n01b_memory as n01b
from dlojz.chapters import n06_ddp as n06
from dlojz.chapters import n08_large_batch as n08
from dlojz.chapters import n11_fsdp as n11
from dlojz.chapters import n12_model_parallel as n12
from dlojz.figures import batch_sweep, look, report, timeline

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


# What is drawn ------------------------------------------------------------------------------------

PICTURES = {"plot_images", "plot_batch"}  # they show images, and nothing measured
# Parts of a figure, or of a page; and a figure of Optuna's.
PARTS = {"plot_row", "plot", "plot_study", "plot_ladder"}


def titled(path):
    """Yield the names of a module's figures, and whether they or what they call write a title."""
    functions = {
        f.name: f for f in ast.parse(path.read_text()).body if isinstance(f, ast.FunctionDef)
    }

    def writes(name, seen=()):
        called = {ast.unparse(c.func) for c in ast.walk(functions[name]) if isinstance(c, ast.Call)}
        more = called & functions.keys() - {*seen}
        return "entitle" in called or any(writes(other, (*seen, name)) for other in more)

    for name in functions:
        if name.startswith("plot") and name not in PICTURES | PARTS:
            yield name, writes(name)


def test_every_figure_has_a_title():
    found = {}
    for folder in ("figures", "chapters", "race", "pairing"):
        for path in (ROOT / folder).rglob("*.py"):
            found |= {f"{path.relative_to(ROOT)}: {name}": is_so for name, is_so in titled(path)}
    assert len(found) > 70
    assert not [name for name, is_so in found.items() if not is_so]


def test_a_long_title_is_wrapped_within_its_figure():
    axes = plt.subplots(figsize=(6, 3))[1]
    look.entitle(axes, "a step of $x$ takes 12 ms and " * 6, "recorded on a machine, " * 12)
    figure = axes.figure
    figure.canvas.draw()
    for text in (figure._suptitle, figure._supxlabel):
        assert text.get_window_extent().x1 <= figure.bbox.x1
    assert "$x$" in figure.get_suptitle()


RECORDED = {  # those with many parts, and those that are drawn for several chapters
    "phases": lambda: report.plot_phases(runs.recordings("h200/03-resnet50-fp16-*-b0256*")),
    "steps": lambda: report.plot_steps(runs.recorded("h100/00-resnet50-cpu-b0032")),
    "sweep": lambda: batch_sweep.plot_sweep(runs.recordings("h100/01-resnet50-fp32*")),
    "update": lambda: n01b.plot_update(runs.recorded("cpu/11-alive")),
    "step": lambda: timeline.plot_step(runs.recorded("h100/04-trace-fault-item")),
    "scaling": lambda: n06.plot_scaling(runs.recordings("h200/06-resnet50*")),
    "variants": lambda: n06.plot_variants(runs.recorded("h200/06-ddp-x2"), to="DDP"),
    "finder": lambda: n08.plot_finder(runs.recorded("h100/08-finder")),
    "fits": lambda: n11.plot_fits(runs.recorded("cpu/11-fits")),
    "splits": lambda: n12.plot_splits(runs.recorded("h200/12-splits-x4")),
}


FINDINGS = {  # of those whose numbers a notebook has, too
    "phases": "nhwc-b0256, resnet50, batch 256: 1.94 times as fast as",
    "scaling": "4 processes reach 98.2 % of linear scaling",
    "update": "DDP: 21.4 GB at the peak, 57 % of it activations",
    "fits": "Of 11 plans 7 fit 80 GB, 11 fit 141 GB; the least: 64 GPUs",
}


@pytest.mark.parametrize("name", RECORDED)
def test_a_title_has_a_number_a_setting_and_a_short_legend(name):
    figure = np.ravel(RECORDED[name]())[0].figure
    assert re.search(r"\d", figure.get_suptitle())
    assert FINDINGS.get(name, "") in figure.get_suptitle().replace("\n", " ")
    assert len(figure.get_suptitle().splitlines()) <= 3
    assert re.search("recorded on|predicted|NVIDIA", figure.get_supxlabel())
    figure.canvas.draw()
    for text in (figure._suptitle, figure._supxlabel):
        assert text.get_window_extent().x1 <= figure.bbox.x1
    legends = [*figure.legends, *filter(None, (ax.get_legend() for ax in figure.axes))]
    assert all(len(drawn.get_texts()) <= 8 for drawn in legends)
    for ax in figure.axes:
        assert ax.get_xlabel() or ax.get_title("left") or not ax.axison, "what the axis shows"
