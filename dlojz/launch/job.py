"""A submitted job: its state, how to cancel and explain it, and how to find jobs again."""

import json
import os
import re
import shlex
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from dlojz.course import FileError, base_folder, read_small, read_table, write_atomically
from dlojz.jobs import keeper
from dlojz.jobs.keeper import Cause
from dlojz.launch import asking, beside
from dlojz.launch.follow import Bar
from dlojz.launch.here import Here
from dlojz.launch.slurm import Slurm
from dlojz.runs import by_hand, outcome, outside
from dlojz.runs.folder import NUMBER
from dlojz.table import Table

QUEUE = ("job", "name", "state", "time", "processes", "note", "command")  # a process per GPU
QUEUE_S = 4.0  # for Slurm to answer: then the table has what was last known
LONGEST_S = 10**9  # of a job that is shown: the times in a file may be any numbers
OWN = re.compile(r'/(trainer\.py|program/.*)", line ')  # of a traceback: a file of the trainee's
MESSAGES = ("keeper.txt", "slurm.txt")  # in a job's folder: errors outside the trainer


class State(StrEnum):
    """The state of a job. OUT_OF_MEMORY is an ordinary result, such as in a batch sweep."""

    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    NODE_FAIL = "NODE_FAIL"  # these two on a cluster only
    PREEMPTED = "PREEMPTED"

    @property
    def final(self) -> bool:
        return self not in (State.QUEUED, State.RUNNING)


@dataclass(frozen=True)
class Job:
    """A submitted job: only its folder, so that any process can pick it up again."""

    directory: Path

    kind = "job"

    @property
    def id(self) -> str:
        return self.directory.name

    @property
    def info(self) -> dict:
        """Return the submission; {} for a trainer that was run by hand."""
        try:
            return _read(self.directory / "job.json")
        except FileError:
            return {}

    @property
    def name(self) -> str:
        return self.info.get("name") or "by hand"

    @property
    def command(self) -> str:
        """Return the command as it was submitted, quoted for a shell."""
        return shlex.join(map(str, self.info.get("command") or []))

    @property
    def beside(self) -> str:
        """Return the files that its program has, copied or in their places; "" for the course's."""
        info = self.info
        if not info.get("folder"):
            return ""
        own = str(Path(info["words"][0]).parent)  # its own folder comes first, what is hidden last
        links = sorted(
            (path for path in map(Path, info["links"]) if path.name != "trainer.py"),
            key=lambda path: (str(path.parent) != own, path.name.startswith("."), path),
        )
        copies = [path for path in info["modules"] if Path(path).name not in beside.OURS]
        text = f"copied: {_some(copies)}"
        return f"{text}; read in place: {_some(links)}" if links else text

    @property
    def is_series(self) -> bool:
        """Return whether it does several runs, each with a log of its own: see `launch.series`."""
        return (self.directory / "plan.json").exists()

    @property
    def launcher(self) -> Here | Slurm:
        """Return the launcher that runs it."""
        return Slurm() if "slurm" in self.info else Here()

    @property
    def status(self) -> dict:
        """Return the state, with started and ended (Unix seconds), exit_code and reason."""
        try:
            info = _read(self.directory / "job.json")
            if not info:
                return by_hand.status(self.directory)
            if not info.get("command"):
                raise FileError("job.json has no command")
            found = _checked("state.json", self.launcher.status(self.directory, info))
            state = State(found["state"])
            if state == State.CANCELLED and found.get("cause") == Cause.ENOUGH:
                state = State.COMPLETED
            return found | {"state": str(state)}
        except (KeyError, OSError, TypeError, ValueError) as error:
            said = f"no {error}" if isinstance(error, KeyError) else str(error)
            said = said.replace(f"{self.directory}/", "")  # a table has room for a file's name
            return {"state": "FAILED", "reason": f"its files are damaged: {said}"}

    @property
    def state(self) -> State:
        return State(self.status["state"])

    def wait(self, timeout: float | None = None) -> State:
        """Block until the job has ended; returns its state, or raises TimeoutError.

        In a notebook or a terminal, a bar shows the progress of a job that takes its time.
        """
        end = time.monotonic() + timeout if timeout is not None else None
        poll_s = self.launcher.poll_s
        with Bar(self) as bar:
            while not (state := self.state).final:
                if end is not None and time.monotonic() > end:
                    raise TimeoutError(f"job {self.id} is still {state} after {timeout} s")
                bar.show()
                time.sleep(poll_s)
        return state

    def cancel(self, reason: str = "", cause: Cause | None = None):
        """Take the job from the queue, or end it; do nothing if it has ended.

        reason: what its status gives afterwards, in place of "cancelled while it ran".
        """
        if not self.state.final:
            keeper.cancel(self.directory, reason, cause)
            self.launcher.cancel(self.directory, self.info)

    def end_early(self, why: str):
        """End a job that has done what it was submitted for: its state becomes COMPLETED."""
        self.cancel(f"ended early: {why}", Cause.ENOUGH)

    def explain(self, lines: int = 12) -> str:
        """Return the state, the last lines of stderr, and where to read more."""
        status = self.status
        reason = status.get("reason")
        text = "".join(outcome.tail(self.directory / name) for name in MESSAGES)
        tail = (text + outcome.errors(self.directory)).splitlines()
        tail = _lines_of_the_trainer(tail[:-lines]) + tail[-lines:]
        head = f"job {self.id} {status['state']}" + (f": {_cut(reason, 500)}" if reason else "")
        return "\n".join([head, *(f"  | {line}" for line in tail), f"  in {self.directory}"])

    def __repr__(self):
        return f"<job {self.id} {_cut(self.name)!r}: {self.state}>"


