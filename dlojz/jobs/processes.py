"""Processes of this machine: how to start, run, identify and end them.

A number alone does not identify a process: `identity` adds when it started, which tells it from a
later one, and where it runs, which tells it from those of another container or an earlier boot.
"""

import ctypes
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
GRACE_S = 5.0  # between SIGTERM and SIGKILL
PROC = Path("/proc")
ENDED, STOPPED = ("", "Z", "X"), ("T", "t")  # letters of states; "": there is no such process
KEEPER, TOKEN = "DLOJZ_KEEPER", "DLOJZ_JOB"  # variables: of keepers, and of what a job started
_prctl = ctypes.CDLL(None).prctl  # found before a fork, which should not load libraries


class ProgramError(Exception):
    """A program that could not be run, or that failed: what it said.

    missing: there is no such program. cut_short: it was killed, or did not answer, and may have
    done its work all the same.
    """

    def __init__(self, said: str, missing: bool = False, cut_short: bool = False):
        super().__init__(said)
        self.missing, self.cut_short = missing, cut_short


def ask(*argv: str, timeout_s: float = 20, env: Mapping[str, str] | None = None) -> str:
    """Return the output of a program. Raises ProgramError with its message if it fails."""
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            encoding="utf-8",
            timeout=timeout_s,
            env=env,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        raise ProgramError(f"no command {argv[0]} here", missing=True) from None
    except subprocess.TimeoutExpired:
        why = f"{argv[0]} did not answer in {timeout_s} s"
        raise ProgramError(why, cut_short=True) from None
    if done.returncode:
        why = done.stderr.strip() or f"{argv[0]}: exit code {done.returncode}"
        raise ProgramError(why, cut_short=done.returncode < 0)
    return done.stdout


def start(
    argv: Sequence[str],
    out,
    err,
    cwd=None,
    env: Mapping[str, str] | None = None,
    keep: Iterable[int] = (),
    end_with_parent: signal.Signals | None = None,
) -> subprocess.Popen:
    """Start a program in a session of its own, so that it survives an interrupt and our end.

    keep: descriptors that it inherits. end_with_parent: the signal it gets when this process dies.
    """
    return subprocess.Popen(
        argv,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        start_new_session=True,
        pass_fds=tuple(keep),
        preexec_fn=end_with_parent and partial(_prctl, PR_SET_PDEATHSIG, end_with_parent),
    )


def reap_orphans(trainer: subprocess.Popen):
    """Let go of adopted processes that have ended, but not of the trainer: its Popen does that."""
    with suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == trainer.pid:
                break
            os.waitpid(ended.si_pid, 0)


def adopt_orphans():
    """Adopt, from now on, the orphans that our children leave behind."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(end_signal: signal.Signals):
    """Ask the kernel to send us this signal when our parent dies."""
    _prctl(PR_SET_PDEATHSIG, end_signal)


# Telling processes apart ----------------------------------------------------------------------


@cache
def here() -> str:
    """Return the scope of our process numbers: this boot of the kernel, and this container."""
    boot = container = ""  # a sandbox may have neither
    with suppress(OSError):
        boot = (PROC / "sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        container = os.readlink(PROC / "self/ns/pid")
    return f"{boot} {container}"


def identity(pid: int) -> dict:
    """Return the identity of a process, ready for JSON."""
    return {"pid": pid, "started": _stat(pid).started, "where": here()}


def is_alive(process: dict) -> bool | None:
    """Return whether the process with this identity still runs; None if that is unknown here."""
    pid = process.get("pid")
    if process.get("where") != here() or not isinstance(pid, int):
        return None
    found = _stat(pid)
    if not found.state and _is_hidden(pid):
        return None
    return found.state not in ENDED and found.started == process.get("started")


def _is_hidden(pid) -> bool:
    """Return whether /proc hides a process of another user, as it may be mounted (hidepid)."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):  # it has ended, or a ticket lies
        pass
    return False


def may_go_on(process: dict) -> bool:
    """Return False for a process that has ended or was stopped, as far as can be known here."""
    alive = is_alive(process)
    return alive is None or (alive and _stat(process["pid"]).state not in STOPPED)


def wake(process: dict):
    """Let the process with this identity go on, if it was stopped, and end its `Alarm.wait`."""
    if is_alive(process):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process["pid"], signal.SIGCONT)


class Alarm:
    """A wait without polling, for a signal or for the end of other processes.

    It ends with a SIGCONT, which `wake` sends, and with a SIGCHLD. A process has one of them.
    """

    def __init__(self):
        self.hears, self.tells = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self.tells, warn_on_full_buffer=False)
        for number in (signal.SIGCONT, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)  # Python then writes to the pipe

    def wait(self, seconds: float, others: Iterable[dict] = (), blind_s: float | None = None):
        """Wait for a signal, or until one of the processes with these identities has ended.

        Takes `seconds` at most, or `blind_s` if one of them cannot be observed from here.
        """
        poll, watched = select.poll(), []
        poll.register(self.hears, select.POLLIN)
        for process in others:
            try:
                fd = _watch(process)
            except OSError:  # of another container, or the kernel has no such descriptors
                seconds = min(seconds, blind_s)
                continue
            if fd is None:
                seconds = 0
            else:
                watched.append(fd)
                poll.register(fd, select.POLLIN)
        poll.poll(max(0, seconds) * 1000)
        for fd in watched:
            os.close(fd)
        with suppress(BlockingIOError):
            os.read(self.hears, 1 << 16)

    def close(self):
        """Leave the signals to another alarm, such as that of a fork."""
        signal.set_wakeup_fd(-1)
        os.close(self.hears)
        os.close(self.tells)


