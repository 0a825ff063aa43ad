"""Figures of notebooks 05 and 05b: a loader's time by task, and its speed against the demand."""

import math
import re
import textwrap
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill, wrap
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from dlojz.chapters.n05_dataloader import search
from dlojz.chapters.n05_dataloader.search import KNOBS, began, of_one_training, ready, trial
from dlojz.course import UserError
from dlojz.figures import report
from dlojz.figures.report import (
    PALETTE,
    SERIES,
    bytes_text,
    duration_text,
    hardware_text,
    legend,
    style,
)
from dlojz.runs import log, outcome, stats
from dlojz.runs.stats import summary
from dlojz.table import Table

# Decoding ----------------------------------------------------------------------------

KINDS = {"decoder": "decoded only", "road": "to a crop ready for a batch", "nvJPEG": "on the GPU"}


class Way(NamedTuple):
    """A way from the bytes of a JPEG file to an image, with its speed in each round."""

    kind: str  # one of KINDS
    name: str
    speeds: list[float]  # images per CPU-second; on the GPU per second of wall time
    batch: int | None = None  # nvJPEG's

    @property
    def median(self) -> float:
        return float(np.median(self.speeds))


def ways(run) -> list[Way]:
    """Return the timed ways of a run of experiments/decoders.py, in its order."""
    found = log.read(run)
    ways = [
        Way(
            case["kind"],
            name,
            _speeds(case),
            case.get("batch"),
        )
        for name, case in found.cases.items()
        if case.get("kind") in KINDS
    ]
    if not ways:
        raise UserError(f"{found.path}: no decoder was timed; job.explain() says why")
    return ways


def _speeds(case):
    return case["images_per_s"] if case["kind"] == "nvJPEG" else case["images_per_cpu_s"]


def ratio(run, name: str, to: str) -> tuple[float, float, float]:
    """Return the speed-up of one way over another, and the ends of its 95 % interval.

    name, to: names in the table, such as "torchvision, v2, uint8".
    """
    found = {way.name: way.speeds for way in ways(run)}
    for asked in (name, to):
        if asked not in found:
            raise UserError(f"{asked!r} was not timed: expected one of {', '.join(found)}")
    return stats.interval([a / b for a, b in zip(found[name], found[to], strict=True)])


def decoders(run) -> Table:
    """Return a table of the ways to decode: speed, spread of the rounds, ratio to the first."""
    rows, first = [], {}
    found = ways(run)
    for way in found:
        base = first.setdefault(way.kind, way.median)
        spread = f"{min(way.speeds):,.0f} to {max(way.speeds):,.0f}"
        times = f"{way.median / base:.2f}"
        rows.append((KINDS[way.kind], way.name, f"{way.median:,.0f}", spread, times))
    if not any(way.name == "simplejpeg" for way in found):
        lacks = "not installed" + ": pip install simplejpeg" * (not summary(run).recorded)
        rows.append((KINDS["decoder"], "simplejpeg", "-", lacks, "-"))
    unit = "images per CPU-second" + ("; GPU: per second" if "nvJPEG" in first else "")
    return Table(("", "way", unit, "rounds", "times the first"), rows, "<<>>>")


def plot_decoders(run, ax=None):
    """Draw the speed of each way on the processor, with the spread of its rounds."""
    run = log.read(run)
    found = [way for way in ways(run) if way.kind != "nvJPEG"]
    colours = {"decoder": PALETTE["limit"], "road": PALETTE["speed"]}
    with style(grid="x"):
        ax = ax or plt.subplots(figsize=(9, 1.2 + 0.36 * len(found)))[1]
        rows = np.arange(len(found)) + 0.5 * np.array([way.kind == "road" for way in found])
        labels = set()
        for row, way in zip(rows, found, strict=True):
            label = KINDS[way.kind] if way.kind not in labels else None
            labels.add(way.kind)
            ax.barh(row, way.median, 0.7, color=colours[way.kind], label=label)
            reach = [[way.median - min(way.speeds)], [max(way.speeds) - way.median]]
            ax.errorbar(way.median, row, xerr=reach, color="black", lw=1, capsize=2.5)
            ax.text(max(way.speeds), row, f"  {way.median:,.0f}", va="center", fontsize=9)
        ax.set_yticks(rows, [way.name for way in found])
        ax.invert_yaxis()
        ax.margins(x=0.1)
        ax.set(xlabel="images per CPU-second (median; the line: all rounds)", xlim=(0, None))
        ax.set_title(f"one core of {_processor(run)}", fontsize=9, fontweight="normal")
        ax.legend(ncols=2, loc="lower left", bbox_to_anchor=(0, 1.06), fontsize=9)
    return ax


