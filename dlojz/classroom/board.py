"""The class board: where trainees are, what fails, who waits, how well they predict.

found = board.open_class("/shared/class"); board.overview(found)

It reads what trainees share (see `dlojz.classroom`), under their pseudonyms.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from dlojz.classroom import standing
from dlojz.classroom.members import Classroom, read
from dlojz.course import progress
from dlojz.figures.look import FAINT, PALE, PALETTE, SERIES, legend, style
from dlojz.table import BAD, GOOD, QUIET, Table

UNSCORED = "no prediction was scored yet"
NOBODY = "nobody shares here yet: trainees type `dlojz share FOLDER`, and see first what is shared"
STATES = {  # of a trainee in a notebook: the words in a legend, and the colour
    None: ("not begun", FAINT),
    standing.BEGUN: ("begun", PALETTE["again"]),
    standing.TRIED: ("checked, not passed", PALETTE["power"]),
    standing.PASSED: ("passed", GOOD),
}
JOBS = {"waits": "QUEUED", "runs": "RUNNING"}
MARKS = {  # the parts of a notebook, in a figure
    "predicted": ("o", "white"),
    "checked": ("X", BAD),
    "passed": ("*", GOOD),
    "answered": ("s", "white"),
}
SPANS = {  # the use of time, in a figure: the colour and the height of its bar
    "reads and edits": (PALE, 0.3),
    "a job runs": (PALETTE["forward"], 0.62),
    "a job waits": (PALETTE["transfer"], 0.62),
}
RIGHT = {"loc": "upper left", "bbox_to_anchor": (1, 1), "fontsize": 9}  # of a legend
SHOWN = (0.5, 32)  # ratios beyond are drawn at the edge, so that one absurd value spoils nothing
FACTORS = (1 / 100, 100)  # of a prediction, likewise, and of the middle of what was measured
PANELS = 3  # of calibration
NAMED = 3  # clocks that differ
LONGEST_MIN = 240  # of a sitting that is drawn


def open_class(folder: str | Path | None) -> Classroom:
    """Return the class of a folder, as it is now, with the notebooks of this course.

    None: a class without trainees, for a notebook that has no folder yet.
    """
    return Classroom([], Counter(), 0) if folder is None else read(folder, progress.asked())


# Words -------------------------------------------------------------------------------------------


def overview(found: Classroom) -> Table:
    """Return a table of the trainees: where each is, and since when."""
    ages = defaultdict(list)
    for word, state in JOBS.items():
        for member, age in standing.jobs(found, state):
            ages[member.name, word].append(age)
    rows = [_member_row(found, member, ages) for member in found.members]
    head = ("trainee", "notebook", "last did", "passed", "seen", "jobs")
    return Table(head, rows, "<<<>><", NOBODY)


def _member_row(found, member, ages):
    last = member.entries[-1] if member.entries else None
    where = (last.notebook, standing.WORDS[last.kind]) if last else ("", "")
    passed = len(standing.passed(member))
    jobs = [(word, own) for word in JOBS if (own := ages.get((member.name, word)))]
    said = ", ".join(f"{len(own)} {word} {_minutes(own[0])}" for word, own in jobs)
    return (member.name, *where, str(passed), _ago(found.time - member.time), said)


def failing(found: Classroom, nudges: Mapping[tuple[str, str], str] | None = None) -> Table:
    """Return a table of the checks that fail, first the one that keeps most trainees.

    nudges: by step and hint, what a trainee is shown; see `dlojz.check.exercise.nudges`.
    """
    rows = []
    for row in standing.failing(found):
        hint, count = row.hints[0]
        said = (nudges or {}).get((row.step, hint), "")
        word = f"{hint} ({count})" if hint else "no hint"
        rows.append((row.step, f"{row.stuck} of {row.tried}", str(row.attempts), word, said))
    head = ("check", "not passed", "failed verdicts", "most frequent hint", "which says")
    return Table(head, rows, "<>><<", "no check has failed")


def jobs(found: Classroom) -> Table:
    """Return a table of the jobs that wait, the longest first, and of those that run."""
    rows = [
        (member.name, word, _minutes(age))
        for word, state in JOBS.items()
        for member, age in standing.jobs(found, state)
    ]
    return Table(("trainee", "job", "since"), rows, "<<>", "no job waits or runs")


def calibration(found: Classroom) -> Table:
    """Return a table of how the predictions stand to what was measured or estimated."""
    rows = []
    for names, pairs in standing.calibration(found).items():
        factors = [predicted / right for predicted, right in pairs]
        near = sum(max(f, 1 / f) <= 1.25 for f in factors)
        over, under = sum(f > 1 for f in factors), sum(f < 1 for f in factors)
        counts = (str(len(factors)), f"{near / len(factors):.0%}", str(over), str(under))
        rows.append((*names, *counts, f"{statistics.median(factors):.3g}"))
    head = ("predicted", "beside", "scores", "within 25 %", "too high", "too low")
    return Table((*head, "median of the factors"), rows, "<<>>>>>", UNSCORED)


def parts(found: Classroom, notebook: str | None = None) -> Table:
    """Return a table of when the parts of a notebook were reached, in minutes after its start.

    notebook: such as "02_amp"; by default the one in which most trainees are.
    """
    sittings = standing.sittings(found, notebook or standing.busiest(found))
    if not sittings:
        return Table((), [], "", NOBODY)
    rows = []
    for part in standing.PARTS:
        times = sorted((t - s.begin, s.member.name) for s in sittings if (t := s.reached(part)))
        slowest = f"{times[-1][0] / 60:.0f} min, {times[-1][1]}" if times else ""
        rows.append((part, len(times), [seconds for seconds, _ in times], slowest))
    for name, spans in (("in the queue", "queued"), ("jobs run", "running")):
        own = [sum(b - a for a, b in getattr(s, spans)) for s in sittings]
        rows.append((name, sum(map(bool, own)), own, ""))
    cells = [
        (name, f"{count} of {len(sittings)}", _median(seconds), slowest)
        for name, count, seconds, slowest in rows
    ]
    return Table(("part", "trainees", "median", "slowest"), cells, "<>><")


def _median(seconds):
    return f"{statistics.median(seconds) / 60:.0f} min" if seconds else ""


def notes(found: Classroom) -> str:
    """Return the notes below a board: the trainees on it, and the files that were skipped."""
    count, waits = len(found.members), len(standing.jobs(found))
    told = [f"{count} trainee{'s' * (count != 1)}, {waits} job{'s' * (waits != 1)} waiting"]
    told += [f"skipped: {n} ({why})" for why, n in sorted(found.skipped.items())]
    if clocks := [f"{m.name} by {m.ahead / 60:+.0f} min" for m in found.members if m.ahead]:
        more = ", ..." * (len(clocks) > NAMED)
        told.append(f"clocks differ, and times are corrected: {', '.join(clocks[:NAMED])}{more}")
    if found.left_out:
        told.append(f"{found.left_out} entries left out: unknown here, or not well-formed")
    return "; ".join(told)


def to_dict(found: Classroom) -> dict:
    """Return the board for programs, in JSON's types only."""
    tables = {
        table.__name__: table(found) for table in (overview, failing, jobs, calibration, parts)
    }
    rows = {n: [dict(zip(t.head, r, strict=True)) for r in t.rows] for n, t in tables.items()}
    return rows | {
        "speedups": standing.speedups(found),
        "skipped": dict(found.skipped),
        "clocks_ahead_s": {m.name: m.ahead for m in found.members if m.ahead},
        "left_out": found.left_out,
        "notebook": standing.busiest(found),
    }


