"""The queue of this machine: a ticket for each job, and a lock for each device.

A ticket is a file in a folder that all users share, held with flock by the keeper of its job: the
kernel releases it when the keeper ends, however it ends. The folder is open to everybody, so only
a plain file that looks like a ticket and is held counts; all else in it is left alone.

A device's lock is a socket's name in Linux's abstract namespace, which spans the machine
(a container with a network of its own has its own): only one process, and those that inherit the
socket from it, can hold it. It is not a file, so nobody can remove or replace it, and it is free as
soon as the last of them ends.
"""

import fcntl
import hashlib
import json
import os
import pwd
import re
import socket
import stat
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dlojz.jobs import processes

TICKET = re.compile(r"(ticket|running)-(\d{8,15})-[0-9a-f]{8}")
LARGEST = 1 << 16  # the most bytes of a ticket
UNBORN_S = 60  # a submitter takes less
LAST = 10**15 - 1  # the largest number that a ticket can have


class QueueError(OSError):
    """The machine's queue folder can't be used: what it is, and what to do."""


def devices() -> tuple[str, ...]:
    """Return what one job at a time may hold: each GPU, or else the processor as a whole."""
    from dlojz import presets  # who submits asks, and no keeper does

    return presets.gpus() or ("cpu",)


def queue_folder() -> Path:
    """Return the machine's folder of tickets: $DLOJZ_QUEUE, or one in /tmp for all users."""
    # Not tempfile's folder: TMPDIR may differ between sessions, and all must share the queue.
    chosen = os.environ.get("DLOJZ_QUEUE")
    folder = Path(chosen).resolve() if chosen else Path("/tmp/dlojz-queue")
    if not os.path.lexists(folder):
        fresh = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
        try:
            fresh.mkdir(parents=True)
            fresh.chmod(0o1777)  # all users write, none removes another's files
        except OSError as error:
            raise QueueError(f"no queue folder {folder} ({error.strerror}): {_ELSEWHERE}") from None
        try:
            fresh.rename(folder)
        except OSError:  # another process was faster
            fresh.rmdir()
    if folder.is_symlink() or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise QueueError(
            f"{folder} is not a folder that you may write to; its owner is {folder_owner(folder)}: "
            f"ask for `chmod 1777 {folder}`, or {_ELSEWHERE}"
        )
    return folder


_ELSEWHERE = "set DLOJZ_QUEUE to a folder that all users of this machine can write to"


def folder_owner(path: Path) -> str:
    """Return the name of the user who owns a file."""
    return user_name(os.lstat(path).st_uid)


def user_name(uid: int) -> str:
    """Return the name of a user by number."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"number {uid}"


# Tickets ------------------------------------------------------------------------------------


def take(run: Path, token: str, wanted: Sequence[str]) -> tuple[Path, int]:
    """Join the queue for one of the devices `wanted`, for the job in `run` with this token.

    Returns the ticket and the open descriptor that holds it.
    """
    folder = queue_folder()
    held = (ticket for ticket in _tickets(folder) if (about := read(ticket)) and about["held"])
    number = max(map(_number, held), default=0) + 1
    name = f"{min(number, LAST):08d}-{uuid.uuid4().hex[:8]}"
    fresh, fd = folder / f".new-{name}", None
    about = {"run": str(run), "token": token, "devices": list(wanted)}
    try:
        fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        os.fchmod(fd, 0o644)  # the others must be able to read it, whatever this user's umask
        os.write(fd, json.dumps(about).encode())
        fcntl.flock(fd, fcntl.LOCK_EX)
        ticket = folder / f"ticket-{name}"
        fresh.rename(ticket)  # held before it can be seen
    except OSError as error:
        if fd is not None:
            os.close(fd)
        with suppress(OSError):
            fresh.unlink()
        raise QueueError(f"no ticket in {folder} ({error.strerror}): {_ELSEWHERE}") from None
    return ticket, fd


def running(ticket: Path) -> Path:
    """Return the ticket's name once its job runs, when it no longer blocks the queue."""
    return ticket.with_name(ticket.name.replace("ticket-", "running-"))


