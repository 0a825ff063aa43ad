"""Runs jobs on this machine, in order: `python -m dlojz.jobs.supervisor RUN TICKET` supervises one.

There is no daemon. Each job has a supervisor process of its own, which outlives the notebook that
submitted it. It waits its turn by ticket, holds a lock for each device, enforces the time limit,
ends all that the job started, and writes down how it went.

The tickets and the locks are files: see `dlojz.jobs.tickets`.
"""

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from dlojz import course, presets
from dlojz.jobs import tickets
from dlojz.runs import outcome

POLL_S = 0.1  # how often a supervisor looks at the queue, the clock and the wish to cancel
GRACE_S = 5.0  # between SIGTERM and SIGKILL
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h

# What a launcher outside told its own processes: our job is not one of them.
LAUNCHER_VARIABLES = re.compile(
    r"(SLURM_|PMI|PET_|TORCHELASTIC_|TORCH_NCCL_|GROUP_|ROLE_)|"
    r"(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)$"
)


def supervise(run: Path, ticket: Path):
    """Wait for the turn of the job in `run`, run it, and write down how it went.

    Raises BecomeJob in a process that was forked from this one.
    """
    job = json.loads((run / "job.json").read_text())
    me = os.getpid()
    try:
        held = _wait_for_devices(run, ticket, job)
        if not held:
            _write_state(run, "CANCELLED", ended=time.time(), reason="cancelled while it waited")
            return
        ticket.rename(tickets.running(ticket))  # the next may try
        _run(run, job, held)
    except OSError as error:
        _write_state(run, "FAILED", ended=time.time(), reason=f"could not be run: {error}")
        raise
    finally:
        if os.getpid() == me:
            ticket.unlink(missing_ok=True)
            tickets.running(ticket).unlink(missing_ok=True)


def _wait_for_devices(run, ticket, job):
    count = job["n_gpu"] if presets.gpus() else 1
    while not (run / "cancel").exists():
        first = tickets.is_first(ticket)
        if first and (held := tickets.grab(count)):
            return held
        time.sleep(POLL_S if first else 5 * POLL_S)  # a long queue must not disturb the job
    return {}


def _run(run, job, held):
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # what it leaves behind is ours to end
    kills_before = _oom_kills()
    with (run / "stdout.txt").open("ab") as out, (run / "stderr.txt").open("ab") as err:
        process = _start(job, _environment(run, job, held), held.values(), out, err)
    started = time.time()
    _write_state(run, "RUNNING", started=started, devices=list(held))
    exit_code, stopped = _watch(run, process, time.monotonic() + job["time_max_s"])
    _end_all()
    memory_was_full = _oom_kills() > kills_before  # for some process of this machine
    state, reason = stopped or outcome.from_exit(run, exit_code, memory_was_full)
    _write_state(
        run,
        state,
        started=started,
        ended=time.time(),
        devices=list(held),
        exit_code=exit_code,
        reason=reason,
    )


class BecomeJob(BaseException):
    """In a process that was forked to be the job: leave the supervisor, and run `argv`."""

    def __init__(self, argv: list[str], processes: int):
        super().__init__(argv, processes)
        self.argv, self.processes = argv, processes


def _start(job, environment, locks, out, err) -> psutil.Process:
    """The job's process: a fork of this one, where torch is imported already (`warm`)."""
    # If this process is killed the job ends with it; torchrun must be left time to end its ranks.
    end_signal = signal.SIGKILL if job["n_gpu"] == 1 else signal.SIGTERM
    python, *argv = job["argv"]
    if python != sys.executable or "torch" not in sys.modules:
        return psutil.Popen(
            job["argv"],
            cwd=job["cwd"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            pass_fds=tuple(locks),  # a device stays locked until its last user is gone
            preexec_fn=lambda: _end_with_parent(end_signal),
        )
    if child := os.fork():
        return psutil.Process(child)
    os.setsid()
    _end_with_parent(end_signal)
    with open(os.devnull) as nothing:
        for stream, descriptor in ((nothing, 0), (out, 1), (err, 2)):
            os.dup2(stream.fileno(), descriptor)
    for lock in locks:
        os.set_inheritable(lock, True)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(job["cwd"])
    presets.gpus.cache_clear()  # the job may use fewer
    raise BecomeJob(argv, job["n_gpu"])


def _end_with_parent(end_signal):
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, end_signal)


def _environment(run, job, held):
    environment = {k: v for k, v in os.environ.items() if not LAUNCHER_VARIABLES.match(k)}
    environment |= {"DLOJZ_RUN": str(run), "DLOJZ_ROOT": job["cwd"], "PYTHONUNBUFFERED": "1"}
    if "cpu" not in held:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(held)
    return environment


def _watch(run, process, deadline):
    """Wait for the end of `process`: its exit code, and (state, reason) if it was made to end."""
    while True:
        with suppress(psutil.TimeoutExpired):
            return process.wait(POLL_S), None
        if (run / "cancel").exists():
            stopped = ("CANCELLED", "cancelled while it ran")
        elif time.monotonic() > deadline:
            stopped = ("TIMEOUT", "ended at its time limit")
        else:
            continue
        process.terminate()  # torchrun ends its workers in order
        try:
            return process.wait(GRACE_S), stopped
        except psutil.TimeoutExpired:
            process.kill()
            return process.wait(), stopped


def _end_all():
    """End what the job left behind: workers of a loader, ranks of a killed torchrun."""
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.terminate()
        _, alive = psutil.wait_procs(children, timeout=GRACE_S)
        for child in alive:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(alive, timeout=GRACE_S)


def _oom_kills() -> int:
    """How many processes the kernel has killed for want of memory since it was started."""
    match = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.M)
    return int(match[1]) if match else 0


def _write_state(run, state, **fields):
    course.write_atomically(run / "state.json", json.dumps({"state": state, **fields}))


if __name__ == "__main__":
    # The descriptor of the ticket was inherited, and stays open as long as this process lives.
    supervise(Path(sys.argv[1]), Path(sys.argv[2]))