def _minutes(seconds):
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.0f} h"


def _ago(seconds):
    return "now" if seconds < 60 else f"{_minutes(seconds)} ago" if seconds < 1.5e5 else "long ago"


# Figures -----------------------------------------------------------------------------------------


def plot_places(found: Classroom, ax=None):
    """Draw the progress of each trainee in each notebook; a dot marks the one that is open now."""
    trainees, known = sorted(found.members, key=_progress), list(STATES)
    columns = [n for n in found.notebooks if any(standing.state(m, n) for m in trainees)]
    with style(grid="x"):
        ax = ax or plt.subplots(figsize=(7.5, 1.6 + 0.2 * min(len(trainees), 60)))[1]
        if not columns:
            return _nothing(ax, "where the class is")
        cells = [[known.index(standing.state(m, n)) for n in columns] for m in trainees]
        colours = ListedColormap([colour for _, colour in STATES.values()])
        ax.pcolormesh(cells, cmap=colours, vmin=0, vmax=len(known) - 1, edgecolors="white", lw=1.5)
        for row, member in enumerate(trainees):
            if member.entries:
                at = columns.index(member.entries[-1].notebook) + 0.5
                ax.plot(at, row + 0.5, "o", ms=4, color="black", mec="white")
        ax.set_xticks(np.arange(len(columns)) + 0.5, [n.partition("_")[0] for n in columns])
        _rows(ax, [member.name for member in trainees])
        ax.set(title=f"Where the class is: {len(trainees)} trainees", xlabel="notebook")
        ax.grid(False)
        named = {words: Patch(color=colour) for words, colour in STATES.values()}
        named["now here"] = Line2D([], [], marker="o", color="black", ls="", ms=4)
        legend(ax, named, **RIGHT)
    return ax


