"""Figures of notebook 11: exchanges and memory of shards, padding, checkpointing, predictions.

Each takes a run of an experiment (sharding, padding, recompute, fits) or a recording.
"""

import statistics
from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from dlojz.course import UserError
from dlojz.figures import drawing, plans, report
from dlojz.figures.look import PALETTE, SERIES, entitle, legend, percent, style
from dlojz.runs import log
from dlojz.runs.memory import Peak
from dlojz.table import Table

HELD = ("parameters", "gradients", "unreduced", "optimizer", "gathered")
MOVED = ("parameters", "gradients", "optimizer")  # moved to the host by FSDP2's offload policy
AGAIN = ", checkpointing"
SHORT = 0.2  # of the longest bar: shorter ones are drawn enlarged, too
CARDS = {"80 GB": 80e9, "141 GB": 141e9}  # of an H100 and an H200


# Exchanges ---------------------------------------------------------------------------------------


def exchanged(case: Mapping, processes: int) -> dict[tuple[str, str], tuple[int, float]]:
    """Return the numbers of calls and of bytes that a process sends, by pass and operation.

    In a ring each of n processes sends (n - 1) / n of the whole tensor to gather it, as much to
    scatter its sum, and twice that for an all-reduce, which does both.
    """
    found = defaultdict(lambda: (0, 0.0))
    for call in case["collectives"]:
        key = call["phase"], call["op"]
        calls, sent = found[key]
        found[key] = calls + 1, sent + _sent(call, processes)
    return dict(found)


def _sent(call, processes):
    """Return the bytes that a process sends in a collective of its group."""
    members = call.get("members", processes)
    rounds = 2 if call["op"] == "all_reduce" else 1
    return rounds * (members - 1) / members * call["bytes"]


def collectives(run) -> Table:
    """Return a table of the collectives in a step of each way, and the bytes of a process.

    The bytes are those of a ring: gloo has no reduce-scatter, and reduces all to each process.
    """
    run, rows, first = drawing.of_experiment(run, "collectives", "sharding.py"), [], None
    for way, case in run.cases.items():
        found = exchanged(case, run.start["size"])
        sent = sum(size for _, size in found.values())
        first = first or sent
        passes = [_calls(found, phase) for phase in ("forward", "backward")]
        rows.append((way, *passes, report.bytes_text(sent), f"x {sent / first:.2f}"))
    return Table(("", "forward", "backward", "a process sends", ""), rows, "<<<>>")


def _calls(found, phase):
    """Return the calls of a pass in words: "4 all-gathers, 5 reduce-scatters"."""
    named = {op.replace("_", "-"): calls for (of, op), (calls, _) in found.items() if of == phase}
    return ", ".join(f"{n} {op}{'s' * (n > 1)}" for op, n in named.items()) or "nothing"


def between(case: Mapping, processes: int, nodes: int) -> tuple[float, float]:
    """Return the bytes that a node sends in a step: between its processes, and to another node.

    A ring of all processes leaves each node once. The ring of the processes with the same shard
    leaves it with each message, and each process of the node is in one such ring.
    """
    inside, outside, own = 0.0, 0.0, processes // nodes
    for call in case["collectives"]:
        sent = _sent(call, processes)
        crossing = {"all": 1, "shards": 0, "copies": own}[call["group"]]
        inside, outside = inside + (own - crossing) * sent, outside + crossing * sent
    return inside, outside


def nodes(run) -> int:
    """Return the number of copies of the model in a run of HSDP, each counted as a node."""
    run = drawing.of_experiment(run, "collectives", "sharding.py")
    calls = [call for case in run.cases.values() for call in case["collectives"]]
    found = {call["members"] for call in calls if call.get("group") == "copies"}
    if len(found) != 1:
        raise UserError(f"{run.path}: no copies in it; expected a run of --compare nodes")
    return found.pop()