def plot_nvjpeg(run, ax=None):
    """Draw the images per second of the GPU's decoder against its batch size."""
    run = log.read(run)
    found = {way.batch: way.speeds for way in ways(run) if way.kind == "nvJPEG"}
    if not found:
        raise UserError(f"no nvJPEG in {run.path}: it needs an NVIDIA GPU")
    with style():
        ax = ax or plt.subplots(figsize=(6, 3.4))[1]
        median = [np.median(speeds) for speeds in found.values()]
        ax.plot(list(found), median, "o-", color=SERIES[2])
        ends = ([min(s) for s in found.values()], [max(s) for s in found.values()])
        ax.fill_between(list(found), *ends, color=SERIES[2], alpha=0.2)
        ax.set_xscale("log", base=2)
        ax.set_xticks(list(found), list(found))
        ax.set(xlabel="images in a batch", ylabel="nvJPEG (images/s)", ylim=(0, None))
        ax.set_title(hardware_text(summary(run)), fontsize=9, fontweight="normal")
    return ax


def _processor(run):
    """Return the processor's name, for a recording with its date."""
    s = summary(run)
    name = run.start.get("cpu", s.device_name)
    return f"{name}, recorded {s.date}" if s.recorded else name


# Trials ------------------------------------------------------------------------------

READY = 0.3  # share of the steps; with more batches ready, a trial tells little about its loader


def trials(jobs=(), file: Path | None = None) -> Table:
    """Return a table of the knobs of each trial and its results, earlier sessions first.

    Trials of other models, sizes or machines are kept, but not shown: see `search.kept`.
    """
    return trial_table(*search.kept(jobs, file))


def trial_table(runs, like: dict | None = None) -> Table:
    """Return a table of the six knobs of each trial and its results, with the fastest marked.

    Trials within the noise of the fastest are marked, too.

    runs: jobs, or kept trials; `trials` also shows those of earlier sessions.
    like: the trial to compare with, by default the last. Trials of other models, sizes or machines
    are left out.
    """
    rows, code = _comparable(runs, like)
    best = _fastest([row for row in rows if row["code"] == code])
    head = ("trial", *KNOBS.values(), "images/s", "waits for data", "first batch", "host memory")
    cells = [(*_trial_cells(row), _trial_note(row, best, code)) for row in rows]
    empty = "no trials yet: give the list that submit() returned"
    return Table((*head, ""), cells, "<" + ">" * 10 + "<", empty)


def _comparable(runs, like=None):
    """Return (the trials of one training, the code of its last trainer)."""
    runs = runs if isinstance(runs, list | tuple) else [runs]
    rows = [run if isinstance(run, dict) else trial(run) for run in runs]
    like = like or next((row for row in reversed(rows) if began(row)), None)
    return (of_one_training(rows, like), like["code"]) if like else (rows, None)


