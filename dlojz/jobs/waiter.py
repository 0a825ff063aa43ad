"""The waiter of a job, or of a sweep's jobs, on this machine: `python -m dlojz.jobs.waiter`.

It is started in the first job's folder, with its ticket's path and descriptor as arguments. Each
time that it comes first in the queue and the devices are free, it forks a keeper for the next job.
It ends with the last one, which is how the waiter behind it learns that it is first. There is no
daemon, and a sweep of any length is one process.

Waiting must not slow down the job that is being measured. So it sleeps until the waiter before it
or the keeper of the job that runs has ended, or until somebody wakes it for a job to be cancelled.

The next job's folder is the working directory. So the waiter still finds it after it was renamed,
and does not confuse it with a new folder of the same number after it was removed.
"""

import json
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from itertools import islice
from pathlib import Path

from dlojz.course import write_atomically
from dlojz.jobs import keeper, processes, tickets

BEAT_S = 30.0  # between signs of life, for observers on other machines
BEHIND_S = 2.0  # between looks of the second in the queue, for the first may have been stopped


class Waiter:
    """The waiter for the jobs that a ticket names, the first of them in the present folder."""

    def __init__(self, ticket: Path, fd: int):
        about = tickets.own(fd)
        self.ticket, self.fd = ticket, fd
        self.token, self.wanted = about["token"], about["devices"]
        first = Path(about["run"])
        self.runs = [first, *map(first.with_name, about["more"])]
        self.job = self.read(Path())
        self.alarm = processes.Alarm()
        self.beat = time.monotonic()
        if about["process"] != processes.identity(os.getpid()):  # its submitter was killed
            sign(fd, self.runs, os.getpid(), ticket)

    def run(self):
        """Fork a keeper for each job, in order."""
        if self.job is None:  # its folder was removed before we began
            self.go_on_with(self.runs[1:])
        while self.drop_unwanted():
            others = tickets.ahead(self.ticket, self.wanted)
            nearest = list(islice((o for o in others if processes.may_go_on(o["process"])), 2))
            if nearest:
                seconds = BEHIND_S if len(nearest) == 1 else BEAT_S
                self.alarm.wait(seconds, [nearest[0]["process"]], keeper.LOOK_S)
            else:
                self.begin()
        with suppress(OSError):  # the last job's keeper has it, or the queue's folder was removed
            self.ticket.unlink()

    def begin(self):
        """Begin the next job if its devices are free; else wait for those that run."""
        folder = self.ticket.parent
        clear_up(folder)
        if locks := tickets.grab(folder, self.wanted, self.job["devices_held"]):
            try:
                self.fork(locks)
            except tickets.QueueError:  # its disk is full
                return self.alarm.wait(keeper.LOOK_S)
            except OSError as error:
                failed = {"state": "FAILED", "reason": f"could not be run: {error}"}
                keeper.write_final(failed | {"ended": time.time()}, locks)
            finally:
                for lock in locks.values():
                    lock.close()
            return self.go_on_with(self.runs[1:])
        running = [about["process"] for about in tickets.running_on(folder, self.wanted)]
        seconds = keeper.LOOK_S if free_from_orphans(folder, self.wanted) else BEAT_S
        return self.alarm.wait(seconds, running, keeper.LOOK_S)

    def fork(self, locks):
        """Fork a keeper for the job in the present folder; return when it is known as such."""
        ticket, fd = self.running_ticket(locks)
        hears, tells = os.pipe()
        if os.fork() == 0:
            try:
                self.alarm.close()
                if fd != self.fd:
                    os.close(self.fd)
                with keeper.SAID.open("ab") as said:
                    os.dup2(said.fileno(), sys.stdout.fileno())
                    os.dup2(said.fileno(), sys.stderr.fileno())
                sign(fd, [Path()], os.getpid())
                os.close(tells)
                keeper.Keeper(self.job, ticket, fd).run(locks)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.close(tells)
        os.read(hears, 1)  # until it has signed: a ticket of a dead process would be cleared up
        os.close(hears)
        if fd != self.fd:
            os.close(fd)

    def running_ticket(self, locks):
        """Return a ticket for the job that begins: the last one takes the waiter's own."""
        about = {"run": str(Path.cwd()), "token": self.job["token"], "locked": list(locks)}
        if len(self.runs) > 1:
            return tickets.make_running(self.ticket, about | {"devices": self.wanted})
        tickets.write(self.fd, **about)
        with suppress(OSError):  # the queue's folder was removed
            return self.ticket.rename(tickets.running(self.ticket)), self.fd
        return self.ticket, self.fd

    def drop_unwanted(self) -> bool:
        """Drop the jobs that are no longer wanted, and return whether any is left."""
        kept = []
        for i, run in enumerate(self.runs):
            place = run if i else Path()
            cancelled = keeper.cancelled_in(place, "while it waited")
            if cancelled and (i == 0 or self.read(run)):
                keeper.write_final(cancelled | {"ended": time.time()}, {}, place)
            elif i or os.stat(place).st_nlink:  # otherwise the folder was removed
                kept.append(run)
        if time.monotonic() > self.beat + BEAT_S:
            self.beat = time.monotonic()
            for run in kept:
                with suppress(OSError):
                    os.utime(run / keeper.STATE)
        if kept != self.runs:
            self.go_on_with(kept)
        return bool(self.runs)

    def go_on_with(self, runs):
        """Enter the folder of the first of these jobs, and say in the ticket which are left."""
        if runs and runs[0] != self.runs[0]:
            while runs and not (job := self.read(runs[0])):
                runs = runs[1:]  # its folder was removed or renamed
            if runs:
                self.job = job
                os.chdir(runs[0])
        self.runs = runs
        if runs:
            tickets.write(self.fd, run=str(runs[0]), more=[run.name for run in runs[1:]])

    def read(self, run) -> dict | None:
        """Return the job in a folder if it is one of ours: its number may be another job's now."""
        with suppress(OSError, ValueError, KeyError):
            job = json.loads((run / "job.json").read_bytes())
            return job if job["token"].startswith(self.token) else None
        return None