def _some(paths, most=6):
    """Return the first of these paths of a job's folder, as they are in the project."""
    names = [str(path).removeprefix("program/") for path in paths[:most]]
    return ", ".join(names) + (f" and {len(paths) - most} more" if len(paths) > most else "")


A_NUMBER = ((int, float), "a number")
FORMS = {  # what a table of jobs computes with or shows
    "name": (str, "text"),
    "command": (list, "a list"),
    "submitted": A_NUMBER,
    "started": A_NUMBER,
    "ended": A_NUMBER,
    "reason": (str, "text"),
    "cause": (str, "text"),
    "slurm": (str, "text"),
}


def _read(file: Path) -> dict:
    return _checked(file.name, read_table(file))


def _checked(file: str, table: dict) -> dict:
    """Return a file's table; raise FileError for a field that no table of jobs could show."""
    for name, (kind, word) in FORMS.items():
        value = table.get(name)
        if value is not None and not isinstance(value, kind):
            raise FileError(f"{name} in {file} is {_cut(repr(value))}, expected {word}")
    return table


def _lines_of_the_trainer(lines):
    """Return the last lines of a traceback that are about the trainee's own file."""
    places = [i for i, line in enumerate(lines) if OWN.search(line)]
    return [*lines[places[-1] : places[-1] + 2], "    ..."] if places else []


def jobs() -> list[Job]:
    """Return all runs of this folder, oldest first."""
    runs = base_folder() / "runs"
    found = (Job(runs / number) for number in _newest_first(runs))
    return [job for job in found if _has_begun(job.directory)][::-1]


def _newest_first(runs):
    try:
        numbers = [e.name for e in os.scandir(runs) if NUMBER.fullmatch(e.name)]
    except FileNotFoundError:
        return []
    return sorted(numbers, key=int, reverse=True)


def _has_begun(run):
    """Return whether a folder holds a job or a log: otherwise it is just being submitted."""
    try:
        return "job.json" in (names := os.listdir(run)) or "events.jsonl" in names
    except PermissionError:  # that is said of it, then
        return True
    except OSError:  # a link to itself, or removed just now
        return False


def find(number: str | int) -> Job:
    """Return the job with this id; 12 and "0012" are the same."""
    text = str(number)
    directory = base_folder() / "runs" / text.zfill(4)
    if not NUMBER.fullmatch(text) or not directory.is_dir():
        known = ", ".join(j.id for j in jobs()[-5:]) or "none yet"
        raise LookupError(f"no job {_cut(text)!r} in {directory.parent}; the last ones: {known}")
    return Job(directory)