def plot_trials(runs, ax=None):
    """Draw the images per second of each trial, in order, with notes on what bars can't show."""
    rows = [row for row in _comparable(runs)[0] if row["images_per_s"]]
    if not rows:
        raise UserError("no trial with a speed: give jobs; job.explain() says what stopped them")
    best, names = _fastest(rows), _differences(rows)
    with style(grid="x"):
        ax = ax or plt.subplots(figsize=(10, 1.2 + 0.42 * len(rows)))[1]
        for at, row in enumerate(rows):
            colour = PALETTE["update"] if row in best else PALETTE["speed"]
            speed, waits = row["images_per_s"], row["data_share"]
            ax.barh(at, speed, 0.7, color=colour)
            ax.barh(at, waits * speed, 0.7, color="white", alpha=0.55, hatch="////", ec="white")
            ax.text(speed, at, _trial_text(row), va="center", fontsize=9)
        ax.set_yticks(
            range(len(rows)), [f"{r['name']}: {n}" for r, n in zip(rows, names, strict=True)]
        )
        ax.invert_yaxis()
        fastest = max(row["images_per_s"] for row in rows)
        ax.set(xlim=(0, 1.9 * fastest))  # room for the text
        ax.set_xlabel("images/s (pale: the share of a step that waits for images)")
        what = f"{rows[0]['model']}, {rows[0]['image_size']} px, batch {rows[0]['batch_size']}"
        ax.set_title(f"{what}; {rows[0]['device_name']}", fontsize=9, fontweight="normal")
    return ax


def fastest(jobs):
    """Return the trial with the most images per second."""
    speeds = [trial(job)["images_per_s"] or 0 for job in jobs]
    if not any(speeds):
        raise UserError("no trial with a speed: job.explain() says why")
    return jobs[speeds.index(max(speeds))]


def _fastest(rows):
    """Return the fastest trial, and those behind it by less than equal runs differ.

    Disturbed trials are left out, because their speed is unknown.
    """
    done = [row for row in rows if row["state"] == "COMPLETED" and row["images_per_s"]]
    done = [row for row in done if not row.get("disturbance")]
    most = max((row["images_per_s"] for row in done), default=0)
    near = (1 - row.get("spread", stats.SPREAD_CPU) for row in done)
    return [
        row for row, share in zip(done, near, strict=True) if row["images_per_s"] >= share * most
    ]


def _trial_cells(row):
    knobs = (_knob_text(row["knobs"][name]) for name in KNOBS)
    if not row["images_per_s"]:
        return (row["name"], *knobs, "-", "-", "-", "-")
    memory = bytes_text(row["host_memory_bytes"])
    speed = f"{row['images_per_s']:,.0f}"
    return (row["name"], *knobs, speed, f"{row['data_share']:.0%}", _seconds(row), memory)


def _trial_note(row, best, code):
    """Return the caveats about a trial's speed; code: the last trial's trainer's."""
    if row["state"] != "COMPLETED":
        return row["state"]
    star = "★ fastest" if len(best) == 1 else "among the fastest"
    notes = [star] * (row in best) + ["another trainer"] * (row["code"] not in (code, None))
    notes += [f"short: {ready(row)} batches were ready"] * (ready(row) > READY * row["steps"])
    if left_out := row.get("left_out"):
        notes.append(f"without its last {left_out} steps: nothing was left to decode")
    notes += [row["disturbance"]] if row.get("disturbance") else []
    return "; ".join(notes)


def _knob_text(value):
    if value is None:
        return "-"
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)


def _trial_text(row):
    text = f"  {row['images_per_s']:,.0f}; waits {row['data_share']:.0%}"
    text += f"; first batch {_seconds(row)}; {bytes_text(row['host_memory_bytes'])}"
    return f"{text}; disturbed" if row.get("disturbance") else text


def _seconds(row):
    return duration_text(row["first_load_s"])


def _differences(rows):
    """Return each trial's values of the knobs that differ between trials: "2 workers"."""
    names = [n for n in KNOBS if len({row["knobs"][n] for row in rows}) > 1] or ["num_workers"]
    return [", ".join(_knob_words(name, row["knobs"][name]) for name in names) for row in rows]


def _knob_words(name, value):
    word = KNOBS[name]
    if name == "num_workers":
        return f"{value} worker{'' if value == 1 else 's'}"
    return f"{'' if value else 'not '}{word}" if isinstance(value, bool) else f"{word} {value}"


