"""Figures and tables of a trace: where the time of a step goes, and one step drawn.

Each takes whatever `open_trace` takes: a trace, its file, or a job that has written one.
"""

from collections import defaultdict

import matplotlib.pyplot as plt

from dlojz.course import UserError
from dlojz.figures import drawing
from dlojz.figures.look import KINDS, LINE, PALETTE, entitle, percent, style
from dlojz.runs.columns import PHASES
from dlojz.table import Table
from dlojz.traces import breakdown, host, kinds, spans
from dlojz.traces.trace import open_trace

# Waits, drawn hatched.
LOST = {
    host.DATA: PALETTE["data"],
    host.SYNC: PALETTE["failure"],
    host.COLLECTOR: PALETTE["model"],
    kinds.COMMUNICATION: KINDS[kinds.COMMUNICATION],
    host.READS: PALETTE["activations"],
    host.ALLOCATOR: PALETTE["power"],
    host.COPIES: KINDS[kinds.COPIES],
    host.AWAY: "black",
    breakdown.LAUNCHES: PALETTE["limit"],
    breakdown.PYTHON: PALETTE["limit"],
    breakdown.PAUSES: LINE,
}
NAMED = 8  # entries of a legend
ROOM = 0.04  # of a step: the name of a shorter phase has no room
IDLE = "nothing is computed"  # where the trainee is to find out why
NO_CALLS = "this trace does not tell where the host waits"


def times(of, causes=True) -> Table:
    """Return a table of the milliseconds of a step, by what they were spent on.

    causes: whether to tell why the device waits, or only for how long.
    """
    found = breakdown.analyse(open_trace(of))
    rows = []
    for name, ms in sorted(found.kinds.items(), key=lambda item: -item[1]):
        note = ""
        if name == kinds.MATRIX and found.tensor_cores is not None:
            note = f"{found.tensor_cores:.0%} of it on tensor cores"
        if name == kinds.COMMUNICATION and found.device:
            note = f"{found.exposed_ms:.2f} ms of it not overlapped"
        if name == kinds.COPIES and found.pageable_ms and causes:
            note = f"{found.pageable_ms:.2f} ms of it from memory that is not pinned"
        rows.append((name, f"{ms:.2f}", f"{ms / found.step_ms:.1%}", note))
    who = "the device waits for" if found.device else "the training waits for"
    idle = {f"{who}: {cause}": ms for cause, ms in found.idle.items()}
    if not causes:
        idle = {IDLE: sum(idle.values())}
    for words, ms in sorted(idle.items(), key=lambda item: -item[1]):
        rows.append((words, f"{ms:.2f}", f"{ms / found.step_ms:.1%}", ""))
    nothing = f"nothing to show of {found.unseen}" if found.unseen else "nothing was recorded"
    return Table(("", "ms of a step", "share", ""), rows, "<>><", nothing)


def waits(of, causes=True) -> Table:
    """Return a table of where the host waits for the device, and how long the device then idles.

    causes: whether to name what is written in the program, such as print, or the operation of torch
    that it becomes.
    """
    found = breakdown.analyse(opened := open_trace(of))
    places = defaultdict(list)
    for wait in found.waits:
        places[(wait.why if causes else wait.op) or wait.call, wait.line].append(wait)
    rows = [
        (
            who,
            line or "-",
            f"{sum(w.count for w in mine) / found.steps:.3g}",
            f"{sum(w.ms for w in mine) / found.steps:.2f}",
            f"{sum(w.idle_ms for w in mine) / found.steps:.2f}",
        )
        for (who, line), mine in places.items()
    ]
    head = ("asked by", "in", "times a step", "host waits (ms)", "device idle after it (ms)")
    hidden = found.unseen or (opened.on_gpu and not opened.calls)
    return Table(head, rows, "<<>>>", NO_CALLS if hidden else "the host waits nowhere")


def plot_shares(traces, verdicts=True, ax=None):
    """Draw the parts of a step's time in several traces, {label: trace}; waits are hatched.

    verdicts: whether to write beside each what bounds it, and to colour the waits by their cause;
    False where the trainee is to find out.
    """
    with style(grid="x"):
        ax = ax or plt.subplots(figsize=(10, 1.7 + 0.5 * len(traces)))[1]
        for row, of in enumerate(traces.values()):
            found = breakdown.analyse(open_trace(of))
            left = 0.0
            for name, share in _computed(found).items():
                ax.barh(row, share, 0.65, left=left, label=name, color=KINDS[name])
                left += share
            lost = {f"waits: {name}": (share, LOST[name]) for name, share in found.lost.items()}
            if not verdicts:
                lost = {IDLE: (sum(found.lost.values()), PALETTE["limit"])}
            for label, (share, colour) in lost.items():
                look = {"color": colour, "alpha": 0.5, "hatch": "///", "ec": "white"}
                ax.barh(row, share, 0.65, left=left, label=label, **look)
                left += share
            if verdicts:
                ax.text(left + 0.01, row, found.verdict, va="center", fontsize=9)
        ax.set(yticks=range(len(traces)), yticklabels=traces, ylim=(len(traces) - 0.5, -0.5))
        ax.set(xlabel="share of a step", xlim=(0, 1.5 if verdicts else 1))
        ax.set_xticks([0, 0.25, 0.5, 0.75, 1])
        _legend(ax)
        entitle(ax, _computing_text(traces), _device_text(traces.values()))
    return ax


