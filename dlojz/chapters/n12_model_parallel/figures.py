"""Figures of notebook 12: schedules of a pipeline, plans, long sequences, and predictions."""

import statistics
from collections.abc import Mapping

import numpy as np

from dlojz.figures import drawing, plans, report
from dlojz.figures.report import PALETTE, SERIES, bytes_text
from dlojz.runs import log
from dlojz.table import Table

KINDS = {  # of a pipeline's actions
    "F": ("forward", PALETTE["forward"]),
    "B": ("backward", PALETTE["backward"]),
    "I": ("backward, of the input", SERIES[2]),
    "W": ("backward, of the weights", PALETTE["power"]),
}
SCHEDULES = dict(zip(("GPipe", "1F1B", "interleaved 1F1B", "zero bubble"), SERIES, strict=False))
HELD = ("parameters", "gradients", "optimizer")
MESSAGES = report.COLLECTIVES | {"reduce_scatter": SERIES[2], "send": SERIES[1]}
WAYS = {"whole": PALETTE["limit"], "ring": SERIES[0], "Ulysses": SERIES[1]}


# Schedules ----------------------------------------------------------------------------------------


def _schedules(run, parts: int | None = None) -> dict[str, list]:
    """Return each case's fields with the actions of all processes, by name."""
    ranks = drawing.of_experiment(run, "actions", "schedules.py").ranks
    found = {}
    for name, case in ranks[0].cases.items():
        if parts in (None, case["parts"]):
            found[name] = case | {"actions": [rank.cases[name]["actions"] for rank in ranks]}
    return found


def bubble(case: Mapping) -> tuple[float, float | None]:
    """Return the share of the step in which processes have no action: counted, and predicted.

    The latter is for backward passes in one piece, of stages that all take the same time.
    """
    p, busy = len(case["actions"]), [end - begin for *_, begin, end, _ in _all(case)]
    counted = 1 - sum(busy) / p / _span(case)[1]
    rounds = case["stages"] * case["parts"]
    return counted, None if _is_divided(case) else (p - 1) / (rounds + p - 1)


def _all(case):
    return [action for actions in case["actions"] for action in actions]


def _is_divided(case):
    return any(kind == "W" for kind, *_ in _all(case))


def _span(case) -> tuple[float, float]:
    """Return the begin of a step, and its length, in ms."""
    begin = min(action[3] for action in _all(case))
    return begin, max(action[4] for action in _all(case)) - begin


def live(case: Mapping) -> list[float]:
    """Return the most parts whose activations each process holds, as if it had one stage."""
    found = []
    for actions in case["actions"]:
        now, most = {}, 0
        for _, stage, _, _, _, parts in actions:
            now[stage] = parts
            most = max(most, sum(now.values()))
        found.append(most / case["stages"])
    return found


def bubbles(run) -> Table:
    """Return a table of the schedules by parts: their bubbles, and the activations they keep."""
    rows = []
    for case in _schedules(run).values():
        counted, predicted = bubble(case)
        kept = ", ".join(f"{parts:g}" for parts in live(case))
        share = "-" if predicted is None else f"{predicted:.1%}"
        cells = f"{_span(case)[1]:,.1f} ms", f"{counted:.1%}", share, kept
        rows.append((case["schedule"], str(case["parts"]), *cells))
    head = ("schedule", "parts", "step", "bubble", "predicted", "live parts, by process")
    return Table(head, rows, "<>>>><")


def plot_schedules(run, parts: int | None = None, axes=None):
    """Draw the actions of each process in time, for each schedule; by default of the 8 parts."""
    cases = _schedules(run, parts or _parts(run))
    longest = max(_span(case)[1] for case in cases.values())
    size = 11, 1.2 + sum(0.45 + 0.28 * len(case["actions"]) for case in cases.values())
    look = {"ha": "center", "va": "center", "fontsize": 7, "color": "white"}
    with drawing.axes(axes, size, "x", (len(cases), 1), sharex=True) as axes:
        for ax, case in zip(axes, cases.values(), strict=True):
            first = _span(case)[0]
            for process, actions in enumerate(case["actions"]):
                for kind, stage, part, begin, end, _ in actions:
                    later = stage >= len(case["actions"])  # the second stage of a process
                    label, colour = KINDS[kind]
                    bar = {"color": colour, "ec": "white", "lw": 0.6, "alpha": 0.6 if later else 1}
                    ax.barh(process, end - begin, 0.86, begin - first, label=label, **bar)
                    if end - begin > longest / 80:
                        ax.text((begin + end) / 2 - first, process, part + 1, **look)
            drawing.rows(ax, [f"stage {n}" for n in _stages(case)])
            ax.tick_params(axis="y", labelsize=8, length=0)
            ax.grid(visible=False)
            drawing.caption(ax, _told(case))
            ax.set_xlim(0, 1.01 * longest)
        axes[-1].set_xlabel("ms")
        named = {label: colour for kind, (label, colour) in KINDS.items() if _has(cases, kind)}
        drawing.legend(axes[-1], 4, (1, -0.35), drawing.swatches(named), loc="upper right")
        drawing.entitle(axes[0], _finding(cases), _where(run))
    return axes