def _progress(member):
    """Return a key to sort by: those who are furthest come last, and so on top of a figure."""
    last = member.entries[-1].notebook if member.entries else ""
    return len(standing.passed(member)), last, member.name.casefold()


def plot_failing(found: Classroom, ax=None):
    """Draw the number of trainees that each check keeps, and its most frequent hint."""
    rows = standing.failing(found)
    with style(grid="x"):
        ax = ax or plt.subplots(figsize=(7.5, 1.8 + 0.4 * len(rows)))[1]
        if not rows:
            return _nothing(ax, "what fails", "no check has failed")
        for place, row in enumerate(rows):
            ax.barh(place, row.failed, 0.62, color=PALETTE["pending"])
            ax.barh(place, row.stuck, 0.62, color=BAD)
            hint, count = row.hints[0]
            said = f"{hint}: {count}" if hint else "no hint"
            _beside(ax, said, (row.failed, place), 9)
        ax.set_yticks(range(len(rows)), [row.step.replace("_", " ") for row in rows])
        ax.invert_yaxis()
        ax.grid(False, axis="y")
        ax.margins(x=0.3)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        most = max(rows, key=lambda row: row.failed)
        title = f"{most.step.replace('_', ' ')} fails most, with its most frequent hint"
        ax.set(title=title, xlabel="trainees")
        named = {
            "not passed yet": Patch(color=BAD),
            "passed later": Patch(color=PALETTE["pending"]),
        }
        legend(ax, named, **RIGHT)
    return ax


def plot_speedups(found: Classroom, ax=None):
    """Draw a histogram of the speed-ups that were proven, by step."""
    by_step = standing.speedups(found)
    with style():
        ax = ax or plt.subplots(figsize=(7.5, 3.6))[1]
        if not by_step:
            return _nothing(ax, "speed-ups of the room", "no check that asks for speed has passed")
        ratios = [np.clip(ratios, *SHOWN) for ratios in by_step.values()]
        low, high = min(0.9, *map(min, ratios)), max(2.0, *map(max, ratios)) * 1.05
        edges = np.geomspace(low, high, 33)
        colours = [SERIES[place % len(SERIES)] for place in range(len(ratios))]
        ax.hist(ratios, edges, stacked=True, color=colours, rwidth=0.9)
        ax.axvline(1, color="black", lw=1)
        ax.set_xscale("log")
        best = max(by_step, key=lambda step: statistics.median(by_step[step]))
        title = f"{best}: {statistics.median(by_step[best]):.3g} times as fast, as a median"
        ax.set(title=title, xlabel="times as fast as before", ylabel="trainees")
        ax.yaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_xticks([t for t in (0.5, 1, 1.5, 2, 3, 5, 10, 20, 32) if low <= t <= high])
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.tick_params(axis="x", which="minor", length=0)
        named = (f"{s} ({len(r)}), median {statistics.median(r):.3g}" for s, r in by_step.items())
        legend(ax, dict(zip(named, [Patch(color=c) for c in colours], strict=True)), **RIGHT)
    return ax


def plot_calibration(found: Classroom, axes=None):
    """Draw predictions against what was measured, a panel for each of the most frequent ones.

    On the line they are equal; in the band, within a factor of 2.
    """
    shown = list(standing.calibration(found).items())[:PANELS]
    with style("both"):
        if axes is None:
            size = {"figsize": (3.6 * max(1, len(shown)), 3.7)}
            axes = plt.subplots(1, max(1, len(shown)), squeeze=False, **size)[1][0]
        for ax in axes[len(shown) :]:
            ax.set_axis_off()
        if not shown:
            return [_nothing(axes[0], "predictions", UNSCORED)]
        for ax, (names, pairs) in zip(axes, shown, strict=False):
            _plot_panel(ax, *names, np.array(pairs))
        axes[0].set_ylabel("predicted")
    return axes


def _plot_panel(ax, name, how, pairs):
    """Draw one quantity: the room's predictions over what each trainee has found."""
    middle = np.median(pairs[:, 1])
    right = middle * np.clip(pairs[:, 1] / middle, *FACTORS)
    predicted = right * np.clip(pairs[:, 0] / pairs[:, 1], *FACTORS)
    every = np.concatenate([right, predicted])
    ends = np.array([every.min() / 1.6, every.max() * 1.6])
    ax.fill_between(ends, ends / 2, ends * 2, color=FAINT, lw=0)
    ax.plot(ends, ends, color="black", lw=1)
    over, look = predicted > right, {"transform": ax.transAxes, "fontsize": 9}
    for which, colour in ((over, PALETTE["data"]), (~over, PALETTE["speed"])):
        ax.plot(right[which], predicted[which], "o", color=colour, alpha=0.65, mec="white", ms=7)
    ax.text(0.04, 0.95, f"too high: {over.sum()}", va="top", color=PALETTE["data"], **look)
    ax.text(0.96, 0.05, f"too low: {(~over).sum()}", ha="right", color=PALETTE["speed"], **look)
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel=how, title=name)
    ax.set_box_aspect(1)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if ends[1] < 300 * ends[0] else (1,)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())


