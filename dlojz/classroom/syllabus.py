"""The course in one, two or four days: its notebooks, talks and breaks, and when each begins.

    dlojz syllabus --days 2          # the timetable, and what does not fit
    dlojz syllabus --laptop          # two hours without a GPU, alone
    dlojz rehearse --day 2 --of 4    # a day's notebooks, unattended

solutions/syllabi.toml says what is taught on which day, and a notebook's card how long it takes.
"""

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import time
from itertools import accumulate, pairwise
from pathlib import Path

from dlojz import course
from dlojz.classroom import rehearse
from dlojz.course import UserError
from dlojz.table import Table

KINDS = ("talk", "work", "break")  # besides notebooks
LAPTOP, HOURS = "laptop", 2
ABOUT = {"begin": time, "end": time, "teaching_minutes": int}  # what holds for each day


@dataclass(frozen=True)
class Part:
    """A talk, a notebook, work of their own, or a break."""

    kind: str
    name: str
    minutes: int
    catch_up: bool = False  # the notebook before it is left out
    until: str = ""  # the first heading of a notebook that is left out


@dataclass(frozen=True)
class Day:
    """A day's parts, in order. Times are minutes after midnight."""

    title: str
    parts: tuple[Part, ...]
    begin: int
    end: int
    most: int  # minutes of teaching

    @property
    def times(self) -> list[int]:
        """Return the begin of each part, and the end of the last one."""
        return list(accumulate((part.minutes for part in self.parts), initial=self.begin))

    @property
    def teaching(self) -> int:
        """Return the minutes of all parts but the breaks."""
        return sum(part.minutes for part in self.parts if part.kind != "break")

    @property
    def notebooks(self) -> list[str]:
        """Return the names of the notebooks, in order."""
        return [part.name for part in self.parts if part.kind == "notebook"]


# The file ----------------------------------------------------------------------------------------


def file() -> Path:
    """Return the file of all syllabi."""
    return course.course_root() / "solutions" / "syllabi.toml"


def read(path: Path | None = None) -> dict[int, list[Day]]:
    """Return the days of each syllabus, by how many there are. Raises UserError."""
    path = path or file()
    found = _tables(path)
    found.pop(LAPTOP, None)
    begin, end, most = about = [found.pop(key, None) for key in ABOUT]
    if [type(value) for value in about] != [*ABOUT.values()]:
        raise UserError(f"{path}: expected {', '.join(ABOUT)}, as in begin = 09:00:00")
    hours = [60 * at.hour + at.minute for at in (begin, end)]
    syllabi = {}
    for number, tables in found.items():
        if not isinstance(tables, list):
            raise UserError(f"{path}: {number} is no list: expected days [[{number}]]")
        if number != str(len(tables)):
            raise UserError(f"{path}: there are {len(tables)} days [[{number}]]: expected {number}")
        syllabi[int(number)] = [_day(path, number, table, *hours, most) for table in tables]
    return syllabi


def laptop(path: Path | None = None) -> Day:
    """Return the two hours without a GPU, from minute 0 on. Raises UserError."""
    path = path or file()
    return _day(path, LAPTOP, _tables(path).get(LAPTOP, {}), 0, HOURS * 60, HOURS * 60)


def _tables(path):
    content = course.read_small(path)
    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: can't be read as TOML: {error}") from None


def _day(path, number, table, *about):
    try:
        return Day(table["title"], tuple(_part(path, part) for part in table["parts"]), *about)
    except KeyError as error:
        raise UserError(f"{path}: a day [[{number}]] has no {error.args[0]}") from None


def _part(path, table) -> Part:
    match table:
        case {"notebook": name, **more} if more in ({}, {"catch_up": True}):
            notebook = rehearse.find(name)
            return Part("notebook", notebook.stem, rehearse.card_minutes(notebook), bool(more))
        case {"notebook": name, "until": str(until)} if len(table) == 2:
            notebook = rehearse.find(name)
            return Part("notebook", notebook.stem, _minutes(notebook, until), until=until)
        case {"minutes": int(minutes), **more} if minutes > 0 and len(more) == 1:
            ((kind, name),) = more.items()
            if kind in KINDS:
                return Part(kind, name, minutes)
    raise UserError(
        f"{path}: {table}: expected one of {', '.join(KINDS)} with minutes, a whole number; or a "
        "notebook, with catch_up = true if need be"
    )


