"""Jobs on this machine, one after the other on its devices."""

import json
import os
import re
import shlex
import sys
import time
import uuid
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from dlojz.course import base_folder, read_table, write_atomically
from dlojz.jobs import keeper, processes, tickets, waiter

# Freed by a keeper to write the final state on a full disk. Some file systems need 16 KiB for each
# name, size or date that changes (btrfs).
RESERVE_BYTES = 1 << 18
SILENT_S = 100  # without a sign of life, a waiter or keeper on another machine is lost
BEGIN_S = 20  # for a waiter whose submitter was killed to write its identity


LOST = {  # what is known of a job that nobody keeps
    "state": "FAILED",
    "reason": "lost: its keeper was killed, its folder was moved, or the machine was restarted",
    "cause": keeper.Cause.LOST,
}


class Here:
    """The launcher of this machine; it has the same members as `slurm.Slurm`."""

    name = "local"
    whole_sweeps = True  # all jobs of a sweep are submitted, or none
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
        return shlex.join(str(trainer) if w == f"RUN/{request.start}" else w for w in words)

    def submit(self, runs: Sequence[Path], requests: Sequence):
        """Start a waiter for the jobs in these folders, which already hold their trainers.

        They run in this order.
        """
        while (free := os.open(os.devnull, os.O_RDWR)) < 3:
            pass  # a descriptor of ours with a standard stream's number would be replaced by it
        os.close(free)
        wanted, token = tickets.devices(), uuid.uuid4().hex  # a folder's name may be used again
        for i, (run, request) in enumerate(zip(runs, requests, strict=True)):
            job = _job(request) | {
                "root": str(base_folder()),
                "folder": request.folder or str(base_folder()),
                "devices": list(wanted),
                "devices_held": 1 if wanted == ("cpu",) else request.n_gpu,
                "token": f"{token}.{i:06d}",
            }
            (run / keeper.RESERVE).write_bytes(os.urandom(RESERVE_BYTES))
            write_atomically(run / keeper.STATE, json.dumps({"state": "QUEUED"}))
            write_atomically(run / "job.json", json.dumps(job, indent=1))
        ticket, fd = tickets.take(runs, token, wanted)
        try:
            _start_waiter(runs, ticket, fd)
        except BaseException:
            ticket.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)

    def status(self, run: Path, info: dict) -> dict:
        """Return the status in the job's folder; LOST, and since when, if no process keeps it."""
        for _ in range(2):  # a keeper may have followed the waiter just now, or ended
            status, process = read_table(run / keeper.STATE), read_table(run / keeper.KEEPER)
            if status.get("state") not in ("QUEUED", "RUNNING"):
                return status
            if _lives(run, info, process):
                if status["state"] == "QUEUED" and "ticket" in process:
                    status["reason"] = _why(run, Path(process["ticket"]), info["devices"])
                return status
        return status | LOST | {"ended": (run / keeper.STATE).stat().st_mtime}

    def cancel(self, run: Path, info: dict):
        """Wake the waiter or the keeper, which then sees that the job is to be cancelled."""
        processes.wake(read_table(run / keeper.KEEPER))


def _job(request) -> dict:
    """Return a request's job.json, with the Python to run: $DLOJZ_PYTHON, or this."""
    return request.to_dict() | {"python": os.environ.get("DLOJZ_PYTHON") or sys.executable}


def _start_waiter(runs, ticket, fd):
    environment = {k: v for k, v in os.environ.items() if k not in ("DLOJZ_RUN", processes.TOKEN)}
    hears, tells = os.pipe()
    try:
        with (runs[0] / keeper.SAID).open("wb") as said:
            argv = [sys.executable, "-P", "-m", "dlojz.jobs.waiter", ticket, fd, hears]
            process = processes.start(
                [str(word) for word in argv],
                said,
                said,
                cwd=runs[0],
                env=environment | {processes.KEEPER: "1"},
                keep=[fd, hears],  # the waiter holds the ticket from here on
            )
        waiter.sign(fd, runs, process.pid, ticket)
        os.write(tells, waiter.BEGUN)  # a fork of another thread may keep the pipe open
    finally:
        os.close(hears)
        os.close(tells)  # which the waiter waits for: it may change what we have just written


def _lives(run, info, process) -> bool:
    """Return whether the job's waiter or keeper is alive, as far as this process can tell."""
    if not process:  # it has only just been started
        return time.time() < info.get("submitted", 0) + BEGIN_S
    alive = processes.is_alive(process)
    if alive is None:  # another machine, container or boot: look for its sign of life
        return time.time() < (run / keeper.STATE).stat().st_mtime + SILENT_S
    return alive


def _why(run, ticket, wanted) -> str:
    """Return the reason why a job waits, in one line; "" if it is about to start, or unknown."""
    now = int(time.monotonic())
    others = list(tickets.ahead(ticket, wanted, lambda other: _seen(other, now)))
    own = _seen(ticket, now)
    names = [Path(own["run"]).name, *own["more"]] if own else []
    count = sum(1 + len(other["more"]) for other in others)
    count += names.index(run.name) if run.name in names else 0
    if count:
        owners = {tickets.user_name(o["owner"]) for o in others if o["owner"] != os.getuid()}
        whose = f", of {' and '.join(sorted(owners))}" if owners else ""
        return f"waits for {count} job{'s' * (count > 1)} before it{whose}"
    for device in wanted:
        if holder := next(iter(tickets.running_on(ticket.parent, [device])), None):
            whose, held = tickets.user_name(holder["owner"]), Path(holder["run"])
            name = re.sub(r"[^\w.-]", "?", held.name)[:40]  # another user may lie
            where = "" if held.parent == run.parent else ", in another course folder"
            return f"waits for {device}, held by run {name} of {whose}{where}"
        if inode := tickets.lock_inode(ticket.parent, device):
            mine = processes.holders([inode])
            who = f"process {min(mine)}" if mine else "another user's process"
            return f"waits for {device}, held by {who}"
    return ""


@lru_cache(maxsize=1 << 12)
def _seen(ticket, second):
    """Return a ticket's content in this second, if its process goes on; a table asks again."""
    about = tickets.read(ticket)
    return about if about and processes.may_go_on(about["process"]) else None
