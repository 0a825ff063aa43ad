"""Figures of notebooks 06 and 06b: the scaling of processes, their exchanges, and the cost."""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from matplotlib.ticker import FuncFormatter
from scipy.optimize import nnls

from dlojz.course import UserError
from dlojz.figures import drawing, report
from dlojz.figures.look import COLLECTIVES, PALE, PALETTE, SERIES, entitle, legend, percent
from dlojz.runs import log, stats
from dlojz.table import Table


def _ranks(run) -> list[log.Run]:
    """Return the logs of an experiment's processes. Raises UserError if it failed."""
    found = log.read_ranks(run)
    for each in found:
        if each.end.get("outcome") != "completed":
            error = each.end.get("error", "it has not ended: wait for it, with job.wait()")
            raise UserError(f"{each.path}: {error}")
    return found


def _cases(run, names=None) -> list[tuple[str, dict]]:
    """Return these cases of an experiment, by default all of them."""
    run = _ranks(run)[0]
    if missing := [name for name in names or () if name not in run.cases]:
        raise UserError(
            f"{run.path}: no variant {missing[0]!r} in it, only {', '.join(run.cases)}; "
            f'ask for it with --variants "{missing[0]}"'
        )
    return [(name, case) for name, case in run.cases.items() if names is None or name in names]


# Scaling -----------------------------------------------------------------------------------------


def speeds(runs) -> dict[int, list[float]]:
    """Return the images/s of each run, summed over its processes, by the number of processes."""
    found = defaultdict(list)
    for summary in map(stats.summary, runs):
        if summary.images_per_s:
            found[summary.size].append(summary.images_per_s)
    return dict(sorted(found.items()))


def efficiency(runs) -> Table:
    """Return a table of speed and efficiency: N processes against N times one process."""
    found = speeds(runs)
    one = np.mean(found[1]) if 1 in found else None
    rows = []
    for n, values in found.items():
        share = "-" if one is None else f"{np.mean(values) / (n * one):.1%}"
        spread = f"{min(values):,.0f} to {max(values):,.0f}"
        rows.append((f"{n}", f"{np.mean(values):,.0f}", spread, f"{len(values)}", share))
    head = ("processes", "images/s", "from, to", "runs", "of linear")
    return Table(head, rows, ">>>>>", "no run has measured a speed")


def plot_scaling(runs, ax=None):
    """Draw the loss to linear scaling, in percent, against the number of processes."""
    runs = [stats.summary(run) for run in runs]
    found = speeds(runs)
    if not found:
        raise UserError("no run has measured a speed; job.explain() says why")
    with drawing.axes(ax, (7, 3.6)) as ax:
        least, means = min(found), {n: np.mean(values) for n, values in found.items()}
        each = means[least] / least  # images/s of a process, if scaling were linear
        for at, (n, values) in enumerate(found.items()):
            missing = [100 * (1 - value / (n * each)) for value in values]
            mean = 100 * (1 - means[n] / (n * each))
            ax.bar(at, mean, 0.6, color=PALETTE["after"])
            ax.plot([at] * len(missing), missing, "o", ms=4, color="black", alpha=0.5, mew=0)
            text = f"{means[n]:,.0f} images/s"
            above = {"textcoords": "offset points", "ha": "center", "fontsize": 9}
            ax.annotate(text, (at, max(0, *missing)), (0, 6), **above)
        ax.axhline(0, color="black", lw=0.8)
        ax.set_xticks(range(len(found)), list(found))
        ax.set(xlabel="processes", ylabel="missing to linear scaling (%)")
        low, high = ax.get_ylim()
        ax.set_ylim(low, high + 0.2 * (high - low))
        setting = f"dots: runs; {drawing.where(runs[-1])}{report.disturbed_text(runs)}"
        entitle(ax, _scaling_text(means, each), setting)
    return ax


