"""Files that others may damage, lock or replace: read with an error that says what to do.

The room's errors are here as well; `dlojz.course` shows all of it by the same names.
"""

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
from pathlib import Path
from typing import IO

MEND = "repair it, or move it away to start afresh"  # a damaged file of a trainee's answers
SMALL = 16 * 1024 * 1024  # the largest file to read whole, in bytes
LOCK_S = 1.0  # the longest wait for a lock: another process may be stopped
LARGE = 64 * SMALL  # for a notebook with its figures
FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "your disk quota is used up"}


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


def read_table(path: str | Path, advice: str = "") -> dict:
    """Return the JSON object in a small file; {} if there is no file. Raises FileError.

    advice: the remedy for a file that can't be read, for the error.
    """
    try:
        return table_of(read_small(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        why = str(error)
        if not isinstance(error, FileError):
            why = f"{path} can't be read: {getattr(error, 'strerror', None) or error}"
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
