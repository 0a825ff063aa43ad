"""Tables and figures of runs, for notebooks, terminals and slides.

Figures take runs and axes, and return the axes; every number comes from `dlojz.runs.stats.summary`.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import matplotlib.pyplot as plt
import numpy as np

from dlojz.course import UserError
from dlojz.figures.look import PALE, PALETTE, entitle, legend, percent, style
from dlojz.runs import derived, labels, log, outcome
from dlojz.runs.columns import PHASES
from dlojz.runs.folder import path_of
from dlojz.runs.outside import Outside
from dlojz.runs.stats import Summary, summary
from dlojz.table import BAD_INK, PAPER, STATE_COLOURS, Table, harmless

SAME = 0.01  # speeds nearer than this are called equal
VISIBLE = 0.002  # of a step: the legend names no shorter phase
OUTPUT_LINES = 12  # of a program without a Chronometer, that its report shows


# Words ---------------------------------------------------------------------------------------


def bytes_text(count: float | None) -> str:
    """Return 1_234_567_890 as "1.23 GB" (10^9 bytes); "not measured" for None."""
    if count is None:
        return "not measured"
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= 0.9995 * size:  # it rounds to one unit
            return f"{count / size:.3g} {unit}"
    return f"{count:.3g} bytes"


def duration_text(seconds: float | None) -> str:
    """Return a duration in the unit that a person would use."""
    if seconds is None:
        return "not measured"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:.3g} h"


def speed_text(images_per_s: float) -> str:
    """Return images per second without decimals, or with one if there are only a few."""
    return f"{images_per_s:,.0f}" if images_per_s >= 9.95 else f"{images_per_s:.1f}"


def setting_text(s: Summary) -> str:
    """Return the setting of a run in one line: model, sizes, data and hardware."""
    processes = f" x {s.size} processes" if s.size > 1 else ""
    data = ", synthetic data" if s.synthetic else ""
    where = f"; {hardware_text(s)}" if s.device != "?" else ""  # "?": failed without a device
    return f"{_sizes_text(s)}{processes}{data}{where}"


def _sizes_text(s: Summary, *more: str) -> str:
    known = (s.image_size and f"{s.image_size} px", s.batch_size and f"batch {s.batch_size}")
    return ", ".join(filter(None, (s.model, *known, *more)))


def hardware_text(s: Summary) -> str:
    """Return the device that computed, and its kind; for a recording, also when it was made."""
    text = f"{s.device_name} ({s.device})"
    if not s.recorded:
        return text
    # The first recordings were made before the optimizer of step 02 was fused.
    older = ", unfused" if "precision" in s.arguments and s.optimizer == "SGD" else ""
    return f"recorded on {text}, torch {s.versions.get('torch')}, {s.date}{older}"


def measured(run) -> log.Run:
    """Return the log of an experiment. Raises UserError if it ended before it had measured."""
    found = log.read(run)
    if not (found.measures or found.cases):
        raise UserError(f"{found.path}: nothing was measured; see the job's stderr.txt")
    return found


def experiment_text(run) -> str:
    """Return the setting of an experiment in one line, with its precision and its mode."""
    s = summary(run)
    how = s.arguments.get("precision"), s.arguments.get("mode")
    return f"{_sizes_text(s, *how)}; {hardware_text(s)}"


# One run: its report ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Inspection:
    """The report of one run: its setting, its speed, where its time goes, and what it costs."""

    summary: Summary
    tail: str = ""  # the end of the output of a run that failed, or has no Chronometer

    def lines(self) -> list[tuple[str, str]]:
        """Return (name, text) for each thing that was measured."""
        s = self.summary
        lines = [("what", setting_text(s))] if s.model != "?" else []
        lines += _loss_lines(s)
        if s.images_per_s:
            lines += _speed_lines(s)
        if s.outside:
            lines += outside_lines(s.outside)
        elif s.peak_memory_bytes:
            lines.append(("peak memory", _memory_text(s)))
        if s.cpu_s is not None and not s.outside:
            lines.append(("CPU time", f"{duration_text(s.cpu_s)}, in {duration_text(s.seconds)}"))
        if s.images_per_s:
            lines.append(("energy", _energy_text(s)))
        if s.epoch_s:
            count = f"{s.train_images:,} images"
            of = f"as many as ImageNet has, {count}" if s.synthetic else count
            text = f"{duration_text(s.epoch_s)} for {of}, extrapolated"
            lines.append(("epoch", text))
        if s.validation_s:
            lines.append(("validation", duration_text(s.validation_s) + _validation_text(s)))
        if s.epochs and not s.synthetic:  # a few repeated batches are soon memorized
            lines.append(("accuracy", f"{s.epochs[-1]['val_accuracy']:.1%} in validation"))
        if s.disturbance:
            lines.append(("disturbed", s.disturbance))
        if s.foreign and s.completed:
            how = "of a training, in processes that it starts itself, as with `-n 2`"
            lines.append(("steps", f"not measured: `dlojz watch` measures those {how}"))
        return lines + [("note", n) for n in s.notes]

    def __repr__(self):
        s = self.summary
        head = f"run {s.name}: {s.state}" + (f" ({s.reason})" if s.reason else "")
        body = [f"  {what:<12} {text}" for what, text in self.lines()]
        bars = [
            f"  {phase:<12} {share:6.1%} {'█' * round(40 * share)}"
            for phase, share in s.shares.items()
        ]
        text = "\n".join([head, *body, *bars, *(["", self.tail] if self.tail else [])])
        return harmless(text, keep="\n\t")

    def _repr_html_(self):
        s = self.summary
        colour = STATE_COLOURS.get(s.state, BAD_INK)
        reason = f" {escape(str(s.reason))}" if s.reason else ""
        rows = "".join(
            f'<tr><td style="text-align:left"><b>{escape(what)}</b></td>'
            f'<td style="text-align:left">{escape(text)}</td></tr>'
            for what, text in self.lines()
        )
        tail = f"<pre>{escape(self.tail)}</pre>" if self.tail else ""
        return (
            f'<div><b>Run {escape(s.name)}</b> <span style="color:{PAPER};background:{colour};'
            f'padding:1px 8px;border-radius:8px">{escape(s.state)}</span>{reason}'
            f"<table>{rows}</table>{_bar_html(s)}{tail}</div>"
        )


def inspect_run(run) -> Inspection:
    """Return the report of a job, a run's folder or a recording."""
    s = summary(run)
    failed = hasattr(run, "explain") and s.state not in ("COMPLETED", "RUNNING", "QUEUED")
    if s.foreign and not failed:
        return Inspection(s, _output(path_of(run) / "stdout.txt"))
    # The first line of explain() is the state, which the report shows already.
    return Inspection(s, run.explain().partition("\n")[2] if failed else "")


