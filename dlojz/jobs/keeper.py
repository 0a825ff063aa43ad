"""The keeper of one job on this machine, from submission to end: `python -m dlojz.jobs.keeper`.

It is started in the job's folder, with its ticket's path and descriptor as arguments. It waits its
turn, locks the devices, starts the trainer, enforces the time limit, obeys a request to cancel,
ends all that the job left behind, writes the final state, and ends. There is no daemon: each job
has a keeper of its own, which outlives the notebook that submitted it, does not import torch and
inherits its submitter's limits, groups and niceness.

The job's folder is the keeper's working directory. So the keeper still finds it after it was
renamed, and does not confuse it with a new folder of the same number after it was removed.

If a keeper is killed, so is its trainer. Before it takes a device, the next keeper ends what is
left: the processes with the session or the $DLOJZ_JOB that the dead keeper's ticket names.
"""

import errno
import json
import os
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from dlojz import course
from dlojz.course import write_atomically
from dlojz.jobs import processes, tickets

POLL_S = 0.1  # between looks at the queue, the clock and the request to cancel
BEAT_S = 10.0  # between signs of life, for observers on other machines
DISK_FULL_S = 600.0  # how long it waits for room to write the final state
LOST = "lost: its keeper was killed, or the machine was restarted"
STATE, CANCEL, RESERVE = Path("state.json"), Path("cancel"), Path(".reserve")
KEEPER = Path("keeper.json")  # which process keeps the job: see processes.identity

# Variables that an outer launcher set for its own processes: our job is not one of them.
LAUNCHER_VARIABLES = re.compile(
    r"(SLURM_|PMI|PET_|TORCHELASTIC_|TORCH_NCCL_|GROUP_|ROLE_)|"
    r"(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)$"
)