def sign(fd: int, runs, pid: int, ticket: Path | None = None):
    """Write into a ticket and its jobs' folders which process waits for them or keeps them.

    ticket: the one that waits, from which others can tell why.
    """
    process = processes.identity(pid)
    tickets.write(fd, process=process)
    about = json.dumps(process | ({"ticket": str(ticket)} if ticket else {}))
    for run in runs:
        with suppress(OSError):
            write_atomically(run / keeper.KEEPER, about)


# What killed waiters and keepers left behind ---------------------------------------------------


def clear_up(folder: Path):
    """End what is left of this user's jobs whose keepers were killed, and say so in their state."""
    tickets.remove_unborn(folder)
    for ticket, about in tickets.abandoned(folder):
        first, token = Path(about["run"]), about["token"]
        if ticket.name.startswith("running-"):
            leader = about.get("leader")
            processes.end(lambda t=token, s=leader: processes.leftovers(t, s))
        for run in (first, *map(first.with_name, about["more"])):
            with suppress(OSError, ValueError, KeyError):
                _say_lost(run, token)
        ticket.unlink(missing_ok=True)


def _say_lost(run, token):
    file = run / keeper.STATE
    known = json.loads(file.read_bytes())
    is_its_own = json.loads((run / "job.json").read_bytes())["token"].startswith(token)
    if is_its_own and known["state"] in ("QUEUED", "RUNNING"):
        (run / keeper.RESERVE).unlink(missing_ok=True)
        lost = {"state": "FAILED", "ended": time.time(), "reason": keeper.LOST}
        write_atomically(file, json.dumps(known | lost))


def free_from_orphans(folder: Path, wanted) -> bool:
    """End processes of this user that hold a device although the keeper that locked it is gone.

    Returns whether a device is held and no ticket says by which job.
    """
    named = {device for about in tickets.running_on(folder, wanted) for device in about["locked"]}
    unnamed = False
    for device in set(wanted) - named:
        if inode := tickets.lock_inode(folder, device):
            unnamed = True
            holders = processes.holders(inode)
            if holders and not any(map(processes.is_keeper, holders)):
                processes.end(lambda i=inode: processes.holders(i))
    return unnamed


def main(ticket: str, fd: str, submitted: str):
    # Whatever the submitter ignored or blocked: we wait for children, and hear of signals.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.read(int(submitted), 1)  # until our submitter has signed for us, or has ended
    os.close(int(submitted))
    Waiter(Path(ticket), int(fd)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