def _output(file):
    """Return the last lines of what a program printed, and where the rest is."""
    lines = outcome.tail(file).splitlines()[-OUTPUT_LINES:]
    return "\n".join([*(f"  | {line}" for line in lines), f"  in {file}"])


def _loss_lines(s):
    """Return (name, text) of a loss that is not finite, and of a gradient scaler."""
    if s.divergence:
        todo = "a smaller --lr, or --clip-norm 1"
        if s.scale is not None:
            todo += ", or --precision bf16"
        yield "loss", f"{s.divergence}: such a run does not train. Try {todo}"
    if s.skipped:
        lost, due = s.skipped
        normal = "" if s.divergence else ", as is normal at first"
        why = f" for gradients that were not finite{normal}" * (lost > 0)
        yield "scaler", f"skipped {lost} of {due} updates{why}; scale {s.scale:,g} at the end"


def _validation_text(s):
    loss = s.epochs[-1].get("val_loss", 0) if s.epochs else 0
    return "" if math.isfinite(loss) else f", and its loss is {loss}"


def _speed_lines(s):
    low, high = s.step_ms_spread
    device = ""
    if s.device_images_per_s:
        device = f" ({speed_text(s.device_images_per_s)} by the device's clock)"
    rate = f"{speed_text(s.images_per_s)} images/s"
    if s.tokens_per_s:
        rate, device = f"{speed_text(s.tokens_per_s)} tokens/s", ""
    lines = [
        ("throughput", f"{rate}{device}"),
        (
            "step",
            f"{s.step_ms:,.1f} ms (median of {s.steps}; 80 % within {low:,.1f} to {high:,.1f}; "
            f"{s.clock} clock)",
        ),
    ]
    if s.ahead_ms is not None:
        which = "median; of the process that is least ahead" if s.size > 1 else "median"
        lines.append(("host", f"{s.ahead_ms:,.0f} ms ahead of the device ({which})"))
    if s.graphs:
        lines.append(("compiler", _compiler_text(s)))
    return [*lines, ("optimizer", s.optimizer)]