def _scaling_text(means, each):
    """Return the share of linear scaling that the most processes reach."""
    most = max(means)
    if len(means) == 1:
        return f"{most} process{'es' * (most > 1)}: {means[most]:,.0f} images/s"
    return f"{most} processes reach {percent(means[most] / most / each, 1)} of linear scaling"


# The link ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Link:
    """The alpha-beta model of an all-reduce, fitted to measured times.

    In a ring each of n processes sends 2 (n - 1) / n times the tensor (Patarasuk and Yuan,
    "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009).
    """

    processes: int
    latency_s: float  # alpha: the fixed cost of a call; on a GPU, of back-to-back calls
    bandwidth: float  # 1 / beta: bytes/s that each process sends, nccl-tests' "bus bandwidth"

    def sent(self, size: float) -> float:
        """Return the bytes that each process sends to sum a tensor of `size` bytes."""
        return 2 * (self.processes - 1) / self.processes * size

    def milliseconds(self, size: float) -> float:
        """Return the time of an all-reduce of `size` bytes over all processes."""
        return 1000 * (self.latency_s + self.sent(size) / self.bandwidth)

    def __repr__(self):
        latency, bandwidth = 1000 * self.latency_s, self.bandwidth / 1e9
        return f"{self.processes} processes: {latency:.3g} ms + bytes sent / {bandwidth:.3g} GB/s"


def _all_reduces(run):
    """Return the number of processes, the sizes in bytes, and their median milliseconds."""
    run, found = _ranks(run)[0], defaultdict(list)
    for measure in run.measures:
        if measure.what == "all_reduce":
            found[measure.x].append(measure.value)
    if not found:
        raise UserError(f"{run.path}: no all_reduce in it; expected a run of all_reduce.py")
    sizes = np.array(sorted(found))
    return run.start["size"], sizes, np.array([np.median(found[size]) for size in sizes])


def link(run) -> Link:
    """Return the link fitted to a run of experiments/all_reduce.py."""
    return _fitted(*_all_reduces(run))


def _fitted(n, sizes, ms) -> Link:
    """Fit by least squares of relative errors, so that small tensors count like large ones."""
    unit = Link(n, latency_s=0, bandwidth=1)
    terms = np.column_stack([np.ones(len(ms)), unit.sent(sizes)]) / (ms[:, None] / 1000)
    (latency, per_byte), _ = nnls(terms, np.ones(len(ms)))
    return Link(n, latency, 1 / per_byte)


def _link_text(model):
    """Return the size of a tensor whose bytes cost as much as the call itself."""
    half = model.latency_s * model.bandwidth / model.sent(1)
    size = report.bytes_text(half)
    return (
        f"{model.processes} processes: below {size} the latency of a call costs more than its bytes"
    )


def plot_link(runs, ax=None):
    """Draw the time of an all-reduce against the size of its tensor, measured and modelled."""
    told = []
    with drawing.axes(ax, (11, 3.8), "both") as ax:
        for run, colour in zip(runs, SERIES, strict=False):
            n, sizes, ms = _all_reduces(run)
            model = _fitted(n, sizes, ms)
            ax.plot(sizes, ms, "o", color=colour, label=drawing.where(run))
            ax.plot(sizes, model.milliseconds(sizes), color=colour, label=str(model))
            told.append(_link_text(model))
        ax.set(xscale="log", yscale="log", xlabel="size of the tensor", ylabel="all-reduce (ms)")
        entitle(
            ax,
            "\n".join(told),
            "lines: the model fitted to the points, latency + bytes sent / bandwidth",
        )
        ax.xaxis.set_major_formatter(FuncFormatter(lambda size, _: report.bytes_text(size)))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:g}"))
        ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return ax


# The cost of DDP ---------------------------------------------------------------------------------