def sent(run) -> dict[str, tuple[float, float]]:
    """Return the bytes that a node sends in a step of each way: inside, and to another node."""
    size, count = log.read(run).start["size"], nodes(run)
    return {way: between(case, size, count) for way, case in log.read(run).cases.items()}


def plot_sent(run, ax=None):
    """Draw the bytes that a node sends in a step of each way: inside, and to another node."""
    found, left = sent(run), 0
    looks = {"inside the node": SERIES[0], "to another node": SERIES[1]}
    with drawing.axes(ax, (9, 1.2 + 0.5 * len(found)), "x") as ax:
        for (what, colour), sizes in zip(looks.items(), np.array([*found.values()]).T, strict=True):
            bars = ax.barh([*found], sizes / 1e6, 0.6, left, color=colour, label=what)
            texts = [report.bytes_text(size) if size else "" for size in sizes]
            ax.bar_label(bars, texts, label_type="center", color="white", fontsize=9)
            left = left + sizes / 1e6
        ax.invert_yaxis()
        ax.set(xlabel="a node sends in a step (MB)")
        count = log.read(run).start["size"]
        drawing.legend(ax, 2)
        crossing = {way: outside for way, (_, outside) in found.items() if outside}
        least, most = (f(crossing, key=crossing.get) for f in (min, max))
        share = percent(crossing[least] / crossing[most])
        text = f"{least}: {share} of the bytes of {most} leave the node"
        entitle(ax, text, f"{count} processes, counted as if on {nodes(run)} nodes")
    return ax


def norms(run) -> Table:
    """Return a table of the gradients' norms: all, as for clipping, and process 0's."""
    run = drawing.of_experiment(run, "norm", "sharding.py")
    rows = [(way, f"{c['norm']:.4f}", f"{c['own_norm']:.4f}") for way, c in run.cases.items()]
    return Table(("", "norm of all gradients", "of what process 0 holds"), rows, "<>>")


def equality(run) -> Table:
    """Return a table of each way's distance from the first: losses, gradients, time of a step."""
    run, rows = drawing.of_experiment(run, "losses", "sharding.py"), []
    first = np.array(next(iter(run.cases.values()))["losses"])
    for way, case in run.cases.items():
        apart = np.abs(np.array(case["losses"]) / first - 1).max()
        ms = statistics.median(case["step_ms"])
        rows.append((way, f"{apart:.1g}", f"{case['gradient_away']:.1g}", f"{ms:,.1f} ms"))
    head = ("", "losses apart", "last gradients apart", "median step")
    return Table(head, rows, "<>>>")


# Memory ------------------------------------------------------------------------------------------


def held(run) -> dict[str, Peak]:
    """Return the bytes in each process for each way, by part; on a GPU with activations."""
    found = {}
    ranks = drawing.of_experiment(run, "bytes", "sharding.py").ranks
    for way in ranks[0].cases:
        for rank, each in enumerate(ranks):
            case = each.cases[way]
            parts = {part: size for part in HELD if (size := case["bytes"].get(part))}
            found[f"{way}, process {rank}"] = _with_the_rest(parts, case.get("peak_bytes"))
    return found


def trained(jobs, labels) -> dict[str, Peak]:
    """Return the bytes in each process of these jobs between steps, by part."""
    found = {}
    for job, label in zip(jobs, labels, strict=True):
        for rank, run in enumerate(log.read_ranks(job)):
            if not run.share.held:
                raise UserError(f"{run.path}: it does not say what it holds; did it complete?")
            peak = run.memory.get("device_peak_bytes")
            found[f"{label}, process {rank}"] = _with_the_rest(run.share.held, peak)
    return found


def _with_the_rest(parts, peak_bytes) -> Peak:
    """Return these parts, and the rest of a measured peak as activations."""
    rest = max(0, peak_bytes - sum(parts.values())) if peak_bytes else 0
    return Peak(dict(parts) | ({"activations": rest} if peak_bytes else {}))