def oversubscribed(jobs) -> str:
    """Return lines that name the jobs with more busy workers and threads than cores."""
    by_text = {}
    for job in jobs:
        by_text.setdefault(oversubscription(job) or "enough cores for all", []).append(job.id)
    return "\n".join(fill(f"{', '.join(ids)}: {text}", 100) for text, ids in by_text.items())


def oversubscription(run) -> str:
    """Return a warning if a run has more busy workers and threads than cores; else "".

    On a GPU only one thread of the training counts: the one that launches the work.
    """
    found = log.read(run)
    workers = found.probe.loader.num_workers or 0
    on_gpu = found.setup.get("device", "").startswith("cuda")
    threads = 1 if on_gpu else found.start.get("threads")
    return crowding(workers, threads or 1, found.start.get("cpu_count") or 1)


def crowding(workers: int, threads: int, cores: int) -> str:
    """Return a warning if these workers and threads of one process exceed its cores; else ""."""
    if not workers or workers + threads <= cores:
        return ""
    return (
        f"oversubscribed: {workers} worker{'s' * (workers > 1)} decoding and {threads} "
        f"thread{'s' * (threads > 1)} training share {cores} core{'s' * (cores > 1)}, "
        "so they wait for each other. "
        "Try fewer workers, or fewer threads (OMP_NUM_THREADS)"
    )


# Supply and demand -------------------------------------------------------------------


@dataclass(frozen=True)
class Supply:
    """The images/s of a model, and of its loader by number of workers.

    Without workers the training process loads its images between its steps, which is slower than
    either alone, so it counts only if nothing else was tried.
    """

    consumed: float
    given: dict[int, float]
    cores: int | None  # available to the loader
    shared: bool = False  # the model computes on the same cores

    @property
    def beside(self) -> dict[int, float]:
        """Return the speeds of loaders with workers, which run in parallel with the training."""
        return {w: speed for w, speed in sorted(self.given.items()) if w} or self.given

    @property
    def best(self) -> int:
        """Return the number of workers with the highest speed."""
        return max(self.beside, key=self.beside.get)

    @property
    def bound(self) -> bool:
        """Return whether the model waits for data with every tried number of workers."""
        return self.given[self.best] < self.consumed

    @property
    def together(self) -> float:
        """Return the images/s of both together, if either keeps all cores busy."""
        return 1 / (1 / self.consumed + 1 / self.given[self.best])

    @property
    def enough(self) -> int:
        """Return the fewest workers that feed the model, perhaps extrapolated from the best."""
        fed = [workers for workers, speed in self.beside.items() if speed >= self.consumed]
        each = self.given[self.best] / max(1, self.best)
        return fed[0] if fed else math.ceil(self.consumed / each)

    @property
    def short(self) -> str:
        """Return the bottleneck in a few words: data bound or not, and the loader's best supply."""
        most = f"{self.given[self.best]:,.0f} images/s with {_knob_words('num_workers', self.best)}"
        return f"{'not ' * (not self.bound)}data bound, the loader gives up to {most}"

    def __str__(self):
        beside = "in parallel, " * bool(self.best)  # in the figure, 0 workers may give more
        workers = _knob_words("num_workers", self.best)
        most = f"{self.given[self.best]:,.0f} {beside}with {workers}"
        enough = _knob_words("num_workers", self.enough)
        text = f"data bound: the model takes {self.consumed:,.0f} images/s, the loader gives "
        if not self.bound:
            verb = "is" if self.enough == 1 else "are"
            text = f"not {text}up to {most}; {enough} {verb} enough"
        else:
            cores = f"{self.enough} core{'s' * (self.enough > 1)}"
            text += f"at most {most}; {enough} on {cores} would be enough"
        if self.shared:
            most = f"{self.together:,.0f} images/s"
            text += f"; here both share the cores: together at most about {most}"
        return text


