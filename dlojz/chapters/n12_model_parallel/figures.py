"""Figures of notebook 12: schedules of a pipeline, plans, long sequences, and predictions."""

import statistics
from collections.abc import Mapping

import numpy as np
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from dlojz.figures import drawing, plans, report
from dlojz.figures.look import COLLECTIVES, MEMORY, PALETTE, SERIES, entitle
from dlojz.figures.report import bytes_text
from dlojz.runs import log
from dlojz.table import Table

KINDS = {  # of a pipeline's actions
    "F": ("forward", PALETTE["forward"]),
    "B": ("backward", PALETTE["backward"]),
    "I": ("backward, of the input", SERIES[2]),
    "W": ("backward, of the weights", PALETTE["power"]),
}
HELD = ("parameters", "gradients", "optimizer")
MESSAGES = COLLECTIVES | {"send": SERIES[1]}
MESSAGES |= {"computed": PALETTE["limit"]}
WAYS = {"whole": PALETTE["limit"], "ring": SERIES[0], "Ulysses": SERIES[1]}


def _schedules(run, parts: int | None = None) -> list[dict]:
    """Return the cases with the actions of all processes: of that many parts, or fewer; or all."""
    ranks = drawing.of_experiment(run, "actions", "schedules.py").ranks
    counts = [case["parts"] for case in ranks[0].cases.values()]
    wanted = max((n for n in counts if n <= (parts or 0)), default=min(counts))
    return [
        case | {"actions": [rank.cases[name]["actions"] for rank in ranks]}
        for name, case in ranks[0].cases.items()
        if parts is None or case["parts"] == wanted
    ]


def bubble(case: Mapping) -> tuple[float, float | None]:
    """Return the share of the step in which processes have no action: counted, and predicted.

    The latter is for backward passes in one piece, of stages that all take the same time.
    """
    every, p = [action for actions in case["actions"] for action in actions], len(case["actions"])
    counted = 1 - sum(end - begin for *_, begin, end, _ in every) / p / _span(case)[1]
    divided = any(kind == "W" for kind, *_ in every)
    return counted, None if divided else (p - 1) / (case["stages"] * case["parts"] + p - 1)


def _span(case) -> tuple[float, float]:
    """Return the begin of a step, and its length, in ms."""
    begin = min(action[3] for actions in case["actions"] for action in actions)
    return begin, max(action[4] for actions in case["actions"] for action in actions) - begin


def gpipe_bubble(run, parts: int = 8) -> float:
    """Return the share of a step in which the processes have no action under GPipe."""
    cases = _schedules(run, parts)
    return next(bubble(case)[0] for case in cases if case["schedule"] == "GPipe")


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
    for case in _schedules(run):
        counted, predicted = bubble(case)
        kept = ", ".join(f"{parts:g}" for parts in live(case))
        share = "-" if predicted is None else f"{predicted:.1%}"
        cells = f"{_span(case)[1]:,.1f} ms", f"{counted:.1%}", share, kept
        rows.append((case["schedule"], str(case["parts"]), *cells))
    head = ("schedule", "parts", "step", "bubble", "predicted", "live parts, by process")
    return Table(head, rows, "<>>>><")


def plot_schedules(run, parts: int = 8, axes=None):
    """Draw the actions of each process in time, for each schedule."""
    cases = _schedules(run, parts)
    longest = max(_span(case)[1] for case in cases)
    size = 11, 1.2 + sum(0.45 + 0.28 * len(case["actions"]) for case in cases)
    look = {"ha": "center", "va": "center", "fontsize": 7}
    with drawing.axes(axes, size, "x", (len(cases), 1), sharex=True) as axes:
        for ax, case in zip(axes, cases, strict=True):
            first = _span(case)[0]
            for process, actions in enumerate(case["actions"]):
                for kind, stage, part, begin, end, _ in actions:
                    later = stage >= len(case["actions"])  # the second stage of a process
                    label, colour = KINDS[kind]
                    bar = {"color": colour, "ec": "white", "lw": 0.6, "alpha": 0.6 if later else 1}
                    ax.barh(process, end - begin, 0.86, begin - first, label=label, **bar)
                    if end - begin > longest / 80:
                        ink = "white" if kind == "B" and not later else "black"
                        ax.text((begin + end) / 2 - first, process, part + 1, color=ink, **look)
            n, two = len(case["actions"]), case["stages"] == 2
            names = (f"stages {i}, {i + n}" if two else f"stage {i}" for i in range(n))
            drawing.rows(ax, names)
            ax.tick_params(axis="y", labelsize=8, length=0)
            ax.grid(visible=False)
            drawing.caption(ax, _told(case))
            ax.set_xlim(0, 1.01 * longest)
        axes[-1].set_xlabel("ms")
        named = drawing.swatches(dict(KINDS.values()))
        drawing.legend(axes[-1], 4, (1, -1.4 / len(cases[0]["actions"])), named, loc="upper right")
        entitle(axes[0], _finding(cases), _where(run))
    return axes


