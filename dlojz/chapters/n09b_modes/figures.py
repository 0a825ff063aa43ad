"""Figures of notebook 09b: runs as the rungs of a ladder, and the gain of compiling at its top.

modes.plot_rungs(runs.recordings("h200/09-ladder-*"))
"""

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap

import numpy as np

from dlojz.chapters.n09_compile import breakeven
from dlojz.chapters.n09_compile.figures import COMPILED, EAGER
from dlojz.chapters.n09b_modes.worth_figures import steps_text
from dlojz.course import UserError
from dlojz.figures import drawing, report
from dlojz.figures.look import entitle
from dlojz.runs.stats import Summary, summary
from dlojz.table import QUIET, Table

# A bar that is longer than this share of the longest has room for a line of text.
LONG = 0.8


@dataclass(frozen=True)
class Rung:
    """A run, and the runs to compare it with."""

    run: Summary
    first: Summary  # the slowest of its ladder
    eager: Summary | None = None  # the same training, not compiled

    @property
    def words(self) -> str:
        """Return the words that distinguish this run, after the notebook that teaches it."""
        return f"{_step(self.run)}  {_named(self.run)}"

    @property
    def gain(self) -> float:
        """Return the speed-up over the first rung."""
        return self.run.images_per_s / self.first.images_per_s

    @property
    def break_even(self) -> float | None:
        """Return the step at which its compilation had paid for itself; None if unknown.

        Code from a cache hides the price, and without an eager run there is no gain.
        """
        if not self.run.compile_s or self.run.compile_cached or not self.eager:
            return None
        step_ms = 1000 * self.eager.batch_size * self.eager.size / self.eager.images_per_s
        gain = self.run.images_per_s / self.eager.images_per_s
        return breakeven.steps(self.run.compile_s, step_ms, gain)

    @property
    def price(self) -> str:
        """Return the seconds of compiling, and the break-even step, in words."""
        if not self.run.graphs:
            return "" if _mode(self.run) == "off" else "nothing was compiled"
        cores = f" on {self.run.cpus} cores" * bool(self.run.cpus)
        compiled = f"compiled in {self.run.compile_s:.0f} s{cores}"
        if self.run.compile_cached:
            return f"{compiled}; the code for training was in a cache"
        if self.break_even is None:
            return compiled
        even = steps_text(self.break_even)
        return f"{compiled}, {'never pays' if even == 'never' else f'pays after {even}'}"


def _mode(s):
    return s.arguments.get("compile", "off")


def _step(s):
    if _mode(s) != "off":
        return "09"
    if s.arguments.get("channels_last"):
        return "03"
    return "02" if _precision(s) != "fp32" else "01"


def _precision(s):
    return s.arguments.get("precision") or "fp32"


def _named(s):
    """Return a run's mode, precision and layout; tuned: it tried other tile sizes for kernels."""
    precision = {"tf32": "TF32"}.get(_precision(s), _precision(s))
    if _mode(s) != "off":
        layout = "" if s.arguments.get("channels_last") else ", NCHW"
        tuned = ", tuned" * ("COORDINATE_DESCENT_TUNING=1" in (s.command or ""))
        return f"{_mode(s)}, {precision}{layout}{tuned}"
    return f"channels_last, {precision}" if _step(s) == "03" else precision


# Ladders -----------------------------------------------------------------------------------------


def ladders(runs: Sequence) -> dict[str, list[Rung]]:
    """Return the comparable runs, by model and batch, in the order of the course.

    A run that failed, or measured no step, is left out. Raises UserError if all are.
    """
    found = {}
    for s in map(summary, runs):
        if s.images_per_s:
            processes = f" x {s.size} processes" if s.size > 1 else ""
            title = f"{s.model}, {s.image_size} px, batch {s.batch_size}{processes}"
            found.setdefault((title, s.device_name, s.data), []).append(s)
    if not found:
        raise UserError("no run with a measured step: job.explain() says why")
    several = len({title for title, *_ in found}) < len(found)
    titles = {key: ", ".join(key) if several else key[0] for key in found}
    return {titles[key]: _rungs(some) for key, some in found.items()}


def _rungs(some):
    ordered = sorted(some, key=lambda s: (_step(s), s.images_per_s))
    return [Rung(s, ordered[0], _eager(s, ordered)) for s in ordered]


def _eager(s, others):
    """Return the eager run to compare a compiled one with, if possible on the same host."""

    def setting(run):
        return _precision(run), run.arguments.get("channels_last")

    eager = [other for other in others if _mode(other) == "off" != _mode(s)]
    same = [other for other in eager if setting(other) == setting(s)]
    return min(same, key=lambda other: other.cpus != s.cpus, default=None)


def gain(runs: Sequence) -> float:
    """Return the speed-up of the fastest rung over the first one, of a single ladder."""
    [rungs] = ladders(runs).values()
    return max(rung.gain for rung in rungs)


# Drawing -----------------------------------------------------------------------------------------