class Keeper:
    """The keeper of the job in the present folder."""

    def __init__(self, ticket: Path, fd: int):
        self.job = json.loads(Path("job.json").read_text())
        self.ticket, self.fd = ticket, fd
        self.known = self.written = {"state": "QUEUED"}  # what the state file is to say, and says
        self.beat = time.monotonic()

    def run(self):
        """Run the job, from the ticket to the final state."""
        locks = {}
        try:
            final, locks = self.wait_for_devices()
            final = final or self.train(locks)
        except OSError as error:
            final = {"state": "FAILED", "reason": f"could not be run: {error}"}
        write_final(self.known | final | {"ended": time.time()}, locks)
        with suppress(OSError):  # somebody removed the queue's folder, or put another in its place
            self.ticket.unlink()

    # Waiting ----------------------------------------------------------------------------------

    def wait_for_devices(self):
        """Wait for this job's turn; return (None, its devices' locks) or (its final state, {})."""
        process = processes.identity(os.getpid())
        tickets.write(self.fd, process=process)
        write_atomically(KEEPER, json.dumps(process))
        folder, wanted, count = self.ticket.parent, self.job["devices"], self.job["devices_held"]
        while not (final := self.unwanted("while it waited")):
            before = tickets.before(self.ticket, wanted)
            others = [other for other in before if processes.may_go_on(other["process"])]
            if not others:
                clear_up(folder)
                if locks := tickets.grab(folder, wanted, count):
                    with suppress(OSError):  # the queue's folder was removed
                        self.ticket = self.ticket.rename(tickets.running(self.ticket))
                    return None, locks
                free_from_orphans(folder, wanted)
            self.write("QUEUED", reason=_why(folder, others, wanted))
            time.sleep(5 * POLL_S if others else POLL_S)  # a long queue must not slow the job down
        return final, {}

    # Training ---------------------------------------------------------------------------------

    def train(self, locks) -> dict:
        """Run the trainer on the devices, and return how it ended."""
        processes.adopt_orphans()
        kills_before = _oom_kills()
        trainer = self.start(locks)
        leader = processes.identity(trainer.pid)
        try:
            # Others read this while it runs; if this keeper is killed, the next ends the session.
            tickets.write(self.fd, leader=leader, locked=list(locks))
            self.write("RUNNING", started=time.time(), devices=list(locks), reason=None)
            from dlojz.runs import outcome  # now that it costs no time, nor memory while it waits

            code, final = self.watch(trainer)
        finally:
            if trainer.returncode is None:  # something went wrong here
                trainer.kill()
                trainer.wait()
            token = self.job["token"]
            processes.end(lambda: processes.descendants() | processes.leftovers(token, leader))
        if final:
            return final | {"exit_code": code}
        memory_was_full = _oom_kills() > kills_before  # of any process on this machine
        state, reason = outcome.from_exit(Path.cwd(), code, memory_was_full)
        if state == "FAILED" and (why := _no_room()):
            reason = f"{reason}; {why}"
        return {"state": state, "exit_code": code, "reason": reason}

    def watch(self, trainer):
        """Wait for the trainer; return its exit code, and the final state if it was ended."""
        final, deadline = None, time.monotonic() + self.job["time_max_s"]
        while (code := processes.wait(trainer, POLL_S)) is None and not final:
            processes.reap_orphans(trainer)
            final = self.unwanted("while it ran")
            if time.monotonic() > deadline:
                final = {"state": "TIMEOUT", "reason": "ended at its time limit"}
        if code is None:
            trainer.terminate()  # torchrun then ends its processes cleanly
            if (code := processes.wait(trainer, processes.GRACE_S)) is None:
                trainer.kill()
                code = trainer.wait()
        return code, final

    def start(self, locks):
        # If the keeper is killed, so is the trainer; torchrun gets time to end its ranks.
        end_signal = signal.SIGKILL if self.job["n_gpu"] == 1 else signal.SIGTERM
        with open("stdout.txt", "ab") as out, open("stderr.txt", "ab") as err:
            return processes.start(
                trainer_argv(self.job, Path.cwd()),
                out,
                err,
                cwd=self.job["cwd"],
                env=environment(self.job, locks, Path.cwd()),
                keep=[lock.fileno() for lock in locks.values()],  # held until the last process ends
                end_with_parent=end_signal,
            )

    # Looking and writing ----------------------------------------------------------------------

    def unwanted(self, when: str) -> dict | None:
        """Return the final state if the job is no longer wanted; else show that we live."""
        if os.stat(".").st_nlink == 0:
            return {"state": "CANCELLED", "reason": "its folder was removed"}
        if CANCEL.exists():
            reason = ""
            with suppress(OSError):  # a wish that can't be read is a wish
                reason = CANCEL.read_text(errors="replace").strip()
            return {"state": "CANCELLED", "reason": reason or f"cancelled {when}"}
        if time.monotonic() > self.beat + BEAT_S:
            self.beat = time.monotonic()
            with suppress(OSError):
                os.utime(STATE)
        return None

    def write(self, state, **fields):
        """Write the state, if it is news. A full disk must not end the job."""
        self.known = self.known | {"state": state} | fields
        if self.known != self.written:
            with suppress(OSError):
                write_atomically(STATE, json.dumps(self.known))
                self.written = self.known


def write_final(state: dict, locks):
    """Write how the job ended, even on a full disk: a file is kept to make room."""
    deadline = time.monotonic() + DISK_FULL_S
    while os.stat(".").st_nlink:  # otherwise the folder was removed, and nothing reads it
        try:
            write_atomically(STATE, json.dumps(state))
            break
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or time.monotonic() > deadline:
                raise
            if not RESERVE.exists():
                for lock in locks.values():
                    lock.close()  # no other job should wait for our disk
                time.sleep(1)
            RESERVE.unlink(missing_ok=True)
    RESERVE.unlink(missing_ok=True)


