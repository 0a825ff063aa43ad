"""Figures of notebook 09: a compiler's result for a model, its gain, and its cost.

Each takes runs of experiments (pointwise, graphs, compile_time) or recordings.
"""

import math
import re
import statistics
from dataclasses import dataclass
from html import escape

import numpy as np

from dlojz.chapters.n09_compile import breakeven
from dlojz.chapters.n09_compile.breakeven import BreakEven
from dlojz.course import UserError
from dlojz.figures import drawing, report
from dlojz.figures.look import PALETTE, entitle, legend
from dlojz.runs.stats import summary
from dlojz.table import QUIET_INK, Table

EAGER, COMPILED, WORSE = (PALETTE[name] for name in ("before", "after", "failure"))
COMPILING = PALETTE["transfer"]
WAYS = ("eager", "whole model")  # of experiments/compile_time.py
RATIO = "x: how many times as fast it is compiled (the median of calls in turn)"
# The marks around a kernel in Inductor's source, in C++ and in Triton.
KERNELS = re.compile(r"async_compile\.(?:cpp\w*|triton)\(.*?r?'''\n(?P<source>.*?)'''", re.DOTALL)
MOVES = re.compile(r"loadu?\(|\bstore\(|in_out_ptr\d+\[|\bin_ptr\d+\[|out_ptr\d+\[")
COMPUTES = re.compile(r"\btmp\d+ = ")


# Pointwise chains --------------------------------------------------------------------------------


def plot_pointwise(run, axes=None):
    """Draw the time of each chain of experiments/pointwise.py, eager and compiled, by size."""
    run = report.measured(run)
    sizes = list(dict.fromkeys(case["elements"] for case in run.cases.values()))
    with drawing.axes(axes, (11, 4), shape=(1, len(sizes))) as axes:
        for ax, elements in zip(axes, sizes, strict=True):
            cases = [c for c in run.cases.values() if c["elements"] == elements]
            unit, scale = _unit(max(statistics.median(c["eager_ms"]) for c in cases))
            for at, case in enumerate(cases):
                _plot_pair(ax, at, case, scale)
            ax.set_xticks(range(len(cases)), [_launches(case) for case in cases])
            ax.margins(y=0.16)  # room for the text
            below = "{}, eager → {}, compiled".format(*launched(run))
            ax.set(ylabel=f"time of a call ({unit})", xlabel=below)
            title = f"{elements:,} elements, {report.bytes_text(4 * elements)}"
            ax.set_title(title, fontsize=10)
        handles = drawing.swatches({"eager": EAGER, "compiled": COMPILED})
        legend(axes[0], handles, loc="upper left")
        entitle(axes, _chains_text(run, sizes), f"{RATIO}\n{drawing.where(run)}")
    return axes


def _chains_text(run, sizes):
    """Return the range of the gains, on the longest and on the shortest tensors."""
    told = []
    for elements in dict.fromkeys((max(sizes), min(sizes))):
        cases = [case for case in run.cases.values() if case["elements"] == elements]
        gains = [ratio(case["eager_ms"], case["compiled_ms"]) for case in cases]
        told.append(f"{min(gains):.2g} to {max(gains):.2g} on {elements:,} elements")
    return f"Compiled, times as fast: {', '.join(told)}"


def _plot_pair(ax, at, case, scale):
    """Draw two bars, and the compiled one's speed-up, in red if it is slower."""
    ms = [statistics.median(case[f"{way}_ms"]) for way in ("eager", "compiled")]
    bars = ax.bar((at - 0.2, at + 0.2), np.multiply(ms, scale), 0.38, color=(EAGER, COMPILED))
    labels = [f"{v:,.0f}" if (v := scale * value) >= 99.95 else f"{v:.3g}" for value in ms]
    ax.bar_label(bars, labels, fontsize=7.5, padding=1)
    gain = ratio(case["eager_ms"], case["compiled_ms"])
    text = f"x {gain:.1f}" if gain >= 0.95 else f"x {gain:.2f}"
    style = {"color": "black" if gain > 1 else WORSE, "weight": "normal" if gain > 1 else "bold"}
    above = {"textcoords": "offset points", "ha": "center", "va": "bottom", "fontsize": 9}
    ax.annotate(text, (at, scale * max(ms)), (0, 10), **above, **style)


