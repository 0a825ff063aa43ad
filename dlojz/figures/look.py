"""The look of all figures: what each colour means, the style, the title, the legend.

No other module names a colour. A table is a family: its colours can be told apart by colour-blind
readers, and those of parts that touch each other differ in lightness, so also in print.
"""

from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from textwrap import fill

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

from dlojz.table import BAD, GOOD, QUIET
from dlojz.traces import kinds

# Okabe and Ito's colours, which colour-blind readers can tell apart.
BLUE, SKY, GREEN, ORANGE = "#0072B2", "#56B4E9", GOOD, "#E69F00"
VERMILLION, PURPLE = "#D55E00", "#CC79A7"
GREY, DARK, INK = "#8A8A94", QUIET, "#333333"
LINE, PALE, FAINT = "#C4C4CC", "#E3E3E8", "#EFEFF3"

PHASES = {  # of a step
    **{"data": VERMILLION, "transfer": "#F2C14E", "forward": SKY, "backward": BLUE},
    "update": GREEN,
}
MEMORY = {  # the parts of a step's memory
    **{"parameters": BLUE, "gradients": SKY, "optimizer": "#004B75", "unreduced": "#B3DDF2"},
    **{"buffers": "#999999", "casts": ORANGE, "activations": PURPLE, "gathered": GREEN},
    **{"communication": "#7FCFB6", "temporaries": VERMILLION, "unsplit": "#CCCCCC"},
    **{"cublas": "#555555"},
}
KINDS = {  # of kernels; not the colours of the phases, above which they stand (Tol's "muted")
    **{kinds.MATRIX: "#332288", kinds.NORMALIZATION: "#44AA99", kinds.REST: "#DDCC77"},
    **{kinds.LAYOUT: "#882255", kinds.COPIES: "#999933", kinds.COMMUNICATION: "#CC6677"},
}
FORMATS = {"fp32": DARK, "tf32": ORANGE, "bf16": GREEN, "fp16": BLUE, "fp8": PURPLE}
FORMATS |= {"int8": VERMILLION, "int4": SKY}
COLLECTIVES = {"all_reduce": BLUE, "broadcast": ORANGE, "all_gather": PURPLE}
COLLECTIVES |= {"reduce_scatter": GREEN}
PLANS = {  # of a model on many GPUs: pale, under a text
    **{"one GPU": "#DDDDE2", "DDP": "#A6D5EF", "FSDP": "#5FA8D3", "tensors": "#F2C063"},
    **{"stages": "#86C8A8", "tensors and stages": "#E39A6B", "nothing fits": "#F7F7F9"},
}
PALETTE = {
    **PHASES,
    **{
        "before": GREY,
        "after": BLUE,
    },  # eager and compiled, NCHW and channels_last, theirs and ours
    **{"speed": BLUE, "activations": MEMORY["activations"], "power": ORANGE},
    **{"limit": GREY, "model": DARK, "failure": BAD, "again": "#A9CCE3", "pending": "#F3D9A4"},
}
SERIES = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)  # for what has no colour of its own
WAYS = {"eager": GREY, "PyTorch": GREY, "compiled": BLUE, "Triton": GREEN}  # to run a program
OWN = {"NCHW": GREY, "channels_last": BLUE, "before": GREY, "after": BLUE, **FORMATS, **WAYS}

STYLE = {
    "figure.dpi": 110,
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": PALE,
    "legend.frameon": False,
    "savefig.bbox": "tight",
}
WIDE = 10.5  # characters of a title in an inch


def colours(names: Iterable[str]) -> dict[str, str]:
    """Return a colour for each name: its own if all have one, else those of a series."""
    names = list(names)
    if all(name in OWN for name in names):
        return {name: OWN[name] for name in names}
    return {name: SERIES[at % len(SERIES)] for at, name in enumerate(names)}


def percent(share: float, digits: int = 0) -> str:
    """Return a share as "98 %"."""
    return f"{100 * share:.{digits}f} %"


def ink(colour: str) -> str:
    """Return the colour of a text that is legible on this one."""
    red, green, blue = mpl.colors.to_rgb(colour)
    return "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.55 else "white"


@contextmanager
def style(grid="y"):
    """Draw in the course's style inside this context."""
    interactive = mpl.is_interactive()
    try:
        with plt.rc_context({**STYLE, "axes.grid.axis": grid}):
            try:
                yield
            finally:
                interactive = mpl.is_interactive()
    finally:
        # A notebook's first figure loads its backend, which turns interactive mode on: leave it
        # on, also if that figure could not be drawn.
        mpl.interactive(interactive)


def entitle(axes, finding: str, setting: str = ""):
    """Write the finding above a figure, and below it, smaller, where it was measured and how."""
    figure = np.ravel(axes)[0].figure
    width = int(WIDE * figure.get_figwidth())
    place = {"x": 0.01, "ha": "left", "parse_math": False}
    lines = [fill(line, width) for line in finding.splitlines()]
    figure.suptitle("\n".join(lines), fontsize=11, fontweight="bold", **place)
    lines = [fill(line, int(1.4 * width)) for line in setting.splitlines()]
    figure.supxlabel("\n".join(lines), fontsize=8, color=DARK, **place)


def legend(where, named: Mapping, **look):
    """Draw a legend of {label: handle} into axes or a figure, with each label shown literally.

    Matplotlib would read "$" as mathematics, and leave out labels that begin with "_".
    """
    drawn = where.legend(list(named.values()), [str(i) for i in range(len(named))], **look)
    for text, label in zip(drawn.get_texts(), named, strict=True):
        text.set_parse_math(False)
        text.set_text(label)
    return drawn
