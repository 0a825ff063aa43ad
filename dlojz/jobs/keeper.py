"""The keeper of one job on this machine, from its start to its end.

It is a fork of the job's waiter, in the job's folder, and has the locks of the devices. It starts
the trainer, enforces the time limit, obeys a request to cancel, ends all that the job left behind,
writes the final state, and ends. It outlives the notebook that submitted the job, does not import
torch and inherits its submitter's limits, groups and niceness.

All modules are imported before the job begins to wait: the package may be upgraded meanwhile.

If a keeper is killed, so is its trainer. Before it takes a device, the next waiter ends what is
left: the processes with the session or the $DLOJZ_JOB that the dead keeper's ticket names.
"""

import errno
import json
import os
import re
import resource
import signal
import subprocess
import time
import traceback
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

from dlojz import course
from dlojz.course import write_atomically
from dlojz.jobs import processes, stacks, tickets
from dlojz.jobs.meter import Meter
from dlojz.runs import outcome

LOOK_S = 0.5  # between looks, if no signal comes: it does not from another machine
BEAT_S = 20.0  # between signs of life, for observers on other machines
DISK_FULL_S = 600.0  # how long it waits for room to write the final state


class Cause(StrEnum):
    """The causes of a job's state that decisions depend on; a reason is for people."""

    LOST = "lost"  # nobody keeps it; its keeper may still find out more
    ENOUGH = "enough"  # it was cancelled, and had done what it was submitted for


STATE, CANCEL, RESERVE = Path("state.json"), Path("cancel"), Path(".reserve")
SAID = Path("keeper.txt")  # what a waiter or a keeper said
KEEPER = Path("keeper.json")  # which process keeps the job: see processes.identity

# Variables that an outer launcher set for its own processes: our job is not one of them.
LAUNCHER_VARIABLES = re.compile(
    r"(SLURM_|PMI|OMPI_|MV2_|MPI_LOCAL|PALS_|PET_|TORCHELASTIC_|TORCH_NCCL_|GROUP_|ROLE_)|"
    r"(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)$"
)


class Keeper:
    """The keeper of the job in the present folder, whose devices are locked."""

    def __init__(self, job: dict, ticket: Path, fd: int):
        self.job, self.ticket, self.fd = job, ticket, fd
        self.known = {"state": "QUEUED"}
        self.beat = time.monotonic()
        self.alarm = processes.Alarm()

    def run(self, locks):
        """Run the job to its final state."""
        try:
            final = self.train(locks)
        except OSError as error:
            final = {"state": "FAILED", "reason": f"could not be run: {error}"}
        except Exception as error:
            traceback.print_exc()
            why = f"its keeper failed: {type(error).__name__}: see {Path.cwd() / SAID}"
            final = {"state": "FAILED", "reason": why}
        write_final(self.known | final | {"ended": time.time()}, locks)
        with suppress(OSError):  # somebody removed the queue's folder, or put another in its place
            self.ticket.unlink()

    def train(self, locks) -> dict:
        """Run the trainer on the devices, and return how it ended."""
        processes.adopt_orphans()
        kills_before, meter = _oom_kills(), Meter(locks)
        trainer = self.start(locks)
        leader = processes.identity(trainer.pid)
        try:
            # Others read this while it runs; if this keeper is killed, the next ends the session.
            tickets.write(self.fd, leader=leader, locked=list(locks))
            self.known = {"state": "RUNNING", "started": time.time(), "devices": list(locks)}
            with suppress(OSError):  # a full disk must not end the job
                write_atomically(STATE, json.dumps(self.known))
            code, final = self.watch(trainer, meter)
        finally:
            if trainer.returncode is None:  # something went wrong here
                trainer.kill()
                trainer.wait()
            token = self.job["token"]
            processes.end(lambda: processes.descendants() | processes.leftovers(token, leader))
        meter.end(**usage())
        if final:
            return final | {"exit_code": code} | usage()
        memory_was_full = _oom_kills() > kills_before  # of any process on this machine
        state, reason = outcome.from_exit(Path.cwd(), code, memory_was_full)
        if state == "FAILED" and (why := _no_room()):
            reason = f"{reason}; {why}"
        return {"state": state, "exit_code": code, "reason": reason} | usage()

    def watch(self, trainer, meter):
        """Wait for the trainer; return its exit code, and the final state if it was ended."""
        final, deadline = None, time.monotonic() + self.job["time_max_s"]
        while (code := trainer.poll()) is None and not final:
            self.alarm.wait(min(LOOK_S, deadline - time.monotonic()))
            processes.reap_orphans(trainer)
            meter.look()
            final = self.unwanted()
            if time.monotonic() > deadline:
                stood = stacks.keep(Path.cwd(), processes.descendants())
                final = {"state": "TIMEOUT", "reason": f"ended at its time limit; {stood}"}
        if code is None:
            trainer.terminate()  # torchrun then ends its processes cleanly
            with suppress(subprocess.TimeoutExpired):
                return trainer.wait(processes.GRACE_S), final
            trainer.kill()
        return trainer.wait(), final

    def start(self, locks):
        # If the keeper is killed, so is the trainer; torchrun gets time to end its ranks.
        end_signal = signal.SIGKILL if self.job["n_gpu"] == 1 else signal.SIGTERM
        with open("stdout.txt", "ab") as out, open("stderr.txt", "ab") as err:
            return processes.start(
                trainer_argv(self.job, Path.cwd()),
                out,
                err,
                cwd=self.job["folder"],
                env=environment(self.job, locks, Path.cwd()),
                keep=[lock.fileno() for lock in locks.values()],  # held until the last process ends
                end_with_parent=end_signal,
            )

    def unwanted(self) -> dict | None:
        """Return the final state if the job is no longer wanted; else show that we live."""
        if os.stat(".").st_nlink == 0:
            return {"state": "CANCELLED", "reason": "its folder was removed"}
        if cancelled := cancelled_in(Path(), "while it ran"):
            return cancelled
        if time.monotonic() > self.beat + BEAT_S:
            self.beat = time.monotonic()
            with suppress(OSError):
                os.utime(STATE)
        return None


