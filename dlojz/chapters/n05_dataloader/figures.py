"""Figures of notebooks 05 and 05b: a loader's time by task, and its speed against the demand."""

import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from dlojz.chapters.n05_dataloader.search import workers_text
from dlojz.course import UserError
from dlojz.figures import drawing
from dlojz.figures.look import PALETTE, SERIES, colours, entitle, legend, percent
from dlojz.figures.report import bytes_text
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
    ways = []
    for name, case in found.cases.items():
        if (kind := case.get("kind")) in KINDS:
            speeds = case["images_per_s" if kind == "nvJPEG" else "images_per_cpu_s"]
            ways.append(Way(kind, name, speeds, case.get("batch")))
    if not ways:
        raise UserError(f"{found.path}: no decoder was timed; job.explain() says why")
    return ways


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
    rows, first, found = [], {}, ways(run)
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
    with drawing.axes(ax, (9, 1.2 + 0.36 * len(found)), "x") as ax:
        rows = np.arange(len(found)) + 0.5 * np.array([way.kind == "road" for way in found])
        for row, way in zip(rows, found, strict=True):
            ax.barh(row, way.median, 0.7, color=colours[way.kind], label=KINDS[way.kind])
            reach = [[way.median - min(way.speeds)], [max(way.speeds) - way.median]]
            ax.errorbar(way.median, row, xerr=reach, color="black", lw=1, capsize=2.5)
            ax.text(max(way.speeds), row, f"  {way.median:,.0f}", va="center", fontsize=9)
        ax.set_yticks(rows, [way.name for way in found])
        ax.invert_yaxis()
        ax.margins(x=0.1)
        ax.set(xlabel="images per CPU-second (median; the line: all rounds)", xlim=(0, None))
        drawing.legend(ax, 2)
        entitle(ax, _fastest_text(found), f"one core of {_processor(run)}")
    return ax


def _fastest_text(found):
    """Return the fastest way to a crop, or to an image, relative to the first."""
    roads = [way for way in found if way.kind == "road"] or found
    best = max(roads, key=lambda way: way.median)
    times = best.median / roads[0].median
    return f"{best.name}: {times:.3g} times the images per second of {roads[0].name}"


def plot_nvjpeg(run, ax=None):
    """Draw the images per second of the GPU's decoder against its batch size."""
    run = log.read(run)
    found = {way.batch: way.speeds for way in ways(run) if way.kind == "nvJPEG"}
    if not found:
        raise UserError(f"no nvJPEG in {run.path}: it needs an NVIDIA GPU")
    with drawing.axes(ax, (6, 3.4)) as ax:
        median = [np.median(speeds) for speeds in found.values()]
        ax.plot(list(found), median, "o-", color=SERIES[2])
        ends = ([min(s) for s in found.values()], [max(s) for s in found.values()])
        ax.fill_between(list(found), *ends, color=SERIES[2], alpha=0.2)
        ax.set_xscale("log", base=2)
        ax.set_xticks(list(found), list(found))
        ax.set(xlabel="images in a batch", ylabel="nvJPEG (images/s)", ylim=(0, None))
        (small, slow), *_, (large, fast) = [*zip(found, median, strict=True)] * 2
        text = f"nvJPEG decodes {fast:,.0f} images/s in batches of {large:,}"
        if slow < fast:
            text += f", {fast / slow:.2g} times as many as in batches of {small:,}"
        entitle(ax, text, drawing.where(run))
    return ax


def _processor(run):
    """Return the processor's name, for a recording with its date."""
    s = summary(run)
    name = run.start.get("cpu", s.device_name)
    return f"{name}, recorded {s.date}" if s.recorded else name


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
        most = f"{self.given[self.best]:,.0f} images/s with {workers_text(self.best)}"
        return f"{'not ' * (not self.bound)}data bound, the loader gives up to {most}"

    def __str__(self):
        beside = "in parallel, " * bool(self.best)  # in the figure, 0 workers may give more
        workers = workers_text(self.best)
        most = f"{self.given[self.best]:,.0f} {beside}with {workers}"
        enough = workers_text(self.enough)
        text = f"data bound: the model takes {self.consumed:,.0f} images/s, the loader gives "
        if self.bound:
            cores = f"{self.enough} core{'s' * (self.enough > 1)}"
            text += f"at most {most}; {enough} on {cores} would be enough"
        else:
            verb = "is" if self.enough == 1 else "are"
            text = f"not {text}up to {most}; {enough} {verb} enough"
        if self.shared:
            text += "; here both share the cores: together at most about "
            text += f"{self.together:,.0f} images/s"
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
    with drawing.axes(ax, (9, 3.6)) as ax:
        sentences, shown, model = [], {}, summary(model_run)
        for (name, run), colour in zip(named.items(), colours(named).values(), strict=True):
            found = supply(run, model)
            cases = _loader_cases(loader := log.read(run))
            if not loader.end:
                sentences.append(f"{name}: its job failed or goes on: worker counts may be missing")
            label = name + _others_text(cases, found.cores)
            shown[label] = _plot_given(ax, cases, colour)
            sentences.append(f"{name}: {found.short}" if len(named) > 1 else str(found))
        line = {"color": PALETTE["failure"], "linestyle": "--"}
        band = SERIES[0] if len(named) == 1 else PALETTE["limit"]
        shown["all rounds"] = Patch(color=band, alpha=0.2, lw=0)
        shown["the model consumes"] = ax.axhline(found.consumed, **line)
        ax.set(ylabel="images/s", ylim=(0, None), xticks=shown[label].get_xdata())
        itself = "the training loads images itself, in turn with its steps"
        ax.set_xlabel(f"workers (hollow, 0: {itself})")
        if model.disturbance:
            sentences.append(f"the model was disturbed: {model.disturbance}")
        entitle(ax, "\n".join(sentences), drawing.where(model_run))
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