def _parts(run) -> int:
    """Return the number of parts to draw: 8, or the largest below it."""
    counts = {case["parts"] for case in _schedules(run).values()}
    return max([n for n in counts if n <= 8], default=min(counts))


def _stages(case):
    """Return the stages of each process in words: "0", or "0 and 4"."""
    count = len(case["actions"])
    return [
        " and ".join(str(n) for n in range(first, count * case["stages"], count))
        for first in range(count)
    ]


def _has(cases, wanted):
    return any(kind == wanted for case in cases.values() for kind, *_ in _all(case))


def _told(case):
    counted, predicted = bubble(case)
    text = f"{case['schedule']}: {counted:.0%} of the time without work"
    return text + ("" if predicted is None else f", predicted {predicted:.0%}")


def _finding(cases):
    shares = {case["schedule"]: bubble(case)[0] for case in cases.values()}
    best, worst = min(shares, key=shares.get), max(shares, key=shares.get)
    case = next(iter(cases.values()))
    given = f"{len(case['actions'])} processes, {case['parts']} parts"
    text = f"{given}: without work for {shares[worst]:.0%} of a step under {worst}, "
    return text + f"for {shares[best]:.0%} under {best}"


def _where(run):
    wait = log.read(run).start["arguments"]["wait"]
    how = f"sleeps stand for work, {wait:g} ms for a block's forward pass; " if wait else ""
    return how + drawing.where(run)


def plot_bubbles(run, ax=None):
    """Draw the bubble of each schedule by the number of parts, and the predicted one."""
    cases = [*_schedules(run).values()]
    counts = sorted({case["parts"] for case in cases})
    with drawing.axes(ax, (7.5, 4), "y") as ax:
        for name, colour in SCHEDULES.items():
            mine = [case for case in cases if case["schedule"] == name]
            shares = [100 * bubble(case)[0] for case in mine]
            ax.plot([case["parts"] for case in mine], shares, "o", color=colour, label=name)
        p, x = len(cases[0]["actions"]), np.linspace(counts[0], counts[-1], 99)
        for rounds, line in ((1, "-"), (2, "--")):
            label = f"(p - 1) / ({'2 ' * (rounds - 1)}m + p - 1)"
            y = 100 * (p - 1) / (rounds * x + p - 1)
            ax.plot(x, y, line, color=PALETTE["limit"], label=label, zorder=0)
        ax.set_xticks(counts)
        ax.set(xlabel="parts, m", ylabel="bubble (% of a step)", ylim=(0, None))
        drawing.legend(ax, 1, (1, 1), loc="upper left")
        over = [bubble(c)[0] - bubble(c)[1] for c in cases if bubble(c)[1] is not None]
        title = f"{p} processes: the bubble is the predicted one, and up to "
        title += f"{100 * max(over):.0f} points more for messages"
        drawing.entitle(ax, title, _where(run))
    return ax


def plot_live(run, parts: int | None = None, ax=None):
    """Draw the most parts whose activations each process holds, for each schedule."""
    cases = _schedules(run, parts or _parts(run)).values()
    with drawing.axes(ax, (8.5, 3.6), "y") as ax:
        for place, case in enumerate(cases):
            held, name = live(case), case["schedule"]
            at = np.arange(len(held)) + 0.2 * (place - (len(cases) - 1) / 2)
            bars = ax.bar(at, held, 0.18, color=SCHEDULES[name], label=name)
            ax.bar_label(bars, [f"{parts:g}" for parts in held], fontsize=8, padding=1)
        ax.set_xticks(range(len(held)), [f"process {n}" for n in range(len(held))])
        ax.set_ylabel("parts with live activations")
        drawing.legend(ax, 4)
        most = {case["schedule"]: live(case) for case in cases}
        title = f"GPipe keeps all {most['GPipe'][0]:g} parts, and 1F1B "
        title += f"{most['1F1B'][0]:g} in the first process, {most['1F1B'][-1]:g} in the last"
        setting = "two stages in a process count half each; " + _where(run)
        drawing.entitle(ax, title, setting)
    return ax


# Plans --------------------------------------------------------------------------------------------


