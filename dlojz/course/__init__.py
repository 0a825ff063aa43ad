"""The course's files and the chain of its steps. Imports neither torch nor the rest of dlojz."""

import difflib
import errno
import fcntl
import getpass
import json
import math
import os
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from html import escape
from pathlib import Path
from typing import IO

from dlojz.course import presets  # noqa: F401  as course.presets

MARKER = ".course-root"  # a file in the top folder of a clone

# The steps that edit the trainer. Each solution is its predecessor with the step's TODOs done; the
# first is the starter.
CHAIN = (
    *("00_start", "01_gpu", "02_amp", "03_channels_last", "04_profiler", "05_dataloader"),
    *("06_ddp", "09_compile", "11_fsdp"),
)
# Exercises beside the trainer, each on the trainee's copy of a prepared file.
PREPARED = {
    "00_cluster": "allocation.sbatch",
    "04_segments": "segments.py",
    "04_slow": "slow.py",
    "09_repair": "repair.py",
}
# One without a verdict: a figure shows whether it is right.
COPIED = {**PREPARED, "06_batchnorm": "batchnorm.py"}
# Their chapters; a step's chapter has the step's name.
CHAPTERS = {
    "00_cluster": "n00c_cluster",
    "04_segments": "n04b_roofline",
    "04_slow": "n04c_slow",
    "06_batchnorm": "n06b_scaling",
    "09_repair": "n09_repair",
}
# A step's second file, which trainees write beside their trainer. It imports it by its path.
BESIDE: dict[str, str] = {}

MEND = "repair it, or move it away to start afresh"  # a damaged file of a trainee's answers
SMALL = 16 * 1024 * 1024  # the largest file to read whole, in bytes
LOCK_S = 1.0  # the longest wait for a lock: another process may be stopped
LARGE = 64 * SMALL  # for a notebook with its figures
FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "your disk quota is used up"}
STARTER = Path(__file__).parents[1] / "dlojz.py"  # in a clone this may be the trainee's file


class UserError(ValueError):
    """An error that a trainee can fix, shown in a notebook as its message, without a traceback.

    So it says what was found, what was expected, and what to type next.
    """

    def _render_traceback_(self):  # IPython's hook
        return [f"{type(self).__name__}: {self}"]


class NoRoomError(OSError, UserError):
    """A full disk or quota: the file to be written, and a way to make room."""

    def __str__(self):
        return self.strerror


class MissingError(FileNotFoundError, UserError):
    """A missing folder or file of the course, and a way to get it."""


class FileError(UserError):
    """A file that can't be read, and its fault."""


def no_room(error: BaseException) -> str:
    """Return the full disk or quota that caused this error, with the remedy; or ""."""
    if not isinstance(error, OSError) or error.errno not in FULL:
        return ""
    return (
        f"{FULL[error.errno]}: `du -sh runs/*` shows what is large; make room (rm -r runs/NUMBER), "
        "then again"
    )


@contextmanager
def needs_room(path: Path):
    """Raise NoRoomError, with the remedy, if `path` can't be written because a disk is full."""
    try:
        yield
    except NoRoomError:
        raise
    except OSError as error:
        if not (why := no_room(error)):
            raise
        raise NoRoomError(error.errno, f"{path} could not be written: {why}") from error


def course_root(start=".") -> Path:
    """Return the course's top folder, $DLOJZ_ROOT or at or above `start`.

    Paths and runs/ are relative to it: a notebook's kernel starts in notebooks/ and a job anywhere.
    """
    if root := os.environ.get("DLOJZ_ROOT"):  # empty counts as unset
        return Path(root).resolve()
    here = Path(start).resolve()
    for folder in (here, *here.parents):
        if (folder / MARKER).exists():
            return folder
    raise MissingError(
        f"no course folder at or above {here}: expected a file {MARKER} in one of them; "
        "cd into your clone, or set DLOJZ_ROOT to it (the package alone has no notebooks and "
        "solutions: git clone the course's repository, whose address your instructor knows)"
    )


