"""Figures of notebook 07: the cost of augmenting and of mixing, a mixed batch, and the accuracy."""

import io
import statistics
from functools import partial
from typing import NamedTuple

import numpy as np

from dlojz import course
from dlojz.course import UserError
from dlojz.figures import drawing, paired
from dlojz.figures.look import PALETTE, SERIES, entitle
from dlojz.figures.report import hardware_text
from dlojz.runs.stats import interval, summary
from dlojz.table import Table

# The cost on a core ------------------------------------------------------------------------------

ROADS = {  # of experiments/costs.py: from a file's bytes to a tensor
    "PIL": ("PIL images", SERIES[1]),
    "tensor": ("tensors", SERIES[0]),
    "tensor, augmented as PIL": ("tensors, but the augmentation on PIL images", SERIES[2]),
}
costs_of = partial(drawing.of_experiment, field="measured", experiment="experiments/costs.py")


def seconds(run, measured: str, size: int) -> dict[tuple[str, str], list[float]]:
    """Return the seconds of an image in each round, by kind and way.

    measured: "alone", "decoded" or "road"; size: of the training's images, in pixels.
    """
    run = costs_of(run)
    found = {
        (case["kind"], case["way"]): case["seconds"]
        for case in run.cases.values()
        if case["measured"] == measured and case["size"] == size
    }
    if not found:
        sizes = sorted({case["size"] for case in run.cases.values()})
        raise UserError(f"{run.path}: nothing of {size} pixels; expected one of {sizes}")
    return found


def ratio(run, way: str, size: int = 224) -> tuple[float, float, float]:
    """Return the speed of PIL images over tensors for an augmentation alone, and its 95 % interval.

    way: such as "RandAugment(2, 9)".
    """
    found = seconds(run, "alone", size)
    if ("PIL", way) not in found:
        known = ", ".join(way for kind, way in found if kind == "PIL")
        raise UserError(f"{way!r} was not timed: expected one of {known}")
    return interval(np.divide(found["tensor", way], found["PIL", way]).tolist())


def costs(run, size: int = 224) -> Table:
    """Return a table of the augmentations alone: microseconds of an image, with their range."""
    found, rows = seconds(run, "alone", size), []
    for way in dict.fromkeys(way for _, way in found):
        if way != "nothing":
            cells = [_microseconds(found[kind, way]) for kind in ("PIL", "tensor")]
            middle, low, high = ratio(run, way, size)
            rows.append((way, *cells, f"{middle:.2f} ({low:.2f} to {high:.2f})"))
    head = ("", "PIL (µs)", "tensor (µs)", "on PIL, times as fast (95 %)")
    return Table(head, rows, "<>>>")


def _microseconds(spent):
    low, middle, high = (1e6 * f(spent) for f in (min, statistics.median, max))
    return f"{middle:,.0f} ({low:,.0f} to {high:,.0f})"


def plot_costs(run, model_run, cores: int | None = None, size: int = 224, ax=None):
    """Draw the images/s of some cores by augmentation and road, with the model's demand.

    model_run: one that did not wait for its images. cores: by default the measured machine's.
    """
    run, model = costs_of(run), summary(model_run)
    cores = cores or run.start.get("cpu_count") or 1
    found = seconds(run, "road", size)
    ways = list(dict.fromkeys(way for _, way in found))
    with drawing.axes(ax, (9, 1.6 + 0.62 * len(ways)), "x") as ax:
        for (kind, way), spent in found.items():
            at = ways.index(way) + 0.27 * ([*ROADS].index(kind) - 1)
            speeds = cores / np.array(spent)
            middle = float(np.median(speeds))
            label, colour = ROADS[kind]
            ends = [[middle - speeds.min()], [speeds.max() - middle]]
            ax.barh(at, middle, 0.25, color=colour, label=label)
            ax.errorbar(middle, at, xerr=ends, color="black", lw=1, capsize=2)
            ax.text(speeds.max(), at, f"  {middle:,.0f}", va="center", fontsize=8)
        if model.images_per_s is None:
            raise UserError(f"run {model.name} is {model.state}: it has no speed to compare with")
        text = f"{model.model} consumes {model.images_per_s:,.0f}"
        ax.axvline(model.images_per_s, color=PALETTE["failure"], ls="--", label=text)
        drawing.rows(ax, ways)
        ax.margins(x=0.1)
        ax.set(xlabel=f"images/s of {cores} cores, if each is as fast as one (median; line: all)")
        drawing.legend(ax, 2)
        setting = f"{size} px, from JPEG files; {_processor(run)}\n{hardware_text(model)}"
        entitle(ax, _fed_text(found, cores, model), setting)
    return ax