def write(fd: int, **more):
    """Add to what a ticket says; fd: the descriptor that holds it."""
    os.lseek(fd, 0, os.SEEK_SET)
    about = json.loads(os.read(fd, LARGEST)) | more
    os.lseek(fd, 0, os.SEEK_SET)
    with suppress(OSError):  # a full disk: the ticket is still held
        os.write(fd, json.dumps(about).encode())


def before(ticket: Path, wanted: Sequence[str]) -> list[dict]:
    """Return the tickets of jobs that wait for one of these devices and came earlier."""
    mine = (_number(ticket), ticket.name)
    found = []
    for other in _tickets(ticket.parent):
        if other.name.startswith("ticket-") and (_number(other), other.name) < mine:
            about = read(other)
            if about and about["held"] and set(wanted) & set(about["devices"]):
                found.append(about)
    return found


def abandoned(folder: Path) -> list[tuple[Path, dict]]:
    """Return this user's tickets whose keeper was killed, and what they say."""
    found = ((ticket, read(ticket)) for ticket in _tickets(folder))
    mine = [(ticket, about) for ticket, about in found if about and about["owner"] == os.getuid()]
    # After that another user may hold it.
    return [(t, a) for t, a in mine if not a["held"] or processes.is_alive(a["process"]) is False]


def remove_unborn(folder: Path):
    """Remove what this user's submitters left that were killed before their ticket had a name."""
    for file in folder.glob(".new-*"):
        with suppress(OSError):
            found = file.lstat()
            if found.st_uid == os.getuid() and found.st_mtime < time.time() - UNBORN_S:
                file.unlink()


def read(ticket: Path) -> dict | None:
    """Return what a ticket says, with `held` and `owner`; None if it is no ticket of ours."""
    try:
        fd = os.open(ticket, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # gone, a link, or not readable for us
        return None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):  # a pipe, a folder
            return None
        about = json.loads(os.read(fd, LARGEST))
        forms = {"run": str, "token": str, "devices": list, "locked": list, "process": dict}
        if not all(isinstance(about.setdefault(k, form()), form) for k, form in forms.items()):
            return None
        about["devices"] = [str(device) for device in about["devices"]]
        return about | {"held": not _try_lock(fd, fcntl.LOCK_SH), "owner": found.st_uid}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    finally:
        os.close(fd)


def _tickets(folder):
    with suppress(OSError):
        return [folder / name for name in os.listdir(folder) if TICKET.fullmatch(name)]
    return []


def _number(ticket):
    return int(TICKET.fullmatch(ticket.name)[2])


def _try_lock(fd, kind) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# Devices --------------------------------------------------------------------------------------


def grab(folder: Path, wanted: Sequence[str], count: int) -> dict[str, socket.socket]:
    """Return locks on `count` free devices of these, by device; {} if fewer are free."""
    held = {}
    for device in wanted:
        if len(held) == count:
            break
        lock = socket.socket(socket.AF_UNIX)
        try:
            lock.bind(_address(folder, device))
        except OSError:
            lock.close()
        else:
            held[device] = lock
    if len(held) < count:
        for lock in held.values():
            lock.close()
        return {}
    return held


def holder(folder: Path, device: str) -> dict | None:
    """Return what the ticket of the job that runs on a device says; None if no job does."""
    for ticket in _tickets(folder):
        if ticket.name.startswith("running-"):
            about = read(ticket)
            if about and about["held"] and device in about["locked"]:
                return about
    return None


def lock_inode(folder: Path, device: str) -> int | None:
    """Return the inode of a device's socket, by which its holders are found; None if free."""
    name = _address(folder, device).replace("\0", "@", 1)
    try:
        lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    except OSError:  # a sandbox without it: then nobody can tell
        return None
    for columns in (line.split(maxsplit=7) for line in lines):
        if columns[7:] == [name]:
            return int(columns[6])
    return None


def _address(folder, device):
    """Return the socket name of a queue's device, within the 107 bytes that Linux allows."""
    queue = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    name = device if len(device) < 60 else hashlib.sha256(device.encode()).hexdigest()
    return f"\0dlojz-{queue}-{name}"