def in_a_clone() -> bool:
    """Return whether there is a course folder; the package runs jobs without one, too."""
    try:
        return course_root().is_dir()
    except FileNotFoundError:
        return False


def base_folder() -> Path:
    """Return the folder of runs/ and data/: the course's, or without one the current one."""
    return course_root() if in_a_clone() else Path.cwd()


def data_folder() -> Path:
    """Return the trainer's default folder of images: $DLOJZ_DATA, or data/."""
    return base_folder() / (os.environ.get("DLOJZ_DATA") or "data")


def trainer() -> Path:
    """Return the file that the trainee edits."""
    return course_root() / "dlojz" / "dlojz.py"


def step(name: str | int) -> str:
    """Return the step's full name: "01_gpu" for 1, "1", "01" and "01_gpu"."""
    text = str(name)
    for known in CHAIN:
        if text == known or (text.isdecimal() and int(text) == int(known[:2])):
            return known
    raise LookupError(
        f"no step {text!r} that edits the trainer: expected one of {', '.join(CHAIN)}"
    )


def chapter(name: str) -> str:
    """Return the chapter of a step or of a prepared exercise: a folder of dlojz/chapters/."""
    return CHAPTERS[name] if name in CHAPTERS else f"n{step(name)}"


def experiment(name: str) -> Path:
    """Return a chapter's program, such as "latency.py"."""
    found = list(course_root().glob(f"dlojz/chapters/*/experiments/{name}"))
    if not found:
        raise LookupError(f"no chapter has an experiment {name!r}")
    return found[0]


def prepared(name: str) -> Path:
    """Return the original of an exercise's file."""
    folder = course_root() / "dlojz" / "chapters" / chapter(name) / "experiments"
    return folder / (COPIED | BESIDE)[name]


def own(name: str) -> str:
    """Return the path of the trainee's copy in the course's folder; make it if it is missing.

    An existing copy stays unchanged. To begin again, rename it.
    """
    copy = trainer().with_name(BESIDE[name]) if name in BESIDE else course_root() / COPIED[name]
    if not copy.exists():
        write_atomically(copy, read_small(prepared(name)))
    return str(copy.relative_to(course_root()))


def files_beside(name: str | int) -> list[str]:
    """Return the names of the files that the trainer imports after this step."""
    place = CHAIN.index(step(name))
    return [file for other, file in BESIDE.items() if CHAIN.index(other) <= place]


def file_beside(program: Path, name: str) -> Path:
    """Return the path of a file that a trainee writes beside a program. Raises FileError."""
    file = program.resolve().with_name(name)
    if file.exists():
        return file
    copies = [f'course.own("{other}")' for other, known in BESIDE.items() if known == name]
    how = f"{copies[0]} makes your copy, in {trainer().parent}" if copies else "put it there"
    raise FileError(f"{program} imports {name}, and there is no {file}: {how}")


def solution(name: str | int) -> Path:
    """Return the trainer after this step, or a prepared file without its faults."""
    if name in COPIED:
        return course_root() / "solutions" / COPIED[name]
    return course_root() / "solutions" / f"dlojz_{step(name)}.py"


def before(name: str | int) -> Path:
    """Return the trainer before this step: its starting point."""
    place = CHAIN.index(step(name))
    return solution(CHAIN[max(0, place - 1)])


def catch_up(name: str | int) -> Path | None:
    """Replace the trainee's trainer by the starting point of a step; return its saved copy.

    The files beside it that it imports, and the one that the step edits, are replaced and saved,
    too. None if all were unchanged files of the course.
    """
    start = {trainer().name: read_small(before(name))}
    for file in files_beside(name):
        handed_out = BESIDE.get(step(name)) == file
        start[file] = read_small(prepared(step(name)) if handed_out else _solved(file))
    saved = _save()
    _put_back(start)
    return saved