def plot_held(run, ax=None):
    """Draw the memory of each process for each way, by part."""
    return _plot_held(held(run), run, ax)


def plot_trained(jobs, labels, ax=None):
    """Draw the memory of each process of these jobs of the trainer, by part."""
    return _plot_held(trained(jobs, labels), jobs[0], ax)


def _plot_held(found, run, ax):
    with style(grid="x"):
        ax = plans.plot(found, ax=ax, each="process")
        activations = any("activations" in peak.parts for peak in found.values())
        rest = "activations: all the rest of the peak" if activations else "without activations"
        entitle(ax, _held_text(found), f"{drawing.where(run)}; {rest}")
    return ax


def _held_text(found):
    """Return the least memory of a process, relative to the first one's."""
    first, least = next(iter(found)), min(found, key=lambda name: found[name].bytes)
    share = percent(found[least].bytes / found[first].bytes)
    if least == first:
        return f"{first}: {report.bytes_text(found[first].bytes)}, the least"
    least, first = (name.rpartition(", process")[0] for name in (least, first))
    return f"{least}: {share} of the memory of {first}"


# Padding -----------------------------------------------------------------------------------------


def padded(run) -> dict[str, dict[int, int]]:
    """Return the root's gathered bytes, by placement and number of GPUs."""
    found = defaultdict(dict)
    for case in drawing.of_experiment(run, "placement", "padding.py").cases.values():
        size = sum(row["gathered"] for row in case["parameters"] if row["part"] == "root")
        found[case["placement"]][case["gpus"]] = size
    return dict(found)


def padding(run) -> Table:
    """Return a table of the padded parameters by number of GPUs, with the other placement last."""
    cases = [*drawing.of_experiment(run, "placement", "padding.py").cases.values()]
    shown = [case for case in cases if case["placement"] == cases[0]["placement"]] + cases[-1:]
    rows = []
    for same in zip(*(case["parameters"] for case in shown), strict=True):
        first, gathered = same[0], [row["gathered"] for row in same]
        if max(gathered) > first["bytes"]:
            cells = (f"{first['name']} ({first['part']})", str(first["shape"]))
            rows.append((*cells, *map(report.bytes_text, (first["bytes"], *gathered))))
    head = [f"on {case['gpus']:,} GPUs" for case in shown]
    head[-1] += f", {shown[-1]['placement']}"
    return Table(("", "shape", "whole", *head), rows, "<<>" + ">" * len(head), "none is padded")


def plot_padding(run, ax=None):
    """Draw the root's gathered bytes against the number of GPUs, by placement."""
    found, looks = padded(run), zip(SERIES[1::-1], ("o-", "s--"), strict=True)
    with drawing.axes(ax, (7.5, 3.6), "both") as ax:
        for (placement, sizes), (colour, line) in zip(found.items(), looks, strict=False):
            heights = [size / 1e6 for size in sizes.values()]
            ax.plot([*sizes], heights, line, color=colour, label=placement)
        ax.set_xscale("log", base=2)
        ax.set_xticks(gpus := [*next(iter(found.values()))], [f"{n:,}" for n in gpus])
        ax.set(yscale="log", xlabel="GPUs", ylabel="gathered by each GPU (MB)")
        ax.legend()
        (one, first), *_, (other, last) = [*found.items()] * 2
        gpus = max(first.keys() & last.keys())
        text = (
            f"On {gpus:,} GPUs each gathers {first[gpus] / last[gpus]:,.0f} times as much by {one}"
        )
        what = f"parameters outside of the blocks, {run_model(run)}, float32"
        entitle(ax, f"{text} as by {other}", what)
    return ax


def run_model(run) -> str:
    """Return the name of the model of an experiment."""
    return log.read(run).start["arguments"]["model"]


# Checkpointing -----------------------------------------------------------------------------------


