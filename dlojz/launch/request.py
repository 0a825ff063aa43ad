"""Submit the trainer as a job: on this machine, or on Slurm."""

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from dlojz import course, sites
from dlojz.course import course_root
from dlojz.jobs import tickets, warm
from dlojz.launch import slurm
from dlojz.launch.job import Job
from dlojz.launch.slurm import SlurmError
from dlojz.runs.folder import new_run


class SubmitError(Exception):
    """A job that can't be submitted, with what to change."""


class Script(str):
    """What a job would run; shown as it is."""

    __slots__ = ()
    __repr__ = str.__str__


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
    if tickets.devices() == ("cpu",):
        most, what = max(2, len(os.sched_getaffinity(0))), "no GPU, and CPUs for so many processes"
    else:
        most, what = len(tickets.devices()), "so many GPUs"
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
    ticket, fd = tickets.take_ticket(run)
    try:
        _keep(run, job | {"ticket": str(ticket)})
        if warm.supervise(run, ticket, fd, environment):
            return
        with (run / "supervisor.txt").open("wb") as output:
            subprocess.Popen(
                [sys.executable, "-P", "-m", "dlojz.jobs.supervisor", str(run), str(ticket)],
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
