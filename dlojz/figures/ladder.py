"""The ladder: what each step of the course reached, in images/s, memory and energy per image.

ladder.plot_ladder()     # yours; until a check has passed, the recorded one
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from textwrap import wrap

import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from dlojz import course
from dlojz.course import CHAIN, progress
from dlojz.figures.look import PALETTE, percent, style
from dlojz.figures.report import speed_text
from dlojz.runs import reached, recordings
from dlojz.runs.reached import Reached
from dlojz.table import QUIET

# ResNet-50 with a batch of 256 on one H100, one run of each step, in one session: see `_ladder` of
# tools/recordings.py. 06, on two such GPUs, is drawn once it is recorded. 09 is in mode default,
# which its solution takes on a GPU. A step that is not in this table has no recording.
RECORDED = {
    "00_start": "h100/ladder-00_start*",
    "01_gpu": "h100/ladder-01_gpu*",
    "02_amp": "h100/ladder-02_amp*",
    "03_channels_last": "h100/ladder-03_channels_last*",
    "05_dataloader": "h100/ladder-05_dataloader*",
    "06_ddp": "h100/ladder-06_ddp-x2*",
    "09_compile": "h100/ladder-09_compile-x1*",
}
OTHERS = {
    "04_profiler": "to find the time, not to save it",
    "07_augmentation": "for accuracy, not for speed",
    "08_large_batch": "for accuracy, not for speed",
    "10_kernels": "for a kernel, not for the step",
    "11_fsdp": "for models that do not fit",
}
TWO = {"06_ddp": "needs two GPUs: see notebook 06"}
NOTES = {  # from a step on
    "00_start": "00 ran on the processor beside the GPU, in fp32.",
    "02_amp": "01 is in fp32, what follows in bf16.",
    "05_dataloader": "Up to 03 the images are synthetic, then from files, of 100 classes.",
    "06_ddp": "06 is on two GPUs.",
}
UNTIL_THEN = "The recorded ladder. Yours will be drawn here once one of your checks has passed."
YOURS = "Your ladder, from the checks that you passed"
THE_OTHER = "The recorded ladder, all of it: ladder.plot_ladder(shown=ladder.recorded())"
UNKEPT = "passed: check again to see it"  # by a version that kept no figures

# How to say in what a step differs from those that it stands beside.
DIFFERS = {
    "device_name": "on {}",
    "image_size": "{} px",
    "batch_size": "batch {}",
    "memory_of": "memory of the {}",
    "torch": "torch {}",
}


def _gb(value):
    return f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"


PANELS = {  # by the field of `Reached`: its title, its unit, its colour, its text
    "images_per_s": ("throughput (images/s)", 1, PALETTE["speed"], speed_text),
    "peak_memory_bytes": ("peak memory (GB)", 1e9, PALETTE["activations"], _gb),
    "energy_per_image_j": ("energy per image (J)", 1, PALETTE["power"], "{:.3f}".format),
}


@dataclass(frozen=True)
class Ladder:
    """The figures that steps of the course reached, recorded or from a trainee's verdicts."""

    title: str
    found: Mapping[str, Reached]  # by step
    otherwise: str  # what to write beside a step that is not among them
    known: Mapping[str, str] = field(default_factory=dict)  # for some steps, what to write instead
    notes: tuple[str, ...] = ()
    series: bool = False  # recorded in one session, so that only the steps differ


def recorded(until: str | int = CHAIN[-1]) -> Ladder:
    """Return the ladder of the recordings up to a step: what comes later is still to be guessed."""
    last = CHAIN.index(course.step(until))
    runs = {
        step: recordings(name)
        for step, name in RECORDED.items()
        if step in CHAIN[: last + 1] and (step not in TWO or _made(name))
    }
    found = {step: reached.of(some, some) for step, some in runs.items()}
    known = OTHERS | TWO | dict.fromkeys(CHAIN[last + 1 :], "later in the course")
    told = " ".join(note for step, note in NOTES.items() if step in found)
    return Ladder(UNTIL_THEN, found, "not recorded", known, (told,), series=True)


def _made(name):
    return any((course.course_root() / "reference").glob(name))


def yours() -> Ladder | None:
    """Return the ladder of this course folder's verdicts; None if none has passed."""
    found, known = {}, {CHAIN[0]: "no check of its own"}
    passed = {step: v for step, v in progress.passed().items() if step in CHAIN}
    for step, verdict in passed.items():
        kept = verdict.get("reached", {})
        found |= {of: Reached.read(figures) for of, figures in kept.items()}
        known |= {} if kept else {step: UNKEPT}
    return Ladder(YOURS, found, "not passed yet", known, (THE_OTHER,)) if passed else None


def base(found: Mapping[str, Reached]) -> str | None:
    """Return the first of those steps that can be compared: most of them, else the latest."""
    settings = [r.setting for _, r in sorted(found.items())]
    if not settings:
        return None
    most = max(reversed(settings), key=settings.count)
    return next(step for step in sorted(found) if found[step].setting == most)


def apart(shown: Ladder) -> dict[str, str]:
    """Return each step's difference from the base, if it cannot be compared with it."""
    found = {} if shown.series else shown.found
    wanted = found[base(found)].setting if found else {}
    told = {
        step: ", ".join(
            _difference(name, value) for name, value in r.setting.items() if value != wanted[name]
        )
        for step, r in found.items()
    }
    return {step: text for step, text in told.items() if text}


def _difference(name, value):
    if name == "processes":
        return f"{value} process{'es' * (value > 1)}"
    return DIFFERS.get(name, "{}").format(value)