def plot_variants(run, only=None, to=None, ax=None):
    """Draw the additional time of each variant of a run of experiments/ddp.py.

    only: the variants to draw, by default all; to: the one to compare with, by default the first,
    without communication.
    """
    run = log.read(run)
    name, first = _cases(run, [to] if to else None)[0]
    others = [(other, case) for other, case in _cases(run, only) if other != name]
    base = np.median(first["step_ms"])
    with drawing.axes(ax, (10, 0.9 + 0.42 * len(others)), "x") as ax:
        ends = []
        for row, (_, case) in enumerate(others):
            added = np.subtract(case["step_ms"], first["step_ms"])  # round by round
            ax.barh(row, np.median(added), 0.65, color=PALETTE["speed"])
            ax.plot([added.min(), added.max()], [row, row], color="black", lw=1.2)
            sent = case.get("collectives", [])
            size = report.bytes_text(sum(c["bytes"] for c in sent))
            text = f"  {np.median(added) / base:+.1%}   {len(sent)} calls, {size}"
            ax.text(max(0, added.max()), row, text, va="center", fontsize=9)
            ends += [added.min(), added.max()]
        ax.axvline(0, color="black", lw=0.8)
        ax.set_yticks(range(len(others)), [other for other, _ in others])
        low, high = min(0, *ends), max(0, *ends)
        room = high - low
        ax.set(ylim=(len(others) - 0.4, -0.6), xlim=(low - 0.05 * room, high + 0.45 * room))
        ax.set_xlabel(f"added to the {base:,.1f} ms of '{name}' (ms per batch; line: all rounds)")
        given = run.start["arguments"]
        what = f"{given['model']}, batch {given['batch_size']} x {run.start['size']} processes"
        what += ", compiled" * (given.get("compile", "off") != "off")
        entitle(ax, _added_text(name, first, others), f"{what}; {drawing.where(run)}")
    return ax


def _added_text(name, first, others):
    """Return the variant that changes the time most, in percent."""
    added = {
        other: np.median(np.subtract(case["step_ms"], first["step_ms"]))
        / np.median(first["step_ms"])
        for other, case in others
    }
    most = max(added, key=lambda other: abs(added[other]))
    change = f"{100 * abs(added[most]):.1f} % {'more' if added[most] > 0 else 'less'}"
    text = f"{most}: {change} time than {name}"
    return f"{text}, the most of {len(added)}" if len(added) > 1 else text


def calls(run, variants) -> Table:
    """Return a table of one process's messages in a step of these variants, by operation."""
    rows = []
    for name, case in _cases(run, variants):
        sizes = defaultdict(list)
        for call in case.get("collectives", []):
            sizes[call["op"].removeprefix("_").removesuffix("_base")].append(call["bytes"])
        for op, sent in sorted(sizes.items()):
            largest, total = report.bytes_text(max(sent)), report.bytes_text(sum(sent))
            rows.append((name, op, f"{len(sent)}", total, largest))
    return Table(("variant", "operation", "calls", "bytes", "largest"), rows, "<<>>>")


# Equality with one process -----------------------------------------------------------------------


def updates(run) -> np.ndarray:
    """Return the losses of a run as an array [updates, batches of an update].

    The batches of an update are those of all processes at one step, or those accumulated by one
    process.
    """
    ranks = log.read_ranks(run)
    together = ranks[0].start["arguments"].get("accumulate", 1)
    count = min(len(r.steps) for r in ranks)  # in a stopped run one process may be ahead
    losses = np.stack([np.array(r.steps.loss[:count]) for r in ranks], axis=1)  # [steps, processes]
    whole = len(losses) // together * together
    return losses[:whole].reshape(-1, together * len(ranks))


def _away(mine, theirs) -> np.ndarray:
    """Return the relative distance of each update's losses from another run's.

    With equal numbers of batches per update it is the largest over the batches, otherwise that of
    the means.
    """
    if mine.shape[1] != theirs.shape[1]:
        mine, theirs = (losses.mean(1, keepdims=True) for losses in (mine, theirs))
    count = min(len(mine), len(theirs))
    return np.abs(mine[:count] / theirs[:count] - 1).max(1)