def latest(name: str | None = None) -> Job | list[Job]:
    """Return the last submission (with this name), as `submit` did: a job, or a sweep's list.

    Without a name, a series that a check or a tool submitted does not count: it has no log.
    """
    for job in reversed(jobs()):
        if job.info and (name == job.name or (name is None and not job.is_series)):
            return _sweep(job) or job
    wanted = f" named {name!r}" if name else ""
    raise LookupError(f"no job{wanted} in {base_folder() / 'runs'}: submit one first")


def _sweep(job) -> list[Job]:
    """Return the jobs that are left of a job's sweep; [] if it has none."""
    try:
        numbers = json.loads(read_small(job.directory / "sweep.json"))
        found = [Job(job.directory.with_name(n)) for n in numbers if NUMBER.fullmatch(n)]
    except (OSError, RecursionError, TypeError, ValueError):  # no such file, or a torn one
        return []
    return [job for job in found if job.directory.is_dir()]


def queue(name: str | None = None, last: int = 5) -> Table:
    """Return the jobs that wait or run, and the `last` that ended; `widgets.queue` is live."""
    rows = [queue_row(job, status) for job, status in in_queue(name, last)]
    return Table(QUEUE, rows, "<<<>><<", "no jobs")


def queue_row(job: Job, status: dict) -> tuple[str, ...]:
    """Return a job's row in `queue`, with the columns of QUEUE."""
    who = (job.id, _cut(job.name), status["state"], _time(job, status))
    notes = [(status.get("reason") or "").partition("\n")[0], _from_outside(job, status)]
    note = _cut("; ".join(filter(None, notes)))
    return (*who, _cut(str(job.info.get("n_gpu", 1))), note, _cut(job.command, 1000))


def _from_outside(job, status) -> str:
    """Return the figures of a job without a log: "1.8 CPUs, 2.1 GB, GPU 43 %"; else ""."""
    if status["state"] not in ("RUNNING", "COMPLETED") or not outcome.is_foreign(job.directory):
        return ""
    seen = outside.read(job.directory)
    return seen.in_short if seen else ""


def in_queue(name: str | None = None, last: int = 5) -> list[tuple[Job, dict]]:
    """Return the jobs that `queue` shows, oldest first, each with its present status."""
    runs, shown, ended, index = base_folder() / "runs", [], 0, {}
    known = _read_index(runs)
    with asking.within(QUEUE_S):
        for number in _newest_first(runs):
            mark, entry = _mark(f"{runs}/{number}"), known.get(number)
            if entry and entry[0] == mark and (ended >= last or name not in (None, entry[1])):
                index[number] = entry
                continue
            if not _has_begun(runs / number):
                continue
            job = Job(runs / number)
            own_name, status = job.name, job.status
            final = State(status["state"]).final
            if final and status.get("cause") != Cause.LOST:  # a keeper may still find out more
                index[number] = [mark, own_name]
            if name in (None, own_name) and not (final and ended >= last):
                ended += final
                shown.append((job, status))
    if index != known:
        with suppress(OSError):  # a full disk: then the next look reads them all
            write_atomically(runs / INDEX, json.dumps(index))
    return shown[::-1]


INDEX = ".ended.json"  # beside the runs: {number: [mark, name]} of the ended ones


def _mark(run: str) -> list[int] | None:
    """Return a mark that changes if a run's folder is replaced, or a file is put into it."""
    try:
        found = os.stat(run)
    except OSError:  # removed just now, or a link to itself
        return None
    return [found.st_ino, found.st_mtime_ns]


def _read_index(runs) -> dict[str, list]:
    """Return the index that an earlier look wrote: it spares reading those that are not shown."""
    with suppress(FileError):
        found = read_table(runs / INDEX).items()
        return {n: entry for n, entry in found if isinstance(entry, list) and len(entry) == 2}
    return {}


def _cut(text: str, most: int = 60) -> str:
    """Return the beginning of a text that may be megabytes long."""
    return text if len(text) <= most else text[: most - 3] + "..."


def _time(job, status):
    info = job.info
    begin = status.get("started") or info.get("submitted")
    if begin is None:
        return ""
    seconds = (status.get("ended") or time.time()) - begin
    seconds = int(min(max(0, seconds), LONGEST_S))  # a clock may be put back
    verb = "" if status.get("started") else "waits "
    return f"{verb}{seconds // 60}:{seconds % 60:02d}"