def trainer_argv(job: dict, run: Path) -> list[str]:
    """Return the command of the job in this folder: the trainer, or torchrun for several processes.

    torchrun's own files go into the folder as well; otherwise they stay in the temporary one.
    """
    words = [str(run / "trainer.py"), *job["command"][1:]]
    if job["n_gpu"] == 1:
        return [job["python"], *words]
    torchrun = [job["python"], "-m", "torch.distributed.run", "--standalone"]
    options = ["--local-addr=127.0.0.1", f"--nproc-per-node={job['n_gpu']}"]
    return [*torchrun, *options, f"--log-dir={run / 'torchrun'}", *words]


def environment(job: dict, locks, run: Path) -> dict[str, str]:
    """Return the trainer's environment: ours, less an outer launcher's variables, plus its own."""
    found = {k: v for k, v in os.environ.items() if not LAUNCHER_VARIABLES.match(k)}
    found.pop(processes.KEEPER, None)
    found |= {"DLOJZ_RUN": str(run), "DLOJZ_ROOT": job["cwd"], "PYTHONUNBUFFERED": "1"}
    found[processes.TOKEN] = job["token"]
    if job["n_gpu"] > 1:  # otherwise each process starts a thread per CPU
        cpus = len(os.sched_getaffinity(0))
        found.setdefault("OMP_NUM_THREADS", str(max(1, cpus // job["n_gpu"])))
    if "cpu" not in locks:
        found["CUDA_VISIBLE_DEVICES"] = ",".join(locks)
    return found


# What killed keepers left behind --------------------------------------------------------------


def clear_up(folder: Path):
    """End what is left of this user's jobs whose keepers were killed, and say so in their state."""
    tickets.remove_unborn(folder)
    for ticket, about in tickets.abandoned(folder):
        run, token = Path(about["run"]), about["token"]
        if ticket.name.startswith("running-"):
            leader = about.get("leader")
            processes.end(lambda t=token, s=leader: processes.leftovers(t, s))
        with suppress(OSError, ValueError, KeyError):
            file = run / STATE
            known = json.loads(file.read_text())
            is_its_own = json.loads((run / "job.json").read_text())["token"] == token
            if is_its_own and known["state"] in ("QUEUED", "RUNNING"):
                (run / RESERVE).unlink(missing_ok=True)
                lost = {"state": "FAILED", "ended": time.time(), "reason": LOST}
                write_atomically(file, json.dumps(known | lost))
        ticket.unlink(missing_ok=True)


def free_from_orphans(folder: Path, wanted):
    """End processes of this user that hold a device although the keeper that locked it is gone."""
    for device in wanted:
        if tickets.holder(folder, device):  # its keeper lives: no search through all processes
            continue
        if inode := tickets.lock_inode(folder, device):
            holders = processes.holders(inode)
            if holders and not any(map(processes.is_keeper, holders)):
                processes.end(lambda i=inode: processes.holders(i))


def _why(folder, others, wanted):
    """Return why the job waits, in one line."""
    if others:
        return f"waits for {len(others)} job{'s' * (len(others) > 1)} before it"
    for device in wanted:
        if job := tickets.holder(folder, device):
            whose = tickets.user_name(job["owner"])
            run = Path(job["run"])
            name = re.sub(r"[^\w.-]", "?", run.name)[:40]  # another user may lie
            where = "" if run.parent == Path.cwd().parent else ", in another course folder"
            return f"waits for {device}, held by run {name} of {whose}{where}"
        if inode := tickets.lock_inode(folder, device):
            mine = processes.holders(inode)
            who = f"process {min(mine)}" if mine else "another user's process"
            return f"waits for {device}, held by {who}"
    return f"waits for {' or '.join(wanted)}"


def _oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory since it booted."""
    match = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.M)
    return int(match[1]) if match else 0


def _no_room() -> str:
    """Return what is full, and what to do, or "". A quota is seen only by who writes."""
    file = Path(".room")
    try:
        file.write_bytes(os.urandom(1 << 16))  # no zeros, which some file systems store as nothing
    except OSError as error:
        return course.no_room(error)
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)
    return ""


if __name__ == "__main__":
    # Whatever the submitter ignored or blocked: we wait for children, and hear of signals.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    Keeper(Path(sys.argv[1]), int(sys.argv[2])).run()
