"""Submit the trainer as a job, watch it, cancel it: on this machine, or on Slurm.

    from dlojz.launch import submit, queue, latest
    job = submit("dlojz/dlojz.py --test -b 128")          # one job
    jobs = submit([f"dlojz/dlojz.py --test -b {b}" for b in (8, 16, 32)], name="sweep")
    job.wait(); job.state; job.directory; job.cancel()

What runs is what was submitted: the trainer is copied into the job's folder, and the copy is run.
Jobs outlive whoever submitted them; on one machine they run one after the other.
"""

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import cache
from pathlib import Path

import psutil

from dlojz import course, local, sites, slurm, warm
from dlojz.course import course_root
from dlojz.runs import log, outcome
from dlojz.runs.folder import new_run
from dlojz.slurm import SlurmError
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


class SubmitError(Exception):
    """A job that can't be submitted, with what to change."""


class Script(str):
    """What a job would run; shown as it is."""

    __slots__ = ()
    __repr__ = str.__str__


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
        if not State(status["state"]).final and here and not local.is_alive(Path(info["ticket"])):
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


def submit(
    command: str | Sequence,
    n_gpu: int = 1,
    name: str = "dlojz",
    time_max: str = "00:10:00",
    module: str | None = None,
    account: str | None = None,
    files: Mapping[str, bytes] | None = None,
    dry_run: bool = False,
) -> Job | list[Job] | Script:
    """Run the trainer with its flags as a job, when its turn comes: here, or on Slurm.

    command: "dlojz/dlojz.py --test -b 128". A list of commands submits each, to run in order. A
        tuple is one command in words, for paths that a shell would trip over.
    n_gpu: GPUs, one process for each; on a machine without a GPU, processes. On a cluster more than
        one node has takes whole nodes.
    time_max: "HH:MM:SS", or another form that Slurm knows; then the job is ended. On a cluster it
        is stopped before, goes back to the queue and on from its checkpoint, if it keeps one.
    module, account: a cluster loads the one, in place of its site's, and charges the other;
        "xyz@a100" asks for nodes with A100s.
    files: what the job finds in its folder, by name.
    dry_run: submit nothing, show the script or the command.
    """
    try:
        seconds = sites.seconds(time_max)
    except ValueError as error:
        raise SubmitError(f"time_max={error}") from None
    recorded = {"module": module, "account": account}
    files = files or {}
    if dry_run:
        one = command[0] if isinstance(command, list) and command else command
        return _script(_prepare(one, n_gpu), n_gpu, name, seconds, recorded)
    if isinstance(command, list):
        if not command:
            raise SubmitError("an empty list of commands: expected at least one")
        prepared = [_prepare(c, n_gpu) for c in command]  # all are right before any is submitted
        jobs = [_submit_one(p, n_gpu, name, seconds, recorded, files) for p in prepared]
        for job in jobs:
            course.write_atomically(job.directory / "sweep.json", json.dumps([j.id for j in jobs]))
        return jobs
    return _submit_one(_prepare(command, n_gpu), n_gpu, name, seconds, recorded, files)


def trainer_argv(trainer: Path, flags: Sequence[str], n_gpu: int) -> list[str]:
    """What a local job runs: the trainer itself, or torchrun for several processes."""
    if n_gpu == 1:
        return [sys.executable, str(trainer), *flags]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, "--local-addr=127.0.0.1", f"--nproc-per-node={n_gpu}", str(trainer), *flags]


def _prepare(command, n_gpu) -> tuple[Path, bytes, list[str]]:
    """The trainer, its source, and all words; raises SubmitError for what could only fail later."""
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
    if launcher() == "local":
        _fits_here(n_gpu)
    trainer = _find(words[0])
    source = trainer.read_bytes()
    try:
        compile(source, str(trainer), "exec")
    except SyntaxError as error:
        line = (error.text or "").rstrip()
        raise SubmitError(
            f"{trainer}, line {error.lineno}: {error.msg}\n    {line}\n"
            f"    {' ' * ((error.offset or 1) - 1)}^\nnothing was submitted"
        ) from None
    return trainer, source, words


def _fits_here(n_gpu):
    if local.devices() == ("cpu",):
        most, what = max(2, len(os.sched_getaffinity(0))), "no GPU, and CPUs for so many processes"
    else:
        most, what = len(local.devices()), "so many GPUs"
    if n_gpu > most:
        raise SubmitError(f"n_gpu={n_gpu}: this machine has {what}: {most}; ask for at most that")