def _compiler_text(s):
    graphs, breaks = _count(s.graphs, "graph"), _count(s.graph_breaks, "break")
    share = f", {s.compile_share:.0%} of the job" if s.compile_share else ""
    cached = "; the code for training came from a cache" * s.compile_cached
    return f"{graphs}, {breaks}; compiling took {duration_text(s.compile_s)}{share}{cached}"


def _count(number, word):
    return f"{number or 'no'} {word}{'s' * (number != 1)}"


def outside_lines(seen: Outside) -> list[tuple[str, str]]:
    """Return (name, text) for each thing that a job's keeper measured from outside."""
    shared = ""
    if seen.processes > 1:
        shared = f", of {seen.processes} processes, which each count what they share"
    cpu = f"{seen.busy_cpus:.2g} busy on average, {duration_text(seen.cpu_s)} in all"
    lines = [
        ("time", duration_text(seen.seconds)),
        ("CPUs", cpu),
        ("peak memory", f"{bytes_text(seen.peak_memory_bytes)} resident{shared}"),
    ]
    if seen.gpus:
        of = f" of {bytes_text(seen.gpu_memory_limit_bytes)}" if seen.gpu_memory_bytes else ""
        which = f" (mean of {seen.gpus} GPUs)" if seen.gpus > 1 else ""
        use = "not measured" if seen.gpu_use is None else f"{seen.gpu_use:.0%} of the time in use"
        fullest = ", the fullest" if seen.gpus > 1 else ""
        lines += [
            ("GPU", use + which),
            ("GPU memory", f"{bytes_text(seen.gpu_memory_bytes)}{of} at its peak{fullest}"),
        ]
    energy = "not measured: no counter here"
    if seen.energy_j is not None:
        watts = f", {seen.energy_j / seen.seconds:,.0f} W" if seen.seconds else ""
        joules, unit = (
            (seen.energy_j / 1000, "kJ") if seen.energy_j >= 1000 else (seen.energy_j, "J")
        )
        energy = f"{joules:,.1f} {unit} of the GPU{'s' * (seen.gpus > 1)}{watts}"
    return [*lines, ("energy", energy)]


def _memory_text(s):
    of = "of the device" if s.memory_of == "device" else f"of the {s.memory_of}, on the host"
    limit = f" of {bytes_text(s.memory_limit_bytes)}" if s.memory_limit_bytes else ""
    return f"{bytes_text(s.peak_memory_bytes)}{limit}, {of}"


def _energy_text(s):
    if s.energy_per_image_j is None:
        return "no sensor here"
    return f"{s.energy_per_image_j:.3g} J per image, {s.power_w:.0f} W"


def _bar_html(s):
    """Return the shares of a step as one bar, with its legend."""
    bar = legend = ""
    for phase, share in s.shares.items():
        text, colour = f"{phase} {share:.1%}", PALETTE[phase]
        bar += f'<div title="{text}" style="width:{100 * share:.2f}%;background:{colour}"></div>'
        square = f'<span style="color:{colour}">■</span>'
        legend += f'<span style="white-space:nowrap">{square} {text}</span> '
    if not bar:
        return ""
    return (
        '<div style="display:flex;width:100%;max-width:640px;height:16px;margin:4px 0">'
        f"{bar}</div><div>{legend}</div>"
    )


