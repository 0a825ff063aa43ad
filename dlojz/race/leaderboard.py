"""The board of a race: a table, pictures, and the difference of an entry from another one."""

import difflib

from dlojz import course, launch
from dlojz.course import Diff
from dlojz.figures import drawing
from dlojz.figures.look import PALE, PALETTE, entitle
from dlojz.race import ranking, results
from dlojz.race.entering import entries
from dlojz.race.rules import RaceError, open_race
from dlojz.table import BAD, GOOD, QUIET, Table

EMPTY = 'nothing is entered yet: dlojz race enter FOLDER NAME "dlojz/dlojz.py ..."'


def board(race) -> Table:
    """Return the table of a race: the best so far first, ties as ties.

    Accuracies are of an entry's last round, and differences by pairs of the rounds it shared.
    """
    race = open_race(race)
    there, damaged = entries(race)
    known = {entry.name: entry for entry in there}
    rows = [_row(place, known) for place in ranking.standings(race, known)]
    rows += [(name, "", "", "", "", "", f"can't be read: {why}") for name, why in damaged.items()]
    head = ("entry", "by", "accuracy", "seconds", "joules", "lines changed", "place")
    return Table(head, rows, "<<>>>><", EMPTY)


def _row(place, known):
    entry = known.get(place.name)
    accuracy = f"{100 * place.accuracy:.1f} %" if place.accuracies else ""
    if place.half is not None:
        accuracy = f"{100 * place.accuracy:.1f} ± {100 * place.half:.1f} %"
    joules = "not measured" if place.accuracies else ""
    if place.joules:
        joules = f"{_mean(place.joules):,.0f}"
    seconds = f"{_mean(place.seconds):.1f}" if place.seconds else ""
    about = (entry.by, str(lines_changed(entry))) if entry else ("", "")
    return (place.name, about[0], accuracy, seconds, joules, about[1], _words(place))


def _mean(values):
    return sum(values) / len(values)


def _words(place) -> str:
    told = f"{place.word} {place.against}".strip()
    if place.word == ranking.OUT:
        told = f"out: {place.why[:160]}"
    elif found := place.margin:
        points = f"{found.mean:+.1f} points, gate {found.gate:.1f}"
        told = f"{place.word} ({points}, against {found.best})"
        if place.word == ranking.TIE:
            told = f"tie with {found.best} ({points})"
    if place.cut:
        told += f"; {place.cut} of its runs ended at the budget"
    return told + (f"; disturbed: {place.disturbed}" if place.disturbed else "")


def told(race) -> str:
    """Return a line for each entry: its place, or why it is out, and what to do then."""
    race, lines = open_race(race), []
    for place in ranking.standings(race, [entry.name for entry in entries(race)[0]]):
        lines.append(f"{place.name}: {_words(place) if place.why else place.word}")
        if place.word == ranking.OUT:
            few = "give it fewer epochs, or make a race with more --seconds, on a quiet machine"
            lines.append(f"  next: {few if place.cut else 'mend it'}, and enter it by a new name")
    return "\n".join(lines) or EMPTY


def lines_changed(entry) -> int:
    """Return the number of lines that differ from the course's starter, in all its files."""
    return sum(line[0] in "+-" for line in _differences(_starter(), entry.files))


def diff(race, name: str, other: str = "") -> Diff:
    """Return the difference of an entry from another one, or from the starter."""
    race = open_race(race)
    known = {entry.name: entry for entry in entries(race)[0]}
    for wanted in filter(None, (name, other)):
        if wanted not in known:
            raise RaceError(
                f"no entry {wanted!r}: expected one of {', '.join(known) or 'none yet'}"
            )
    mine, theirs = known[name], known.get(other)
    flags = [f"# {e.name}: {' '.join(e.flags)}" for e in filter(None, (theirs, mine))]
    base = theirs.files if theirs else _starter()
    lines = _differences(base, mine.files, other or "starter", name, headings=True)
    return Diff("\n".join([*flags, *lines]))


def _starter():
    return {launch.beside.COPY: course.read_small(course.solution("00_start"))}


def _differences(base, files, old="", new="", headings=False) -> list[str]:
    found = []
    for path in dict.fromkeys([*base, *files]):
        texts = [
            side.get(path, b"").decode(errors="replace").splitlines() for side in (base, files)
        ]
        told = [*difflib.unified_diff(*texts, f"{old}/{path}", f"{new}/{path}", n=2, lineterm="")]
        found += told if headings else [line for line in told[2:] if line]
    return found


# Pictures -----------------------------------------------------------------------------------------


def plot_board(race, axes=None):
    """Draw accuracy, seconds and, where they are measured, joules of each entry; return the axes.

    A dot is a run. The bar is the 95 % interval of the mean accuracy; a line shows the budget.
    """
    race = open_race(race)
    every = ranking.standings(race)
    places = [place for place in every if place.accuracies]
    out = [place for place in every if place.word == ranking.OUT]
    columns = ["accuracy (%)", "seconds; grey: below the floor", "joules"][
        : 3 if places and all(p.joules for p in places) else 2
    ]
    shape, size = (1, len(columns)), (9, 2 + 0.42 * len(places))
    with drawing.axes(axes, size, "x", shape, sharey=True) as axes:
        for row, place in enumerate(places):
            tie = place.ties_with(places[0].name)
            colour = GOOD if place.word == ranking.BEST else PALETTE["data"] if tie else QUIET
            values = ([100 * a for a in place.accuracies], place.seconds, place.joules)
            for ax, runs in zip(axes, values, strict=False):
                ax.plot(runs, [row + 0.25] * len(runs), "o", ms=4, color=colour, alpha=0.5, mew=0)
                ax.plot(_mean(runs), row, "D", ms=7, color=colour, mec="white")
            axes[1].barh(row, place.floor_s or 0, 0.5, color=PALE)
            ends = 100 * (place.accuracy - place.half), 100 * (place.accuracy + place.half)
            axes[0].plot(ends, (row, row), color=colour, lw=4, alpha=0.45, solid_capstyle="butt")
        drawing.rows(axes[0], [place.name for place in places])
        for ax, label, most in zip(axes, columns, (None, race.seconds, race.joules), strict=False):
            ax.set_xlabel(label)
            if most:
                ax.axvline(most, color=BAD, ls="--", lw=1)
        for ax in axes[1:]:
            ax.set_xlim(0, 1.06 * ax.get_xlim()[1])
        entitle(axes[0], _finding(race, places, out), _setting(race, places, out))
    return axes


def _finding(race, places, out):
    if not places:
        names = ", ".join(place.name for place in out)
        return f"All that have run are out: {names}" if out else "No entry has run yet"
    best = places[0]
    ties = [place.name for place in places if place.ties_with(best.name)]
    told = f"{best.name}: {100 * best.accuracy:.1f} ± {100 * best.half:.1f} %"
    return f"{told} in {race.seconds} s" + (f", and a tie with {', '.join(ties)}" if ties else "")


def _setting(race, places, out):
    if not places:
        return "\n".join(f"{place.name}: {place.why[:100]}" for place in out[:6])
    last = [one for one in results.read(race) if one.done][-1]
    return f"{last.place}; {race.runs} runs each, judged on images that were drawn afterwards"