def plot_ladder(until: str | int = CHAIN[-1], shown: Ladder | None = None, axes=None):
    """Draw throughput, memory and energy of each step of the course; return the three axes.

    until: the last step that is shown of the recordings; shown: a ladder to draw, by default yours.

    Steps with other sizes or on other hardware than most are hatched, and have no ratio.
    """
    shown = shown or yours() or recorded(until)
    with style(grid="x"):
        if axes is None:
            figure, axes = plt.subplots(1, 3, sharey=True, figsize=(11, 4.6))
            title = "\n".join(filter(None, (_finding(shown), shown.title)))
            figure.suptitle(title, fontweight="bold", fontsize=11, x=0.01, ha="left")
            below = "\n".join(_caption(shown))
            look = {"fontsize": 8.5, "x": 0.01, "ha": "left", "color": QUIET}
            figure.supxlabel(below, parse_math=False, **look)
        for ax, name in zip(axes, PANELS, strict=True):
            _plot_panel(ax, shown, name)
        for row, step in enumerate(CHAIN):
            if step not in shown.found:
                _say(axes[0], row, shown.known.get(step, shown.otherwise))
        axes[0].set_yticks(range(len(CHAIN)), map(_words, CHAIN))
        axes[0].set_ylim(len(CHAIN) - 0.5, -0.5)
    return axes


def _comparable(shown):
    """Return the steps that have a ratio to the first of them, which is on a GPU if one is."""
    different = apart(shown)
    same = [step for step in sorted(shown.found) if step not in different]
    return [step for step in same if shown.found[step].on_gpu] or same


def _finding(shown):
    """Return the gain of the last step that can be compared with the first; "" without two."""
    found, known = shown.found, _comparable(shown)
    if len(known) < 2:
        return ""
    first, last = (found[step] for step in (known[0], known[-1]))
    text = f"{_words(known[-1])}: {last.images_per_s / first.images_per_s:.3g} times as fast as "
    text += _words(known[0])
    if last.energy_per_image_j and first.energy_per_image_j:
        share = last.energy_per_image_j / first.energy_per_image_j
        text += f", for {percent(share)} of its energy"
    return text


def _plot_panel(ax, shown, name):
    """Draw one figure of all steps: a bar, its value, and its ratio to the first comparable one."""
    title, unit, colour, text = PANELS[name]
    found, different = shown.found, apart(shown)
    known = {step: v for step, r in sorted(found.items()) if (v := getattr(r, name)) is not None}
    same = [step for step in _comparable(shown) if step in known]
    for step in sorted(found.keys() - known.keys()):
        no_sensor = name == "energy_per_image_j" and not found[step].on_gpu
        _say(ax, CHAIN.index(step), "no sensor" if no_sensor else "not measured")
    hatched = {"fill": False, "hatch": "/////", "edgecolor": colour, "lw": 0}
    for step, value in known.items():
        row, interval = CHAIN.index(step), found[step].interval * (name == "images_per_s")
        ax.barh(row, value / unit, 0.62, **(hatched if step in different else {"color": colour}))
        if interval:
            ax.plot(interval, (row, row), "|-", color="black", ms=6)
        # A wide interval may run into the text.
        at = min(interval[1], 1.15 * value) if interval else value / unit
        star = "*" * (found[step].disturbed > 0 and name == "images_per_s")
        written = _say(ax, row, text(value / unit) + star, at, color="black")
        if step in same[1:]:
            _say(ax, 0.5, f"×{value / known[same[0]]:.2f}", 1, xycoords=written)
    if not known:
        ax.spines[["bottom", "left"]].set_visible(False)
    longest = max(known.values(), default=0) / unit
    ax.set(title=title, xlim=(0, 1.45 * longest or 1))  # room for the text
    ax.xaxis.set_major_locator(MaxNLocator(5) if known else NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}" if x > 9 else f"{x:.3g}"))
    ax.tick_params(left=False)


def _say(ax, row, text, x=0.0, color=QUIET, **where):
    """Write a few words beside a bar, or in its place."""
    look = {"textcoords": "offset points", "va": "center", "fontsize": 9, "color": color}
    # An interval's line may lie below the text.
    look["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    return ax.annotate(text, (x, row), (5, 0), **look, **where)


def _words(step):
    """Return a step as the figure names it: "03 channels last"."""
    return step.replace("_", " ")


def _caption(shown):
    """Return the lines below the figure: what the bars are, and which of them stand apart."""
    if not shown.found:
        return []
    r, others = shown.found[base(shown.found)], apart(shown)
    several = len(shown.found) - len(others) > 1
    processes = f" x {r.processes} processes" if r.processes > 1 else ""
    timed = any(of.interval for of in shown.found.values())
    first = "bar on a GPU" if shown.series else "solid bar"
    told = [f"×: compared with the first {first}"] * several
    told += ["Black line: 95 % interval of the mean"] * timed
    different = [f"{_words(step)} ({text})" for step, text in others.items()]
    slowed = [
        f"{_words(step)} ({of.disturbed} of {of.runs} runs)"
        for step, of in sorted(shown.found.items())
        if of.disturbed
    ]
    return [
        f"{r.device_name}, torch {r.torch}, {r.date}: {r.model}, {r.image_size} px, batch "
        f"{r.batch_size}{processes}, {r.data}. Peak memory of the {r.memory_of}.",
        *([f"{'. '.join(told)}."] if told else []),
        *shown.notes,
        *wrap(f"Hatched, not comparable: {'; '.join(different)}." * bool(different), 175),
        *wrap(f"* Disturbed while it was timed: {'; '.join(slowed)}." * bool(slowed), 175),
    ]