def factors(run) -> dict[str, dict[str, float]]:
    """Return kept bytes, operations and time of a step for each way, relative to the first."""
    cases = drawing.of_experiment(run, "kept_bytes", "recompute.py").cases
    first = next(iter(cases.values()))
    return {
        way: {
            "kept": case["kept_bytes"] / first["kept_bytes"],
            "operations": case["flops"] / first["flops"],
            "time": float(np.median(np.divide(case["step_ms"], first["step_ms"]))),
        }
        for way, case in cases.items()
    }


def recomputed(run) -> Table:
    """Return a table of checkpointing's kept bytes, and its cost."""
    cases, rows = drawing.of_experiment(run, "kept_bytes", "recompute.py").cases, []
    for way, factor in factors(run).items():
        case = cases[way]
        ms = statistics.median(case["step_ms"])
        sizes = (report.bytes_text(case[f"{what}_bytes"]) for what in ("kept", "peak"))
        more = (f"x {factor['operations']:.2f}", f"{ms:,.1f} ms", f"x {factor['time']:.2f}")
        rows.append((way, *sizes, *more))
    head = ("checkpointing", "kept", "peak", "operations", "median step")
    return Table((*head, "ratio in the same round (median)"), rows, "<>>>>>")


def plot_recompute(run, axes=None):
    """Draw the activations kept by checkpointing, beside its cost in time."""
    run = drawing.of_experiment(run, "kept_bytes", "recompute.py")
    cases, found = run.cases, factors(run)
    with drawing.axes(axes, (11, 1.4 + 0.5 * len(cases)), "x", shape=(1, 2), sharey=True) as axes:
        keeps, costs = axes
        kept = [case["kept_bytes"] / 1e6 for case in cases.values()]
        bars = keeps.barh(range(len(cases)), kept, 0.6, color=PALETTE["activations"])
        keeps.bar_label(bars, [report.bytes_text(1e6 * v) for v in kept], padding=4)
        keeps.set(xlabel="kept for the backward pass (MB)", xlim=(0, 1.2 * max(kept)))
        drawn = {}
        looks = {"operations": (-0.18, "limit", "black"), "time": (0.18, "after", "white")}
        for what, (shift, colour, ink) in looks.items():
            at, values = np.arange(len(cases)) + shift, [f[what] for f in found.values()]
            drawn[what] = costs.barh(at, values, 0.34, color=PALETTE[colour])
            text = {"label_type": "center", "fontsize": 9, "color": ink}  # away from the line
            costs.bar_label(drawn[what], [f"x {v:.2f}" for v in values], **text)
        costs.set_xlim(0, 1.1 * max([*values, 4 / 3]))
        costs.set_xlabel(f"a step's operations and time, relative to “{next(iter(cases))}”")
        drawn["4/3"] = costs.axvline(4 / 3, color=PALETTE["limit"], ls="--", zorder=0)
        drawing.rows(keeps, cases)
        legend(costs, drawn, ncols=3, loc="lower left", bbox_to_anchor=(0, 1), fontsize=9)
        way = min(found, key=lambda way: found[way]["kept"])
        kept, time = percent(found[way]["kept"]), f"{found[way]['time']:.2f} times the time"
        text = f"Checkpointing {way}: {kept} of the activations are kept, for {time} of a step"
        entitle(axes, text, drawing.where(run))
    return axes


# Predictions -------------------------------------------------------------------------------------


def predicted(run) -> dict[str, Peak]:
    """Return the highest peak of each plan of experiments/fits.py."""
    cases = drawing.of_experiment(run, "peaks", "fits.py").cases
    return {_plan(case["plan"]): plans.highest(case)[1] for case in cases.values()}


def _plan(plan):
    """Return a plan in a few words: "8 GPUs, FSDP, checkpointing"."""
    several = plan["gpus"] > 1
    words = [f"{plan['gpus']:,} GPU{'s' * several}"]
    words += [plan["sharding"].upper()] * several
    if (copies := plan.get("copies", 1)) > 1:
        words.append(f"{copies} copies of {plan['gpus'] // copies:,} shards")
    return ", ".join(words + ["checkpointing"] * (plan["checkpointing"] != "off"))


