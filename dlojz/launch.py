"""Submit the trainer as a job, watch it, cancel it.

    from dlojz.launch import submit, queue, latest
    job = submit("dlojz/dlojz.py --test -b 128")          # one job
    jobs = submit([f"dlojz/dlojz.py --test -b {b}" for b in (8, 16, 32)], name="sweep")
    job.wait(); job.state; job.directory; job.cancel()

What runs is what was submitted: the trainer is copied into the job's folder, and the copy is run.
Jobs run one after the other and outlive whoever submitted them.
"""

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from dlojz import local, log
from dlojz.course import course_root


class State(StrEnum):
    """Where a job is. OUT_OF_MEMORY is an ordinary result: one looks for it in a batch sweep."""

    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"

    @property
    def final(self) -> bool:
        return self not in (State.QUEUED, State.RUNNING)


class SubmitError(Exception):
    """A job that can't be submitted, with what to change."""


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
        info, status = self.info, _read_json(self.directory / "state.json")
        if not info:
            return _status_by_hand(self.directory)
        here = info["host"] == socket.gethostname()  # elsewhere nobody can tell
        if not State(status["state"]).final and here and not local.is_alive(Path(info["ticket"])):
            status = _read_json(self.directory / "state.json")  # it may have ended just now
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
            time.sleep(0.05)
        return state

    def cancel(self):
        """Take it from the queue, or end it. Nothing happens to one that has ended."""
        if not self.state.final:
            (self.directory / "cancel").touch()

    def explain(self, lines: int = 12) -> str:
        """The state, the last lines of stderr, and where to read more."""
        reason = self.status.get("reason")
        error = self.directory / "stderr.txt"
        tail = error.read_text(errors="replace").splitlines()[-lines:] if error.exists() else []
        head = f"job {self.id} {self.state}" + (f": {reason}" if reason else "")
        return "\n".join([head, *(f"  | {line}" for line in tail), f"  in {self.directory}"])

    def __repr__(self):
        return f"<job {self.id} {self.name!r}: {self.state}>"


def submit(
    command: str | Sequence,
    n_gpu: int = 1,
    name: str = "dlojz",
    time_max: str = "00:10:00",
    **recorded,
) -> Job | list[Job]:
    """Run the trainer with its flags as a job, when its turn comes.

    command: "dlojz/dlojz.py --test -b 128". A list of commands submits each, to run in order. A
        tuple is one command in words, for paths that a shell would trip over.
    n_gpu: GPUs, one process for each; on a machine without a GPU, processes.
    time_max: "HH:MM:SS"; then the job is ended.
    recorded: kept in the job's job.json (account, module, ...).
    """
    seconds = _seconds(time_max)
    if isinstance(command, list):
        if not command:
            raise SubmitError("an empty list of commands: expected at least one")
        prepared = [_prepare(c, n_gpu) for c in command]  # all are right before any is submitted
        jobs = [_submit_one(p, n_gpu, name, seconds, recorded) for p in prepared]
        for job in jobs:
            log.write_atomically(job.directory / "sweep.json", json.dumps([j.id for j in jobs]))
        return jobs
    return _submit_one(_prepare(command, n_gpu), n_gpu, name, seconds, recorded)


def trainer_argv(trainer: Path, flags: Sequence[str], n_gpu: int) -> list[str]:
    """What a local job runs: the trainer itself, or torchrun for several processes."""
    if n_gpu == 1:
        return [sys.executable, str(trainer), *flags]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, "--local-addr=127.0.0.1", f"--nproc-per-node={n_gpu}", str(trainer), *flags]


def _prepare(command, n_gpu) -> tuple[Path, list[str]]:
    """The trainer's file and its flags; raises SubmitError for what could only fail later."""
    try:
        words = shlex.split(command) if isinstance(command, str) else [str(w) for w in command]
    except ValueError as error:
        raise SubmitError(
            f"can't read the command {command!r} ({error}): quote it as in a shell, or give a "
            "tuple of words"
        ) from None
    if not words:
        raise SubmitError('an empty command: expected one like "dlojz/dlojz.py --test -b 32"')
    if not isinstance(n_gpu, int) or n_gpu < 1:
        raise SubmitError(f"n_gpu={n_gpu!r}: expected a whole number from 1")
    found = len(local.devices())
    if local.devices() != ("cpu",) and n_gpu > found:
        raise SubmitError(f"n_gpu={n_gpu}: this machine has {found}; ask for at most that")
    trainer = _find(words[0])
    source = trainer.read_text()
    try:
        compile(source, str(trainer), "exec")
    except SyntaxError as error:
        line = (error.text or "").rstrip()
        raise SubmitError(
            f"{trainer}, line {error.lineno}: {error.msg}\n    {line}\n"
            f"    {' ' * ((error.offset or 1) - 1)}^\nnothing was submitted"
        ) from None
    return trainer, words


