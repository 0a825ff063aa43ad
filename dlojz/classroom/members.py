"""The members of a class, read from the files that they share; no file is trusted.

Anybody who can write into the folder may put anything there: links, pipes, gigabytes, HTML, the
name of another trainee. What is not a small, regular, well-formed file is skipped and counted.
"""

import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from dlojz.classroom import summary
from dlojz.classroom.summary import seconds
from dlojz.course import UserError, read_small

SHARED = re.compile(r"[0-9a-f]{16}\.json")  # the name of a shared file
MOST = 1000  # files that are read
MOST_BYTES = 32 * 1024 * 1024  # of all of them; a trainee of the whole course has about 50 kB
AHEAD_S = 600  # by how much another machine's clock may differ
DAY_S = 86400  # a file that is newer by more than that was copied
YEAR_S = 366 * DAY_S  # what is older has nothing to do with this class


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
    ahead: float = 0.0  # by how many seconds this trainee's clock is; all times are corrected


@dataclass(frozen=True)
class Classroom:
    """The trainees who share in a folder, and what in it was not read."""

    members: list[Member]
    skipped: Counter  # why: how many files
    left_out: int  # entries without a proper form, or of no notebook of this course
    notebooks: tuple[str, ...] = ()  # of the course, in order
    time: float = 0.0  # as it was read


def read(folder: str | Path, asked: Iterable[tuple[str, str, str]] = ()) -> Classroom:
    """Return the class of a folder. asked: as `progress.asked` returns it; other keys are left out.

    Raises UserError if there is no such folder, OSError if it can't be listed.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise UserError(f"no folder {folder}: expected the one into which your trainees share")
    places = {(kind, key): notebook for notebook, kind, key in asked}
    now, skipped, left_out, found = time.time(), Counter(), 0, []
    for file in _files(folder, skipped):
        try:
            content, out = summary.parse(read_small(file.path, summary.LARGEST, links=False))
        except (ValueError, OSError) as why:
            refused = isinstance(why, PermissionError)
            skipped["not readable by you" if refused else "damaged"] += 1
            continue
        member, others = _member(content, places, file.stat(follow_symlinks=False).st_mtime, now)
        left_out += out + others
        found.append((file.name, member))
    notebooks = tuple(sorted({*places.values()}))
    return Classroom(_told_apart(found), +skipped, left_out, notebooks, now)


def _files(folder, skipped) -> list[os.DirEntry]:
    """Return the files to read, and count the others by why they are skipped.

    In turns: each owner's newest comes first, so that nobody's thousand files hide another's.
    """
    found = {}
    for file in os.scandir(folder):
        why = "not a shared file" if not SHARED.fullmatch(file.name) else _unfit(file)
        if not why and found.setdefault(file.inode(), file) is not file:
            why = "a second name of a file"
        if why and not file.name.startswith("."):
            skipped[why] += 1
    about = [(file.stat(follow_symlinks=False), file) for file in found.values()]
    about.sort(key=lambda pair: -pair[0].st_mtime)
    turns, size = defaultdict(count), 0
    about.sort(key=lambda pair: next(turns[pair[0].st_uid]))
    fits = [f for info, f in about[:MOST] if (size := size + info.st_size) <= MOST_BYTES]
    skipped["too many files"] = len(about) - len(fits)
    return fits


def _unfit(file) -> str:
    """Return the reason not to read a file; "" for a small, regular one."""
    if file.is_symlink():
        return "a link"
    if not file.is_file(follow_symlinks=False):
        return "not a regular file"
    try:
        size = file.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return "removed just now"
    return "too large" if size > summary.LARGEST else ""


def _member(content, places, written, now) -> tuple[Member, int]:
    """Return a trainee, and how many entries were left out.

    written: when the file was, by the clock of the folder's machine. The trainee's may differ.
    """
    when = min(written, now)
    ahead = seconds(content["time"]) - when
    if abs(ahead) <= AHEAD_S or ahead < -DAY_S:
        when, ahead = min(when, when + ahead), 0.0
    first, last = when - YEAR_S, now + AHEAD_S
    entries = [
        Entry(at, entry["kind"], entry["key"], place, entry)
        for entry in content["entries"]
        if first <= (at := seconds(entry["time"]) - ahead) < last
        and (place := _place(entry, places))
    ]
    runs = []
    for row in content["runs"]:
        given = [row[name] for name in ("submitted", "started", "ended")]
        times = [None if time is None else seconds(time) - ahead for time in given]
        if all(time is None or first <= time < last for time in times):
            runs.append(Run(row["state"], *times))
    out = len(content["entries"]) + len(content["runs"]) - len(entries) - len(runs)
    entries.sort(key=lambda entry: entry.time)
    return Member(content["as"], when, entries, runs, ahead), out


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
    same = defaultdict(list)
    for file, member in found:
        same[member.name.casefold()].append(file)
    members = []
    for file, member in found:
        files = same[member.name.casefold()]
        length = next(n for n in range(4, 17) if len({name[:n] for name in files}) == len(files))
        name = member.name if len(files) == 1 else f"{member.name} ({file[:length]})"
        members.append(replace(member, name=name))
    return sorted(members, key=lambda member: member.name.casefold())