def offloaded(run, copy) -> Table:
    """Return a table of the plans with FSDP, and their memory if the host keeps the shards.

    In a step the GPU gets its shard for each pass, in float32, and returns its gradients.
    copy: a run of experiments/tensors.py on a GPU, for the speed of such a copy.
    """
    speed, rows = _copy_speed(copy), []
    for case in drawing.of_experiment(run, "peaks", "fits.py").cases.values():
        if case["plan"]["sharding"] == "fsdp":
            stays = [{k: v for k, v in p.items() if k not in MOVED} for p in case["peaks"].values()]
            left = max(sum(parts.values()) for parts in stays)
            copied = 3 * 4 * case["parameters"] / case["plan"]["gpus"]
            sizes = (plans.highest(case)[1].bytes, left, copied)
            seconds = f"{copied / speed:.2g} s"
            rows.append((_plan(case["plan"]), *map(report.bytes_text, sizes), seconds))
    head = ("", "on the GPU", "offloaded", "copied in a step", f"at {speed / 1e9:.0f} GB/s")
    return Table(head, rows, "<>>>>")


def _copy_speed(run):
    found = report.measured(run)
    ms = next((m.value for m in found.measures if m.what.startswith("the copy alone")), None)
    if ms is None:
        raise UserError(f"{found.path}: no copy in it; expected a run of tensors.py on a GPU")
    batch, size = (found.start["arguments"][name] for name in ("batch_size", "image_size"))
    return 4 * 3 * batch * size**2 / ms * 1000


def plot_fits(run, cards: Mapping[str, float] = CARDS, ax=None):
    """Draw the predicted memory of each GPU for each plan, by part, with the memory of cards.

    Of the plans with DDP it is the one with the most GPUs, because all need the same.
    """
    found = predicted(run)
    for name in [name for name in found if name.endswith("DDP")][:-1]:
        del found[name]
    found = dict(sorted(found.items(), key=lambda plan: plan[0].endswith(AGAIN)))
    with style(grid="x"):
        ax = plans.plot(found, ax=ax)
        _enlarge(ax, found)
        most = max([peak.bytes for peak in found.values()] + [*cards.values()])
        ax.set_xlim(0, 1.15 * most / 1e9)
        for card, size in cards.items():
            ax.axvline(size / 1e9, **plans.CARD, zorder=0)
            look = {"ha": "center", "va": "bottom", "fontsize": 9, "bbox": plans.PAPER}
            ax.text(size / 1e9, -0.7, card, **look)
        arguments = log.read(run).start["arguments"]
        what = "predicted: {model}, {batch_size} images of {image_size} px on each GPU, {precision}"
        entitle(ax, _fits_text(found, cards), what.format(**arguments))
    return ax


def _enlarge(ax, found):
    """Draw the last plans again in the room beside them, if their bars are too short to compare."""
    most = max(peak.bytes for peak in found.values())
    low = {name: peak for name, peak in [*found.items()][-3:] if peak.bytes < SHORT * most}
    if len(low) < 3:
        return
    inset = ax.inset_axes((0.45, 0.5 / len(found), 0.52, 2.4 / len(found)))
    plans.plot(low, ax=inset)
    inset.get_legend().remove()
    inset.set(yticks=[], xlabel="")
    drawing.caption(inset, "the same, enlarged (GB)")


def _fits_text(found, cards):
    """Return the number of plans that fit each card, and the one that needs the least."""
    least = min(found, key=lambda name: found[name].bytes)
    told = [
        f"{sum(peak.bytes < size for peak in found.values())} fit {card}"
        for card, size in cards.items()
    ]
    text = f"the least: {least}, {report.bytes_text(found[least].bytes)}"
    if not told:
        return f"The least: {least}, {report.bytes_text(found[least].bytes)}"
    return f"Of {len(found)} plans {', '.join(told)}; {text}"