def cancelled_in(run: Path, when: str) -> dict | None:
    """Return the final state of a job that is to be cancelled, else None."""
    found = wish(run)
    if found is None:
        return None
    reason = found.get("reason") or f"cancelled {when}"
    return {"state": "CANCELLED", "reason": reason, "cause": found.get("cause")}


def wish(run: Path) -> dict | None:
    """Return the reason and the cause for which somebody wants a job cancelled; None: nobody."""
    if not (run / CANCEL).exists():
        return None
    with suppress(course.FileError):  # a wish that can't be read is a wish
        return course.read_table(run / CANCEL)
    return {}


def cancel(run: Path, reason: str, cause: Cause | None):
    """Write into a job's folder that it is no longer wanted."""
    write_atomically(run / CANCEL, json.dumps({"reason": reason, "cause": cause}))


def write_final(state: dict, locks, run: Path = Path()):
    """Write a job's final state to its folder, even on a full disk: a kept file makes room."""
    reserve, deadline = run / RESERVE, time.monotonic() + DISK_FULL_S
    while os.stat(run).st_nlink:  # otherwise the folder was removed, and nothing reads it
        try:
            write_atomically(run / STATE, json.dumps(state))
            break
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or time.monotonic() > deadline:
                raise
            if not reserve.exists():
                for lock in locks.values():
                    lock.close()  # no other job should wait for our disk
                time.sleep(1)
            reserve.unlink(missing_ok=True)
    reserve.unlink(missing_ok=True)


def trainer_argv(job: dict, run: Path) -> list[str]:
    """Return the command of the job in this folder: the trainer, or torchrun for several processes.

    torchrun's own files go into the folder as well; otherwise they stay in the temporary one.
    """
    start, *flags = job["words"]
    words = [str(run / start), *flags]
    if job["n_gpu"] == 1:
        return [job["python"], *words]
    torchrun = [job["python"], "-m", "torch.distributed.run", "--standalone"]
    options = ["--local-addr=127.0.0.1", f"--nproc-per-node={job['n_gpu']}"]
    return [*torchrun, *options, f"--log-dir={run / 'torchrun'}", *words]


def environment(job: dict, locks, run: Path) -> dict[str, str]:
    """Return the trainer's environment: ours, less an outer launcher's variables, plus its own."""
    course.guard_compiled_code()
    found = {k: v for k, v in os.environ.items() if not LAUNCHER_VARIABLES.match(k)}
    found.pop(processes.KEEPER, None)
    found |= {"DLOJZ_RUN": str(run), "DLOJZ_ROOT": job["root"], "PYTHONUNBUFFERED": "1"}
    found[processes.TOKEN] = job["token"]
    if job["n_gpu"] > 1:  # otherwise each process starts a thread per CPU
        cpus = len(os.sched_getaffinity(0))
        found.setdefault("OMP_NUM_THREADS", str(max(1, cpus // job["n_gpu"])))
    if "cpu" not in locks:
        found["CUDA_VISIBLE_DEVICES"] = ",".join(locks)
    return found


def usage() -> dict:
    """Return the CPU time of all processes of the job, and the peak memory of the largest."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = round(used.ru_utime + used.ru_stime, 3)
    return {"cpu_s": seconds, "peak_memory_bytes": 1024 * used.ru_maxrss}


def _oom_kills() -> int:
    """Return the number of processes that the kernel has killed for lack of memory."""
    match = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(encoding="utf-8"), re.M)
    return int(match[1]) if match else 0


def _no_room() -> str:
    """Return a sentence on a full disk and its remedy, or "". A quota shows only in a write."""
    file = Path(".room")
    try:
        file.write_bytes(os.urandom(1 << 16))  # no zeros, which some file systems store as nothing
    except OSError as error:
        return course.no_room(error)
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)
    return ""