def _minutes(notebook, until):
    """Return the minutes of a notebook up to a heading: those of its card, by its cells."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    heads = [f"## {until}\n" in "".join(cell["source"]) for cell in cells]
    if True not in heads:
        raise UserError(f"until = {until!r}: expected a heading of {notebook.name}")
    return round(rehearse.card_minutes(notebook) * heads.index(True) / len(cells))


def of(days: int) -> list[Day]:
    """Return the syllabus of that many days."""
    known = read()
    if days not in known:
        there = ", ".join(map(str, sorted(known)))
        raise UserError(f"no syllabus for {days} days: expected one of {there}")
    return known[days]


def notebooks(day: int, days: int) -> list[str]:
    """Return the notebooks of one day of a syllabus."""
    found = of(days)
    if not 1 <= day <= days:
        raise UserError(f"--day {day} --of {days}: expected a day from 1 to {days}")
    return found[day - 1].notebooks


def parts(name: str) -> list[Part]:
    """Return the parts with this name, of all syllabi."""
    days = [day for syllabus in read().values() for day in syllabus]
    return [part for day in days for part in day.parts if part.name == name]


def talks() -> dict[str, Path]:
    """Return the slides of each talk by its title, in the order of the longest syllabus."""
    files = (course.course_root() / "solutions" / "talks").glob("*.md")
    titles = {
        path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# "): path
        for path in files
    }
    days = [day for syllabus in reversed(read().values()) for day in syllabus]
    asked = dict.fromkeys(part.name for day in days for part in day.parts)
    return {name: titles[name] for name in asked if name in titles}


# Does it fit? ------------------------------------------------------------------------------------


def problems(days: Sequence[Day]) -> list[str]:
    """Return the problems of a class: days that are too long, notebooks out of order."""
    said = []
    for number, day in enumerate(days, 1):
        if (end := day.times[-1]) > day.end:
            said.append(f"day {number} ends at {_clock(end)}: expected {_clock(day.end)} or before")
        if day.teaching > day.most:
            said.append(f"day {number} teaches {day.teaching} minutes: expected at most {day.most}")
    parts = [part for day in days for part in day.parts if part.kind == "notebook"]
    names = [part.name for part in parts]
    said += [f"{b} comes after {a}" for a, b in pairwise(names) if a > b]
    said += [f"{name} is there twice" for name in dict.fromkeys(names) if names.count(name) > 1]
    for place, part in enumerate(parts):
        needed = _needed(part.name)
        if needed and not part.catch_up and needed not in names[:place]:
            said.append(f"{part.name} needs {needed} before it, or catch_up = true")
    return said


def _needed(name):
    """Return the notebook that this one goes on from: the step before, or its first part."""
    if name in course.CHAIN:
        return dict(pairwise(reversed(course.CHAIN))).get(name)
    return next((step for step in course.CHAIN if step[:2] == name[:2]), None)


# Showing -----------------------------------------------------------------------------------------


def timetable(day: Day) -> Table:
    """Return the parts of a day: begin, duration and name."""
    rows = [
        (_clock(at), f"{part.minutes} min", part.kind, _said(part) + _slides(part))
        for at, part in zip(day.times, day.parts, strict=False)
    ]
    left = day.most - day.teaching
    rows.append((_clock(day.times[-1]), f"{left} min", "", "left for questions"))
    return Table(("at", "", "", ""), rows, "<><<")


def _said(part):
    if part.until:
        return f"{part.name}, up to its heading {part.until!r}"
    return f"{part.name}, after `dlojz catch-up {part.name[:2]}`" if part.catch_up else part.name


def _slides(part):
    slides = talks().get(part.name) if part.kind == "talk" else None
    return f": {slides.relative_to(course.course_root())}" if slides else ""


def _clock(minutes):
    return f"{minutes // 60:02d}:{minutes % 60:02d}"