def _launches(case):
    return "{}\n{eager} → {compiled}".format(case["function"], **case["launches"])


def launched(run) -> tuple[str, str]:
    """Return the units of a run's numbers of launches: eager, and compiled."""
    return ("kernels" if summary(run).on_gpu else "operations"), "kernels"


def ratio(before_ms, after_ms) -> float:
    """Return the speed-up of the second over the first: the median over calls timed in turn."""
    return float(np.median(np.divide(before_ms, after_ms)))


def _unit(ms):
    """Return a unit of time that suits a value, and the factor for milliseconds."""
    return ("ms", 1.0) if ms >= 1 else ("µs", 1000.0)


def moved(run) -> Table:
    """Return a table of launches, bytes and bandwidth of each chain on the longest tensor."""
    run = report.measured(run)
    elements = max(case["elements"] for case in run.cases.values())
    rows, words = [], dict(zip(("eager", "compiled"), launched(run), strict=True))
    for case in run.cases.values():
        if case["elements"] == elements:
            rows += [_moved_row(case, way, word) for way, word in words.items()]
    head = ("", "", "launched", "bytes moved", "time", "bandwidth", "compiled in")
    return Table(head, rows, "<<>>>>>")


def _moved_row(case, way, launched):
    launches = case["launches"][way]
    ms, count = statistics.median(case[f"{way}_ms"]), case["bytes"][way]
    unit, scale = _unit(ms)
    return (
        case["function"] if way == "eager" else "",
        way,
        f"{launches} {launched if launches != 1 else launched.removesuffix('s')}",
        report.bytes_text(count),
        f"{scale * ms:,.3g} {unit}",
        f"{count / ms / 1e6:,.0f} GB/s",
        "" if way == "eager" else report.duration_text(case["compile_s"]),
    )


# The generated kernel ----------------------------------------------------------------------------


class Source(str):
    """A kernel's source with numbered lines: coloured where memory is read or written."""

    def __repr__(self):
        lines = enumerate(self.splitlines(), 1)
        return "\n".join(f"{number:3}  {line}" for number, line in lines)

    def _repr_html_(self):
        moves, computes = ("rgba(213,94,0,.18)", "rgba(0,114,178,.14)")
        rows = ""
        for number, line in enumerate(self.splitlines(), 1):
            colour = moves if MOVES.search(line) else computes if COMPUTES.search(line) else "none"
            margin = f'<span style="color:{QUIET_INK}">{number:3}  </span>'
            rows += f'<div style="background:{colour}">{margin}{escape(line)}</div>'
        box = '<span style="background:{};padding:0 6px">{}</span>'
        legend = box.format(moves, "moves data") + " " + box.format(computes, "computes")
        return f'<div>{legend}</div><pre style="line-height:1.35;overflow-x:auto">{rows}</pre>'


def kernel(run, function: str) -> Source:
    """Return the generated kernel of a chain, such as "4 sin", on the longest tensor."""
    cases = sorted(report.measured(run).cases.values(), key=lambda case: case["elements"])
    sources = {case["function"]: case["source"] for case in cases}
    if function not in sources:
        known = ", ".join(sources)
        raise UserError(f"no chain {function!r} in this run: expected one of {known}")
    found = [match["source"] for match in KERNELS.finditer(sources[function])]
    return Source("\n".join(found) or sources[function])


# Graphs, breaks, recompilations ------------------------------------------------------------------


def graphs(run) -> Table:
    """Return a table of the results of experiments/graphs.py, by case."""
    cases = {name: case for name, case in report.measured(run).cases.items() if "calls" in case}
    rows = []
    for name, case in cases.items():
        counts = (case["graphs"], len(case["breaks"]), len(case["recompiles"]))
        error = case["fullgraph"]
        said = f"call {error['call'] + 1}: {error['error']}" if error else "nothing"
        rows.append((name, *map(str, counts), _last_call(case), said))
    head = ("case", "graphs", "breaks", "recompilations", "last call", "fullgraph=True says")
    return Table(head, rows, "<>>><<")


def _last_call(case):
    return "compiled" if case["graphs_run"][-1] else "EAGER"


