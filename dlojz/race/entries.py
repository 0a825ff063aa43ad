"""A race's rules and its entries, in files that several users may share.

An entry is a snapshot of a trainer, of the modules beside it and of its flags. It is read as data:
only `dlojz race run` executes it.
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
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path, PurePosixPath

from dlojz import course, launch
from dlojz.course import UserError, presets
from dlojz.images import dataset
from dlojz.runs import source

RULES, ENTRY = "race.toml", "entry.json"
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,29}")
BY = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,23}|")  # a pseudonym, as on a class board
PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,60}")  # of the path of a file of an entry
LARGEST = 300_000  # bytes of an entry: sources, not weights
ORGANISERS = ("--data", "--seed", "--checkpoint", "--resume", "--test", "--test-nsteps")
NEEDED = ("decode", "build_transforms", "build_model")  # which the judge calls
LIMITS = {  # of the whole numbers in the rules
    "classes": (2, 5000),
    "seed": (0, 2**32 - 1),
    "seconds": (1, 86_400),
    "runs": (2, 100),
    "judged": (1, dataset.MAX_VAL_IMAGES),
    "joules": (1, 10**9),
}
TEXT = """\
# The rules of a race; docs/race.md explains them. After the first round they stay as they are.
data = {data}  # the images to train on, made by `dlojz data`
classes = {classes}
seed = {seed}  # of these images
seconds = {seconds}  # budget of a run, from the start of its process to its end
{joules}
runs = {runs}  # of each entry in a round, each with a seed of its own
judged = {judged}  # images of each class that judge, drawn after the runs
level = {level}  # the risk of putting an entry ahead that is not better
"""


class RaceError(UserError):
    """A mistake in a race, its rules or an entry: what was found, and what to do."""


@dataclass(frozen=True)
class Race:
    """A race, as race.toml has it."""

    folder: Path
    data: str
    classes: int
    seed: int
    seconds: int
    runs: int
    judged: int
    level: float
    joules: int | None = None  # None: no budget of energy

    @property
    def rules(self) -> dict:
        """Return the rules without the folder, ready for JSON."""
        return {name: value for name, value in asdict(self).items() if name != "folder"}


@dataclass(frozen=True)
class Entry:
    """A trainer and its flags, as they were entered."""

    name: str
    by: str  # a pseudonym, or ""
    flags: tuple[str, ...]
    entered: float  # Unix seconds
    files: Mapping[str, bytes]  # the trainer, as launch.beside.COPY, and the modules beside it
    folder: Path

    @property
    def sha256(self) -> str:
        """Return the checksum of its flags and of all its files."""
        parts = [json.dumps(self.flags), *(f"{n}\0{self.files[n]!r}" for n in sorted(self.files))]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    @property
    def trainer(self) -> Path:
        return self.folder / launch.beside.COPY


# The rules ----------------------------------------------------------------------------------------


def new(folder, data=None, seconds=20, joules=None, runs=None, judged=50, level=0.05) -> Race:
    """Make the folder of a race, and return the race.

    data: the images to train on, by default the course's. seconds, joules: the budget of a run;
    None: no budget of energy. runs: of each entry in a round, by default 3 on a CPU, 5 on a GPU.
    judged: images of each class that judge. level: the risk that a tie is taken for a victory.
    Raises RaceError if there is a race already, or for a rule that can't be.
    """
    folder, data = Path(folder), Path(data or course.data_folder()).resolve()
    held = dataset.about(data)
    runs = runs or (5 if presets.gpus() else 3)
    race = Race(
        folder.resolve(), str(data), held["classes"], held["seed"], seconds, runs, judged, level
    )
    race = _checked(asdict(race) | {"joules": joules}, folder / RULES)
    if os.path.lexists(folder / RULES):
        raise RaceError(f"{folder} holds a race already: `dlojz race board {folder}` shows it")
    with course.needs_room(folder):
        (folder / "entries").mkdir(parents=True, exist_ok=True)
    none = "# joules = 3000  # no budget of energy"
    given = f"joules = {joules}  # budget of a run's GPU" if joules else none
    quoted = race.rules | {"data": json.dumps(race.data), "joules": given}
    course.write_atomically(folder / RULES, TEXT.format_map(quoted))
    return race


def open_race(folder) -> Race:
    """Return the race in a folder. Raises RaceError."""
    if isinstance(folder, Race):
        return folder
    file = Path(folder) / RULES
    try:
        held = tomllib.loads(course.read_small(file).decode())
    except FileNotFoundError:
        raise RaceError(
            f"no race in {folder}: expected a file {RULES} in it; `dlojz race new {folder}` makes "
            "one"
        ) from None
    except (OSError, ValueError) as error:
        raise RaceError(f"{file} can't be read: {error}") from None
    return _checked({"folder": Path(folder).resolve()} | held, file)


def _checked(held, file) -> Race:
    """Return the race with these rules. Raises RaceError for one that can't be."""
    known, given = {f.name for f in fields(Race)}, {n for n in held if held[n] is not None}
    for words, names in (("unknown", given - known), ("missing", known - {"joules"} - given)):
        if names:
            raise RaceError(f"{file}: {words} rule {min(names)!r}; known are {sorted(known)}")
    for name, (low, high) in LIMITS.items():
        value = held.get(name)
        if name in given and not (type(value) is int and low <= value <= high):
            raise RaceError(f"{file}: {name} is {value!r}, expected {low} to {high:,}")
    if not (isinstance(held["level"], float) and 0 < held["level"] < 0.5):
        raise RaceError(f"{file}: level is {held['level']!r}, expected a risk such as 0.05")
    if not isinstance(held["data"], str):
        raise RaceError(f"{file}: data is {held['data']!r}, expected a folder")
    return Race(**held)