def _find(name: str) -> Path:
    root = course_root()
    candidates = [f / name for f in (Path.cwd(), root, root / "dlojz", root / "solutions")]
    for path in candidates:
        if path.is_file():
            return path.resolve()
    raise SubmitError(
        f"no trainer {name!r} in {Path.cwd()} or {root}: the command begins with the file to run, "
        'as in "dlojz/dlojz.py --test"'
    )


def _submit_one(prepared, n_gpu, name, time_max_s, recorded) -> Job:
    trainer, words = prepared
    run = log.new_run()
    copy = run / "trainer.py"
    shutil.copyfile(trainer, copy)
    ticket, fd = local.take_ticket(run)
    try:
        job = {
            "name": name,
            "command": words,
            "trainer": str(trainer),
            "argv": trainer_argv(copy, words[1:], n_gpu),
            "cwd": str(course_root()),
            "n_gpu": n_gpu,
            "time_max_s": time_max_s,
            "submitted": time.time(),
            "host": socket.gethostname(),
            "ticket": str(ticket),
            **recorded,
        }
        log.write_atomically(run / "job.json", json.dumps(job, indent=1, default=str))
        log.write_atomically(run / "state.json", json.dumps({"state": "QUEUED"}))
        with (run / "supervisor.txt").open("wb") as output:
            subprocess.Popen(
                [sys.executable, "-P", "-m", "dlojz.local", str(run), str(ticket)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # a notebook's interrupt or end does not reach it
                pass_fds=(fd,),  # the supervisor holds the ticket from here on
            )
    finally:
        os.close(fd)
    return Job(run)


def _seconds(time_max: str) -> float:
    try:
        days, _, clock = str(time_max).rpartition("-")
        fields = [int(f) for f in clock.split(":")]
        if not 1 <= len(fields) <= 3 or min(fields) < 0:
            raise ValueError
    except ValueError:
        raise SubmitError(f"time_max={time_max!r}: expected HH:MM:SS, such as 00:10:00") from None
    seconds = 0
    for value in fields:
        seconds = 60 * seconds + value
    return seconds + 86400 * int(days or 0)


# Finding jobs again -------------------------------------------------------------------------


def jobs() -> list[Job]:
    """All runs of this course folder, oldest first."""
    runs = course_root() / "runs"
    names = sorted((p.name for p in runs.glob("*") if p.name.isdigit()), key=int)
    return [Job(runs / name) for name in names]


def find(number: str | int) -> Job:
    """The job with this id; 12 and "0012" are the same."""
    text = str(number)
    directory = course_root() / "runs" / (text.zfill(4) if text.isdigit() else text)
    if not text.isdigit() or not directory.is_dir():
        known = ", ".join(j.id for j in jobs()[-5:]) or "none yet"
        raise LookupError(f"no job {text!r} in {directory.parent}; the last ones: {known}")
    return Job(directory)


def latest(name: str | None = None) -> Job | list[Job]:
    """The last submission (with this name), as `submit` returned it: a job, or a sweep's list."""
    for job in reversed(jobs()):
        if job.info and name in (None, job.name):
            sweep = _read_json(job.directory / "sweep.json")
            return [find(i) for i in sweep] if sweep else job
    wanted = f" named {name!r}" if name else ""
    raise LookupError(f"no job{wanted} in {course_root() / 'runs'}: submit one first")


class Queue(list):
    """Jobs as a table: text in a terminal, HTML in a notebook."""

    HEAD = ("job", "name", "state", "time", "GPUs", "command")

    def rows(self) -> list[tuple]:
        return [
            (j.id, j.name, str(j.state), _time(j), str(j.info.get("n_gpu", 1)), j.command)
            for j in self
        ]

    def __repr__(self):
        rows = [self.HEAD, *self.rows()]
        if len(rows) == 1:
            return "no jobs"
        widths = [max(len(r[i]) for r in rows) for i in range(5)]
        return "\n".join(
            "  ".join([*(c.ljust(w) for c, w in zip(r[:5], widths, strict=True)), r[5]])
            for r in rows
        )

    def _repr_html_(self):
        from html import escape

        def row(cells, tag):
            return "<tr>" + "".join(f"<{tag}>{escape(c)}</{tag}>" for c in cells) + "</tr>"

        if not self:
            return "<p>no jobs</p>"
        return f"<table>{row(self.HEAD, 'th')}{''.join(row(r, 'td') for r in self.rows())}</table>"


def queue(name: str | None = None, last: int = 5) -> Queue:
    """The jobs that wait or run, and the `last` ones that have ended."""
    wanted = [j for j in jobs() if name in (None, j.name)]
    ended = [j for j in wanted if j.state.final]
    hidden = set(ended[: max(0, len(ended) - last)])
    return Queue(j for j in wanted if j not in hidden)


def _time(job):
    status, info = job.status, job.info
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
        return {"state": "RUNNING"}
    names = {"completed": "COMPLETED", "out_of_memory": "OUT_OF_MEMORY"}
    begin, end = (datetime.fromisoformat(e["time"]).timestamp() for e in (run.start, run.end))
    state = names.get(run.end["outcome"], "FAILED")
    return {"state": state, "started": begin, "ended": end, "reason": run.end.get("error")}


def _read_json(path):
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}