def reasons(run) -> Table:
    """Return a table of reasons: the line of each graph break, the guard of each recompilation."""
    rows = []
    for name, case in report.measured(run).cases.items():
        for found in case.get("breaks", ()):
            rows.append((name, f"line {found['line']}: {found['text']}", found["reason"]))
        guards = case.get("recompiles", ())
        for guard in guards[:2]:
            rows.append((name, f"guard: {guard}", "recompiled"))
        if len(guards) > 2:
            rows.append((name, f"... and {len(guards) - 2} more guards", "recompiled"))
        rows += [(name, "log", warning) for warning in case.get("warnings", ())]
    return Table(("case", "where", "what Dynamo says"), rows, "<<<")


def plot_calls(run, cases=("Python counter", "Python counter, repaired"), ax=None):
    """Draw the calls of some cases: compiled in this call, run compiled, or run eager."""
    found = report.measured(run).cases
    looks = {"compiles": COMPILING, "runs compiled": COMPILED, "runs eager": EAGER}
    with drawing.axes(ax, (9, 1.2 + 0.5 * len(cases)), "x") as ax:
        for row, name in enumerate(cases):
            case = found[name]
            for call, made in enumerate(case["graphs_made"]):
                ran = "runs compiled" if case["graphs_run"][call] else "runs eager"
                ax.barh(row, 0.9, 0.6, call + 0.55, color=looks["compiles" if made else ran])
        drawing.rows(ax, cases)
        longest = max(len(found[name]["graphs_run"]) for name in cases)
        ax.set_xticks(range(1, longest + 1))
        ax.set(xlim=(0.4, longest + 0.6), xlabel="call")
        drawing.legend(ax, 3, named=drawing.swatches(looks))
        counts = {name: sum(map(bool, found[name]["graphs_made"])) for name in cases}
        most = max(counts, key=counts.get)
        text = f"{most}: compiled {counts[most]} times in {longest} calls"
        least = min(counts, key=counts.get)
        text += f", {least} {counts[least]}" * (least != most)
        entitle(ax, text, drawing.where(run))
    return ax


def compiled_nothing(run) -> Table:
    """Return a table of modules compiled in two ways, with the results."""
    cases = report.measured(run).cases.items()
    rows = [(name, str(c["graphs"]), _last_call(c)) for name, c in cases if "calls" not in c]
    head = ("module, and what was called", "graphs", "what ran")
    return Table(head, rows, "<><", "this run has no such cases")


def stale(run) -> Table:
    """Return a table of processes with one cache: the request of each, and its result."""
    rows = []
    for name, case in report.measured(run).cases.items():
        asked = (case["asked"], repr(case["tag"]) if case["tag"] else "")
        code = "from the cache" if case["from_cache"] else "compiled"
        errors = (f"{case[error]:.2e}" for error in ("error", "eager_error"))
        rows.append((name, *asked, code, case["computed"], *errors))
    head = ("", "asked for", "tag", "its code", "computed in", "error", "eager")
    return Table(head, rows, "<<<<<>>", "this run has no such cases")