def _computing_text(traces):
    """Return the least and the most that is computed in a step of these traces."""
    lost = {
        name: sum(breakdown.analyse(open_trace(of)).lost.values()) for name, of in traces.items()
    }
    least, most = max(lost, key=lost.get), min(lost, key=lost.get)
    text = f"Computing takes {percent(1 - lost[most])} of a step ({most})"
    return text if least == most else f"{text}, or {percent(1 - lost[least])} ({least})"


def _device_text(traces):
    """Return the devices of these traces."""
    opened = [open_trace(of) for of in traces]
    names = [each.device if each.on_gpu else each.unseen or "processor" for each in opened]
    return "; ".join(dict.fromkeys(names))


def _computed(found) -> dict[str, float]:
    """Return the share of a step that is not lost, by kind of work; overlapping work is scaled."""
    spent = {k: found.kinds[k] for k in KINDS if k in found.kinds and k != kinds.COMMUNICATION}
    if kinds.COPIES in spent:  # pageable copies count as lost
        spent[kinds.COPIES] = max(0.0, spent[kinds.COPIES] - found.pageable_ms)
    rest = 1 - sum(found.lost.values())
    total = sum(spent.values())
    return {name: rest * ms / total for name, ms in spent.items() if total}


def plot_step(of, number=None, verdict=True, ax=None, title=""):
    """Draw one step: what the host was doing, and the device below it.

    number: the step's place in the trace, from 0, by default the middle one.
    verdict: whether to write what bounds the step; title: what to write before the device's name.
    """
    found = open_trace(of)
    number = len(found.steps) // 2 if number is None else number
    if not 0 <= number < len(found.steps):
        raise UserError(f"no step {number}: the trace has {len(found.steps)}, from 0")
    step = found.steps[number]
    work = _work_of(found, step) if found.on_gpu else _operations(found, step)
    end = max([step.end, *(e.end for e in work)])
    places = sorted({e.where for e in work})
    with style(grid="x"):
        ax = ax or plt.subplots(figsize=(11, 1.8 + 0.6 * len(places)))[1]
        _draw_host(ax, found, step)
        for row, where in enumerate(places, 1):
            for name, colour in KINDS.items():
                mine = [e for e in work if e.where == where and kinds.kind(e.name) == name]
                _draw(ax, row, mine, step.begin, color=colour, label=name)
        what = "GPU" if found.on_gpu else "thread"
        one = not found.on_gpu and len(places) == 1
        names = ["operations"] if one else [f"{what} {where}" for where in places]
        ax.set(yticks=range(len(places) + 1), yticklabels=["host", *names])
        ax.set(ylim=(len(places) + 0.5, -0.75), xlim=(0, end - step.begin))
        ax.set_xlabel(f"in {step.name} (ms)")
        said = breakdown.analyse(found).verdict if verdict else None
        length = f"a step of {end - step.begin:.3g} ms"
        entitle(ax, ": ".join(filter(None, (title, said, length))), _device_text([found]))
        _legend(ax)
    return ax


def _legend(ax):
    """Draw a legend of what is longest: at most `NAMED` entries."""
    handles, labels = ax.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    lengths = dict.fromkeys(unique, 0.0)
    for handle, label in zip(handles, labels, strict=True):
        lengths[label] = max(lengths[label], _length(handle))
    longest = sorted(unique, key=lengths.get, reverse=True)[:NAMED]
    shown = {label: handle for label, handle in unique.items() if label in longest}
    drawing.legend(ax, 3, named=shown, fontsize=8)


def _length(handle):
    """Return the length of bars: of one by `barh`, or of several by `broken_barh`."""
    if hasattr(handle, "patches"):
        return sum(bar.get_width() for bar in handle.patches)
    return sum(path.get_extents().width for path in handle.get_paths())


def _work_of(found, step):
    """Return the work that was launched in this step, whenever the device did it."""
    asked = {c.id for c in found.calls if c.id and step.begin <= c.begin < step.end}
    return [e for e in found.work if e.id in asked]


def _operations(found, step):
    """Return the operations of a step that are not nested in others."""
    return spans.outermost(op for op in found.ops if step.begin <= op.begin < step.end)


def _draw_host(ax, found, step):
    """Draw the phases of a step as the host went through them, and over them where it waited."""
    phases = {name: [] for name in PHASES}
    for r in found.ranges:
        name = "data" if host.LOADER.match(r.name) else r.name
        if name in phases and r.where == found.thread and step.begin <= r.begin < step.end:
            phases[name].append(r)
    for name, events in phases.items():
        _draw(ax, 0, events, step.begin, color=PALETTE[name], alpha=0.35)
        length = sum(e.end - e.begin for e in events)
        if length > ROOM * (step.end - step.begin):
            middle = (events[0].begin + events[-1].end) / 2 - step.begin
            ax.text(middle, -0.43, name, ha="center", va="bottom", fontsize=8)
    for label, colour, events in (
        ("the host waits", PALETTE["failure"], host.synchronisations(found)),
        ("garbage collector", PALETTE["model"], host.collections(found)),
    ):
        events = [e for e in events if step.begin <= e.begin < step.end]
        _draw(ax, 0, events, step.begin, height=0.35, color=colour, label=label)


def _draw(ax, row, events, zero, height=0.7, **look):
    """Draw events as bars, as wide as they are long."""
    whole = spans.union((e.begin, e.end) for e in events)
    bars = [(begin - zero, end - begin) for begin, end in whole]
    if bars:
        ax.broken_barh(bars, (row - height / 2, height), linewidth=0, **look)
