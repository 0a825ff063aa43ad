"""A submitted job: its state, its cancelling, its end explained; and how jobs are found again."""

import json
import os
import shlex
import socket
import time
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path

import psutil

from dlojz.course import course_root
from dlojz.jobs import tickets
from dlojz.launch import slurm
from dlojz.runs import log, outcome
from dlojz.table import Table

QUEUE = ("job", "name", "state", "time", "GPUs", "note", "command")
MESSAGES = ("supervisor.txt", "slurm.txt")  # in a job's folder: what went wrong around it


class State(StrEnum):
    """Where a job is. OUT_OF_MEMORY is an ordinary result: one looks for it in a batch sweep."""

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
    """A submitted job: nothing but its folder, so any process can pick it up again."""

    directory: Path

    @property
    def id(self) -> str:
        return self.directory.name

    @property
    def info(self) -> dict:
        """What was submitted; {} for a trainer that was run by hand."""
        return _read_json(self.directory / "job.json")

    @property
    def name(self) -> str:
        return self.info.get("name", "by hand")

    @property
    def command(self) -> str:
        """As it was submitted, quoted for a shell."""
        return shlex.join(self.info.get("command", []))

    @property
    def status(self) -> dict:
        """The state and what goes with it: started, ended (Unix seconds), exit_code, reason."""
        info, file = self.info, self.directory / "state.json"
        if not info:
            return _status_by_hand(self.directory)
        if "slurm" in info:
            return slurm.status(self.directory, info["slurm"])
        status = _read_json(file)
        here = info["host"] == socket.gethostname()  # elsewhere nobody can tell
        if not State(status["state"]).final and here and not tickets.is_alive(Path(info["ticket"])):
            status = _read_json(file)  # it may have ended just now
            if not State(status["state"]).final:
                reason = "lost: its supervisor was killed, or the machine was restarted"
                status |= {"state": "FAILED", "reason": reason}
        return status

    @property
    def state(self) -> State:
        return State(self.status["state"])

    def wait(self, timeout: float | None = None) -> State:
        """Block until the job has ended; returns its state. TimeoutError after `timeout` s."""
        end = time.monotonic() + timeout if timeout is not None else None
        while not (state := self.state).final:
            if end is not None and time.monotonic() > end:
                raise TimeoutError(f"job {self.id} is still {state} after {timeout} s")
            time.sleep(1 if "slurm" in self.info else 0.05)  # a controller serves many
        return state

    def cancel(self):
        """Take it from the queue, or end it. Nothing happens to one that has ended."""
        if self.state.final:
            return
        if "slurm" in self.info:
            slurm.cancel(self.info["slurm"])
        else:
            (self.directory / "cancel").touch()

    def explain(self, lines: int = 12) -> str:
        """The state, the last lines of stderr, and where to read more."""
        reason = self.status.get("reason")
        files = (self.directory / name for name in MESSAGES)
        text = "".join(f.read_text(errors="replace") for f in files if f.exists())
        tail = (text + outcome.errors(self.directory)).splitlines()
        tail = _lines_of_the_trainer(tail[:-lines]) + tail[-lines:]
        head = f"job {self.id} {self.state}" + (f": {reason}" if reason else "")
        return "\n".join([head, *(f"  | {line}" for line in tail), f"  in {self.directory}"])

    def __repr__(self):
        return f"<job {self.id} {self.name!r}: {self.state}>"


def _lines_of_the_trainer(lines):
    """Of a traceback, where the trainee's own file was last seen."""
    places = [i for i, line in enumerate(lines) if 'trainer.py", line' in line]
    return [*lines[places[-1] : places[-1] + 2], "    ..."] if places else []


def jobs() -> list[Job]:
    """All runs of this course folder, oldest first."""
    runs = course_root() / "runs"
    names = sorted((p.name for p in runs.glob("*") if p.name.isdigit()), key=int)
    begun = ("job.json", "events.jsonl")  # neither: somebody is submitting just now
    return [Job(runs / n) for n in names if any((runs / n / f).exists() for f in begun)]


def find(number: str | int) -> Job:
    """The job with this id; 12 and "0012" are the same."""
    text = str(number)
    directory = course_root() / "runs" / (text.zfill(4) if text.isdigit() else text)
    if not text.isdigit() or not directory.is_dir():
        known = ", ".join(j.id for j in jobs()[-5:]) or "none yet"
        raise LookupError(f"no job {text!r} in {directory.parent}; the last ones: {known}")
    return Job(directory)


def latest(name: str | None = None) -> Job | list[Job]:
    """The last submission (with this name), as `submit` returned it: a job, or a sweep's list.

    Without a name, a series that a check or a tool submitted does not count: it has no log.
    """
    for job in reversed(jobs()):
        if job.info and (name == job.name or (name is None and not _is_series(job))):
            sweep = _read_json(job.directory / "sweep.json")
            return [find(i) for i in sweep] if sweep else job
    wanted = f" named {name!r}" if name else ""
    raise LookupError(f"no job{wanted} in {course_root() / 'runs'}: submit one first")


def _is_series(job):
    return (job.directory / "plan.json").exists()  # of `dlojz.series`


def queue(name: str | None = None, last: int = 5) -> Table:
    """The jobs that wait or run, and the `last` ones that have ended; `widgets.queue` is live."""
    rows = [queue_row(job, status) for job, status in in_queue(name, last)]
    return Table(QUEUE, rows, "<<<>><<", "no jobs")


def queue_row(job: Job, status: dict) -> tuple[str, ...]:
    """What `queue` says of a job with this status, by the columns of QUEUE."""
    who = (job.id, job.name, status["state"], _time(job, status))
    return (*who, str(job.info.get("n_gpu", 1)), _note(status), job.command)


def in_queue(name: str | None = None, last: int = 5) -> list[tuple[Job, dict]]:
    """The jobs that `queue` shows, oldest first, each with its status as it is now."""
    wanted = [(j, j.status) for j in jobs() if name in (None, j.name)]
    ended = [j for j, status in wanted if State(status["state"]).final]
    hidden = set(ended[: max(0, len(ended) - last)])
    return [(j, status) for j, status in wanted if j not in hidden]


def _note(status):
    """Why a job waits, or ended as it did, in one line."""
    reason = (status.get("reason") or "").splitlines() or [""]
    return reason[0] if len(reason[0]) <= 60 else reason[0][:57] + "..."


def _time(job, status):
    info = job.info
    begin = status.get("started") or info.get("submitted")
    if begin is None:
        return ""
    seconds = int((status.get("ended") or time.time()) - begin)
    verb = "" if status.get("started") else "waits "
    return f"{verb}{seconds // 60}:{seconds % 60:02d}"


def _status_by_hand(directory):
    """The state of a trainer that was run without the launcher, from its log alone."""
    try:
        run = log.read(directory)
    except log.LogError:
        return {"state": "FAILED", "reason": "no log"}
    if not run.end:
        gone = run.start["hostname"] == socket.gethostname() and not psutil.pid_exists(
            run.start.get("pid", os.getpid())
        )
        return {"state": "FAILED", "reason": "killed"} if gone else {"state": "RUNNING"}
    names = {"completed": "COMPLETED", "out_of_memory": "OUT_OF_MEMORY"}
    begin, end = (datetime.fromisoformat(e["time"]).timestamp() for e in (run.start, run.end))
    state = names.get(run.end["outcome"], "FAILED")
    return {"state": state, "started": begin, "ended": end, "reason": run.end.get("error")}


def _read_json(path):
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}
