"""The entries of a race: snapshots in files that several users may share.

An entry is a trainer, the modules beside it, and its flags. It is read as data: only
`dlojz race run` executes it.
"""

import ast
import difflib
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from dlojz import course, launch
from dlojz.race.rules import RaceError, open_race
from dlojz.runs import source

ENTRY = "entry.json"
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,29}")
BY = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,23}|")  # a pseudonym, as on a class board
PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,60}")  # of the path of a file of an entry
LARGEST = 300_000  # bytes of an entry: sources, not weights
ORGANISERS = ("--data", "--seed", "--checkpoint", "--resume", "--test", "--test-nsteps")
NEEDED = ("decode", "build_transforms", "build_model")  # which the judge calls


@dataclass(frozen=True)
class Entry:
    """A trainer and its flags, as they were entered."""

    name: str
    by: str  # a pseudonym, or ""
    flags: tuple[str, ...]
    entered: float  # Unix seconds
    files: Mapping[str, bytes]  # the trainer, as launch.beside.COPY, and the modules beside it
    folder: Path
    owner: int  # number of the user

    @property
    def sha256(self) -> str:
        """Return the checksum of its flags and of all its files."""
        parts = [json.dumps(self.flags), *(f"{n}\0{self.files[n]!r}" for n in sorted(self.files))]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def copied(self, folder: Path) -> Path:
        """Write its files into a new folder, and return the trainer's path."""
        for path, content in self.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        return folder / launch.beside.COPY


def enter(race, name: str, command, by: str = "") -> Entry:
    """Enter a trainer and its flags, such as "dlojz/dlojz.py --model resnet18 -e 3".

    A snapshot is taken: later edits do not matter. by: a pseudonym. Nothing of it is run. Raises
    RaceError for a name that is taken, or for an entry that the judge could not judge.
    """
    race = open_race(race)
    if not (isinstance(name, str) and NAME.fullmatch(name)):
        raise RaceError(
            f"{name!r} is not a name: expected at most 30 small letters, digits and -, as in my-net"
        )
    if not BY.fullmatch(by):
        raise RaceError(f"{by!r} is no pseudonym: at most 24 letters, digits, spaces and . _ -")
    trainer, flags = launch.trainer_and_flags(command)
    _check_trainer(trainer)
    _check_flags(trainer, flags)
    files = launch.sources(trainer)
    if (size := sum(map(len, files.values()))) > LARGEST:
        raise RaceError(
            f"{trainer} and its modules have {size:,} bytes, expected at most {LARGEST:,}: an "
            "entry is a program, and learns all else within the budget"
        )
    folder = race.folder / "entries" / name
    entry = Entry(name, by, tuple(flags), time.time(), files, folder, os.getuid())
    _write(entry)
    return entry


def _check_trainer(trainer):
    """Raise an error unless the judge can load the trainer's model and its images."""
    source.must_be_trainer(trainer)
    tree = ast.parse(trainer.read_bytes())
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    if missing := [name for name in NEEDED if name not in defined]:
        raise RaceError(
            f"{trainer} has no {', '.join(missing)}, with which the judge loads your weights: keep "
            "these functions of the course's trainer"
        )


def _check_flags(trainer, flags):
    _check_reserved(flags)
    spellings = [text for flag in launch.flags_of(trainer) for text in flag.spellings]
    for word in _names(flags):
        if not any(known.startswith(word) for known in spellings):
            near = difflib.get_close_matches(word, spellings, 1)
            guess = f"did you mean {near[0]}?" if near else "`--help` lists those it has"
            raise RaceError(f"{trainer} has no flag {word}: {guess}")


def _check_reserved(flags):
    """Raise RaceError for a flag of the organiser's, also for the beginning of its name."""
    for word in _names(flags):
        if any(own.startswith(word) for own in ORGANISERS):
            raise RaceError(f"leave out {word}: the organiser chooses {', '.join(ORGANISERS)}")


def _names(flags):
    return [flag.partition("=")[0] for flag in flags if flag.startswith("--")]


def _write(entry):
    """Write an entry's folder under a temporary name, then rename it: it is whole, or absent."""
    temporary = entry.folder.with_name(f".{entry.name}-{secrets.token_hex(4)}")
    about = {"by": entry.by, "flags": entry.flags, "entered": entry.entered}
    about |= {"files": sorted(entry.files), "sha256": entry.sha256}
    try:
        with course.needs_room(entry.folder):
            entry.copied(temporary)
            (temporary / ENTRY).write_text(json.dumps(about, indent=1), encoding="utf-8")
            for path in (temporary, *temporary.rglob("*")):  # the organiser may be another user
                path.chmod(0o755 if path.is_dir() else 0o444)
            temporary.rename(entry.folder)
    except course.NoRoomError:
        raise
    except OSError as error:
        if os.path.lexists(entry.folder):
            raise RaceError(
                f"{entry.name!r} is entered already, and an entry is not replaced: choose another "
                f"name, such as {entry.name[:28]}-2"
            ) from None
        raise RaceError(
            f"{entry.folder} can't be written ({error.strerror}): the owner of the race can open "
            f"it to all, `chmod 1777 {entry.folder.parent}`"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def entries(race) -> tuple[list[Entry], dict[str, str]]:
    """Return the entries in the order in which they came, and why others can't be read, by name."""
    race, found, damaged = open_race(race), [], {}
    for folder in sorted((race.folder / "entries").iterdir()):
        if folder.name.startswith("."):  # just being written
            continue
        try:
            found.append(_read(folder))
        except (KeyError, OSError, TypeError, ValueError) as error:
            damaged[folder.name] = str(error)
    return sorted(found, key=lambda entry: (entry.entered, entry.name)), damaged


def _read(folder) -> Entry:
    """Return the entry in a folder, which another user may have made: nothing in it is trusted."""
    if not NAME.fullmatch(folder.name) or folder.is_symlink() or not folder.is_dir():
        raise ValueError("not the folder of an entry")
    about = course.table_of(course.read_small(folder / ENTRY, LARGEST, links=False))
    paths, flags, by = about["files"], about["flags"], about["by"]
    if not all(isinstance(text, str) for text in (*paths, *flags, by)) or not BY.fullmatch(by):
        raise ValueError(f"{ENTRY} is damaged")
    _check_reserved(flags)
    if len(paths) > 100 or launch.beside.COPY not in paths:
        raise ValueError(f"{ENTRY} names no trainer")
    for path in paths:
        parts = PurePosixPath(path).parts
        if not parts or not all(PART.fullmatch(part) for part in parts):
            raise ValueError(f"{ENTRY} names the file {path!r}")
        if any((folder / Path(*parts[:i])).is_symlink() for i in range(1, len(parts))):
            raise ValueError(f"{path} is behind a link")
    files = {path: course.read_small(folder / path, LARGEST, links=False) for path in paths}
    when, owner = float(about["entered"]), folder.stat().st_uid
    entry = Entry(folder.name, by, tuple(flags), when, files, folder, owner)
    if entry.sha256 != about["sha256"]:
        raise ValueError("its files have changed since it was entered: enter it under another name")
    return entry