# Several runs: a table ------------------------------------------------------------------------


def compare_runs(runs: Sequence) -> Table:
    """Return a table of the runs' figures, one row each, without the columns that are empty.

    Its column "flags" holds those that not all runs share and that have no column of their own.
    """
    own = labels.apart(labels.command(run) for run in runs)
    rows = [_row(summary(run), run, flags) for run, flags in zip(runs, own, strict=True)]
    kept = [c for c in COLUMNS if c in ALWAYS or any(row[c] not in ("", "-") for row in rows)]
    cells = [tuple(row[column] for column in kept) for row in rows]
    return Table(kept, cells, "".join(COLUMNS[c] for c in kept), "no runs")


def gains(runs: Sequence, flag: str, value, than) -> Table:
    """Return a table of how many times as fast runs with one value of a flag are, by batch size.

    Of precision and memory layout, the other one is the same in both runs of a pair. Runs out of
    memory, and those whose loss is not finite, make no pair.
    """
    found, other = {}, {"precision": "channels_last", "channels_last": "precision"}[flag]
    for s in map(summary, runs):
        if s.images_per_s and flag in s.arguments and not s.divergence:  # not an experiment
            pair = found.setdefault((s.model, s.arguments[other], s.batch_size), {})
            pair[s.arguments[flag]] = s.images_per_s
    ratio = {k: v[value] / v[than] for k, v in found.items() if value in v and than in v}
    batches = sorted({batch for _, _, batch in ratio})
    layouts = {True: "channels_last", False: "NCHW"}
    rows = []
    for model, kept in dict.fromkeys((model, kept) for model, kept, _ in ratio):
        pairs = [(model, kept, batch) for batch in batches]
        cells = [f"{ratio[pair]:.2f}" if pair in ratio else "-" for pair in pairs]
        rows.append((model, layouts.get(kept, kept), *cells))
    head = ("model", other.replace("channels_last", "layout"), *(f"batch {b}" for b in batches))
    return Table(head, rows, "<<" + ">" * len(batches), "no pair of runs")


COLUMNS = {"run": "<", "name": "<", "model": "<", "px": ">", "precision": "<", "batch": ">"}
COLUMNS |= {"flags": "<", "images/s": ">", "step": ">", "peak memory": ">", "J/image": ">"}
COLUMNS |= {"state": "<", "loss": "<", "disturbed": "<"}  # each with its alignment
ALWAYS = ("run", "model", "batch", "images/s", "step", "state")
IN_A_COLUMN = ("-b", "--batch-size", "--image-size", "--model", "--precision")


def _row(s, run, flags):
    return {
        "run": s.name,
        "name": labels.name(run),
        "model": s.model if s.model != "?" else "-",
        "px": str(s.image_size or "-"),
        "precision": s.arguments.get("precision") or "-",
        "batch": f"{s.batch_size} x {s.size}" if s.size > 1 else str(s.batch_size or "-"),
        "flags": " ".join(f for f in flags if re.split("[ =]", f)[0] not in IN_A_COLUMN),
        "images/s": speed_text(s.images_per_s) if s.images_per_s else "-",
        "step": f"{s.step_ms:,.1f} ms" if s.step_ms else "-",
        "peak memory": bytes_text(s.peak_memory_bytes) if s.completed else "-",
        "J/image": f"{s.energy_per_image_j:.3g}" if s.energy_per_image_j else "-",
        "state": s.state,
        "loss": s.divergence,
        "disturbed": s.disturbance,
    }


# Figures --------------------------------------------------------------------------------------


def disturbed_text(found: Sequence[Summary]) -> str:
    """Return more lines for a title if something slowed runs down, or they diverged; else ""."""
    lines = ""
    if slow := [s for s in found if s.disturbance]:
        worst = max(slow, key=lambda s: s.others_cpu or 0)
        lines += f"\ndisturbed{_which(slow, found)}: {worst.disturbance}"
    if lost := [s for s in found if s.divergence]:
        lines += f"\nloss not finite{_which(lost, found)}: {lost[0].divergence}"
    return lines