def plot_stop_and_go(found: Classroom, notebook: str | None = None, ax=None):
    """Draw the use of each trainee's time in a notebook, from the trainee's own start.

    notebook: such as "02_amp"; by default the one in which most trainees are.
    """
    notebook = notebook or standing.busiest(found)
    sittings = sorted(standing.sittings(found, notebook), key=lambda s: s.end - s.begin)
    with style(grid="x"):
        ax = ax or plt.subplots(figsize=(9, 1.6 + 0.2 * min(len(sittings), 60)))[1]
        if not sittings:
            return _nothing(ax, "stop and go")
        for row, sitting in enumerate(sittings):
            _plot_sitting(ax, row + 0.5, sitting)
        _rows(ax, [s.member.name for s in sittings])
        longest = max((s.end - s.begin) / 60 for s in sittings)
        ax.set_xlim(-1, min(max(10, 1.08 * longest), LONGEST_MIN))
        ax.set(title=f"Stop and go in {notebook}", xlabel="minutes after the trainee's own start")
        legend(ax, _named_parts(), **RIGHT)
    return ax


def _plot_sitting(ax, row, sitting):
    """Draw one trainee: the time, the jobs that waited or ran in it, and the parts reached."""

    def minutes(time):
        return (time - sitting.begin) / 60

    spans = ([(sitting.begin, sitting.end)], sitting.running, sitting.queued)
    for (colour, height), found in zip(SPANS.values(), spans, strict=True):
        wide = [(minutes(a), (b - a) / 60) for a, b in found]
        ax.broken_barh(wide, (row - height / 2, height), color=colour, lw=0)
    for part, (mark, colour) in MARKS.items():
        if time := sitting.reached(part):
            size = 8 if mark == "*" else 5.5
            ax.plot(minutes(time), row, mark, color=colour, mec="black", mew=0.6, ms=size)
    if sitting.waits:
        _beside(ax, "waits", (minutes(sitting.end), row), 8)


def _beside(ax, text, at, size):
    look = {"textcoords": "offset points", "va": "center", "color": QUIET}
    ax.annotate(text, at, (5, 0), fontsize=size, **look)


def _named_parts():
    named = {word: Patch(color=colour) for word, (colour, _) in reversed(SPANS.items())}
    for part, (mark, colour) in MARKS.items():
        word = "first check" if part == "checked" else part
        look = {"mfc": colour, "mec": "black", "mew": 0.6, "ls": "", "ms": 7}
        named[word] = Line2D([], [], marker=mark, **look)
    return named


def plot_board(found: Classroom):
    """Draw the whole board on one page; return its figure."""
    with style():
        height = 9 + 0.2 * min(len(found.members), 60)
        figure = plt.figure(figsize=(17, height))
        above, below = figure.subfigures(2, 1, height_ratios=(height - 8, 8))
        plot_places(found, above.add_subplot(1, 2, 1))
        plot_stop_and_go(found, ax=above.add_subplot(1, 2, 2))
        middle, last = below.subfigures(2, 1)
        plot_failing(found, middle.add_subplot(1, 2, 1))
        plot_speedups(found, middle.add_subplot(1, 2, 2))
        plot_calibration(found, last.subplots(1, PANELS))
        figure.suptitle(notes(found), fontsize=10, color=QUIET, x=0.01, ha="left", parse_math=False)
    return figure


def save_board(found: Classroom, path: str | Path) -> Path:
    """Write the whole board to a file, such as board.png."""
    figure = plot_board(found)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return Path(path)


def _rows(ax, names):
    """Name the rows of a figure, literally, in letters that fit."""
    size = max(3.5, min(9, 540 / max(1, len(names))))
    for label in ax.set_yticks(np.arange(len(names)) + 0.5, names, fontsize=size):
        label.label1.set_parse_math(False)
    ax.tick_params(left=False)
    ax.set_ylim(0, len(names))


def _nothing(ax, title, why=NOBODY):
    """Draw an empty figure that says why it is empty."""
    ax.set_axis_off()
    ax.set_title(title.capitalize())
    ax.text(0, 0.8, why, color=QUIET, transform=ax.transAxes, parse_math=False, wrap=True)
    return ax
