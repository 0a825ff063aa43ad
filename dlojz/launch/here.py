"""Jobs on this machine, one after the other on its devices."""

import json
import os
import shlex
import sys
import time
import uuid
from pathlib import Path

from dlojz.course import base_folder, write_atomically
from dlojz.jobs import keeper, processes, tickets
from dlojz.launch.files import read_json

# Freed by a keeper to write the final state on a full disk. Some file systems need 16 KiB for each
# name, size or date that changes (btrfs).
RESERVE_BYTES = 1 << 18
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
        words = keeper.trainer_argv(_job(request), Path("RUN"))
        return shlex.join(str(trainer) if w == "RUN/trainer.py" else w for w in words)

    def submit(self, run: Path, request):
        """Start a keeper for the job in the folder `run`, which already holds the trainer."""
        wanted = tickets.devices()
        job = _job(request) | {
            "cwd": str(base_folder()),
            "devices": list(wanted),
            "devices_held": 1 if wanted == ("cpu",) else request.n_gpu,
            "token": uuid.uuid4().hex,  # a folder's name may be used again, this is not
        }
        (run / keeper.RESERVE).write_bytes(os.urandom(RESERVE_BYTES))
        write_atomically(run / keeper.STATE, json.dumps({"state": "QUEUED"}))
        write_atomically(run / "job.json", json.dumps(job, indent=1))
        ticket, fd = tickets.take(run, job["token"], wanted)
        try:
            process = _start_keeper(run, ticket, fd)
            write_atomically(run / keeper.KEEPER, json.dumps(processes.identity(process.pid)))
        except BaseException:
            ticket.unlink(missing_ok=True)
            raise
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
        processes.wake(read_json(run / keeper.KEEPER))


def _job(request) -> dict:
    """Return what job.json holds of a request, with the Python to run: $DLOJZ_PYTHON, or this."""
    return request.to_dict() | {"python": os.environ.get("DLOJZ_PYTHON") or sys.executable}


def _start_keeper(run, ticket, fd):
    environment = {k: v for k, v in os.environ.items() if k not in ("DLOJZ_RUN", processes.TOKEN)}
    with (run / "keeper.txt").open("wb") as said:
        return processes.start(
            [sys.executable, "-P", "-m", "dlojz.jobs.keeper", str(ticket), str(fd)],
            said,
            said,
            cwd=run,
            env=environment | {processes.KEEPER: "1"},
            keep=[fd],  # the keeper holds the ticket from here on
        )


def _lives(run, info) -> bool:
    """Return whether the job's keeper is alive, as far as this process can tell."""
    process = read_json(run / keeper.KEEPER)
    if not process:  # it has only just been started
        return time.time() < info.get("submitted", 0) + BEGIN_S
    alive = processes.is_alive(process)
    if alive is None:  # another machine, container or boot: look for its sign of life
        return time.time() < (run / keeper.STATE).stat().st_mtime + SILENT_S
    return alive