def plot_rungs(runs: Sequence, axes=None):
    """Draw throughput and energy per image of runs, a pair of axes for each model and batch.

    A compiled run has the cost of compiling, and the break-even against the eager run of the same
    precision and layout.
    """
    found = ladders(runs)
    rows = [len(rungs) for rungs in found.values()]
    layout = {"height_ratios": [n + 1 for n in rows], "width_ratios": (2.2, 1), "sharey": "row"}
    size = (11, sum(rows) * 0.4 + 1.5)
    with drawing.axes(axes, size, "x", shape=(len(found), 2), **layout) as axes:
        axes = np.reshape(axes, (-1, 2))
        figure = axes[0][0].figure
        figure.get_layout_engine().set(hspace=0.06)
        entitle(axes, _gains_text(found), _caption(found))
        for (speed, energy), (title, rungs) in zip(axes, found.items(), strict=True):
            _plot_speed(speed, rungs)
            _plot_energy(energy, rungs)
            speed.set_title(f"{title}: images/s", parse_math=False)
            energy.set_title("energy per image (J)")
            names = [rung.words for rung in rungs]
            speed.set_yticks(range(len(rungs)), names, parse_math=False)
            speed.set_ylim(len(rungs) - 0.4, -0.6)
    return axes


def _gains_text(found):
    """Return the least and the most gain of the compiled runs, with their models and batches."""
    gains = [
        (rung.gain, title)
        for title, rungs in found.items()
        for rung in rungs
        if rung.run.graphs and rung.run is not rung.first
    ]
    if not gains:
        return "No run here is compiled"
    (least, one), (most, other) = min(gains), max(gains)
    text = f"Compiled: {most:.2f} times as fast at best ({other})"
    return text if len(gains) == 1 else f"{text}, {least:.2f} at least ({one})"


def _plot_speed(ax, rungs):
    longest = max(rung.run.images_per_s for rung in rungs)
    for row, rung in enumerate(rungs):
        value = rung.run.images_per_s
        ax.barh(row, value, 0.66, color=COMPILED if rung.run.graphs else EAGER)
        written = _say(ax, row, value, report.speed_text(value), color="black")
        if rung.run is not rung.first:
            written = _say(ax, 0.5, 1, f"×{rung.gain:.2f}", xycoords=written)
        if value > LONG * longest:
            _say(ax, row, 0, rung.price, color="white", fontsize=8.5)
        else:
            _say(ax, 0.5, 1, rung.price, xycoords=written, fontsize=8.5)
    _finish(ax, 1.28 * longest)


def _plot_energy(ax, rungs):
    known = {row: j for row, r in enumerate(rungs) if (j := r.run.energy_per_image_j)}
    first = rungs[0].run.energy_per_image_j
    for row, rung in enumerate(rungs):
        if row not in known:
            _say(ax, row, 0, "no sensor" if not rung.run.on_gpu else "not measured: too short")
            continue
        ax.barh(row, known[row], 0.66, color=COMPILED if rung.run.graphs else EAGER)
        written = _say(ax, row, known[row], f"{known[row]:.3f}", color="black")
        if first and row:
            _say(ax, 0.5, 1, f"×{known[row] / first:.2f}", xycoords=written)
    _finish(ax, 1.45 * max(known.values(), default=1))


def _finish(ax, right):
    ax.set_xlim(0, right)
    ax.locator_params(axis="x", nbins=6)
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}" if x >= 10 else f"{x:.3g}")
    ax.tick_params(axis="y", left=False)


def _say(ax, row, x, text, color=QUIET, fontsize=9, **where):
    """Write a few words right of a point, or of earlier words."""
    look = {"textcoords": "offset points", "va": "center", "fontsize": fontsize, "color": color}
    return ax.annotate(text, (x, row), (5, 0), parse_math=False, **look, **where)


def _caption(found):
    """Return the lines below the figure: the hardware, and an explanation of the ratios."""
    every = [rung.run for rungs in found.values() for rung in rungs]
    hardware = sorted({f"{s.device_name}, torch {s.versions.get('torch')}" for s in every})
    dates = sorted({s.date for s in every})
    data = "synthetic data, " if all(s.synthetic for s in every) else ""
    text = f"{'; '.join(hardware)}, {' and '.join(dates)}: {data}one run each. "
    text += "Grey: eager; blue: compiled. ×: compared with the first bar."
    return "\n".join(wrap(text, 170))


# Hosts -------------------------------------------------------------------------------------------


def hosts(runs: Sequence) -> Table:
    """Return a table of runs with the cores of their hosts, and the hosts' lead."""
    rows = []
    for s in map(summary, runs):
        if s.images_per_s:
            run = (f"batch {s.batch_size}", _named(s), str(s.cpus or "-"))
            ahead = "-" if s.ahead_ms is None else f"{s.ahead_ms:,.1f} ms"
            speed = (report.speed_text(s.images_per_s), f"{s.step_ms:,.1f} ms")
            rows.append((*run, *speed, ahead))
    head = ("", "", "cores", "images/s", "step", "the host is ahead by")
    return Table(head, rows, "<<>>>>")
