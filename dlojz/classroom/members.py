"""The members of a class, read from the files that they share; no file is trusted.

Anybody who can write into the folder may put anything there: links, pipes, gigabytes, HTML, the
name of another trainee. What is not a small, regular, well-formed file is skipped and counted.
"""

import os
import re
import stat
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dlojz.classroom import summary
from dlojz.classroom.summary import seconds
from dlojz.course import UserError

SHARED = re.compile(r"[0-9a-f]{16}\.json")  # the name of a shared file
MOST = 1000  # files that are read
AHEAD_S = 600  # by how much another machine's clock may be ahead


@dataclass(frozen=True)
class Entry:
    """Something that a trainee did: a prediction, a verdict, an answer."""

    time: float  # Unix seconds, as all times here
    kind: str
    key: str
    notebook: str  # which asks for it
    fields: dict  # see `summary.FIELDS`


@dataclass(frozen=True)
class Run:
    """A job of a trainee."""

    state: str
    submitted: float | None
    started: float | None
    ended: float | None


@dataclass(frozen=True)
class Member:
    """A trainee who shares: a pseudonym, and what was done, oldest first."""

    name: str  # two of the same name have a part of their file's name behind it
    time: float  # of the file
    entries: list[Entry]
    runs: list[Run]


@dataclass(frozen=True)
class Classroom:
    """The trainees who share in a folder, and what in it was not read."""

    folder: Path
    members: list[Member]
    skipped: Counter  # why: how many files
    left_out: int  # entries without a proper form, or of no notebook of this course
    notebooks: tuple[str, ...] = ()  # of the course, in order
    time: float = 0.0  # as it was read


class Skip(Exception):  # noqa: N818 - not an error
    """The reason why a file is not read."""


def read(folder: str | Path, asked: Iterable[tuple[str, str, str]] = ()) -> Classroom:
    """Return the class of a folder. asked: as `progress.asked` returns it; other keys are left out.

    Raises UserError if there is no such folder, OSError if it can't be listed.
    """
    folder, asked = Path(folder).expanduser(), list(asked)
    if not folder.is_dir():
        raise UserError(f"no folder {folder}: expected the one into which your trainees share")
    now, skipped, left_out, found = time.time(), Counter(), 0, []
    names = sorted(entry.name for entry in os.scandir(folder) if not entry.name.startswith("."))
    shared = [name for name in names if SHARED.fullmatch(name)]
    skipped["not a shared file"] = len(names) - len(shared)
    skipped["too many files"] = len(shared[MOST:])
    for name in shared[:MOST]:
        try:
            content, out = summary.parse(_content(folder / name))
        except (Skip, ValueError, OSError) as why:
            skipped[_reason(why)] += 1
            continue
        member, others = _member(content, asked, now)
        left_out += out + others
        found.append((name, member))
    notebooks = tuple(sorted({notebook for notebook, _, _ in asked}))
    return Classroom(folder, _told_apart(found), +skipped, left_out, notebooks, now)


def _reason(why):
    if isinstance(why, Skip):
        return str(why)
    return "not readable by you" if isinstance(why, PermissionError) else "damaged"


def _content(path) -> bytes:
    """Return the content of a small, regular file; raise Skip for anything else."""
    if path.is_symlink():
        raise Skip("a link")
    # Without waiting: opening a pipe would wait for its other end.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            raise Skip("not a file of its own")
        if found.st_size > summary.LARGEST:
            raise Skip("too large")
        return os.read(handle, summary.LARGEST)
    finally:
        os.close(handle)


def _member(content, asked, now) -> tuple[Member, int]:
    """Return a trainee, and how many entries were left out."""
    places = {(kind, key): notebook for notebook, kind, key in asked}
    latest = now + AHEAD_S
    entries = [
        Entry(at, entry["kind"], entry["key"], place, entry)
        for entry in content["entries"]
        if (at := seconds(entry["time"])) <= latest and (place := _place(entry, places))
    ]
    runs = [run for row in content["runs"] if (run := _run(row, latest))]
    out = len(content["entries"]) + len(content["runs"]) - len(entries) - len(runs)
    when = min(seconds(content["time"]), now)
    return Member(content["as"], when, sorted(entries, key=lambda e: e.time), runs), out


def _run(row, latest) -> Run | None:
    times = [row[name] and seconds(row[name]) for name in ("submitted", "started", "ended")]
    return Run(row["state"], *times) if max(filter(None, times), default=0) <= latest else None


def _place(entry, places) -> str | None:
    """Return the notebook that asks for this; None if none does."""
    kind, key = entry["kind"], entry["key"]
    if kind == "answers":  # such as "00 what if"
        return next((n for n in places.values() if n.partition("_")[0] == key.split(" ")[0]), None)
    if kind == "mysteries":  # asked for in a loop, without their names
        found = (notebook for (asked, _), notebook in places.items() if asked == kind)
        return next(found, None) if len(key) == 1 else None
    kind = {"scores": "predictions", "hints": "verdicts"}.get(kind, kind)
    return places.get((kind, key))


def _told_apart(found) -> list[Member]:
    """Return the trainees by name; those who share a name get a part of their file's behind it."""
    count = Counter(member.name.casefold() for _, member in found)
    members = [
        member
        if count[member.name.casefold()] == 1
        else Member(f"{member.name} ({file[:4]})", member.time, member.entries, member.runs)
        for file, member in found
    ]
    return sorted(members, key=lambda member: member.name.casefold())