def plot_losses(runs, labels, axes=None):
    """Draw the loss of each update, and the distance of each run from the first."""
    losses = [_losses(run, label) for run, label in zip(runs, labels, strict=True)]
    with drawing.axes(axes, (11, 3.4), shape=(1, 2)) as axes:
        drawn, away = {}, {}
        for i, label in enumerate(labels):
            look = {"color": SERIES[i % len(SERIES)], "marker": "os^"[i % 3]}
            line = {"ls": "--" if i else "-", "ms": max(3, 9 - 3 * i)}
            (drawn[label],) = axes[0].plot(losses[i].mean(1), **line, **look)
            if i:
                distance = np.maximum(_away(losses[i], losses[0]), 1e-9)
                (away[label],) = axes[1].plot(distance, ms=5, **look)
        axes[0].set(xlabel="update", ylabel="mean loss of an update")
        axes[1].set(xlabel="update", yscale="log", ylim=(5e-10, 1))
        axes[1].set_ylabel(f"relative distance from {labels[0]}", parse_math=False)
        if len(losses) > 1:
            most = max(_away(found, losses[0]).max() for found in losses[1:])
            text = f"The losses lie at most {100 * most:.2g} % from those of {labels[0]}"
            entitle(axes, text, drawing.where(runs[0]))
        for ax, named in zip(axes, (drawn, away), strict=True):
            ax.xaxis.get_major_locator().set_params(integer=True)
            legend(ax, named, fontsize=9)
    return axes


def _losses(run, label):
    """Return the losses of each update of a run. Raises UserError if there are none to draw."""
    try:
        found = updates(run)
    except (log.LogError, KeyError) as error:
        raise UserError(f"{label}: no losses to draw: {error}; job.explain() says more") from error
    if len(found) == 0:
        raise UserError(f"{label}: no update to draw; job.explain() says why")
    return found


# Batch normalization -----------------------------------------------------------------------------


def plot_running_means(run, channels=16, ax=None):
    """Draw each process's running mean of each channel, after the same few steps."""
    ranks = _ranks(run)
    with drawing.axes(ax, (9, 3), "x") as ax:
        for rank, found in enumerate(ranks):
            means = found.cases["running means"]["channels"][:channels]
            colour = SERIES[rank % len(SERIES)]
            ax.plot(means, "o", color=colour, alpha=0.85, label=f"process {rank}")
        ax.axhline(0, color=PALETTE["limit"], lw=0.8)
        ax.set(xlabel="channel of the first normalization", ylabel="running mean")
        drawing.legend(ax, 4)
        entitle(ax, _means_text(ranks), drawing.where(run))
    return ax


def _means_text(ranks):
    """Return the share of channels whose running mean has another sign in another process."""
    signs = np.sign([found.cases["running means"]["channels"] for found in ranks])
    differ = (signs != signs[0]).any(0)
    if not differ.any() and len(ranks) > 1:
        return f"No running mean has another sign in another of {len(ranks)} processes"
    return f"{differ.sum()} of {differ.size} running means have another sign in another process"


def statistics(run) -> Table:
    """Return a table of the statistics of a batch split over processes, against one process."""
    rows = []
    for rank, found in enumerate(_ranks(run)):
        for name in ("mean", "variance"):
            seen = found.cases[name]
            away = np.abs(np.divide(seen["yours"], seen["one_process"]) - 1).max()
            word = "the same" if away < 1e-4 else "not the same"
            rows.append((f"{rank}", name, f"{away:.2g}", word))
    head = ("process", "of each channel", "largest relative difference", "as one process")
    return Table(head, rows, "><><")


def searches(run) -> Table:
    """Return a table of the cases of experiments/unused.py: the time of a step, or DDP's error."""
    rows = []
    for name, case in _cases(run):
        if "error" in case:
            rows.append((name, "error", case["error"].split(". ")[0]))
        else:
            rows.append((name, f"{np.median(case['step_ms']):.2f} ms", ""))
    return Table(("case", "median step", "what DDP said"), rows, "<><")


