"""The board of a race: a table, pictures, and the difference of an entry from another one."""

import difflib

from dlojz import course, launch
from dlojz.course import Diff
from dlojz.figures import drawing
from dlojz.figures.report import PALETTE
from dlojz.race import ranking
from dlojz.race.entering import entries
from dlojz.race.rules import RaceError, open_race
from dlojz.table import BAD, GOOD, QUIET, Table

EMPTY = 'nothing is entered yet: dlojz race enter FOLDER NAME "dlojz/dlojz.py ..."'
COLOURS = {ranking.BEST: GOOD, ranking.TIE: PALETTE["data"]}


def board(race) -> Table:
    """Return the table of a race: the best so far first, ties as ties."""
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
    if place.word == ranking.OUT:
        return f"out: {place.why}"
    if not (found := place.margin):
        return f"{place.word} {place.against}".strip()
    told = f"{found.mean:+.1f} points, gate {found.gate:.1f}"
    if place.word == ranking.TIE:
        return f"tie with {found.best} ({told})"
    return f"{place.word} ({told}, against {found.best})"


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


def plot_board(race, ax=None):
    """Draw accuracy over seconds with 95 % intervals, and the budget."""
    race = open_race(race)
    places = [place for place in ranking.standings(race) if place.accuracies]
    with drawing.axes(ax, (7.5, 4.2), "both") as ax:
        for place in places:
            colour = COLOURS.get(place.word, QUIET)
            x, y, half = _mean(place.seconds), 100 * place.accuracy, 100 * (place.half or 0)
            ax.errorbar(x, y, half, color=colour, marker="o", ms=7, capsize=4, mec="white")
            ax.annotate(place.name, (x, y), (7, 4), textcoords="offset points", color=colour)
        ax.axvline(race.seconds, color=BAD, ls="--", lw=1)
        ax.set(title=_finding(race, places), xlabel="seconds of a run, from start to end")
        ax.set(ylabel="accuracy (%), on images drawn afterwards", xlim=(0, 1.08 * race.seconds))
    return ax


def _finding(race, places):
    if not places:
        return "No entry has run yet"
    best = places[0]
    ties = [p.name for p in places if p.word == ranking.TIE and p.against == best.name]
    half = f" ± {100 * best.half:.1f}" if best.half is not None else ""
    told = f"{best.name}: {100 * best.accuracy:.1f}{half} % in {race.seconds} s"
    return told + (f", and a tie with {', '.join(ties)}" if ties else "")


def plot_margins(race, ax=None):
    """Draw the differences from the best so far, seed by seed, and the gate for their mean."""
    found = [place for place in ranking.standings(open_race(race)) if place.margin]
    with drawing.axes(ax, (7.5, 1.6 + 0.5 * len(found)), "x") as ax:
        for row, place in enumerate(found):
            one = place.margin
            ax.barh(row, 2 * one.gate, 0.7, -one.gate, color="#EFEFF3")
            colour = {ranking.AHEAD: GOOD, ranking.BEHIND: BAD}.get(one.word, PALETTE["data"])
            ax.plot(one.points, [row] * len(one.points), "o", ms=4, color=colour, alpha=0.5, mew=0)
            ax.plot(one.mean, row, "D", ms=7, color=colour, mec="white")
        drawing.rows(ax, [f"{p.name} against {p.margin.best}" for p in found])
        ax.axvline(0, color="black", lw=1)
        ax.set(title="A mean must leave the grey gate", xlabel="points of accuracy, by seed")
    return ax
