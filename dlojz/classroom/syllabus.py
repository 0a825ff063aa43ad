"""The course in one, two or four days: its notebooks, talks and breaks, and when each begins.

    dlojz syllabus --days 2          # the timetable, and what does not fit
    dlojz rehearse --day 2 --of 4    # a day's notebooks, unattended

solutions/syllabi.toml says what is taught on which day, and a notebook's card how long it takes.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from dlojz import course
from dlojz.classroom import rehearse
from dlojz.course import UserError
from dlojz.table import Table

KINDS = ("talk", "notebook", "work", "break")
ABOUT = {"begin": str, "end": str, "teaching_minutes": int}  # what holds for each day


@dataclass(frozen=True)
class Part:
    """A talk, a notebook, work of their own, or a break."""

    kind: str
    name: str
    minutes: int
    catch_up: bool = False  # the notebook before it is left out


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
    content = course.read_small(path)
    try:
        found = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: can't be read as TOML: {error}") from None
    about = {key: found.pop(key, None) for key in ABOUT}
    for key, kind in ABOUT.items():
        if not isinstance(about[key], kind):
            raise UserError(f'{path}: expected a line such as {key} = "09:00", or = 390 minutes')
    hours = [_minutes_of(path, about[key]) for key in ("begin", "end")]
    syllabi = {}
    for number, tables in found.items():
        if not isinstance(tables, list):
            raise UserError(f"{path}: {number} is no list: expected days [[{number}]]")
        if number != str(len(tables)):
            raise UserError(f"{path}: there are {len(tables)} days [[{number}]]: expected {number}")
        days = [_day(path, number, table, *hours, about["teaching_minutes"]) for table in tables]
        syllabi[int(number)] = days
    return syllabi


def _minutes_of(path, text):
    hour, _, minute = text.partition(":")
    if not (hour.isdecimal() and minute.isdecimal() and int(hour) < 24 and int(minute) < 60):
        raise UserError(f"{path}: {text!r} is not a time: expected one such as 09:00")
    return 60 * int(hour) + int(minute)


def _day(path, number, table, *about):
    try:
        return Day(table["title"], tuple(_part(path, part) for part in table["parts"]), *about)
    except KeyError as error:
        raise UserError(f"{path}: a day [[{number}]] has no {error.args[0]}") from None


def _part(path, table) -> Part:
    table = table if isinstance(table, Mapping) else {}
    kinds = [kind for kind in KINDS if kind in table]
    allowed = {"catch_up"} if kinds == ["notebook"] else {"minutes"}
    if len(kinds) != 1 or set(table) - {*kinds, *allowed}:
        raise UserError(
            f"{path}: {dict(table)}: expected one of {', '.join(KINDS)}; with minutes, or for a "
            "notebook with catch_up if need be"
        )
    (kind,) = kinds
    if kind == "notebook":
        notebook = rehearse.find(table[kind])
        return Part(kind, notebook.stem, rehearse.card_minutes(notebook), "catch_up" in table)
    if not isinstance(table.get("minutes"), int) or table["minutes"] < 1:
        raise UserError(f"{path}: {dict(table)}: expected minutes, as a whole number")
    return Part(kind, table[kind], table["minutes"])


def of(days: int) -> list[Day]:
    """Return the syllabus of that many days."""
    known = read()
    if days not in known:
        raise UserError(f"no syllabus for {days} days: expected {_listed(known)}")
    return known[days]


def notebooks(day: int, days: int) -> list[str]:
    """Return the notebooks of one day of a syllabus."""
    found = of(days)
    if not 1 <= day <= days:
        raise UserError(f"--day {day} --of {days}: expected a day from 1 to {days}")
    return found[day - 1].notebooks


def _listed(numbers):
    *most, last = map(str, sorted(numbers))
    return f"{', '.join(most)} or {last}" if most else last


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
        place = course.CHAIN.index(name)
        return course.CHAIN[place - 1] if place else None
    number = name[:2]
    return next((step for step in course.CHAIN if step.startswith(number)), None)


# Showing -----------------------------------------------------------------------------------------


def timetable(day: Day) -> Table:
    """Return the parts of a day: begin, duration and name."""
    rows = [
        (_clock(time), f"{part.minutes} min", part.kind, _said(part))
        for time, part in zip(day.times, day.parts, strict=False)
    ]
    left = day.most - day.teaching
    rows.append((_clock(day.times[-1]), f"{left} min", "", "left for questions"))
    return Table(("at", "", "", ""), rows, "<><<")


def _said(part):
    return f"{part.name}, after `dlojz catch-up {part.name[:2]}`" if part.catch_up else part.name


def _clock(minutes):
    return f"{minutes // 60:02d}:{minutes % 60:02d}"