def _loader_cases(found):
    cases = [case for case in found.cases.values() if "num_workers" in case]
    if not cases:
        what = outcome.errors(found.path.parent).strip().rpartition("\n")[2]
        raise UserError(f"{found.path.parent}: no loader was measured. {what}")
    return sorted(cases, key=lambda case: case["num_workers"])


# Storage -----------------------------------------------------------------------------

PASSES = {
    "cold": ("read, cold", PALETTE["limit"]),
    "warm": ("read, warm", SERIES[5]),
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
    with drawing.axes(ax, (9, 1.2 + 0.75 * len(copies)), "x") as ax:
        for row, case in enumerate(copies.values()):
            for place, (way, (label, colour)) in enumerate(PASSES.items()):
                speeds, at = case["images_per_s"][way], row + 0.26 * (place - 1)
                ax.plot([min(speeds), max(speeds)], [at, at], color=colour, lw=3, alpha=0.4)
                ax.plot(np.median(speeds), at, "o", color=colour, ms=8, label=label)
                text = f"{np.median(speeds):,.0f}"
                ax.text(1.06 * max(speeds), at, text, va="center", fontsize=8)
        drawing.rows(ax, copies)
        ax.set(xscale="log", xlabel="images/s, one thread (logarithmic; the line: all rounds)")
        ax.margins(x=0.12, y=0.12)
        drawing.legend(ax, 3)
        entitle(ax, _storage_text(copies), f"{_processor(run)}; {_cold_text(copies)}")
    return ax


def _storage_text(copies):
    """Return the gain of reading the first copy warm, and the share that decoding leaves."""
    name, case = next(iter(copies.items()))
    cold, warm, decoded = (np.median(case["images_per_s"][way]) for way in PASSES)
    text = f"{name}: read {warm / cold:.2g} times as fast from memory as from disk"
    return f"{text}, and decoding leaves {percent(decoded / warm)} of that"


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
    return {
        name: sum(case["operations"].values()) / case["images"]
        for name, case in _copies(run).items()
    }


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
    each = operations_per_image(run)
    kinds = {case["kind"]: each[name] for name, case in _copies(run).items()}
    with drawing.axes(ax, (7.5, 3.6), "both") as ax:
        for (kind, per), colour in zip(kinds.items(), SERIES, strict=False):
            asked = [metadata_load(n, gpus, images_per_s, per) for n in nodes]
            label = f"{kind}: {per:.3g} operations an image"
            ax.plot(nodes, asked, "o-", color=colour, label=label)
            ax.text(nodes[-1] * 1.15, asked[-1], f"{asked[-1]:,.0f}", va="center", fontsize=9)
        ax.set_xscale("log", base=2)
        ax.set(yscale="log", xticks=nodes, xlabel="nodes", ylabel="operations/s")
        ax.set_xticklabels(f"{n:.0f}" for n in nodes)
        ax.set_xlim(nodes[0] * 0.8, nodes[-1] * 2)
        ax.legend(loc="upper left", fontsize=9)
        text = f"{nodes[-1]:.0f} nodes ask for {_asked(kinds, nodes[-1] * gpus * images_per_s)}"
        setting = f"computed: {gpus} GPUs in a node, {images_per_s:,.0f} images/s each"
        entitle(ax, text, setting)
    return ax


def _asked(kinds, images_per_s):
    """Return the operations per second for these images per second, by the kind of copy."""
    told = [f"{per * images_per_s:,.0f} operations/s from {kind}" for kind, per in kinds.items()]
    return ", ".join(told)


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
COLOURS = dict(zip(TASKS, [*SERIES[:4], PALETTE["limit"]], strict=True))


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
    rows = []
    for name, calls, own_s in seen["functions"][:most]:
        each = (f"{calls / seen['images']:.3g}", f"{1000 * own_s / seen['images']:.3f}")
        rows.append((name, *each, f"{own_s / seen['seconds']:.0%}"))
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
    return {who: {t: n[t] / n.total() for t in TASKS} for who, n in found.items() if n}


def plot_tasks(run, ax=None):
    """Draw the shares of the loading time by task, profiled from inside and from outside."""
    run = log.read(run)
    found, trouble = shares(run), _seen_by("py-spy", run).get("trouble", "")
    with drawing.axes(ax, (10, 1.5 + 0.6 * len(found)), "x") as ax:
        for row, parts in enumerate(found.values()):
            drawing.stack(ax, row, parts, COLOURS, 0.65)
        drawing.write_widths(ax, "{:.0%}", 0.04, color="white", fontsize=9)
        drawing.rows(ax, found)
        ax.set(xlim=(0, 1), xlabel="share of the time")
        ax.xaxis.set_major_formatter(PercentFormatter(1))
        drawing.legend(ax, 5)
        parts = next(iter(found.values()))
        most = max((t for t in parts if t != REST), key=parts.get)
        text = f"{percent(parts[most])} of the loading is to {most}"
        entitle(ax, text, "\n".join(filter(None, (drawing.where(run), trouble))))
    return ax


def _seen_by(who, run):
    found = log.read(run)
    if who not in found.cases:
        raise UserError(
            f"{found.path}: no profile by {who} in it; expected a run of loader_profile.py that "
            "has ended well: job.explain() says why"
        )
    return found.cases[who]
