"""The program of a job that does several runs, one after the other: see `launch.series`.

Those that are small go on beside the others, and all runs after the last of these are alone.

Each run is a process of its own, forked from one that has already imported torch, so that it does
not spend seconds on imports. A fresh one begins as Python does: the environment that a trainer sets
before it imports torch acts there, too. A run that fails, or runs out of memory, does not end the
series. With several processes (n_gpu) each runs this program: they go from one run to the next
together, and one that fails ends its run in all of them.
"""

import faulthandler
import json
import math
import os
import shutil
import signal
import socket
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from dlojz import course, idr_torch
from dlojz.jobs import forks, processes

PLAN = "plan.json"  # in the job's folder: the runs, in order
IMAGES = "images"  # in a run's folder: its own copy of some images
REPLAY = "replay"  # in a run's folder: that of the program that follows it
POLL_S = 0.02  # between looks at a child
GRACE_S = 3.0  # for a process after another one of its run has failed
TOO_LONG = 124  # the exit code of a run that was ended because it took too long, as of timeout(1)
STACK_S = 0.5  # a process takes a moment to write where it stands


def main():
    job = Path(os.environ["DLOJZ_RUN"])
    os.environ["DLOJZ_TREE"] = str(os.getppid())  # a run's parent has one of its processes only
    forks.prepare()  # here, once, for all of them
    processes.adopt_orphans()
    plan = json.loads((job / PLAN).read_bytes())
    together = 1 + max((i for i, entry in enumerate(plan) if entry["aside"]), default=-1)
    if together:
        lanes = ([e for e in plan[:together] if e["aside"] == aside] for aside in (False, True))
        for lane in [_fork(job, entries) for entries in lanes]:
            if os.waitpid(lane, 0)[1]:
                sys.exit("some runs of the series could not be begun")
    _go_through(job, plan[together:])


def _fork(job, entries) -> int:
    """Go through these entries in a fork; return its number."""
    child = os.fork()
    if child == 0:
        processes.end_with_parent(signal.SIGKILL)
        processes.adopt_orphans()
        _go_through(job, entries)
        sys.exit(forks.leave_with(0))
    return child


def _go_through(job, entries):
    """Make these runs, one after the other."""
    for entry in entries:
        folder = job / entry["name"]
        if (folder / "exit_code").exists():  # done before the job was requeued
            continue
        with _memory(entry):
            code = _run(job, folder, entry)
            if code == 0 and entry["replay"]:
                replayed = _run(job, folder / REPLAY, entry["replay"])
                _write_once(folder / REPLAY / "exit_code", replayed)
        _write_once(folder / "exit_code", code)
        if idr_torch.is_master:
            print(f"{entry['name']}: exit code {code}", flush=True)


@contextmanager
def _memory(entry):
    """Hold a file without a name for each update that the run keeps for its replay.

    It is memory, and gone when this process ends: network disks are slow, and full ones throttle.
    """
    kept = entry["audit"]["keep"] if entry["replay"] else 0
    files = [os.memfd_create("update") for _ in range(kept)]
    if files:
        entry["audit"]["memory"] = [f"/proc/{os.getpid()}/fd/{file}" for file in files]
    yield
    for file in files:
        os.close(file)


def _run(job, folder, entry) -> int:
    """Make a run in this folder, in a fork; return its exit code, the same in all processes."""
    folder.mkdir(exist_ok=True)
    own = folder / f"exit_code.rank{idr_torch.rank}"
    own.unlink(missing_ok=True)  # of this job, before it was requeued
    if entry["images"] and idr_torch.is_master:
        shutil.copytree(entry["images"], folder / IMAGES, dirs_exist_ok=True)
    if idr_torch.size > 1:
        _meet(folder)
    child = os.fork()
    if child == 0:
        _become(job, folder, entry)
        sys.exit()
    code = _wait(child, folder, entry["most_s"])
    processes.end(processes.descendants)  # what it left behind would disturb the next
    course.write_atomically(own, f"{code}\n")
    while len(codes := _codes(folder)) < idr_torch.size:
        time.sleep(POLL_S)
    if entry["images"] and idr_torch.is_master:
        shutil.rmtree(folder / IMAGES)
    return next(filter(None, codes), 0)


def _write_once(file, number):
    """Write a file in the first process; return in all of them, together, once it is there."""
    if idr_torch.is_master:
        course.write_atomically(file, f"{number}\n")
    while not file.exists():
        time.sleep(POLL_S)


def _meet(folder):
    """Agree on a free port of the first process, for the store of the next run.

    torchrun's own store outlives a run, so the next one would find stale addresses in it.
    """
    file = folder / f"port.{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    with socket.socket() as free:
        free.bind(("", 0))
        _write_once(file, free.getsockname()[1])
    os.environ["MASTER_PORT"] = file.read_text(encoding="utf-8").strip()
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"


def _codes(folder) -> list[int]:
    """Return the exit codes of those processes that have ended their part of a run."""
    files = (folder / f"exit_code.rank{rank}" for rank in range(idr_torch.size))
    return [int(file.read_bytes()) for file in files if file.exists()]


def _wait(child, folder, most_s=None) -> int:
    """Return the exit code of this process's part; kill it if another part has failed.

    TOO_LONG if it has not ended after `most_s`. Then its stack goes to its stderr first.
    """
    ends, last = None, time.monotonic() + most_s if most_s else math.inf
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > last:
            os.kill(child, forks.STACK)
            time.sleep(STACK_S)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return TOO_LONG
        if ends is None and any(_codes(folder)):
            ends = time.monotonic() + GRACE_S  # it may notice and report that
        if ends and time.monotonic() > ends:
            os.kill(child, signal.SIGKILL)
        time.sleep(POLL_S)


def _become(job, folder, entry):
    """Run this entry, from here to the end of the process."""
    processes.end_with_parent(signal.SIGKILL)  # the parent is the series
    for stream, file in ((sys.stdout, "stdout.txt"), (sys.stderr, "stderr.txt")):
        stream.flush()
        descriptor = os.open(folder / file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, stream.fileno())
    faulthandler.register(forks.STACK)
    os.environ |= entry["environment"] | {"DLOJZ_RUN": str(folder)}
    if entry["rehearse"]:
        _rehearse()
    if entry["audit"]:
        os.environ["DLOJZ_AUDIT"] = json.dumps(entry["audit"])
    else:
        os.environ.pop("DLOJZ_AUDIT", None)
    program = entry["trainer"]
    for path, copy in program["copies"].items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        course.write_atomically(folder / path, (job / copy).read_bytes())
    for path, target in program["links"].items():
        with suppress(FileExistsError):  # another process was faster
            (folder / path).symlink_to(target)
    if program["folder"]:
        os.chdir(program["folder"])
    flags = [f.replace("{run}", str(folder)).replace("{job}", str(job)) for f in entry["flags"]]
    run = forks.begin_anew if entry["fresh"] else forks.run_script
    run(str(folder / program["start"]), flags)


def _rehearse():
    """Make the run compute on the meta device, for which torch has no fused optimizers."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    os.environ["DLOJZ_DEVICE"] = "meta"
    register_optimizer_step_pre_hook(_one_by_one)


def _one_by_one(optimizer, args, kwargs):
    for group in optimizer.param_groups:
        group["fused"] = False


if __name__ == "__main__":
    main()
