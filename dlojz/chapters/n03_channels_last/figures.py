"""Figures of notebook 03: the order of a tensor's elements in memory, and its cost.

Each figure takes tensors, runs of experiments or recordings, and returns its axes.
"""

from collections import Counter, defaultdict
from itertools import product

import numpy as np

from dlojz.course import UserError
from dlojz.figures import drawing, report
from dlojz.figures.look import BLUE, GREEN, KINDS, PALETTE, VERMILLION, entitle
from dlojz.runs import log
from dlojz.runs.stats import summary
from dlojz.table import Table
from dlojz.traces import kinds

CHANNELS = (VERMILLION, GREEN, BLUE)  # red, green and blue, as in an image
NCHW, NHWC, WORSE = (PALETTE[name] for name in ("before", "after", "failure"))

# The kinds affected by a layout, with their names in the figures; all others are the rest.
NAMES = {
    kinds.LAYOUT: "change of layout",
    kinds.NORMALIZATION: "batch normalization",
    kinds.MATRIX: "convolution",
}
REST = "the rest"
COLOURS = {
    **{name: KINDS[kind] for kind, name in NAMES.items()},
    REST: KINDS[kinds.REST],
}


def addresses(tensor) -> dict[int, tuple[int, ...]]:
    """Return the indices (n, c, h, w) of each element, by its place in memory."""
    indices = product(*(range(n) for n in tensor.shape))
    at = {sum(np.multiply(index, tensor.stride())): index for index in indices}
    return dict(sorted(at.items()))


def plot_memory(tensors, axes=None):
    """Draw each [N, C, H, W] tensor in its order in memory, by channel, with shape and stride."""
    count = len(tensors)
    with drawing.axes(axes, (11, 2.1 * count), "x", shape=(count, 1)) as axes:
        for ax, tensor in zip(axes, tensors, strict=True):
            for at, (_, c, h, w) in addresses(tensor).items():
                ax.bar(at, 1, 0.94, color=CHANNELS[c % 3])
                style = {"color": "white", "ha": "center", "va": "center", "fontsize": 9}
                ax.text(at, 0.5, f"{'RGB'[c % 3]}\n{h},{w}", **style)
            for n in range(1, tensor.shape[0]):
                ax.axvline(n * tensor.stride()[0] - 0.5, color="black", linewidth=2, ymax=0.6)
            _plot_strides(ax, tensor)
            ax.set(xlim=(-0.6, tensor.numel() - 0.4), ylim=(0, 2.4), yticks=[])
            ax.set_title(f"shape {tuple(tensor.shape)}    stride {tensor.stride()}", fontsize=12)
            ax.spines["left"].set_visible(False)
        ax.set_xlabel("place in memory (elements)")
        apart = " or ".join(str(tensor.stride()[1]) for tensor in tensors)
        text = f"Elements from a pixel's channel to the next: {apart}"
        entitle(axes, text, "in each: channel; row, column. Black: the next image")
    return axes


def _plot_strides(ax, tensor):
    """Draw a bridge from the first element to its neighbour in each direction."""
    words = zip(tensor.stride()[1:], ("channel", "row", "column"), strict=True)
    white = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    for level, (stride, word) in enumerate(sorted(words)):
        top = 1.25 + 0.4 * level
        ax.plot([0, 0, stride, stride], [1, top, top, 1], color="black", linewidth=1)
        text = f"next {word}: +{stride}"
        ax.text(stride + 0.15, top, text, va="center", fontsize=9, bbox=white)


def seen(run) -> Table:
    """Return a table of the layouts of a run's layers, of their inputs and outputs."""
    try:
        rows = log.read(run).probe.layers
    except log.LogError:  # it failed in its first step
        rows = []
    count = Counter()
    for row in rows:
        if "any" not in (row["in_layout"], row["out_layout"]):
            count[row["layer"], row["in_layout"], row["out_layout"]] += row["count"]
    head = ("layer", "how many", "entered in", "left in")
    cells = [(layer, str(n), *layouts) for (layer, *layouts), n in sorted(count.items())]
    return Table(head, cells, "<><<", "this run left no evidence: see inspect_run above")


def kind_of(name: str) -> str:
    """Return the kind of a kernel or an operation, one of COLOURS, by its name."""
    kind = kinds.kind(name)
    if kind == kinds.REST and kinds.AROUND_CONVOLUTIONS.search(name):
        kind = kinds.MATRIX
    return NAMES.get(kind, REST)


