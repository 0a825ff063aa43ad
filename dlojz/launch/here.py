"""Jobs on this machine, one after the other on its devices."""

import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from dlojz.course import course_root, write_atomically
from dlojz.jobs import keeper, processes, tickets
from dlojz.launch.files import read_json

RESERVE_BYTES = 1 << 12  # freed by a keeper to write the final state on a full disk
SILENT_S = 60  # without a sign of life, a keeper on another machine is lost
BEGIN_S = 20  # for a keeper to write its identity


class Here:
    """The launcher of this machine; it has the same members as `slurm.Slurm`."""

    name = "local"
    poll_s = 0.05  # between looks at a job in `wait`

    def check(self, request):
        """Raise ValueError for a request that can't succeed here."""
        found = tickets.devices()
        if found == ("cpu",):
            most, what = max(2, len(os.sched_getaffinity(0))), "no GPU, and CPUs for at most"
        else:
            most, what = len(found), "this many GPUs:"
        if request.n_gpu > most:
            raise ValueError(
                f"n_gpu={request.n_gpu}: this machine has {what} {most}: ask for at most {most}"
            )

    def script(self, request, trainer: Path) -> str:
        """Return the command that would run."""
        return shlex.join(trainer_argv(trainer, request.command[1:], request.n_gpu))

    def submit(self, run: Path, request):
        """Start a keeper for the job in the folder `run`, which already holds the trainer."""
        wanted = tickets.devices()
        count = 1 if wanted == ("cpu",) else request.n_gpu
        job = request.to_dict() | {
            "run": str(run),
            "cwd": str(course_root()),
            "argv": trainer_argv(run / "trainer.py", request.command[1:], request.n_gpu, run),
            "devices": list(wanted),
            "devices_held": count,
        }
        (run / keeper.RESERVE).write_bytes(os.urandom(RESERVE_BYTES))
        write_atomically(run / keeper.STATE, json.dumps({"state": "QUEUED"}))
        write_atomically(run / "job.json", json.dumps(job, indent=1))
        environment = {k: v for k, v in os.environ.items() if k != "DLOJZ_RUN"}
        ticket, fd = tickets.take(run, wanted, count)
        try:
            with (run / "keeper.txt").open("wb") as said:
                process = processes.start(
                    [sys.executable, "-P", "-m", "dlojz.jobs.keeper", str(ticket), str(fd)],
                    said,
                    said,
                    cwd=run,
                    env=environment | {processes.KEEPER: "1"},
                    keep=[fd],  # the keeper holds the ticket from here on
                )
            write_atomically(run / keeper.KEEPER, json.dumps(processes.identity(process.pid)))
        finally:
            os.close(fd)

    def status(self, run: Path, info: dict) -> dict:
        """Return the status that the keeper wrote; the job is lost if its keeper was killed."""
        status = read_json(run / keeper.STATE)
        if status.get("state") not in ("QUEUED", "RUNNING") or _lives(run, info):
            return status
        status = read_json(run / keeper.STATE)  # it may have ended just now
        if status["state"] in ("QUEUED", "RUNNING"):
            status |= {"state": "FAILED", "reason": keeper.LOST}
        return status

    def cancel(self, run: Path, info: dict, reason: str = ""):
        """Ask the keeper to end the job; it checks several times a second."""
        write_atomically(run / keeper.CANCEL, reason)


def _lives(run, info) -> bool:
    """Return whether the job's keeper is alive, as far as this process can tell."""
    process = read_json(run / keeper.KEEPER)
    if not process:  # it has only just been started
        return time.time() < info.get("submitted", 0) + BEGIN_S
    alive = processes.is_alive(process)
    if alive is None:  # another machine, container or boot: look for its sign of life
        return time.time() < (run / keeper.STATE).stat().st_mtime + SILENT_S
    return alive


def trainer_argv(
    trainer: Path, flags: Sequence[str], n_gpu: int, run: Path | None = None
) -> list[str]:
    """Return the command of a job: the trainer, or torchrun for several processes.

    $DLOJZ_PYTHON replaces this Python. run: the job's folder, where torchrun keeps its own files,
    which would otherwise stay in the temporary folder.
    """
    python = os.environ.get("DLOJZ_PYTHON") or sys.executable
    if n_gpu == 1:
        return [python, str(trainer), *flags]
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    logs = [f"--log-dir={run / 'torchrun'}"] if run else []
    return [*torchrun, f"--nproc-per-node={n_gpu}", *logs, str(trainer), *flags]
