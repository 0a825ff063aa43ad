"""The waiter of a job, or of a sweep's jobs, on this machine: `python -m dlojz.jobs.waiter`.

It is started in the first job's folder, with its ticket's path and descriptor as arguments. Each
time that it comes first in the queue and the devices are free, it forks a keeper for the next job.
It ends with the last one, which is how the waiter behind it learns that it is first. There is no
daemon, and a sweep of any length is one process.

Waiting must not slow down the job that is being measured. So it sleeps until the waiter before it
or the keeper of the job that runs has ended, or until it is woken for a job to be cancelled.

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

from dlojz.course import read_table, write_atomically
from dlojz.jobs import keeper, processes, tickets

BEAT_S = 30.0  # between signs of life, for observers on other machines
BEHIND_S = 2.0  # between looks of the second in the queue, for the first may have been stopped
FIRST_S = 5.0  # between looks of the first: a keeper that waits for a full disk frees its device
BEGUN = b"."  # what a fork says
DAMAGED = (OSError, ValueError, KeyError, AttributeError)  # a file of a job that is not as written


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
            processes.reap()
            others = tickets.ahead(self.ticket, self.wanted)
            nearest = (o["process"] for o in others if processes.may_go_on(o["process"]))
            if two := list(islice(nearest, 2)):  # also the one before: the nearest may be stopped
                self.alarm.wait(BEHIND_S if len(two) == 1 else BEAT_S, two, keeper.LOOK_S)
            else:
                self.begin()
        with suppress(OSError):  # the last job's keeper has it, or the queue's folder was removed
            self.ticket.unlink()

    def begin(self):
        """Begin the next job if its devices are free; else wait for those that run."""
        folder = self.ticket.parent
        clear_up(folder)
        if locks := tickets.grab(folder, self.wanted, self.job["devices_held"]):
            begun = self.fork(locks)
            for lock in locks.values():
                lock.close()
            return self.go_on_with(self.runs[1:]) if begun else self.alarm.wait(keeper.LOOK_S)
        running = tickets.running_on(folder, self.wanted)
        named = {device for about in running for device in about["locked"]}
        held = (tickets.lock_inode(folder, device) for device in set(self.wanted) - named)
        seconds = keeper.LOOK_S if any(held) else FIRST_S
        return self.alarm.wait(seconds, [about["process"] for about in running], keeper.LOOK_S)

    def fork(self, locks) -> bool:
        """Fork a keeper for the job in the present folder; return whether it has begun.

        It does not if the system lacks processes, or the queue's disk is full.
        """
        hears, tells = os.pipe()
        try:
            if os.fork() == 0:
                self.become_keeper(locks, tells)
            os.close(tells)
            return os.read(hears, 1) == BEGUN
        except OSError:
            os.close(tells)
            return False
        finally:
            os.close(hears)

    def become_keeper(self, locks, tells):
        """Keep the job in the present folder, to the end of this process."""
        try:
            self.alarm.close()
            with suppress(OSError), keeper.SAID.open("ab") as said:  # else it says it where we did
                os.dup2(said.fileno(), sys.stdout.fileno())
                os.dup2(said.fileno(), sys.stderr.fileno())
            ticket, fd = self.running_ticket(locks)
            if fd != self.fd:
                os.close(self.fd)
            sign(fd, [Path()], os.getpid())
            os.write(tells, BEGUN)  # and not before: what a dead process signed is cleared up
            os.close(tells)
            keeper.Keeper(self.job, ticket, fd).run(locks)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)

    def running_ticket(self, locks):
        """Return a ticket for the job that begins: the last one takes the waiter's own.

        inodes: of the devices' sockets, by which this user's processes are found that hold them.
        """
        about = {"run": str(Path.cwd()), "token": self.job["token"], "locked": list(locks)}
        about["inodes"] = [os.fstat(lock.fileno()).st_ino for lock in locks.values()]
        if len(self.runs) > 1:
            return tickets.make_running(self.ticket, about | {"devices": self.wanted})
        tickets.write(self.fd, **about)
        with suppress(OSError):  # the queue's folder was removed
            return self.ticket.rename(tickets.running(self.ticket)), self.fd
        return self.ticket, self.fd

    def drop_unwanted(self) -> bool:
        """Drop the jobs that are no longer wanted, and return whether any is left."""
        kept = [run for i, run in enumerate(self.runs) if self.is_wanted(run if i else Path())]
        if time.monotonic() > self.beat + BEAT_S:
            self.beat = time.monotonic()
            for run in kept:
                with suppress(OSError):
                    os.utime(run / keeper.STATE)
        if kept != self.runs:
            self.go_on_with(kept)
        return bool(self.runs)

    def is_wanted(self, place) -> bool:
        """Return whether the job in a folder is to run; else write that it is cancelled."""
        with suppress(OSError):  # a folder that was removed, or closed
            cancelled = keeper.cancelled_in(place, "while it waited")
            if cancelled and (place == Path() or self.read(place)):
                keeper.write_final(cancelled | {"ended": time.time()}, {}, place)
                return False
            return place != Path() or os.stat(place).st_nlink > 0
        return False

    def go_on_with(self, runs):
        """Enter the folder of the first of these jobs, and say in the ticket which are left."""
        if runs and runs[0] != self.runs[0]:
            while runs and not (job := self.enter(runs[0])):
                runs = runs[1:]  # its folder was removed or renamed
            self.job = job
        self.runs = runs
        if runs:
            tickets.write(self.fd, run=str(runs[0]), more=[run.name for run in runs[1:]])

    def enter(self, run) -> dict | None:
        """Enter the folder of a job of ours, and return the job."""
        with suppress(OSError):
            os.chdir(run)
            return self.read(Path())
        return None

    def read(self, run) -> dict | None:
        """Return the job in a folder if it is one of ours: its number may be another job's now."""
        with suppress(*DAMAGED):
            job = read_table(run / "job.json")
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


def clear_up(folder: Path):
    """End what is left of this user's jobs whose keepers were killed; who looks sees them lost."""
    tickets.remove_unborn(folder)
    for ticket, about in tickets.abandoned(folder):
        if ticket.name.startswith("running-"):
            token, leader = about["token"], about.get("leader")
            is_here = about["process"].get("where") == processes.here()
            held = about.get("inodes", ()) if is_here else ()
            processes.end(
                lambda t=token, s=leader, i=held: processes.leftovers(t, s) | processes.holders(i)
            )
        ticket.unlink(missing_ok=True)


def main(ticket: str, fd: str, submitted: str):
    # Whatever the submitter ignored or blocked: we wait for children, and hear of signals.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.read(int(submitted), 1)  # until our submitter has signed for us, or has ended
    os.close(int(submitted))
    Waiter(Path(ticket), int(fd)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