def speeds(run) -> dict[str, dict]:
    """Return images per second, MFU, and the largest numbers of any process, for each plan."""
    ranks = drawing.of_experiment(run, "expected_bytes", "splits.py").ranks
    peak = statistics.mean(m.value for rank in ranks for m in rank.measures)
    found = {}
    for name, case in ranks[0].cases.items():
        seconds = statistics.median(case["step_ms"]) / 1000
        found[name] = {
            "images_per_s": case["sizes"]["batch"] / seconds,
            "mfu": case["flops"] / seconds / (1e12 * peak * len(ranks)),
            "step_ms": 1000 * seconds,
        }
        for what in ("peak_bytes", "sent_bytes", "expected_bytes", "exposed_ms"):
            values = [rank.cases[name].get(what) for rank in ranks]
            found[name][what] = None if None in values else max(values)
    return found


def splits(run) -> Table:
    """Return a table of the plans: speed, MFU, memory, messages, and waiting for them."""
    rows = []
    for name, row in speeds(run).items():
        waits = "-"
        if row["exposed_ms"] is not None:
            waits = f"{row['exposed_ms']:,.1f} ms ({row['exposed_ms'] / row['step_ms']:.0%})"
        sizes = (row["peak_bytes"], row["sent_bytes"], row["expected_bytes"])
        speed = (report.speed_text(row["images_per_s"]), f"{row['mfu']:.1%}")
        rows.append((name, *speed, *map(bytes_text, sizes), waits))
    head = ("plan", "images/s", "MFU", "peak memory", "sends", "computed", "waits for messages")
    return Table(head, rows, "<>>>>>>")


def plot_splits(run, axes=None):
    """Draw what a process of each plan holds, what it sends in a step, and the speed."""
    ranks, found = log.read(run).ranks, speeds(run)
    with drawing.axes(axes, (12, 1.6 + 0.4 * len(found)), "x", (1, 3), sharey=True) as axes:
        for row, name in enumerate(found):
            case = max((r.cases[name] for r in ranks), key=lambda case: case["peak_bytes"])
            held = {part: case["bytes"].get(part, 0) / 1e9 for part in HELD}
            held["activations"] = max(0, case["peak_bytes"] / 1e9 - sum(held.values()))
            end = drawing.stack(axes[0], row, held, plans.COLOURS)
            plans.label(axes[0], end, row, bytes_text(case["peak_bytes"]), fontsize=8)
            case = max((r.cases[name] for r in ranks), key=lambda case: case["sent_bytes"])
            sent = {op: size / 1e9 for op, (_, size) in case["calls"].items()}
            end = drawing.stack(axes[1], row, sent, MESSAGES)
            plans.label(axes[1], end, row, bytes_text(case["sent_bytes"]), fontsize=8)
            axes[2].barh(row, 100 * found[name]["mfu"], 0.6, color=PALETTE["speed"])
            text = f"{found[name]['mfu']:.0%}, {report.speed_text(found[name]['images_per_s'])}/s"
            plans.label(axes[2], 100 * found[name]["mfu"], row, text, fontsize=8)
        drawing.rows(axes[0], found)
        labels = ("a process holds (GB)", "a process sends in a step (GB)", "MFU (%), images")
        for ax, label in zip(axes, labels, strict=True):
            ax.set_xlabel(label)
            ax.set_xlim(0, 1.4 * ax.dataLim.xmax)
        for ax in axes[:2]:
            handles, names = ax.get_legend_handles_labels()
            named = {n.replace("_", "-"): h for n, h in zip(names, handles, strict=True)}
            drawing.legend(ax, 2, (0, 1), named, fontsize=8)
        drawing.entitle(axes[0], _best(found), drawing.where(run))
    return axes


def _best(found):
    best, worst = (f(found, key=lambda name: found[name]["mfu"]) for f in (max, min))
    times = found[best]["images_per_s"] / found[worst]["images_per_s"]
    low, high = (f(row["sent_bytes"] for row in found.values()) for f in (min, max))
    text = f"{best} is the fastest, {times:.1f} times as fast as {worst}. "
    return text + f"A process sends {bytes_text(low)} to {bytes_text(high)} in a step"


# Sequences ----------------------------------------------------------------------------------------


def hidden(case: Mapping) -> float:
    """Return the share of the messages' time that computing hides."""
    ms, compute, messages = (
        statistics.median(case[what]) for what in ("ms", "compute_ms", "messages_ms")
    )
    return min(1, max(0, 1 - (ms - compute) / messages))