def _find(name: str) -> Path:
    root = course_root()
    candidates = [f / name for f in (Path.cwd(), root, root / "dlojz", root / "solutions")]
    for path in candidates:
        if path.is_file():
            return path.resolve()
    looked = " or ".join(dict.fromkeys([str(Path.cwd()), str(root)]))
    raise SubmitError(
        f"no trainer {name!r} in {looked}: the command begins with the file to run, "
        'as in "dlojz/dlojz.py --test"'
    )


def launcher() -> str:
    """Who runs jobs: "slurm" where a controller answers, else "local"; $DLOJZ_LAUNCHER decides."""
    chosen = os.environ.get("DLOJZ_LAUNCHER")
    if chosen is None:
        return "slurm" if _slurm_is_here() else "local"
    if chosen not in ("local", "slurm"):
        raise SubmitError(f"DLOJZ_LAUNCHER={chosen!r}: expected local or slurm, or nothing")
    return chosen


_slurm_is_here = cache(slurm.is_here)


def _slurm_script(n_gpu, name, seconds, recorded):
    try:
        return slurm.script(n_gpu, seconds, name, recorded["account"], recorded["module"])
    except (SlurmError, sites.SiteError, OSError) as error:
        raise SubmitError(f"{error}\nnothing was submitted") from None


def _script(prepared, n_gpu, name, seconds, recorded) -> Script:
    trainer, _, words = prepared
    if launcher() == "slurm":
        return Script(_slurm_script(n_gpu, name, seconds, recorded)[0])
    return Script(shlex.join(trainer_argv(trainer, words[1:], n_gpu)))


def _submit_one(prepared, n_gpu, name, time_max_s, recorded, files) -> Job:
    trainer, source, words = prepared
    on_slurm = launcher() == "slurm"
    if on_slurm:
        script, site = _slurm_script(n_gpu, name, time_max_s, recorded)
    run = new_run()
    copy = run / "trainer.py"
    copy.write_bytes(source)
    for file, content in files.items():
        (run / file).write_bytes(content)
    for file in ("stdout.txt", "stderr.txt"):
        (run / file).touch()
    job = {
        "name": name,
        "command": words,
        "trainer": str(trainer),
        "cwd": str(course_root()),
        "n_gpu": n_gpu,
        "time_max_s": time_max_s,
        "submitted": time.time(),
        "host": socket.gethostname(),
        **recorded,
    }
    course.write_atomically(run / "state.json", json.dumps({"state": "QUEUED"}))
    if on_slurm:
        _start_on_slurm(run, job, script, site, [str(copy), *words[1:]])
    else:
        _start_here(run, job | {"argv": trainer_argv(copy, words[1:], n_gpu)})
    return Job(run)


def _start_on_slurm(run, job, script, site, words):
    try:
        number = slurm.sbatch(run, script, site, words)
    except SlurmError as error:
        shutil.rmtree(run)  # it was never a job
        raise SubmitError(
            f"Slurm refused the job: {error}\nthe site is {site.name} (slurm/sites, DLOJZ_SITE); "
            "submit(..., dry_run=True) shows the script; nothing was submitted"
        ) from None
    _keep(run, job | {"slurm": number, "site": site.name})


def _start_here(run, job):
    environment = dict(os.environ)
    if job["n_gpu"] > 1:  # told here: what its processes are forked from reads it as it starts
        threads = max(1, len(os.sched_getaffinity(0)) // job["n_gpu"])
        environment.setdefault("OMP_NUM_THREADS", str(threads))
    ticket, fd = local.take_ticket(run)
    try:
        _keep(run, job | {"ticket": str(ticket)})
        if warm.supervise(run, ticket, fd, environment):
            return
        with (run / "supervisor.txt").open("wb") as output:
            subprocess.Popen(
                [sys.executable, "-P", "-m", "dlojz.local", str(run), str(ticket)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # a notebook's interrupt or end does not reach it
                pass_fds=(fd,),  # the supervisor holds the ticket from here on
            )
    finally:
        os.close(fd)


def _keep(run, job):
    course.write_atomically(run / "job.json", json.dumps(job, indent=1, default=str))


# Finding jobs again -------------------------------------------------------------------------


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
