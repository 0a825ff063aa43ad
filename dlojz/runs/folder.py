"""The folder of a run, runs/<number>, the names of the files in it, and the recorded runs."""

import re
from itertools import count, takewhile
from pathlib import Path

from dlojz.course import MissingError, base_folder, course_root, needs_room

NUMBER = re.compile("[0-9]{1,9}")  # a run's folder
LAST = 10**6  # a larger number is not one of ours, and the next run does not go on from it


def new_run() -> Path:
    """Make and return a fresh folder runs/<number>, even while other processes do the same."""
    runs = base_folder() / "runs"
    with needs_room(runs):
        runs.mkdir(exist_ok=True)
    numbers = (int(p.name) for p in runs.iterdir() if NUMBER.fullmatch(p.name))
    number = max((number for number in numbers if number <= LAST), default=0)
    while True:
        number += 1
        folder = runs / f"{number:04d}"
        try:
            with needs_room(folder):
                folder.mkdir()
        except FileExistsError:  # another process was faster
            continue
        return folder


def path_of(run) -> Path:
    """Return the place of a run's log: the folder of a Job, else the given folder or file."""
    return Path(getattr(run, "directory", run))


def events_file(folder, rank: int = 0) -> Path:
    """Return the path of the log of one process of the run in `folder`."""
    return Path(folder) / ("events.jsonl" if rank == 0 else f"events.rank{rank}.jsonl")


def group_file(folder, rank: int = 0) -> Path:
    """Return the path of a file that is there if this process ended inside its process group."""
    return Path(folder) / f"in-group.rank{rank}"


def trace_file(folder, rank: int = 0) -> Path:
    """Return the path of the compressed trace of one process of the run in `folder`."""
    return Path(folder) / ("trace.json.gz" if rank == 0 else f"trace.rank{rank}.json.gz")


def trace_files(folder) -> list[Path]:
    """Return the paths of the traces of all processes of a run, in the order of their ranks."""
    files = (trace_file(folder, rank) for rank in count())
    return list(takewhile(Path.exists, files))


def recorded(name: str) -> Path:
    """Return the recording reference/<name>: a log, or the folder of a run of several processes."""
    for path in (_reference() / f"{name}.jsonl", _reference() / name):
        if path.exists():
            return path
    raise MissingError(f"no recording {_reference()}/{name}: {_what_is_there()}")


def recordings(pattern: str) -> list[Path]:
    """Return the recordings whose names match, sorted; such as "h100/01-resnet50-fp32-*"."""
    found = sorted(
        path for path in _reference().glob(pattern) if path.is_dir() or path.suffix == ".jsonl"
    )
    if not found:
        raise MissingError(f"no recordings {_reference()}/{pattern}: {_what_is_there()}")
    return found


def _reference():
    return course_root() / "reference"


def _what_is_there():
    folders = sorted(path.name for path in _reference().iterdir() if path.is_dir())
    return f"expected a name in one of the folders {', '.join(folders)}"
