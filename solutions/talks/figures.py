"""What a slide's `draw` block may call, how it is drawn, and the figures that no notebook has."""

import os
import sys
import tempfile
from functools import cache
from importlib import import_module
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

from dlojz import course
from dlojz.classroom import board
from dlojz.figures import batch_sweep, drawing, ladder, report, timeline
from dlojz.runs import log, recorded, recordings
from dlojz.runs.stats import summary
from dlojz.traces.trace import open_traces

WIDE, HIGH = 1180, 575  # pixels of a figure on a slide of 1280 x 720
INCHES = 8.2  # its width for Matplotlib: fewer inches make the type larger
TOOLS = (batch_sweep, board, ladder, report, timeline, recorded, recordings, open_traces)


@cache
def names() -> dict:
    """Return what a block may use: TOOLS, the chapters as n02, and the names of this file."""
    folders = (course.course_root() / "dlojz" / "chapters").glob("n*_*/__init__.py")
    chapters = [path.parent.name for path in folders]
    found = {name.split("_")[0]: import_module(f"dlojz.chapters.{name}") for name in chapters}
    return found | {tool.__name__.split(".")[-1]: tool for tool in TOOLS} | globals()


def draw(path: Path, code: str, inches: float = INCHES, scale: float = 1.5):
    """Write the figure that this code draws, in a slide's shape and without its own title."""
    mpl.use("agg")
    plt.close("all")
    exec(code, {**names()})  # of our own slides
    figure = plt.gcf()
    if figure._suptitle and figure._suptitle.get_weight() == "bold":
        figure.suptitle("")
    if "ours()" in code and not os.environ.get("DLOJZ_CLASS"):
        figure.supxlabel("a simulated class: `make talks CLASS=FOLDER` draws yours", fontsize=8)
    figure.set_size_inches(inches, inches * HIGH / WIDE)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=scale * WIDE / inches, pil_kwargs={"lossless": True, "method": 2})
    plt.close("all")


def ladders(model: str, *steps: str) -> list:
    """Return recorded steps of a model on one H200, by the names that follow `09-ladder-MODEL-`."""
    return [recorded(f"h200/09-ladder-{model}-{step}") for step in steps]


def planted(*faults: str) -> dict:
    """Return the recorded traces of these planted faults, which are no mystery of notebook 04."""
    return {fault: recorded(f"h200/04-trace-unseen-{fault}") for fault in faults}


def ours():
    """Return your class, in the folder that DLOJZ_CLASS names; without it, a simulated one."""
    if folder := os.environ.get("DLOJZ_CLASS"):
        return board.open_class(folder)
    sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
    import pupils

    with tempfile.TemporaryDirectory() as folder:
        shared = Path(folder) / "shared"
        shared.mkdir()
        pupils.make_class(shared, Path(folder) / "homes", 12)
        return board.open_class(shared)


# The five limits ----------------------------------------------------------------------------------


def limits() -> dict[str, tuple[str, float, float, str]]:
    """Return for each limit what was changed, the value before and after, and its unit.

    A change that pushes back this limit and, as far as that is possible, no other one.
    """
    fp32, tf32 = (summary(run) for run in ladders("resnet50", "1-fp32", "2-tf32"))
    nchw, nhwc = (
        summary(recorded(f"h200/03-resnet50-bf16-{layout}-b0256")) for layout in ("nchw", "nhwc")
    )
    bf16 = summary(*ladders("resnet50", "3-bf16"))
    loader = log.read(recorded("h100/05-decoders")).cases
    pil, tensors = (
        np.median(loader[name]["images_per_cpu_s"])
        for name in ("PIL, v1, float32", "torchvision, v2, uint8")
    )
    ddp = log.read(recorded("h200/06-ddp-x2")).cases
    apart, together = (1000 * 512 / np.median(ddp[n]["step_ms"]) for n in ("SyncBatchNorm", "DDP"))
    speed = "images/s"
    return {
        "compute": ("fp32 to TF32", fp32.images_per_s, tf32.images_per_s, speed),
        "memory bandwidth": ("NCHW to channels_last", nchw.images_per_s, nhwc.images_per_s, speed),
        "memory size": (
            "fp32 to bf16",
            256e9 / fp32.peak_memory_bytes,
            256e9 / bf16.peak_memory_bytes,
            "images in 1 GB",
        ),
        "I/O": ("PIL to tensors", pil, tensors, "images/s of a core"),
        "communication": ("SyncBatchNorm left out, 2 GPUs", apart, together, speed),
    }


def plot_limits(ax=None):
    """Draw for each of the five limits the gain of a change that pushes it back."""
    found = limits()
    with drawing.axes(ax, (9, 4), grid="x") as ax:
        for row, (change, before, after, unit) in enumerate(found.values()):
            ax.barh(row, after / before, 0.62, color=report.PALETTE["speed"])
            ax.barh(row, 1, 0.62, color=report.PALETTE["limit"])
            said = " to ".join(f"{v:,.0f}" if v > 99 else f"{v:.1f}" for v in (before, after))
            words = f"× {after / before:.1f}   {change}: {said} {unit}"
            ax.text(after / before + 0.05, row, words, va="center", fontsize=9)
        drawing.rows(ax, found)
        ax.set(xlim=(0, 5.2), xticks=range(4), xlabel="ResNet-50: after, relative to before")
        drawing.caption(ax, "recorded on NVIDIA H200; I/O: one CPU core beside an H100")
    return ax
