"""Whose turn it is on this machine: a ticket for each job, and a lock for each device.

They are files in a folder of the machine, shared by all users, and held with flock: the kernel lets
go of them when their process ends, however it ends. A ticket that nobody holds belongs to a
supervisor that died.
"""

import fcntl
import json
import os
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path

from dlojz import presets


def devices() -> tuple[str, ...]:
    """What one job at a time may hold: each GPU, or else the processor as a whole."""
    return presets.gpus() or ("cpu",)


def queue_folder() -> Path:
    """The machine's folder of tickets and locks: $DLOJZ_QUEUE, or one in /tmp for all users."""
    # Not tempfile's folder: TMPDIR may be one for each session, and all must meet.
    folder = Path(os.environ.get("DLOJZ_QUEUE") or "/tmp/dlojz-queue").resolve()
    if not folder.is_dir():
        fresh = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
        fresh.mkdir(parents=True)
        fresh.chmod(0o1777)  # all users write, none removes another's files
        try:
            fresh.rename(folder)
        except OSError:  # somebody was faster
            fresh.rmdir()
    return folder


def _open(path: Path) -> int:
    """A descriptor to lock: read only, so that it works on other users' files, and never a link."""
    while True:
        try:
            return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            pass
        try:
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            os.fchmod(fd, 0o644)  # others must be able to lock it, whatever this user's umask
            os.close(fd)
        except FileExistsError:  # somebody was faster
            continue


def _try_lock(fd: int, kind=fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _whole_queue(folder):
    fd = _open(folder / "lock")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def take_ticket(run: Path) -> tuple[Path, int]:
    """Join the queue for the job in `run`: the ticket and the open descriptor that holds it."""
    folder = queue_folder()
    with _whole_queue(folder):
        for ticket in (*folder.glob("ticket-*"), *folder.glob("running-*")):
            if not _is_held(ticket):
                with suppress(PermissionError):  # another user's: they will
                    ticket.unlink(missing_ok=True)
        number = max((int(t.name.split("-")[1]) for t in folder.glob("ticket-*")), default=0) + 1
        name = f"{number:08d}-{uuid.uuid4().hex[:8]}"
        fresh = folder / f"new-{name}"
        fresh.write_text(json.dumps({"run": str(run), "user": os.getuid()}))
        fresh.chmod(0o644)
        fd = _open(fresh)
        fcntl.flock(fd, fcntl.LOCK_EX)
        ticket = folder / f"ticket-{name}"
        fresh.rename(ticket)  # held before it can be seen
    return ticket, fd


def is_alive(ticket: Path) -> bool:
    """Is the supervisor with this ticket, waiting or running, alive?"""
    return _is_held(ticket) or _is_held(running(ticket))


def running(ticket: Path) -> Path:
    """The ticket's name once its job runs: it is nobody's predecessor any more."""
    return ticket.with_name(ticket.name.replace("ticket-", "running-"))


def _is_held(ticket: Path) -> bool:
    try:
        fd = os.open(ticket, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not _try_lock(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)


def is_first(ticket: Path) -> bool:
    """Has nobody who waits come before?"""
    earlier = (t for t in ticket.parent.glob("ticket-*") if t.name < ticket.name)
    return not any(_is_held(t) for t in earlier)


def grab(count: int) -> dict[str, int]:
    """Locks on `count` free devices, as {device: descriptor}; empty if fewer are free."""
    held = {}
    for device in devices():
        fd = _open(queue_folder() / f"device-{device}")
        if len(held) < count and _try_lock(fd):
            held[device] = fd
        else:
            os.close(fd)
    if len(held) < count:
        for fd in held.values():
            os.close(fd)
        return {}
    return held
