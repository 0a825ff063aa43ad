"""What processes say to each other, and what it costs: the figures of notebook 06.

Each figure takes a job of several processes, its folder or logs, and returns its axes.
"""

from collections import Counter, defaultdict

import matplotlib.pyplot as plt
import numpy as np

from dlojz import report
from dlojz.runs import log, stats
from dlojz.runs.folder import path_of
from dlojz.runs.log import PHASES
from dlojz.table import Table

COLOURS = {
    "all_reduce": report.PALETTE["speed"],
    "broadcast": report.PALETTE["power"],
    "all_gather": report.PALETTE["activations"],
    "reduce_scatter": report.PALETTE["backward"],
}


def ranks(job) -> list[log.Run]:
    """The logs of a job's processes, by rank. Raises ValueError where one talks to nobody."""
    runs = log.read_ranks(path_of(job))
    if len(runs) < 2:
        raise ValueError(
            f"{runs[0].path}: one process, which talks to nobody: submit it with n_gpu=2 or more"
        )
    if not all("last" in run.evidence for run in runs):
        raise ValueError(
            f"{runs[0].path}: no step was looked at: submit it with --test, and wait for its end"
        )
    return runs


def spoken(run: log.Run) -> list[dict]:
    """The collectives of one process in its last step: op, bytes, dtype, begin_ms, ms."""
    return run.evidence["last"].get("collectives", [])


def _on_gpu(run) -> bool:
    return "communication_ms" in run.evidence["last"]


def _only_asked(run) -> bool:
    """Is it told when the host asked, and not when the GPU did it?"""
    return _on_gpu(run) and run.evidence["last"].get("timed_on") != "gpu"


def collectives(job) -> Table:
    """What one process says in a step, by operation; and how long it takes, over the processes."""
    runs = ranks(job)
    count, size, times = Counter(), Counter(), defaultdict(lambda: [0.0] * len(runs))
    for rank, run in enumerate(runs):
        for c in spoken(run):
            key = (c["op"], c["dtype"], c["backend"])
            times[key][rank] += c["ms"]
            if rank == 0:
                count[key] += 1
                size[key] += c["bytes"]
    rows = [
        (
            *key,
            f"{count[key]}",
            report.bytes_text(size[key]),
            f"{min(times[key]):.1f} to {max(times[key]):.1f} ms",
        )
        for key in sorted(times)
    ]
    time = "time to ask, by process" if _only_asked(runs[0]) else "time, by process"
    head = ("operation", "dtype", "through", "calls", "bytes", time)
    return Table(head, rows, "<<<>>>", "no collectives in the last step")


def plot_collectives(job, axes=None):
    """Buckets against backward: when each process spoke in its last step, and how much it said."""
    runs = ranks(job)
    with report.style(grid="x"):
        if axes is None:
            shape = {"figsize": (11, 1.6 + 0.6 * len(runs)), "width_ratios": (3, 1)}
            axes = plt.subplots(1, 2, **shape)[1]
        when, much = axes
        for rank, run in enumerate(runs):
            _plot_rank(when, rank, run)
            _plot_bytes(much, rank, run)
        for ax in axes:
            ax.set(yticks=range(len(runs)), ylim=(len(runs) - 0.5, -0.5))
        when.set(xlabel="in the last step (ms, clock of each process)", ylabel="process")
        when.set_title(_title(runs))
        much.set(xlabel="sent in a step (MB)", xlim=(0, None))
        much.set_title("how much")
        handles, labels = when.get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        when.legend(
            unique.values(), unique.keys(), ncols=4, loc="upper left", bbox_to_anchor=(0, -0.25)
        )
    return axes


def _title(runs):
    last = [run.evidence["last"] for run in runs]
    if _only_asked(runs[0]):
        return f"when asked for; the GPU: {max(seen['communication_ms'] for seen in last):.1f} ms"
    if _on_gpu(runs[0]):
        spent, exposed = (max(seen[k] for seen in last) for k in ("communication_ms", "exposed_ms"))
        return f"when, on the GPU: {spent:.1f} ms, {exposed:.1f} of them not behind other work"
    return "when: buckets leave while the backward pass goes on"


def _plot_rank(ax, rank, run):
    begin, end = run.evidence["last"].get("backward_ms", (0, 0))
    ax.barh(rank, end - begin, 0.8, left=begin, color="#E3E3E8", label="backward")
    for c in spoken(run):
        look = {"color": COLOURS.get(c["op"], report.PALETTE["limit"]), "alpha": 0.85}
        if _only_asked(run):  # no span to see
            ax.plot(c["begin_ms"], rank, ">", ms=9, label=c["op"], **look)
        else:
            ax.barh(rank, c["ms"], 0.45, left=c["begin_ms"], label=c["op"], ec="white", **look)


def _plot_bytes(ax, rank, run):
    left = 0.0
    for c in spoken(run):
        colour = COLOURS.get(c["op"], report.PALETTE["limit"])
        ax.barh(rank, c["bytes"] / 1e6, 0.45, left=left, color=colour, ec="white")
        left += c["bytes"] / 1e6


def straggler(job) -> tuple[int, float]:
    """(rank, ms): the process for which the others wait in a step, and how long on average.

    It speaks last, so its own collectives are the shortest: it finds all others waiting there. On
    a GPU it is NCCL's kernels that wait.
    """
    times = [
        run.evidence["last"]["communication_ms"]
        if _on_gpu(run)
        else sum(c["ms"] for c in spoken(run))
        for run in ranks(job)
    ]
    rank = int(np.argmin(times))
    others = [t for i, t in enumerate(times) if i != rank]
    return rank, float(np.mean(others) - times[rank])


def plot_ranks(job, ax=None):
    """The phases of a step for each process, its spread, and for whom the others wait."""
    runs = ranks(job)
    with report.style(grid="x"):
        ax = ax or plt.subplots(figsize=(9, 1.4 + 0.5 * len(runs)))[1]
        for rank, run in enumerate(runs):
            clock, times = stats.step_times(run)
            chosen = stats.measured(run)
            left = 0.0
            for phase in PHASES:
                mean = float(np.mean(times[phase][chosen]))
                label = phase if rank == 0 else None
                ax.barh(rank, mean, 0.7, left=left, color=report.PALETTE[phase], label=label)
                left += mean
            steps = sum(times[p][chosen] for p in PHASES)
            low, high = np.percentile(steps, (10, 90))
            ax.plot([low, high], [rank, rank], color="black", lw=1.5, label=None)
        last, waits = straggler(job)
        hosts = [run.start["hostname"] for run in runs]
        several = len(set(hosts)) > 1
        names = [f"process {i}" + f", {host}" * several for i, host in enumerate(hosts)]
        ax.set(yticks=range(len(runs)), yticklabels=names, ylim=(len(runs) - 0.5, -0.5))
        ax.set(xlabel=f"mean step (ms, {clock} clock); line: 10th to 90th percentile")
        who = f"process {1 - last} waits" if len(runs) == 2 else "the others wait"
        ax.set_title(f"in the last step {who} {waits:.1f} ms for process {last}")
        ax.legend(ncols=5, loc="upper left", bbox_to_anchor=(0, -0.35))
    return ax
