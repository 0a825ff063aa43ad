"""The figures of notebook 00: the training loop, drawn from its source, and some images."""

import ast
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch

from dlojz import course
from dlojz.course import UserError
from dlojz.figures import drawing
from dlojz.figures.look import DARK, GREY, PALETTE, entitle, ink, percent, style
from dlojz.runs.columns import PHASES
from dlojz.runs.stats import summary

FIRST = "train_one_epoch"  # the function with the loop
LONGEST = 84  # characters of a line in the drawing


@dataclass(frozen=True)
class Line:
    """A statement of a step: its phase, its function, and its place."""

    phase: str
    function: str
    depth: int  # functions around it
    number: int
    text: str


def lines(source: str) -> list[Line]:
    """Return the statements of a training step in the order of execution.

    The trainer's own functions are followed; a call of `chrono` begins a phase. Statements after
    the step's end (a checkpoint) are left out.
    """
    functions = {f.name: f for f in ast.parse(source).body if isinstance(f, ast.FunctionDef)}
    if FIRST not in functions:
        raise UserError(f"no {FIRST} in this trainer: expected the function with the loop")
    loops = [node for node in functions[FIRST].body if isinstance(node, ast.For)]
    if len(loops) != 1:
        raise UserError(f"{len(loops)} loops in {FIRST}: expected one, over the batches")
    [loop] = loops
    reader = _Reader(source.splitlines(), functions)
    reader.note(loop, FIRST, 0)
    reader.follow(loop.body, FIRST, 0)
    return reader.found


class _Reader:
    """The statements so far, and the present phase."""

    def __init__(self, text, functions):
        self._text, self._functions = text, functions
        self.phase, self.found = "data", []

    def follow(self, body, function, depth) -> bool:
        """Note the statements of a body; return False at the end of the step."""
        for statement in body:
            called = list(_calls(statement))
            alone = isinstance(statement, ast.Expr)
            mark = next((name for owner, name in called if alone and owner == "chrono"), None)
            if mark and mark not in PHASES:
                return False
            if mark:
                self.phase = mark
            elif not isinstance(statement, ast.Return):
                self.note(statement, function, depth)
                if not self._enter(statement, called, function, depth):
                    return False
        return True

    def _enter(self, statement, called, function, depth):
        if isinstance(statement, ast.With):
            return self.follow(statement.body, function, depth + 1)
        own = next((name for owner, name in called if not owner and name in self._functions), None)
        return not own or self.follow(self._functions[own].body, own, depth + 1)

    def note(self, statement, function, depth):
        """Note the first line of a statement, and the line after an `if` of two lines."""
        several = isinstance(statement, ast.If)
        text = self._text[statement.lineno - 1 : statement.lineno + several]
        line = " ".join(each.partition("  #")[0].strip() for each in text)
        line = line if len(line) <= LONGEST else line[: LONGEST - 2] + " …"
        self.found.append(Line(self.phase, function, depth, statement.lineno, line))


def _calls(statement):
    """Yield (owner, name) of the calls in a statement: ("chrono", "forward"), ("", "update")."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Call):
            owner, _, name = ast.unparse(node.func).rpartition(".")
            yield owner, name


def plot_loop(recorded=None, trainer=None, ax=None):
    """Draw the statements of a step in the trainer's file, coloured by phase.

    recorded: a run, to draw its phases' shares beside; trainer: a file, by default your own.
    """
    found = lines((trainer or course.trainer()).read_text(encoding="utf-8"))
    with drawing.axes(ax, (11, 0.6 + 0.29 * len(found)), "x") as ax:
        for row, line in enumerate(found):
            x = 0.125 + 0.022 * line.depth
            look = {"va": "center", "fontsize": 8.5, "family": "monospace", "parse_math": False}
            ax.text(0.115, row, str(line.number), ha="right", color=GREY, **look)
            ax.text(x, row, line.text, **look)
        shares = summary(recorded).shares if recorded else {}
        rows = list(enumerate(found))
        for phase, group in groupby(rows, key=lambda pair: pair[1].phase):
            numbers = [row for row, _ in group]
            _plot_phase(ax, phase, numbers[0] - 0.5, numbers[-1] + 0.5, shares.get(phase))
        back = {"arrowstyle": "-|>", "mutation_scale": 13, "color": DARK, "lw": 1.3}
        bend = "bar,fraction=-0.018"
        ends = ((-0.002, len(found) - 0.6), (-0.002, -0.1))
        ax.add_patch(FancyArrowPatch(*ends, connectionstyle=bend, clip_on=False, **back))
        ax.set(xlim=(-0.03, 1.0), ylim=(len(found) - 0.4, -1.2 if shares else -0.6))
        if shares:
            phase = max(shares, key=shares.get)
            count = sum(line.phase == phase for line in found)
            text = f"{percent(shares[phase])} of a step is in {count} of these {len(found)} lines"
            entitle(ax, f"{text}: the {phase} pass", drawing.where(recorded))
            ax.text(1, -0.9, "share of a step, recorded", ha="right", va="center", fontsize=8.5)
        ax.set_axis_off()
    return ax


def _plot_phase(ax, phase, top, bottom, share):
    """Draw the band of a phase with its name, and its share of a step at the right."""
    colour = PALETTE[phase]
    ax.barh((top + bottom) / 2, 1.0, bottom - top - 0.06, color=colour, alpha=0.1)
    ax.barh((top + bottom) / 2, 0.075, bottom - top - 0.06, color=colour)
    look = {"va": "center", "fontsize": 9, "fontweight": "bold"}
    ax.text(0.0375, (top + bottom) / 2, phase, color=ink(colour), ha="center", **look)
    if share is not None:
        ax.text(0.99, (top + bottom) / 2, f"{share:.1%}", ha="right", **look)


def plot_images(folder, classes: int = 6, per_class: int = 2, axes=None):
    """Draw some training images of the first classes, with their dimensions and file sizes."""
    from PIL import Image

    found = sorted(p for p in (Path(folder) / "train").iterdir() if p.is_dir())[:classes]
    with style():
        if axes is None:
            size = (1.9 * len(found), 1.75 * per_class)
            _, axes = plt.subplots(per_class, len(found), figsize=size, squeeze=False)
        for column, directory in enumerate(found):
            for row, file in enumerate(sorted(directory.iterdir())[:per_class]):
                ax = axes[row][column]
                with Image.open(file) as image:
                    size = f"{image.width} x {image.height}"
                    ax.imshow(image.convert("RGB"))
                ax.set_title(
                    f"{size}, {file.stat().st_size / 1e3:.0f} kB", fontsize=7, loc="center"
                )
                ax.set_axis_off()
    return axes