def _told(case):
    counted, predicted = bubble(case)
    text = f"{case['schedule']}: {counted:.0%} of the time without work"
    text += "" if predicted is None else f", predicted {predicted:.0%}"
    return text + "; lighter: the second stage of a process" * (case["stages"] > 1)


def _finding(cases):
    shares = ", ".join(f"{case['schedule']} {bubble(case)[0]:.0%}" for case in cases)
    given = f"{len(cases[0]['actions'])} processes, {cases[0]['parts']} parts"
    return f"{given}: the bubble of {shares}"


def _where(run):
    wait = log.read(run).start["arguments"]["wait"]
    how = f"a block's forward pass is a sleep of {wait:g} ms, not work\n" if wait else ""
    return how + drawing.where(run)


def plot_live(run, parts: int = 8, ax=None):
    """Draw the most parts whose activations each process holds, for each schedule."""
    cases = _schedules(run, parts)
    with drawing.axes(ax, (8.5, 3.6), "y") as ax:
        for place, case in enumerate(cases):
            held = live(case)
            at = np.arange(len(held)) + 0.2 * (place - (len(cases) - 1) / 2)
            bars = ax.bar(at, held, 0.18, color=SERIES[place], label=case["schedule"])
            ax.bar_label(bars, [f"{parts:g}" for parts in held], fontsize=8, padding=1)
        ax.set_xticks(range(len(held)), [f"process {n}" for n in range(len(held))])
        ax.set(ylabel="parts with live activations")
        ax.margins(y=0.1)
        drawing.legend(ax, 4)
        most = {case["schedule"]: live(case) for case in cases}
        title = f"GPipe keeps all {most['GPipe'][0]:g} parts, and 1F1B "
        title += f"{most['1F1B'][0]:g} in the first process, {most['1F1B'][-1]:g} in the last"
        setting = "with two stages in a process, a part of one counts half; "
        entitle(ax, title, setting + _where(run))
    return ax


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
        for what in ("peak_bytes", "sent_bytes", "expected_bytes", "exposed_ms", "busy_ms"):
            values = [rank.cases[name].get(what) for rank in ranks]
            found[name][what] = None if None in values else max(values)
    return found


def splits(run) -> Table:
    """Return a table of the plans: speed, MFU, memory, messages; GPUs that do no other work."""
    rows = []
    for name, row in speeds(run).items():
        sizes = (row["peak_bytes"], row["sent_bytes"], row["expected_bytes"])
        speed = (report.speed_text(row["images_per_s"]), f"{row['mfu']:.1%}")
        longest = max(row["step_ms"], row["busy_ms"] or 0)  # a profiled step may take longer
        waits = f"{row['exposed_ms'] / longest:.0%}" if row["exposed_ms"] else "-"
        idle = f"{max(0, 1 - row['busy_ms'] / row['step_ms']):.0%}" if row["busy_ms"] else "-"
        rows.append((name, *speed, *map(bytes_text, sizes), waits, idle))
    head = ("plan", "images/s", "MFU", "peak memory", "sends", "by formula", "longest wait", "idle")
    return Table(head, rows, "<>>>>>>>")