# Compile time and break-even ---------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """A way to run a model, against eager: its gain in each step, and its cost before.

    The cost is that of a process: the compiler starts, and compiles.
    """

    name: str
    step_ms: float
    gain: float  # times as fast as eager: the median over steps timed in turn
    low: float  # of its interval: see `median_interval`
    high: float
    cold_s: float  # with an empty cache
    warm_s: float  # in a second process
    graphs: int
    kernels: int

    def break_even(self, paid_s: float) -> BreakEven:
        """Return the break-even of this cost."""
        return BreakEven(paid_s, self.step_ms * self.gain, self.gain, self.low, self.high)

    @property
    def told(self) -> str:
        """Return the gain, its interval, and the conclusion, in words."""
        text = f"x {self.gain:.2f} ({self.low:.2f} to {self.high:.2f})"
        if self.low <= 1 <= self.high:
            return f"{text}: no difference seen"
        return text if self.low > 1 else f"{text}: slower"


def ways(run) -> tuple[Way, Way]:
    """Return the ways of a run of experiments/compile_time.py: eager, and compiled."""
    found = report.measured(run)
    eager, whole = (found.cases[name] for name in WAYS)
    starts = {m.what: m.value for m in found.measures}
    gain = ratio(eager["step_ms"], whole["step_ms"])
    ends = median_interval(np.divide(eager["step_ms"], whole["step_ms"]))
    eager_ms = statistics.median(eager["step_ms"])
    paid = [
        starts.get(f"the compiler starts, {cache}", 0) + _compile_s(whole[cache], eager_ms / gain)
        for cache in ("cold", "warm")
    ]
    graphs, kernels = whole["cold"]["graphs"], whole["cold"]["kernels"]
    return (
        Way(WAYS[0], eager_ms, 1, 1, 1, 0, 0, 0, 0),
        Way(WAYS[1], eager_ms / gain, gain, *ends, *paid, graphs, kernels),
    )


def _compile_s(case, step_ms):
    """Return the seconds of the first steps beyond those that they would take compiled."""
    return max(0.0, sum(case["first_s"]) - len(case["first_s"]) * step_ms / 1000)


def median_interval(values) -> tuple[float, float]:
    """Return the ends of an interval around the median with 95 % or more.

    It counts values on either side, regardless of their distance: on a shared machine one step in a
    hundred takes twenty times as long. Fewer than 6 values show nothing: 0 to infinity.
    """
    ranked, n = sorted(map(float, values)), len(values)
    outside, cut = 0.0, -1  # values to leave out on each side
    while (outside := outside + math.comb(n, cut + 1) / 2**n) <= 0.025:
        cut += 1
    return (ranked[cut], ranked[-1 - cut]) if cut >= 0 else (0.0, math.inf)


def costs(run) -> Table:
    """Return a table of the cost and gain of compiling, with its break-even in steps."""
    rows = [_cost_row(way) for way in ways(run)]
    head = ("", "graphs", "kernels", "cold", "warm", "step", "gain", "break-even", "warm cache")
    return Table(head, rows, "<>>>>><<<")


def _cost_row(way):
    step = f"{way.step_ms:,.1f} ms"
    if not way.graphs:
        return (way.name, *[""] * 4, step, *[""] * 3)
    spent = [report.duration_text(s) for s in (way.cold_s, way.warm_s)]
    even = [str(way.break_even(s)) for s in (way.cold_s, way.warm_s)]
    return (way.name, str(way.graphs), str(way.kernels), *spent, step, way.told, *even)


def plot_break_even(run, ax=None):
    """Draw the seconds that a compiled model is ahead of eager, by step."""
    run = report.measured(run)
    eager, whole = ways(run)
    steps = _steps_shown(eager, whole)
    with drawing.axes(ax, (9, 3.8), "both") as ax:
        ax.axhline(0, color=EAGER, lw=2, label="eager")
        _plot_ahead(ax, whole, whole.cold_s, steps, label="compiled, empty cache")
        _plot_ahead(ax, whole, whole.warm_s, steps, label="compiled, warm cache", ls=":")
        ends = [_ahead_s(whole, whole.cold_s, steps, gain) for gain in (whole.low, whole.high)]
        ax.fill_between([0, steps], *ends, color=COMPILED, alpha=0.15, lw=0)
        ax.set(xlim=(0, steps), xlabel="steps", ylabel="ahead of eager (s)")
        ax.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        drawing.legend(ax, 3)
        setting = f"{report.experiment_text(run)}. Shaded: the interval of the gain"
        entitle(ax, _pays(whole.break_even(whole.cold_s)), setting)
    return ax


def _pays(even):
    if math.isinf(even.steps):
        return "Compiling never pays: a step is slower" if even.high < 1 else "No gain is seen"
    return f"Compiling pays after {even}"


def _steps_shown(eager, whole):
    """Return the steps of the axis: beyond the crossing of the lines.

    Without a near one, until eager has taken three times as long as compiling.
    """
    least = 3000 * whole.cold_s / eager.step_ms
    even = breakeven.steps(whole.cold_s, eager.step_ms, whole.gain)
    return max(least, 1.5 * even if even < 100 * least else 0)


def _plot_ahead(ax, way, paid_s, steps, **look):
    """Draw the seconds saved minus those paid, and mark the break-even."""
    ax.plot([0, steps], _ahead_s(way, paid_s, steps, way.gain), color=COMPILED, lw=2, **look)
    if math.isfinite(even := way.break_even(paid_s).steps):
        ax.plot(even, 0, "o", color="black", zorder=5)


def _ahead_s(way, paid_s, steps, gain):
    """Return the seconds ahead of eager before the first step and after these steps."""
    return [-paid_s, -paid_s + steps * way.step_ms * way.gain * (1 - 1 / gain) / 1000]
