"""The queue of this machine: tickets for its jobs, and a lock for each device.

A `ticket` is for a job that waits, or for all those of a sweep that still wait; a `running` one is
for a job that runs. It is a file in a folder that all users share, held with flock by the waiter or
the keeper: the kernel releases it when that process ends, however it ends. The folder is open to
everybody, so only a plain file that looks like a ticket and is held counts; all else in it is left
alone.

A device's lock is a socket's name in Linux's abstract namespace, which spans the machine
(a container with a network of its own has its own): only one process, and those that inherit the
socket from it, can hold it. It is not a file, so no one can remove or replace it, and it is free as
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
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from dlojz.jobs import processes

LARGEST = 1 << 20  # the most bytes of a ticket, which names each job of a sweep
FORMS = {"run": str, "more": list, "token": str, "devices": list, "locked": list, "process": dict}
UNBORN_S = 60  # a submitter takes less


class QueueError(OSError):
    """The machine's queue folder can't be used: what it is, and what to do."""


def devices() -> tuple[str, ...]:
    """Return the devices that one job at a time may hold: each GPU, or the processor as a whole."""
    from dlojz.course import presets  # who submits asks, and no keeper does

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
            f"{folder} is not a folder that you may write to; its owner is "
            f"{user_name(os.lstat(folder).st_uid)}: ask for `chmod 1777 {folder}`, or {_ELSEWHERE}"
        )
    return folder


_ELSEWHERE = "set DLOJZ_QUEUE to a folder that all users of this machine can write to"


def user_name(uid: int) -> str:
    """Return the name of a user by number."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"number {uid}"


# Tickets ------------------------------------------------------------------------------------


def read(ticket: Path) -> dict | None:
    """Return the content of a ticket, with `held` and `owner`; None if it is no ticket of ours."""
    try:
        fd = os.open(ticket, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # gone, a link, or not readable for us
        return None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):  # a pipe, a folder
            return None
        about = json.loads(os.read(fd, min(LARGEST, found.st_size)))
        if not isinstance(about, dict) or not all(
            isinstance(about.setdefault(k, form()), form) for k, form in FORMS.items()
        ):
            return None
        for key in ("devices", "locked", "more"):
            about[key] = [str(each) for each in about[key]]
        return about | {"held": not _try_lock(fd, fcntl.LOCK_SH), "owner": found.st_uid}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    finally:
        os.close(fd)


def take(runs: Sequence[Path], token: str, wanted: Sequence[str]) -> tuple[Path, int]:
    """Join the queue for one of the devices `wanted`, for the jobs in `runs`, one after the other.

    token: what the jobs' tokens begin with. Returns the ticket and the descriptor that holds it.
    """
    about = {"run": str(runs[0]), "more": [run.name for run in runs[1:]]}
    about |= {"token": token, "devices": list(wanted)}
    number = time.monotonic_ns() // 1000  # of all processes of this machine, whatever its clock
    return make(queue_folder(), "ticket", number, about)


def make(folder: Path, kind: str, number: int, about: dict) -> tuple[Path, int]:
    """Return a new ticket of this process, and the descriptor that holds it."""
    name = f"{number:08d}-{uuid.uuid4().hex[:8]}"
    fresh, fd = folder / f".new-{name}", None
    about = about | {"process": processes.identity(os.getpid())}
    try:
        fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.write(fd, json.dumps(about).encode())
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.fchmod(fd, 0o644)  # the others must be able to read it, but not to lock it first
        ticket = folder / f"{kind}-{name}"
        fresh.rename(ticket)  # held before it can be seen
    except OSError as error:
        if fd is not None:
            os.close(fd)
        with suppress(OSError):
            fresh.unlink()
        raise QueueError(f"no ticket in {folder} ({error.strerror}): {_ELSEWHERE}") from None
    return ticket, fd


def make_running(ticket: Path, about: dict) -> tuple[Path, int]:
    """Return a new ticket of a running job, with the number of one that waits."""
    return make(ticket.parent, "running", _number(ticket), about)


def running(ticket: Path) -> Path:
    """Return the ticket's name once its last job runs, when it no longer blocks the queue."""
    return ticket.with_name(ticket.name.replace("ticket-", "running-"))


def own(fd: int) -> dict:
    """Return the content of the ticket that this descriptor holds."""
    return json.loads(os.pread(fd, LARGEST, 0))


def write(fd: int, **more):
    """Change what a ticket says; fd: the descriptor that holds it.

    It never gets shorter: a reader could see a part of it. A submitter and its waiter share the
    descriptor, and so its position, which therefore is not used.
    """
    text = json.dumps(own(fd) | more).encode()
    with suppress(OSError):  # a full disk: the ticket is still held
        os.pwrite(fd, text.ljust(os.fstat(fd).st_size), 0)


def ahead(ticket: Path, wanted: Sequence[str], read=read) -> Iterator[dict]:
    """Yield the tickets that wait for one of these devices and came earlier, the nearest first."""
    others, mine = _tickets(ticket.parent, "ticket"), (_number(ticket), ticket.name)
    for _, name in reversed(others[: bisect_left(others, mine)]):
        about = read(ticket.with_name(name))
        if about and about["held"] and set(wanted) & set(about["devices"]):
            yield about


def running_on(folder: Path, devices: Sequence[str]) -> list[dict]:
    """Return the tickets of the jobs that run on one of these devices."""
    found = (read(folder / name) for _, name in _tickets(folder, "running"))
    held = (a for a in found if a and a["held"] and set(devices) & set(a["locked"]))
    return [a for a in held if processes.is_alive(a["process"]) is not False]


def abandoned(folder: Path) -> list[tuple[Path, dict]]:
    """Return this user's tickets whose keeper was killed, and what they say."""
    found = ((folder / name, read(folder / name)) for _, name in _tickets(folder))
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


def _tickets(folder, kind=r"ticket|running") -> list[tuple[int, str]]:
    """Return the number and the name of each ticket, in their order."""
    pattern = re.compile(rf"(?:{kind})-(\d{{8,15}})-[0-9a-f]{{8}}")
    with suppress(OSError):
        matches = map(pattern.fullmatch, os.listdir(folder))
        return sorted((int(match[1]), match[0]) for match in matches if match)
    return []


def _number(ticket):
    return int(ticket.name.split("-")[1])


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
        lock = socket.socket(socket.AF_UNIX)
        try:
            lock.bind(_address(folder, device))
        except OSError:
            lock.close()
            continue
        held[device] = lock
        if len(held) == count:
            return held
    for lock in held.values():
        lock.close()
    return {}


def lock_inode(folder: Path, device: str) -> int | None:
    """Return the inode of a device's socket; None if it is free.

    A name in that list may be any user's lie: it is shown, and nothing is ended for it.
    """
    name = _address(folder, device).replace("\0", "@", 1)
    try:
        lines = Path("/proc/net/unix").read_bytes().decode(errors="replace").split("\n")[1:]
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