# The last step of all processes ------------------------------------------------------------------


def ranks(job) -> list[log.Run]:
    """Return the logs of a job's processes, by rank. Raises UserError if they hold no exchange."""
    runs = log.read_ranks(job)
    if len(runs) < 2:
        raise UserError(
            f"{runs[0].path}: one process has nothing to exchange: submit it with n_gpu=2 or more"
        )
    if not all(run.last for run in runs):
        raise UserError(
            f"{runs[0].path}: no step was recorded: submit it with --test, and wait for its end"
        )
    return runs


def collectives(job) -> Table:
    """Return a table of the collectives of a step: one process's messages, and their time."""
    runs = ranks(job)
    sent, times = defaultdict(list), defaultdict(lambda: [0.0] * len(runs))
    for rank, run in enumerate(runs):
        for c in run.last.collectives:
            key = (c["op"], c["dtype"], c["backend"])
            times[key][rank] += c["ms"]
            if rank == 0:
                sent[key].append(c["bytes"])
    rows = []
    for key, ms in sorted(times.items()):
        size = report.bytes_text(sum(sent[key]))
        rows.append((*key, f"{len(sent[key])}", size, f"{min(ms):.1f} to {max(ms):.1f} ms"))
    time = "time to launch, by process" if runs[0].last.only_asked else "time, by process"
    head = ("operation", "dtype", "through", "calls", "bytes", time)
    return Table(head, rows, "<<<>>>", "no collectives in the last step")


def plot_collectives(job, axes=None):
    """Draw the times and sizes of each process's buckets in the last step."""
    runs = ranks(job)
    if not any(run.last.collectives for run in runs):
        raise UserError(
            f"{runs[0].path}: in the last step no process sent anything to another: is the model "
            "wrapped in DistributedDataParallel? Then submit it again"
        )
    size, layout = (11, 1.6 + 0.6 * len(runs)), {"width_ratios": (3, 1), "sharey": True}
    with drawing.axes(axes, size, "x", shape=(1, 2), **layout) as axes:
        when, much = axes
        for rank, run in enumerate(runs):
            _plot_rank(when, rank, run)
            _plot_bytes(much, rank, run)
        drawing.rows(when, range(len(runs)))
        when.set_ylabel("process")
        when.set_xlabel("since the backward pass of the last step began (ms, each process's clock)")
        much.set(xlabel="sent in a step (MB)", xlim=(0, None))
        drawing.legend(when, 4)
        entitle(axes, _title(runs), drawing.where(runs[0]))
    return axes


def _title(runs):
    if not runs[0].last.on_gpu:
        return "Buckets are sent while the backward pass goes on"
    spent = max(run.last.communication_ms for run in runs)
    if runs[0].last.only_asked:
        return f"The messages take {spent:.1f} ms on the GPU; marks: their launches"
    exposed = max(run.last.exposed_ms for run in runs)
    return f"The messages take {spent:.1f} ms on the GPU, {exposed:.1f} of them not overlapped"


def _plot_rank(ax, rank, run):
    begin, end = run.last.backward_ms
    ax.barh(rank, end - begin, 0.8, color=PALE, label="backward")
    for c in run.last.collectives:
        look = {"color": _colour(c), "alpha": 0.85, "label": c["op"]}
        left = c["begin_ms"] - begin
        if run.last.only_asked:  # only the launch is known, not the span
            ax.plot(left, rank, ">", ms=9, **look)
        else:
            ax.barh(rank, c["ms"], 0.45, left, ec="white", **look)


def _plot_bytes(ax, rank, run):
    left = 0.0
    for c in run.last.collectives:
        ax.barh(rank, c["bytes"] / 1e6, 0.45, left, color=_colour(c), ec="white")
        left += c["bytes"] / 1e6


def _colour(collective):
    return COLLECTIVES.get(collective["op"], PALETTE["limit"])