def supply(loader_run, model_run) -> Supply:
    """Return the supply in a run of experiments/loader.py, for a trainer on synthetic data."""
    found, model = log.read(loader_run), summary(model_run)
    given = {case["num_workers"]: case["images_per_s"] for case in _loader_cases(found)}
    if not model.images_per_s:
        raise UserError(f"run {model.name} is {model.state}: it has no speed to compare with")
    medians = {workers: float(np.median(speeds)) for workers, speeds in given.items()}
    return Supply(model.images_per_s, medians, found.start.get("cpu_count"), not model.on_gpu)


def plot_supply(loader_runs, model_run, ax=None):
    """Draw the model's demand for images against the loader's supply.

    loader_runs: a run of experiments/loader.py, or several by name: {"before": run, "after": run}.
    """
    named = loader_runs if isinstance(loader_runs, dict) else {"the loader gives": loader_runs}
    with style():
        ax = ax or plt.subplots(figsize=(9, 3.6))[1]
        sentences, shown, model = [], {}, summary(model_run)
        for (name, run), colour in zip(named.items(), SERIES, strict=False):
            run = log.read(run)
            cases = _loader_cases(run)
            label = name + _others_text(cases, run.start.get("cpu_count"))
            shown[label] = _plot_given(ax, cases, colour)
            found = supply(run, model)
            sentences += wrap(f"{name}: {found.short}" if len(named) > 1 else str(found), 105)
        line = {"color": PALETTE["failure"], "linestyle": "--"}
        band = SERIES[0] if len(named) == 1 else PALETTE["limit"]
        shown["all rounds"] = Patch(color=band, alpha=0.2, lw=0)
        shown["the model consumes"] = ax.axhline(found.consumed, **line)
        ax.set(ylabel="images/s", ylim=(0, None), xticks=shown[label].get_xdata())
        ax.set_xlabel(
            "workers (hollow, 0: the training loads images itself, in turn with its steps)"
        )
        sentences += _model_disturbed(model)
        ax.set_title("\n".join(sentences), fontsize=9, fontweight="normal")
        legend(ax, shown, loc="upper left", bbox_to_anchor=(1, 1))
    return ax


def _plot_given(ax, cases, colour):
    """Draw a loader's supply by workers, with a hollow mark for none; return the line."""
    at = [case["num_workers"] for case in cases]
    middle = [np.median(case["images_per_s"]) for case in cases]
    ends = [[end(case["images_per_s"]) for case in cases] for end in (min, max)]
    ax.fill_between(at, *ends, color=colour, alpha=0.2, lw=0)
    (line,) = ax.plot(at, middle, "o-", color=colour)
    if not at[0]:
        ax.plot(0, middle[0], "o", color=colour, mfc="white")
    return line


def _others_text(cases, cpus):
    most = max(case.get("others_cpu", 0) for case in cases)
    crowded = cpus and most > stats.OTHERS_CPU * cpus
    return f"\n({stats.crowd_text(most, cpus, at_most=True)})" if crowded else ""


def _model_disturbed(s):
    return [f"the model was disturbed: {s.disturbance}"] if s.disturbance else []


def _loader_cases(found):
    cases = [case for case in found.cases.values() if "num_workers" in case]
    if not cases:
        what = outcome.errors(found.path.parent).strip().rpartition("\n")[2]
        raise UserError(f"{found.path.parent}: no loader was measured. {what}")
    return sorted(cases, key=lambda case: case["num_workers"])


# Storage -----------------------------------------------------------------------------

PASSES = {
    "cold": ("read, cold", PALETTE["transfer"]),
    "warm": ("read, warm", PALETTE["forward"]),
    "decoded": ("read, warm, and decoded", PALETTE["speed"]),
}


def storage(run) -> Table:
    """Return a table of the copies in a run of experiments/storage.py: size, speed, operations.

    The metadata operations are those of one pass over all images: files opened, folders listed.
    """
    rows = []
    for name, case in _copies(run).items():
        speeds = (f"{np.median(case['images_per_s'][way]):,.0f}" for way in PASSES)
        size, asked = bytes_text(case["bytes"] / case["images"]), case["operations"]
        operations = f"{asked.get('open', 0):,} + {asked.get('list', 0):,}"
        rows.append((name, f"{case['files']:,}", size, *speeds, operations))
    head = ("", "files", "an image", *(text for text, _ in PASSES.values()), "opened + listed")
    return Table(head, rows, "<>>>>>>")