def _fed_text(found, cores, model):
    """Return the number of roads that feed the model, and the slowest."""
    speeds = {road: cores / float(np.median(spent)) for road, spent in found.items()}
    fed = sum(speed >= model.images_per_s for speed in speeds.values())
    (kind, way), slowest = min(speeds.items(), key=lambda each: each[1])
    text = f"{cores} cores feed {model.model} on {fed} of {len(speeds)} roads"
    return f"{text}; the slowest, {way} on {ROADS[kind][0]}, gives {slowest:,.0f} images/s"


def _processor(run):
    s = summary(run)
    name = f"one core of {run.start.get('cpu', s.device_name)}"
    return f"{name}, recorded {s.date}" if s.recorded else name


# Mixing a batch ----------------------------------------------------------------------------------

WAYS = {
    "loop": ("image by image", PALETTE["failure"]),
    "masks": ("the batch at once", SERIES[2]),
    "compiled": ("the same, compiled", SERIES[0]),
    "v2": ("torchvision's v2, one draw for all", PALETTE["limit"]),
}
mixing_of = partial(drawing.of_experiment, field="launches", experiment="experiments/mixing.py")


def mixing(run) -> Table:
    """Return a table of the ways to mix the largest batch: time, launches and different shares."""
    run = mixing_of(run)
    most, rows = max(case["images"] for case in run.cases.values()), []
    for case in run.cases.values():
        if case["images"] == most:
            low, middle, high = (f(case["ms"]) for f in (min, statistics.median, max))
            time = f"{middle:,.3g} ({low:,.3g} to {high:,.3g})"
            name = WAYS[case["way"]][0]
            rows.append((case["how"], name, time, f"{case['launches']:,}", f"{case['shares']:,}"))
    launched = "kernels" if summary(run).on_gpu else "operations"
    return Table(("", f"{most} images", "ms", launched, "label shares"), rows, "<<>>>")


def plot_mixing(run, axes=None):
    """Draw the time of each way to mix a batch against its size, with its launches."""
    run = mixing_of(run)
    s, hows = summary(run), list(dict.fromkeys(case["how"] for case in run.cases.values()))
    with drawing.axes(axes, (11, 4.6), shape=(1, len(hows)), sharey=True) as axes:
        for ax, how in zip(axes, hows, strict=True):
            for way, (label, colour) in WAYS.items():
                cases = [c for c in run.cases.values() if (c["how"], c["way"]) == (how, way)]
                _plot_way(ax, cases, label, colour, s.on_gpu)
            sizes = sorted({case["images"] for case in run.cases.values()})
            ax.set(xscale="log", yscale="log", xlabel="images in a batch", title=how)
            ax.set_xticks(sizes, sizes)
            ax.minorticks_off()
            drawing.legend(ax, 1, (0, 1.08))
        axes[0].set_ylabel("a batch (ms, median; band: all rounds)")
        text = "\n".join(filter(None, (_mixing_text(run, how) for how in hows)))
        entitle(axes, text, f"{s.arguments['image_size']} px; {drawing.where(run)}")
    return axes


def _mixing_text(run, how):
    """Return the gain of mixing the largest batch at once, over image by image."""
    ms = {
        (case["images"], case["way"]): statistics.median(case["ms"])
        for case in run.cases.values()
        if case["how"] == how
    }
    most = max(images for images, _ in ms)
    if not {(most, "loop"), (most, "masks")} <= ms.keys():
        return ""
    gain = ms[most, "loop"] / ms[most, "masks"]
    return f"{how}, {most} images: at once {gain:.3g} times as fast as image by image"