SPENT = {  # on a phase, in words
    "data": "waiting for images",
    "transfer": "the transfer",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "update": "the update",
}


def _longest_text(s):
    """Return the phase that takes the most of a step, and its share."""
    if not s.shares:
        return "No step was measured"
    phase = max(s.shares, key=s.shares.get)
    step = f"{s.step_ms:,.0f}" if s.step_ms >= 100 else f"{s.step_ms:.3g}"
    return f"A step takes {step} ms, {percent(s.shares[phase])} of it {SPENT[phase]}"


def _gain_text(shown):
    """Return the ratio of speeds of the first run and of that which differs most from it.

    shown: [(summary, label), ...]
    """
    (first, name), *others = ((s.images_per_s, label.partition(":")[0]) for s, label in shown)
    if not others:
        return _longest_text(shown[0][0])
    speed, other = max(others, key=lambda run: abs(math.log(run[0] / first)))
    ratio = "" if abs(speed / first - 1) < SAME else f"{speed / first:.3g} times "
    return f"{other}: {ratio}as fast as {name}".replace("\n", ", ")


def _which(some, found):
    return f" ({', '.join(s.name for s in some)})" if len(found) > 1 else ""


def plot_steps(run, ax=None):
    """Draw each step as a bar of its phases, which shows whether the model waits for data."""
    read = log.read(run)
    clock, times = derived.step_times(read)
    warmup = read.setup.get("warmup_steps", 0)
    with style():
        ax = ax or plt.subplots(figsize=(9, 3.4))[1]
        bottom = np.zeros(len(read.steps))
        at = np.arange(len(bottom))
        for phase in PHASES:
            there = times[phase].sum() > VISIBLE * sum(map(np.sum, times.values()))
            look = {"color": PALETTE[phase], "label": phase if there else None}
            if len(at) <= 200:
                ax.bar(at, times[phase], 0.9, bottom, **look)
            else:  # thousands of bars would take minutes
                ax.fill_between(at, bottom, bottom + times[phase], step="mid", lw=0, **look)
            bottom = bottom + times[phase]
        ax.set(xlabel="step", ylabel=f"time of the step (ms, {clock} clock)")
        ax.set_xlim(-0.5, max(1, len(bottom)) - 0.5)
        ax.xaxis.get_major_locator().set_params(integer=True)
        measured = 0 < warmup < len(bottom)
        if measured:
            _mark_warmup(ax, bottom, warmup)
        s = summary(read)
        workers = "" if s.num_workers is None else f", workers: {s.num_workers}"
        entitle(ax, _longest_text(s), setting_text(s) + workers + disturbed_text([s]))
        place = {"loc": "lower left", "bbox_to_anchor": (0, 1.1 if measured else 1)}
        legend(ax, _there(ax), ncols=5, fontsize=9, **place)
    return ax


def _mark_warmup(ax, steps_ms, warmup):
    """Limit the axis to what the measured steps need, and mark the bars that are cut off."""
    top = 1.5 * np.percentile(steps_ms[warmup:], 95)
    ax.set_ylim(0, top)
    tab = {"color": PALE, "zorder": 0, "lw": 0, "clip_on": False}
    ax.axvspan(-0.5, warmup - 0.5, ymax=1.1, **tab)
    longest = steps_ms[:warmup].max()
    text = f"warm-up: up to {longest:,.0f} ms" if longest > top else "warm-up"
    ax.text(-0.4, 1.02 * top, text, va="bottom", fontsize=9)
    for step in np.flatnonzero(steps_ms > top):
        x, y = np.linspace(step - 0.45, step + 0.45, 5), np.array([0, 1, 0, 1, 0])
        ax.plot(x, (0.9 + 0.03 * y) * top, color="white", lw=3, solid_capstyle="butt")
        if step >= warmup and len(steps_ms) <= 60:
            text = {"rotation": 90, "ha": "center", "va": "top", "color": "white", "fontsize": 8}
            ax.text(step, 0.87 * top, f"{steps_ms[step]:,.0f} ms", **text)