def _watch(process) -> int | None:
    """Return a descriptor that is readable once a process has ended; None if it has."""
    if process.get("where") != here() or not isinstance(process.get("pid"), int):
        raise OSError("not a process of this machine")
    try:
        fd = os.pidfd_open(process["pid"])
    except (ProcessLookupError, OverflowError):
        return None
    if is_alive(process) is False:  # its number is another one's by now
        os.close(fd)
        return None
    return fd


class _Stat(NamedTuple):
    state: str = ""  # a letter
    parent: int = 0
    started: int = 0  # in clock ticks since boot
    ticks: int = 0  # of CPU time, its own and that of its children that have ended
    pages: int = 0  # of resident memory


def _stat(pid) -> _Stat:
    """Return the kernel's facts about a process; empty ones if it is gone."""
    try:
        with open(f"{PROC}/{pid}/stat", "rb", buffering=0) as file:  # a meter reads thousands
            text = file.read()
    except OSError:
        return _Stat()
    fields = text.rpartition(b")")[2].split()  # the name before it may contain anything
    ticks = sum(map(int, fields[11:15]))
    pages = int(fields[21]) if len(fields) > 21 else 0  # of a sandbox, fewer
    return _Stat(fields[0].decode(), int(fields[1]), int(fields[19]), ticks, pages)


# Ending them ----------------------------------------------------------------------------------


def descendants() -> set[int]:
    """Return our living descendants, except keepers and theirs: a job may submit another job."""
    return {pid for pid, stat in _tree().items() if stat.state not in ENDED}


def used() -> list[_Stat]:
    """Return the kernel's facts about our descendants, except keepers and theirs."""
    return [*_tree().values()]


def _tree():
    """Return the facts about our descendants by pid, except keepers and theirs."""
    every, children = {pid: _stat(pid) for pid in _all()}, {}
    for pid, stat in every.items():
        children.setdefault(stat.parent, []).append(pid)
    found, new = {}, {os.getpid()}
    while new:
        new = {child for pid in new for child in children.get(pid, []) if not _is_keeper(child)}
        found |= {pid: every[pid] for pid in new}
    return found


def leftovers(token: str, leader: dict | None) -> set[int]:
    """Return this user's processes that belong to a job: by its token in $DLOJZ_JOB, or by session.

    leader: the identity of the session's first process. If its number has been reused, so has the
    session's.
    """
    found = with_variable(f"{TOKEN}={token}")
    if session := _session(leader):
        found |= _ours(lambda pid: os.getsid(pid) == session)
    return set(filter(_lives, found))


def _session(leader):
    if leader is None or leader["where"] != here():
        return None
    known = _stat(leader["pid"])
    return leader["pid"] if not known.state or known.started == leader["started"] else None


def with_variable(variable: str) -> set[int]:
    """Return this user's other processes that were started with this variable: "NAME=value"."""
    return _ours(lambda pid: variable.encode() in _environment(pid))


def holders(inodes: Iterable[int]) -> set[int]:
    """Return this user's other processes that have a socket with one of these inodes open."""
    wanted = {f"socket:[{inode}]" for inode in inodes}

    def holds(pid):
        return any(os.readlink(file) in wanted for file in (PROC / str(pid) / "fd").iterdir())

    return _ours(holds)


def end(find: Callable[[], set[int]], grace_s: float = GRACE_S) -> set[int]:
    """End the processes that `find()` returns, again and again until it returns none.

    First they get a SIGTERM, once each; after `grace_s` they are killed. Returns those that survive
    even that: they hang in the kernel, or belong to another user.
    """
    begin, asked = time.monotonic(), set()
    while pids := find():
        late = time.monotonic() > begin + grace_s
        for pid in pids if late else pids - asked:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
                os.kill(pid, signal.SIGCONT)  # a stopped one would not react
        asked |= pids
        reap()
        if time.monotonic() > begin + 2 * grace_s:
            return find()
        time.sleep(0.02)
    reap()
    return set()


def reap():
    """Reap the children that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _environment(pid):
    """Return the variables that a process was started with."""
    return (PROC / str(pid) / "environ").read_bytes().split(b"\0")


def _is_keeper(pid) -> bool:
    try:
        return f"{KEEPER}=1".encode() in _environment(pid)
    except OSError:
        return False


def _lives(pid) -> bool:
    return _stat(pid).state not in ENDED


def _all():
    return (int(name) for name in os.listdir(PROC) if name.isdigit())


def _ours(wanted: Callable[[int], bool]) -> set[int]:
    """Return this user's other processes of which this is true: not all users', even for root."""
    found = set()
    for pid in _all():
        with suppress(OSError):  # it has ended
            if (PROC / str(pid)).stat().st_uid == os.getuid() and wanted(pid):
                found.add(pid)
    return found - {os.getpid()}