def _plot_way(ax, cases, label, colour, on_gpu):
    """Draw a line with a band; its label says the launches of the smallest and largest batch."""
    cases = sorted(cases, key=lambda case: case["images"])
    at = [case["images"] for case in cases]
    low, middle, high = ([f(c["ms"]) for c in cases] for f in (min, statistics.median, max))
    first, last = (f"{case['launches']:,}" for case in (cases[0], cases[-1]))
    count = first if first == last else f"{first} to {last}"
    unit = "kernel" if on_gpu or cases[0]["way"] == "compiled" else "operation"
    label = f"{label}: {count} {unit}{'s' * (count != '1')}"
    ax.fill_between(at, low, high, color=colour, alpha=0.2, lw=0)
    ax.plot(at, middle, "o-", color=colour, label=label)


# A mixed batch -----------------------------------------------------------------------------------


def plot_batch(how: str = "cutmix", trainer=None, images: int = 6, side: int = 128, axes=None):
    """Draw a batch before `mixed` and as it returns it, with the shares of its labels.

    how: "mixup" or "cutmix"; trainer: a file, by default yours.
    """
    plain, pixels, targets = mixed_batch(how, trainer or course.trainer(), images, side)
    texts = [f"class {label}" for label in range(images)]
    texts += [shares_text(target, label) for label, target in enumerate(targets)]
    with drawing.axes(axes, (1.8 * images, 4.4), shape=(2, images)) as axes:
        for ax, image, text in zip(axes.flat, [*plain, *pixels], texts, strict=True):
            ax.imshow(image)
            ax.set(xticks=[], yticks=[])
            ax.grid(visible=False)
            drawing.caption(ax, text)
    return axes


def mixed_batch(how, trainer, images, side):
    """Return images of a class each, [N, side, side, 3], the same when mixed, and their targets."""
    import torch
    from PIL import Image

    from dlojz.images import draw
    from dlojz.training import imports, mixing

    trainer = course.course_root() / trainer  # a notebook's kernel starts in notebooks/
    module = imports.from_file(trainer, "trainer_of_a_figure")
    if not hasattr(module, "mixed"):
        raise UserError(f"{trainer}: no function `mixed` in it; catch up with step 07")
    shown = []
    for label in range(images):
        with Image.open(io.BytesIO(draw.jpeg(0, "train", label, 0))) as image:
            shown.append(np.asarray(image.convert("RGB").resize((side, side))))
    pixels = torch.from_numpy(np.stack(shown)).permute(0, 3, 1, 2).contiguous()
    draws = mixing.draws_of(0, 0, 0, images, side)
    pixels, targets = module.mixed(pixels, torch.arange(images), draws, how, images)
    if targets.shape != (images, images):
        expected = f"[{images}, {images}], a share of each class"
        raise UserError(f"{trainer}: `mixed` returned targets {[*targets.shape]}, not {expected}")
    return np.stack(shown), pixels.permute(0, 2, 3, 1).numpy(), targets.numpy()


def shares_text(target, own: int) -> str:
    """Return the classes of one target with their shares, the image's own first."""
    others = [label for label in np.flatnonzero(target > 0.0005) if label != own]
    order = [own, *others]
    return " + ".join(f"{target[label]:.2f} of {label}" for label in order)


# The accuracy ------------------------------------------------------------------------------------

TASKS = {"short": SERIES[1], "long": SERIES[0]}


class Task(NamedTuple):
    """The trainings of one run of experiments/accuracy.py: the clean ones, and the others."""

    clean: paired.Row
    others: dict[str, paired.Row]  # by title

    @classmethod
    def of(cls, run) -> "Task":
        """Return the trainings of a run."""
        clean, *others = paired.rows(run)
        return cls(clean, {row.title: row for row in others})