def plot_storage(run, ax=None):
    """Draw the images per second of each copy: from disk, from memory, and decoded.

    Points, because bars have no length on a logarithmic scale.
    """
    run = log.read(run)
    copies = _copies(run)
    with style(grid="x"):
        ax = ax or plt.subplots(figsize=(9, 1.2 + 0.75 * len(copies)))[1]
        for row, case in enumerate(copies.values()):
            for place, (way, (label, colour)) in enumerate(PASSES.items()):
                speeds, at = case["images_per_s"][way], row + 0.26 * (place - 1)
                label = label if not row else None
                ax.plot([min(speeds), max(speeds)], [at, at], color=colour, lw=3, alpha=0.4)
                ax.plot(np.median(speeds), at, "o", color=colour, ms=8, label=label)
                text = f"{np.median(speeds):,.0f}"
                ax.text(1.06 * max(speeds), at, text, va="center", fontsize=8)
        ax.set_yticks(range(len(copies)), copies)
        ax.invert_yaxis()
        ax.set(xscale="log", xlabel="images/s, one thread (logarithmic; the line: all rounds)")
        ax.margins(x=0.12, y=0.12)
        ax.set_title(f"{_processor(run)}; {_cold_text(copies)}", fontsize=9, fontweight="normal")
        ax.legend(ncols=3, loc="lower left", bbox_to_anchor=(0, 1.06), fontsize=9)
    return ax


def _copies(run):
    found = log.read(run)
    copies = {name: case for name, case in found.cases.items() if "operations" in case}
    if not copies:
        raise UserError(f"{found.path}: nothing was read; job.explain() says why")
    return copies


def _cold_text(copies):
    """Return the share of the files in memory at the begin of a cold pass, in words."""
    kept = [share for case in copies.values() for share in case["still_cached"]]
    if None in kept:
        return "this file system does not show whether a cold pass was cold"
    return f"when a cold pass began, at most {max(kept):.1%} of the files were in memory"


def operations_per_image(run) -> dict[str, float]:
    """Return the metadata operations per image of each copy, in one pass over all."""
    return {name: _per_image(case) for name, case in _copies(run).items()}


def _per_image(case):
    return sum(case["operations"].values()) / case["images"]


def metadata_load(nodes: int, gpus: int, images_per_s: float, per_image: float) -> float:
    """Return the metadata operations per second of a training run on a shared file system.

    gpus: per node; images_per_s: per GPU; per_image: operations for one image.
    """
    return nodes * gpus * images_per_s * per_image


def plot_metadata(run, images_per_s: float, gpus: int = 4, ax=None):
    """Draw the metadata operations per second against the nodes, from files and from shards.

    run: one of experiments/storage.py; images_per_s: consumed by each of the `gpus` of a node.
    """
    nodes = 2.0 ** np.arange(8)
    # The size of the images does not change the operations, so one copy of each kind is enough.
    kinds = {case["kind"]: _per_image(case) for case in _copies(run).values()}
    with style(grid="both"):
        ax = ax or plt.subplots(figsize=(7.5, 3.6))[1]
        for (kind, per), colour in zip(kinds.items(), SERIES, strict=False):
            asked = [metadata_load(n, gpus, images_per_s, per) for n in nodes]
            label = f"{kind}: {per:.3g} operations an image"
            ax.plot(nodes, asked, "o-", color=colour, label=label)
            ax.text(nodes[-1] * 1.15, asked[-1], f"{asked[-1]:,.0f}", va="center", fontsize=9)
        ax.set_xscale("log", base=2)
        ax.set(yscale="log", xticks=nodes, xlabel="nodes", ylabel="operations/s")
        ax.set_xticklabels(f"{n:.0f}" for n in nodes)
        ax.set_xlim(nodes[0] * 0.8, nodes[-1] * 2)
        what = f"computed: {gpus} GPUs in a node, {images_per_s:,.0f} images/s each"
        ax.set_title(what, fontsize=9, fontweight="normal")
        ax.legend(loc="upper left", fontsize=9)
    return ax