def plot_phases(runs: Sequence, ax=None, labels: Sequence[str] | None = None):
    """Draw the mean step of each run as one bar, by phase, with its throughput at the end."""
    found = [summary(r) for r in runs]
    labels = labels or [f"{s.name}\n{s.model}, batch {s.batch_size}" for s in found]
    every = list(zip(found, labels, strict=True))
    shown = [(s, label) for s, label in every if s.shares]
    absent = [(s, label.partition("\n")[0]) for s, label in every if not s.shares]
    if not shown:
        states = ", ".join(f"{s.name} {s.state}" for s in found)
        raise UserError(f"no run with a measured step: {states}; job.explain() says why")
    with style(grid="x"):
        ax = ax or plt.subplots(figsize=(9, 1.3 + 0.6 * len(shown)))[1]
        for row, (s, _) in enumerate(shown):
            left = phase_bar(ax, row, s.phase_ms)
            but = ", disturbed" * bool(s.disturbance) + ", loss not finite" * bool(s.divergence)
            ax.text(left, row, f"  {speed_text(s.images_per_s)} images/s{but}", va="center")
        ax.set_yticks(range(len(shown)), [label for _, label in shown], parse_math=False)
        ax.invert_yaxis()
        told = disturbed_text([s for s, _ in shown])
        ax.margins(x=0.35 if told else 0.22)  # room for the text
        ax.set_xlabel("mean step (ms)")
        hardware = sorted({hardware_text(s) for s, _ in shown})
        if len(hardware) > 1:
            hardware = [f"{text.partition(chr(10))[0]}: {hardware_text(s)}" for s, text in shown]
        notes = [f"{label} has no measured step: {s.state}" for s, label in absent]
        ax.set_xlim(0, None)
        entitle(ax, _gain_text(shown), "\n".join([*hardware, *notes]) + told)
        legend(ax, _there(ax), ncols=5, loc="lower left", bbox_to_anchor=(0, 1), fontsize=9)
    return ax


def _there(ax):
    """Return {label: handle} of the phases that can be seen."""
    named = dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    return {phase: named[phase] for phase in PHASES if phase in named}


def phase_bar(ax, row: int, phase_ms: Mapping[str, float]) -> float:
    """Draw a mean step as one bar, by phase; return its length."""
    left, whole = 0.0, sum(phase_ms.values())
    for phase, width in phase_ms.items():
        label = phase if width > VISIBLE * whole else None
        ax.barh(row, width, 0.6, left, color=PALETTE[phase], label=label)
        left += width
    return left


def _most_text(names, values, unit):
    """Return the largest of these values, as a multiple of the next."""
    order = np.argsort(values)[::-1]
    text = f"{names[order[0]]}: {values[order[0]]:,.3g} {unit}"
    if len(order) == 1 or not values[order[1]]:
        return text
    return f"{text}, {values[order[0]] / values[order[1]]:.2g} times {names[order[1]]}"


def plot_measures(run, ax=None):
    """Draw the figures of a small experiment as bars, in the order in which they were measured."""
    read = log.read(run)
    if not read.measures:
        raise UserError(f"{read.path}: nothing was measured; job.explain() says why")
    values = np.array([m.value for m in read.measures])
    scale, unit = 1, read.measures[0].unit
    if unit == "bytes":
        scale, unit = (1e9, "GB") if values.max() >= 1e9 else (1e6, "MB")
    texts = [m.name if m.x is None else f"{m.name} / {m.x}" for m in read.measures]
    with style(grid="x"):
        ax = ax or plt.subplots(figsize=(9, 0.9 + 0.42 * len(values)))[1]
        bars = ax.barh(range(len(values)), values / scale, 0.6, color=PALETTE["speed"])
        ax.bar_label(bars, fmt="  {:,.3g}", fontsize=9)
        ax.set_yticks(range(len(values)), texts)
        ax.invert_yaxis()
        ax.margins(x=0.15)
        ax.set(xlabel=unit, xlim=(0, None))
        entitle(ax, _most_text(texts, values / scale, unit), hardware_text(summary(read)))
    return ax