def plot_crossing(short_run, long_run, ax=None):
    """Draw the difference of each change from the clean training, in a short and a long task.

    Points are seeds; the bar is the 95 % interval of their mean.
    """
    runs = dict(zip(TASKS, (short_run, long_run), strict=True))
    found = {name: Task.of(run) for name, run in runs.items()}
    titles = list(dict.fromkeys(title for task in found.values() for title in task.others))
    with drawing.axes(ax, (10, 1.9 + 0.62 * len(titles)), "x") as ax:
        ax.axvline(0, color=PALETTE["limit"], lw=1)
        for (name, task), shift in zip(found.items(), (-0.17, 0.17), strict=True):
            for at, title in enumerate(titles):
                if title in task.others:
                    paired.plot_row(ax, at + shift, task.others[title], TASKS[name])
            clean = statistics.fmean(task.clean.accuracies.values())
            label = f"{name}: {_sizes(runs[name])}; clean {clean:.1%}"
            ax.plot([], [], "D", color=TASKS[name], label=label)
        drawing.rows(ax, titles)
        ax.set(xlabel="difference in accuracy from the clean training (percentage points)")
        ax.margins(x=0.08)
        note = "diamond and bar: mean of the pairs and its 95 % interval; dots: seeds"
        drawing.legend(ax, 1)
        setting = f"{note}\n{_model(short_run)}; {drawing.where(short_run)}"
        entitle(ax, _crossing_text(found, titles), setting)
    return ax


def _crossing_text(found, titles):
    """Return the number of changes that gain, and that lose, in each task."""
    told = []
    for name, task in found.items():
        better = sum(row.difference.word == paired.BETTER for row in task.others.values())
        worse = sum(row.difference.word == paired.WORSE for row in task.others.values())
        told.append(f"{name}: {better} better, {worse} worse")
    return f"Of {len(titles)} changes, {'; '.join(told)}"


def _sizes(run):
    given = summary(run).arguments
    return f"{given['images_per_class']} images a class, {given['epochs']} epochs"


def _model(run):
    s = summary(run)
    images = s.arguments["classes"] * s.arguments["val_per_class"]
    return f"{s.model}, {s.image_size} px, validated on {images:,} images"


def crossing(short_run, long_run) -> Table:
    """Return a table of the accuracies and differences in a short task and in a long one."""
    runs = dict(zip(TASKS, (short_run, long_run), strict=True))
    found = {name: Task.of(run) for name, run in runs.items()}
    titles = list(dict.fromkeys(title for task in found.values() for title in task.others))
    clean = [f"{statistics.fmean(task.clean.accuracies.values()):.1%}" for task in found.values()]
    rows = [("clean", clean[0], "", clean[1], "")]
    for title in titles:
        cells = []
        for task in found.values():
            row = task.others.get(title)
            mean = f"{statistics.fmean(row.accuracies.values()):.1%}" if row else "-"
            cells += [mean, paired.words(row.difference) if row else "not trained"]
        rows.append((title, *cells))
    head = ("", *(cell for name, run in runs.items() for cell in (f"{name}: {_sizes(run)}", "")))
    return Table(head, rows, "<><><")


# What others report ------------------------------------------------------------------------------


class Recipe(NamedTuple):
    """A reported training of ResNet-50 on ImageNet, beside one without the change."""

    what: str
    epochs: str
    before: float  # accuracy, in %
    after: float
    source: str


CUTMIX = "github.com/clovaai/CutMix-PyTorch, README (commit 028ca48c)"
PADDLE = "github.com/PaddlePaddle/PaddleClas, ImageAugment_en.md (commit 234a5f44)"
# The README gives errors of 23.68, 22.58 and 21.40 %.
RECIPES = (
    Recipe("mixup", "300", 76.32, 77.42, CUTMIX),
    Recipe("CutMix", "300", 76.32, 78.60, CUTMIX),
    Recipe("mixup, alpha 0.2", "300", 77.31, 78.28, PADDLE),
    Recipe("CutMix", "300", 77.31, 78.39, PADDLE),
    Recipe("RandAugment(2, 5)", "300", 77.31, 77.70, PADDLE),
    Recipe(
        "TrivialAugment, mixup, CutMix, and a longer training with more changes",
        "600",
        76.13,
        80.86,
        "torchvision, ResNet50_Weights; pytorch/vision issue 3995",
    ),
)


def recipes() -> Table:
    """Return a table of what ImageNet's recipes report of ResNet-50, with their sources.

    Each is one training, so its gain has no interval.
    """
    rows = [
        (r.what, r.epochs, f"{r.before:.1f} %", f"{r.after:.1f} %", f"{r.after - r.before:+.1f}",
         r.source)
        for r in RECIPES
    ]  # fmt: skip
    return Table(("", "epochs", "without", "with", "points", "source"), rows, "<>>>><")