# Entries ------------------------------------------------------------------------------------------


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
    entry = Entry(name, by, tuple(flags), time.time(), files, race.folder / "entries" / name)
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
    spellings = [text for flag in launch.flags_of(trainer) for text in flag.spellings]
    for word in (flag.partition("=")[0] for flag in flags if flag.startswith("--")):
        if any(own.startswith(word) for own in ORGANISERS):
            raise RaceError(f"leave out {word}: the organiser chooses {', '.join(ORGANISERS)}")
        if not any(known.startswith(word) for known in spellings):
            near = difflib.get_close_matches(word, spellings, 1)
            guess = f"did you mean {near[0]}?" if near else "`--help` lists those it has"
            raise RaceError(f"{trainer} has no flag {word}: {guess}")


def _write(entry):
    """Write an entry's folder under a temporary name, then rename it: it is whole, or absent."""
    temporary = entry.folder.with_name(f".{entry.name}-{secrets.token_hex(4)}")
    about = {"by": entry.by, "flags": entry.flags, "entered": entry.entered}
    about |= {"files": sorted(entry.files), "sha256": entry.sha256}
    try:
        with course.needs_room(entry.folder):
            for path, content in {
                **entry.files,
                ENTRY: json.dumps(about, indent=1).encode(),
            }.items():
                (temporary / path).parent.mkdir(parents=True, exist_ok=True)
                (temporary / path).write_bytes(content)
                (temporary / path).chmod(0o444)
            temporary.rename(entry.folder)
    except FileExistsError:
        raise _taken(entry) from None
    except course.NoRoomError:
        raise
    except OSError as error:
        if entry.folder.exists():
            raise _taken(entry) from None
        raise RaceError(
            f"{entry.folder} can't be written ({error.strerror}): whoever made the race can open "
            f"it to all, `chmod 1777 {entry.folder.parent}`"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _taken(entry):
    return RaceError(
        f"{entry.name!r} is entered already, and an entry is not replaced: choose another name, "
        f"such as {entry.name[:28]}-2"
    )


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
    if len(paths) > 100 or launch.beside.COPY not in paths:
        raise ValueError(f"{ENTRY} names no trainer")
    for path in paths:
        parts = PurePosixPath(path).parts
        if not parts or not all(PART.fullmatch(part) for part in parts):
            raise ValueError(f"{ENTRY} names the file {path!r}")
        if any((folder / Path(*parts[:i])).is_symlink() for i in range(1, len(parts))):
            raise ValueError(f"{path} is behind a link")
    files = {path: course.read_small(folder / path, LARGEST, links=False) for path in paths}
    entry = Entry(folder.name, by, tuple(flags), float(about["entered"]), files, folder)
    if entry.sha256 != about["sha256"]:
        raise ValueError("its files have changed since it was entered: enter it under another name")
    return entry