REST = "the rest"
# The task of a function, by its name or a caller's; the first pattern that matches counts.
TASKS = {
    "decode": r"ImagingDecoder|ImageFile\.py: |JpegImagePlugin",
    "resize": r"\bresize\b|'resize'",
    "make a tensor, normalize": r"to_tensor|ToTensor|[Nn]ormalize|__array_interface__|numpy\.array"
    r"|ImagingEncoder|TensorBase|as_tensor",
    "make a batch": r"collate|torch\.stack|storage\.py",
    REST: r"",
}
COLOURS = dict(zip(TASKS, [*report.SERIES[:4], report.PALETTE["limit"]], strict=True))


def task(names) -> str:
    """Return the task of a function, one of TASKS. names: its own, then those of its callers."""
    for name in names:
        for found, words in TASKS.items():
            if found != REST and re.search(words, name):
                return found
    return REST


def functions(run, most: int = 10) -> Table:
    """Return a table of the functions that take most of the time of a loader without workers.

    The times are cProfile's.
    """
    seen = _seen_by("cProfile", run)
    rows = [
        (
            name,
            f"{calls / seen['images']:.3g}",
            f"{1000 * own_s / seen['images']:.3f}",
            f"{own_s / seen['seconds']:.0%}",
        )
        for name, calls, own_s in seen["functions"][:most]
    ]
    head = ("function", "calls per image", "own ms per image", "share")
    return Table(head, rows, "<>>>", "nothing was recorded")


def shares(run) -> dict[str, dict[str, float]]:
    """Return the shares of the loading time by task, by each profiler."""
    inside, outside = (_seen_by(who, run) for who in ("cProfile", "py-spy"))
    own, seen = Counter(), Counter()
    for name, _, own_s in inside["functions"]:
        own[task([name])] += own_s
    own[REST] += inside["seconds"] - own.total()  # functions that the log leaves out
    for names, count in outside.get("seen", []):
        seen[task(names)] += count
    found = {"cProfile: no workers": own, "py-spy: the workers": seen}
    return {
        who: {t: counts[t] / counts.total() for t in TASKS}
        for who, counts in found.items()
        if counts
    }


def plot_tasks(run, ax=None):
    """Draw the shares of the loading time by task, profiled from inside and from outside."""
    run = log.read(run)
    found, trouble = shares(run), _seen_by("py-spy", run).get("trouble", "")
    with report.style(grid="x"):
        ax = ax or plt.subplots(figsize=(10, 1.5 + 0.6 * len(found)))[1]
        for row, parts in enumerate(found.values()):
            left = 0.0
            for name, share in parts.items():
                ax.barh(row, share, 0.65, left, label=name, color=COLOURS[name])
                if share > 0.04:  # a narrower bar has no room for text
                    text = {"color": "white", "ha": "center", "va": "center", "fontsize": 9}
                    ax.text(left + share / 2, row, f"{share:.0%}", **text)
                left += share
        ax.set(yticks=range(len(found)), yticklabels=found, ylim=(len(found) - 0.5, -0.5))
        ax.set(xlim=(0, 1), xlabel="\n".join(["share of the time", *textwrap.wrap(trouble, 100)]))
        ax.xaxis.set_major_formatter(PercentFormatter(1))
        handles, labels = ax.get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        ax.legend(unique.values(), unique, ncols=5, loc="lower left", bbox_to_anchor=(0, 1))
    return ax


def _seen_by(who, run):
    found = log.read(run)
    if who not in found.cases:
        raise UserError(
            f"{found.path}: no profile by {who} in it; expected a run of loader_profile.py that "
            "has ended well: job.explain() says why"
        )
    return found.cases[who]