def plot_splits(run, axes=None):
    """Draw the memory of a process and its messages in a step, and the speed, for each plan."""
    ranks, found = log.read(run).ranks, speeds(run)
    with drawing.axes(axes, (12, 1.8 + 0.4 * len(found)), "x", (1, 3), sharey=True) as axes:
        for row, name in enumerate(found):
            cases = [rank.cases[name] for rank in ranks]
            case = max(cases, key=lambda case: case["peak_bytes"])
            held = {part: case["bytes"].get(part, 0) for part in HELD}
            held["activations"] = max(0, case["peak_bytes"] - sum(held.values()))
            most = max(cases, key=lambda case: case["expected_bytes"])
            sent = {op: size for op, (_, size) in most["calls"].items()}
            sent = sent or {"computed": most["expected_bytes"]}
            looks = (held, MEMORY), (sent, MESSAGES)
            for ax, (parts, colours) in zip(axes[:2], looks, strict=True):
                end = drawing.stack(ax, row, parts, colours)
                plans.label(ax, end, row, bytes_text(end), fontsize=8)
            mfu, speed = 100 * found[name]["mfu"], found[name]["images_per_s"]
            axes[2].barh(row, mfu, 0.6, color=PALETTE["speed"])
            plans.label(axes[2], mfu, row, f"{report.speed_text(speed)} images/s", fontsize=8)
        drawing.rows(axes[0], found)
        labels = ("a process holds", "a process sends in a step", "MFU (%)")
        for ax, label in zip(axes, labels, strict=True):
            ax.set(xlabel=label, xlim=(0, 1.45 * ax.dataLim.xmax))
            ax.xaxis.set_major_locator(MaxNLocator(4))
        for ax in axes[:2]:
            handles, names = ax.get_legend_handles_labels()
            named = {n.replace("_", "-"): h for n, h in zip(names, handles, strict=True)}
            drawing.legend(ax, 2, (0, 1), named)
            ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: bytes_text(x) if x else "0"))
        entitle(axes[0], _best(found), drawing.where(run))
    return axes


def _best(found):
    best, worst = (f(found, key=lambda name: found[name]["mfu"]) for f in (max, min))
    times = found[best]["images_per_s"] / found[worst]["images_per_s"]
    text = f"{best}: {found[best]['mfu']:.0%} MFU, {times:.2g} times as fast as {worst}; a process"
    return text + f" sends {bytes_text(found[best]['expected_bytes'])} in a step"


def sequences(run) -> Table:
    """Return a table of attention over long sequences: time, messages, and their results."""
    rows = []
    for case in drawing.of_experiment(run, "tokens", "ring.py").cases.values():
        cells = ("",) * 4
        if "messages_ms" in case:
            ms = [f"{statistics.median(case[w]):,.2f}" for w in ("compute_ms", "messages_ms")]
            cells = (*ms, bytes_text(case["sent_bytes"]), f"{case['away']:.1e}")
        ms = f"{statistics.median(case['ms']):,.2f}"
        rows.append((f"{case['tokens']:,}", case["way"], ms, *cells))
    head = ("tokens", "way", "ms", "without messages", "messages alone", "sends")
    return Table((*head, "gradients away"), rows, "><>>>>>")


def plot_sequences(run, axes=None):
    """Draw attention's time by length, whole and divided, and the messages beside the work."""
    run = drawing.of_experiment(run, "tokens", "ring.py")
    lengths = sorted({case["tokens"] for case in run.cases.values()})
    with drawing.axes(axes, (10.5, 4), "both", (1, 2)) as axes:
        for way, colour in WAYS.items():
            mine = [case for case in run.cases.values() if case["way"] == way]
            drawn = {axes[0]: [case["ms"] for case in mine]}
            if way != "whole":
                drawn[axes[1]] = [
                    100 * np.divide(case["messages_ms"], case["compute_ms"]) for case in mine
                ]
            for ax, rounds in drawn.items():
                low, middle, high = np.quantile(rounds, (0, 0.5, 1), axis=1)
                look = {"color": colour, "label": way, "marker": "o", "ms": 4, "capsize": 2}
                x = [case["tokens"] for case in mine]
                ax.errorbar(x, middle, [middle - low, high - middle], **look)
        labels = "ms, forward and backward", "messages, relative to the work (%)"
        for ax, label in zip(axes, labels, strict=True):
            ax.set(xscale="log", yscale="log", ylabel=label, xlabel="tokens of a sequence")
            ax.xaxis.set_major_locator(FixedLocator(lengths))
            ax.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:,.0f}"))
            ax.xaxis.set_minor_locator(FixedLocator([]))
            ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
        drawing.legend(axes[0], 3)
        here = {case["way"]: case for case in run.cases.values() if case["tokens"] == lengths[-1]}
        ms = {way: statistics.median(case["ms"]) for way, case in here.items()}
        times = [f"{way} {ms['whole'] / ms[way]:.2g}" for way in ("ring", "Ulysses")]
        title = f"{lengths[-1]:,} tokens on {run.start['size']} processes: {' and '.join(times)}"
        setting = f"{drawing.where(run)}; a bar spans all rounds"
        entitle(axes[0], f"{title} times as fast as the whole on one", setting)
    return axes


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
    head = ("plan", "peak memory", "predicted", "error", "sends", "predicted", "error")
    return Table(head, rows, "<>>>>>>")