def restore(name: str | None = None) -> tuple[Path, Path | None]:
    """Make a saved file the trainer again; return it, and the saved copy of the present one.

    name: one of saved(); by default the newest that differs from the trainer and is not empty.
    The files that were saved with it are restored, too.
    """
    mine = _present()
    known = {file.name: file for file in saved()}
    others = [
        file
        for file in known.values()
        if read_small(file) and not _saved_with(file).items() <= mine.items()
    ]
    if name is not None and Path(name).name not in known:
        there = ", ".join(known) or "nothing yet"
        raise LookupError(f"no saved file {name!r}: {_saved_folder()} holds {there}")
    if name is None and not others:
        raise LookupError(
            f"nothing to restore: {_saved_folder()} holds no file that differs from your trainer"
        )
    chosen = known[Path(name).name] if name is not None else others[-1]
    if not read_small(chosen):
        raise FileError(
            f"{chosen} is empty: nothing was restored; `dlojz restore --list` shows all"
        )
    content = _saved_with(chosen)
    kept = _save()
    _put_back(content)
    return chosen, kept


def saved() -> list[Path]:
    """Return the saved trainers, oldest first."""
    return sorted(_saved_folder().glob("dlojz-*.py"))


def _saved_folder():
    return course_root() / "saved"


def _solved(file):
    return course_root() / "solutions" / file


def _files() -> list[Path]:
    return [trainer(), *map(trainer().with_name, BESIDE.values())]


def _present() -> dict[str, bytes]:
    return {file.name: read_small(file) for file in _files() if file.exists()}


def _put_back(contents):
    for name, content in contents.items():
        write_atomically(trainer().with_name(name), content)


def _saved_with(copy) -> dict[str, bytes]:
    """Return the content of a saved trainer and of the files saved with it, by name."""
    when = copy.stem.removeprefix(trainer().stem)
    copies = {file.name: copy.with_stem(f"{file.stem}{when}") for file in _files()}
    return {name: read_small(file) for name, file in copies.items() if file.exists()}


def _save() -> Path | None:
    """Save the trainer and its files; return the copy. None if all are the course's."""
    mine = _present()
    known = {trainer().name: [solution(s) for s in CHAIN]}
    known |= {file: [prepared(other), _solved(file)] for other, file in BESIDE.items()}
    if all(content in map(read_small, known[name]) for name, content in mine.items()):
        return None
    for file in saved():
        if _saved_with(file) == mine:
            return file
    return save_copy(*(trainer().with_name(name) for name in mine))


def save_copy(*files: Path) -> Path:
    """Save copies of a trainee's files in saved/; return the first. Names sort by time."""
    now = f"{datetime.now():%Y%m%d-%H%M%S-%f}"
    copies = [_saved_folder() / f"{file.stem}-{now}{file.suffix}" for file in files]
    for file, copy in zip(files, copies, strict=True):
        with needs_room(copy):
            copy.parent.mkdir(exist_ok=True)
        write_atomically(copy, read_small(file, LARGE))
    return copies[0]


def open_regular(path: str | Path, links: bool = True) -> IO[bytes]:
    """Return an open file that another user may have replaced; raise FileError, or OSError.

    A pipe would wait for its writer, and a device has no end. links: follow a link.
    """

    def opener(name, flags):
        return os.open(name, flags | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW))

    file = open(path, "rb", opener=opener)  # noqa: SIM115  the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise FileError(f"{path} can't be read: it is not a regular file")
    return file


def read_small(path: str | Path, most: int = SMALL, links: bool = True) -> bytes:
    """Return the content of a small file, opened by `open_regular`."""
    with open_regular(path, links) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise FileError(f"{path} can't be read: it is larger than {most:,} bytes")
    return content