def gain(case: dict, first: dict) -> float:
    """Return the speed relative to the first case: the median over steps timed in turn."""
    return float(np.median(np.divide(first["step_ms"], case["step_ms"])))


def step_by_kind(case: dict, first: dict) -> dict[str, float]:
    """Return the milliseconds of a median step by kind, divided like the profiled step."""
    spent = dict.fromkeys(COLOURS, 0.0)
    for name, ms in case["times_ms"].items():
        spent[kind_of(name)] += ms
    step_ms = np.median(first["step_ms"]) / gain(case, first)
    return {kind: step_ms * ms / sum(spent.values()) for kind, ms in spent.items()}


def plot_kinds(runs, axes=None):
    """Draw a step by case and kind of kernel, a panel for each run of experiments/layouts.py."""
    with drawing.axes(axes, (10, 0.5 + 2.2 * len(runs)), "x", shape=(len(runs), 1)) as axes:
        for ax, run in zip(axes, map(report.measured, runs), strict=True):
            if not (cases := run.cases):
                raise UserError(f"{run.path}: no case was measured; see the job's stderr.txt")
            first, ends = next(iter(cases.values())), []
            for row, case in enumerate(cases.values()):
                ends.append(drawing.stack(ax, row, step_by_kind(case, first), COLOURS, 0.7))
                text = f"  {ends[-1]:,.0f} ms, x {gain(case, first):.2f}"
                ax.text(ends[-1], row, text, va="center")
            drawing.rows(ax, cases)
            ax.set(xlim=(0, 1.25 * max(ends)))
            drawing.caption(ax, report.experiment_text(run))
        ax.set_xlabel("step (ms); x: times as fast as the first")
        drawing.legend(axes[0], 4, (0, 1.12))
        entitle(axes, "\n".join(map(_kinds_text, map(report.measured, runs))))
    return axes


def _kinds_text(run):
    """Return the gain of the fastest case over the first, and the kind that it saves most of."""
    first, cases = next(iter(run.cases.values())), run.cases
    name = max(cases, key=lambda name: gain(cases[name], first))
    if cases[name] is first:
        worst = min(cases, key=lambda name: gain(cases[name], first))
        return f"{_precision(run)}: no case is faster, {worst} is x {gain(cases[worst], first):.2f}"
    before, after = step_by_kind(first, first), step_by_kind(cases[name], first)
    most = max(before, key=lambda kind: before[kind] - after[kind])
    saved = f"{before[most] - after[most]:,.0f} ms less of {most}"
    text = f"{name}: {gain(cases[name], first):.2f} times as fast, with {saved}"
    return f"{_precision(run)}: {text}"


def _precision(run):
    return run.start["arguments"].get("precision", "fp32")


def plot_trace(run, cases=("neither", "both"), ax=None):
    """Draw the first kernels of a step over time, by kind, up to the same layer in each case."""
    run = report.measured(run)
    traces = _same_layers([run.cases[case]["trace_ms"] for case in cases])
    with drawing.axes(ax, (11, 1.1 + 0.7 * len(cases)), "x") as ax:
        for row, trace in enumerate(traces):
            for name, start, span in trace:
                colour = COLOURS[kind_of(name)]
                ax.barh(row, span, 0.7, start - trace[0][1], color=colour, edgecolor="white")
            end = start + span - trace[0][1]
            ax.text(end, row, f"  {end:.1f} ms", va="center")
        drawing.rows(ax, cases)
        ax.set(xlim=(0, 1.08 * ax.dataLim.x1), xlabel="time since the first kernel (ms)")
        ends = [trace[-1][1] + trace[-1][2] - trace[0][1] for trace in traces]
        names = [
            {name for name, *_ in trace if kind_of(name) == NAMES[kinds.LAYOUT]} for trace in traces
        ]
        text = f"The same layers take {ends[-1]:.1f} ms ({cases[-1]}) instead of {ends[0]:.1f} ms"
        text += f" ({cases[0]})"
        text += ", without changes of layout" * (bool(names[0]) and not names[-1])
        entitle(ax, text, report.experiment_text(run))
        drawing.legend(ax, 4, (0, 1.12), drawing.swatches(COLOURS))
    return ax


def _same_layers(traces):
    """Return traces up to the last normalization that each of them has: a kernel for a layer."""
    ends = [
        [end for end, (name, *_) in enumerate(trace, 1) if kind_of(name) == "batch normalization"]
        for trace in traces
    ]
    last = min(map(len, ends)) - 1
    return [
        trace[: layers[last]] if last >= 0 else trace
        for trace, layers in zip(traces, ends, strict=True)
    ]