def sequences(run) -> Table:
    """Return a table of attention over long sequences: time, messages, and their results."""
    rows = []
    for case in drawing.of_experiment(run, "tokens", "ring.py").cases.values():
        cells = ("",) * 5
        if "messages_ms" in case:
            ms = [f"{statistics.median(case[w]):,.2f}" for w in ("compute_ms", "messages_ms")]
            cells = (*ms, f"{hidden(case):.0%}", bytes_text(case["sent_bytes"]))
            cells = (*cells, f"{case['away']:.1e}")
        ms = f"{statistics.median(case['ms']):,.2f}"
        rows.append((f"{case['tokens']:,}", case["way"], ms, *cells))
    head = ("tokens", "way", "ms", "without messages", "messages alone", "hidden", "sends")
    return Table((*head, "gradients away"), rows, "><>>>>>>")


def plot_sequences(run, axes=None):
    """Draw attention's time by length, whole and divided, and the hidden share of messages."""
    run = drawing.of_experiment(run, "tokens", "ring.py")
    lengths = sorted({case["tokens"] for case in run.cases.values()})
    with drawing.axes(axes, (10.5, 4), "both", (1, 2)) as axes:
        for way, colour in WAYS.items():
            mine = [case for case in run.cases.values() if case["way"] == way]
            x = [case["tokens"] for case in mine]
            spans = np.array([np.quantile(case["ms"], (0, 0.5, 1)) for case in mine]).T
            low, middle, high = spans
            look = {"color": colour, "label": way, "marker": "o", "ms": 4, "capsize": 2}
            axes[0].errorbar(x, middle, [middle - low, high - middle], **look)
            if way != "whole":
                shares = [100 * hidden(case) for case in mine]
                axes[1].plot(x, shares, "o-", ms=4, color=colour)
        for ax in axes:
            ax.set_xscale("log", base=2)
            ax.set_xticks(lengths, [f"{n:,}" for n in lengths])
            ax.set_xlabel("tokens of a sequence")
        axes[0].set(yscale="log", ylabel="ms, forward and backward")
        axes[1].set(ylabel="messages hidden behind work (%)", ylim=(-4, 104))
        drawing.legend(axes[0], 3)
        here = {case["way"]: case for case in run.cases.values() if case["tokens"] == lengths[-1]}
        ms = {way: statistics.median(case["ms"]) for way, case in here.items()}
        title = f"{lengths[-1]:,} tokens in {run.start['size']} processes: "
        title += " and ".join(
            f"{way} {ms['whole'] / ms[way]:.2f} times as fast as the whole"
            for way in ("ring", "Ulysses")
        )
        drawing.entitle(axes[0], title, drawing.where(run) + "; a bar spans all rounds")
    return axes


# Predictions --------------------------------------------------------------------------------------


def errors(run) -> Table:
    """Return a table of `dlojz estimate` against what was measured, in the fullest process."""
    rows = []
    for name, case in drawing.of_experiment(run, "predicted_bytes", "divisions.py").cases.items():
        cells = []
        for what, expected in (("peak_bytes", "predicted_bytes"), ("sent_bytes", "predicted_sent")):
            measured, predicted = max(case[what]), max(case[expected])
            off = predicted / measured - 1
            cells += [bytes_text(measured), bytes_text(predicted), f"{off:+.1%}"]
        rows.append((name, *cells))
    head = ("plan", "peak", "predicted", "", "sends", "predicted", "")
    return Table(head, rows, "<>>>>>>")


def plot_errors(run, ax=None):
    """Draw the predicted memory and messages of each plan, relative to the measured ones."""
    run = drawing.of_experiment(run, "predicted_bytes", "divisions.py")
    looks = {
        "memory": ("peak_bytes", "predicted_bytes"),
        "messages": ("sent_bytes", "predicted_sent"),
    }
    with drawing.axes(ax, (9, 1.6 + 0.45 * len(run.cases)), "x") as ax:
        worst = {}
        for place, (what, names) in enumerate(looks.items()):
            measured, predicted = ([max(c[n]) for c in run.cases.values()] for n in names)
            off = 100 * (np.divide(predicted, measured) - 1)
            at = np.arange(len(off)) + 0.36 * (place - 0.5)
            bars = ax.barh(at, off, 0.34, color=SERIES[place], label=what)
            ax.bar_label(bars, [f"{value:+.1f} %" for value in off], padding=3, fontsize=8)
            worst[what] = abs(off).max()
        ax.axvline(0, color=PALETTE["limit"], lw=1)
        drawing.rows(ax, run.cases)
        ax.margins(x=0.2)
        ax.set_xlabel("predicted, above or below the measured one (%)")
        drawing.legend(ax, 2)
        title = f"dlojz estimate: memory to within {worst['memory']:.1f} %, "
        title += f"messages to within {worst['messages']:.1f} %"
        drawing.entitle(ax, title, drawing.where(run))
    return ax