def table_of(content: bytes) -> dict:
    """Return the JSON object in `content`, with finite numbers; raise ValueError."""
    try:
        found = json.loads(content, parse_constant=_number, parse_float=_number, parse_int=_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("it holds no table")
    return found


def _number(text):
    """Return a number that a float can hold; raise ValueError for NaN, Infinity, 1e999."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is not a number")
    return int(text) if text.lstrip("-").isdigit() else value


def read_table(path: str | Path, most: int = SMALL, advice: str = "") -> dict:
    """Return the JSON object in a small file; {} if there is no file. Raises FileError.

    advice: the remedy for a file that can't be read, for the error.
    """
    try:
        return table_of(read_small(path, most))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        why = f"{path} can't be read: {getattr(error, 'strerror', None) or error}"
        why = str(error) if isinstance(error, FileError) else why
        raise FileError(f"{why}: {advice}" if advice else why) from error


@contextmanager
def locked(path: Path, seconds: float | None = None) -> Iterator[str]:
    """Hold a lock file; yield "", or the process that holds it if it is not free in time."""
    with needs_room(path):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    end = time.monotonic() + (LOCK_S if seconds is None else seconds)
    try:
        while not (free := _locks(handle)) and time.monotonic() < end:
            time.sleep(0.01)
        if free:
            with suppress(OSError):  # a full disk: the lock has no name then
                os.write(handle, f"{os.getpid():<20}".encode())
        yield "" if free else os.read(handle, 20).decode(errors="replace").strip() or "?"
    finally:
        os.close(handle)


def _locks(handle) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_atomically(path: Path, content: str | bytes):
    """Replace `path` in one step, so that readers see the old content or the new one."""
    # The name has the thread's id because other threads and processes may write at the same time.
    temporary = path.with_name(f".{path.name}.{threading.get_native_id()}")
    with needs_room(path):
        try:
            temporary.write_bytes(content.encode() if isinstance(content, str) else content)
            temporary.replace(path)
        except OSError:  # a full disk: leave nothing behind
            with suppress(OSError):  # some file systems need room to remove a file, too
                temporary.unlink(missing_ok=True)
            raise


def guard_compiled_code():
    """Move this process's temporary folder if others can write to torch.compile's folder in it.

    In a shared /tmp another user may have made torchinductor_<user> before, and torch runs the code
    in it. TORCHINDUCTOR_CACHE_DIR does not move all of it: precompiled headers stay.
    """
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in a container
        name = f"uid_{os.getuid()}"
    code = Path(tempfile.gettempdir(), f"torchinductor_{name}")
    with suppress(OSError):
        if not _is_own(code.parent):  # now, before another user can make it
            code.mkdir(mode=0o700, exist_ok=True)
        if not os.path.lexists(code) or _is_own(code):
            return
    own = os.path.expanduser("~/.cache/dlojz-tmp")
    os.makedirs(own, mode=0o700, exist_ok=True)
    tempfile.tempdir = os.environ["TMPDIR"] = own


def _is_own(folder):
    found = folder.lstat()
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return ours and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


class Diff(str):
    """A unified diff, coloured in a notebook."""

    def _repr_html_(self):
        colours = {
            "+": "rgba(0,158,115,.18)",
            "-": "rgba(213,94,0,.18)",
            "@": "rgba(0,114,178,.14)",
        }
        lines = "".join(
            f'<div style="background:{colours.get(line[:1], "none")}">{escape(line) or " "}</div>'
            for line in self.splitlines()
        )
        return f'<pre style="line-height:1.35">{lines or "no difference"}</pre>'

    def __repr__(self):
        return str(self) or "no difference"


def diff(mine, step: str | int) -> Diff:
    """Return the differences between a job's trainer (or a file) and the solution of a step.

    The differences of files that the solution imports follow.
    """
    path = Path(getattr(mine, "directory", mine))
    path = path / "trainer.py" if path.is_dir() else path
    found = _differences(path, solution(step))
    for file in [] if step in COPIED else files_beside(step):
        found += _differences(path.with_name(file), _solved(file))
    return Diff("\n".join(found))


def _differences(mine, theirs) -> list[str]:
    """Return the lines of a unified diff; `mine` may not exist yet."""
    lines = [
        read_small(file).decode(errors="replace").splitlines()
        if file.exists() or file.name not in BESIDE.values()
        else []
        for file in (mine, theirs)
    ]
    names = _relative(mine), _relative(theirs)
    return [*difflib.unified_diff(*lines, *names, n=2, lineterm="")]


def _relative(path):
    root = course_root()
    return str(path.relative_to(root) if path.is_relative_to(root) else path)