def plot_autotuner(runs, axes=None):
    """Draw each step of two runs of experiments/autotuner.py, without and with the autotuner."""
    with drawing.axes(axes, (11, 3.6), shape=(1, 2), sharey=True) as axes:
        runs = [report.measured(run) for run in runs]
        for run, colour in zip(runs, (NCHW, NHWC), strict=True):
            found = defaultdict(list)
            tuned = "on" if run.start["arguments"]["autotuner"] else "off"
            for m in run.measures:
                found[m.what].append(m.value)
            for ax, (sizes, ms) in zip(axes, found.items(), strict=True):
                label = f"{tuned}: {sum(ms) / 1000:,.1f} s in all, last {ms[-1]:,.0f} ms"
                ax.plot(range(1, len(ms) + 1), ms, "o-", color=colour, label=label)
                ax.set(xlabel=f"step, images of {sizes}")
                ax.xaxis.get_major_locator().set_params(integer=True)
                ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, fontsize=9)
        steps = np.concatenate([line.get_ydata() for ax in axes for line in ax.lines])
        if steps.max() > 5 * np.median(steps):  # else a logarithmic axis only magnifies noise
            axes[0].set_yscale("log")
        else:
            axes[0].set_ylim(bottom=0)
        axes[0].set_ylabel("time of the step (ms)")
        entitle(axes, _tuning_text(axes), report.experiment_text(runs[0]))
    return axes


def _tuning_text(axes):
    """Return the autotuner's cost in all steps of each panel."""
    told = []
    for ax in axes:
        off, on = (sum(line.get_ydata()) / 1000 for line in ax.lines[:2])
        told.append(f"{on - off:+,.1f} s with {ax.get_xlabel().partition(', ')[2]}")
    return f"The autotuner costs {', '.join(told)}, in {len(axes[0].lines[0].get_ydata())} steps"


def plot_matrix(recordings, batch_size=256, axes=None):
    """Draw NCHW beside channels_last by model and precision: throughput."""
    ran = [s for s in map(summary, recordings) if s.batch_size == batch_size]
    ran = [s for s in ran if "channels_last" in s.arguments]  # without the experiments
    table = {(s.model, s.arguments["precision"], s.arguments["channels_last"]): s for s in ran}
    models = list(dict.fromkeys(s.model for s in ran))
    with drawing.axes(axes, (12, 3.2), shape=(1, len(models))) as axes:
        for ax, model in zip(axes, models, strict=True):
            pairs = {
                p: [table.get((model, p, last)) for last in (False, True)]
                for p in ("fp32", "tf32", "fp16", "bf16")
            }
            _plot_pairs(ax, pairs)
            ax.set_title(model)
        axes[0].set_ylabel("throughput (images/s)")
        setting = f"grey: NCHW, blue: channels_last; batch {batch_size}, {ran[0].image_size} px; "
        entitle(axes, _matrix_text(table), setting + report.hardware_text(ran[0]))
    return axes


def _matrix_text(table):
    """Return the gains of channels_last in 16 bits, and those in fp32, over the models."""
    gains = {"16 bits": [], "fp32": []}
    for (model, precision, last), s in table.items():
        other = table.get((model, precision, False))
        if last and s.images_per_s and other and other.images_per_s:
            bits = "16 bits" if precision in ("fp16", "bf16") else precision
            gains.setdefault(bits, []).append(s.images_per_s / other.images_per_s)
    told = [
        f"{min(of):.2f} to {max(of):.2f} in {bits}" if len(of) > 1 else f"{of[0]:.2f} in {bits}"
        for bits in ("16 bits", "fp32")
        if (of := gains[bits])
    ]
    return "channels_last, times as fast as NCHW: " + ", ".join(told or ["no pair was timed"])


def _plot_pairs(ax, pairs):
    """Draw two bars for each precision, and their ratio; in red where channels_last loses."""
    for at, pair in enumerate(pairs.values()):
        values = [getattr(s, "images_per_s", None) or 0 for s in pair]
        ax.bar((at - 0.2, at + 0.2), values, 0.38, color=(NCHW, NHWC))
        text, style = "no pair", {}
        if all(values):
            text, won = f"x {values[1] / values[0]:.2f}", values[1] > values[0]
            style = {"color": "black" if won else WORSE, "weight": "normal" if won else "bold"}
        ax.text(at, max(values), text, ha="center", va="bottom", fontsize=8.5, **style)
    ax.set_xticks(range(len(pairs)), list(pairs))
    ax.margins(y=0.12)
