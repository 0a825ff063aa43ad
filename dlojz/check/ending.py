"""The ending of a check's run, from its exit codes, its log and its stderr."""

import re
import signal
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path

from dlojz import course
from dlojz.launch import series
from dlojz.runs import by_hand, log, outcome, stats
from dlojz.runs.folder import events_file
from dlojz.table import harmless

# Signals by which something else ends a run; the others come from the run's own code.
FROM_OUTSIDE = {signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM}
NO_END = "its log has no end: was run.end() left out, or os._exit() called?"
MOST = 300  # characters of an error
WORKERS = "Original Traceback"  # in the error of a loader's worker: the cause is its last line
FULL = re.compile("|".join(rf"\[Errno {number}\]" for number in course.FULL))


class How(StrEnum):
    COMPLETED = "completed"  # exit code 0, and an end in the log of each process
    FAILED = "failed"
    OUT_OF_MEMORY = "out of memory"
    KILLED = "killed"  # by something else, such as a full disk
    UNFINISHED = "unfinished"  # no exit code: its job ended first


class Cause(StrEnum):
    """The causes of an ending that a check acts on."""

    TOO_LONG = "it took too long"
    NO_ROOM = "there was no room on the disk"
    UNKNOWN_FLAG = "unrecognized arguments"  # argparse's words


@dataclass(frozen=True)
class Ending:
    """The ending of a run: in one word, and in a sentence for people."""

    how: How
    text: str
    cause: Cause | None = None

    @property
    def completed(self) -> bool:
        return self.how == How.COMPLETED


class Role(StrEnum):
    """The purpose of a run in a check."""

    SOLUTION = "solution"  # the solution, with the flags of the job
    YOURS = "yours"  # the trainee's, audited
    BEFORE = "before"  # in a pair, timed: the step before, and the trainee's
    AFTER = "after"
    BESIDE = "beside"  # the solution, with more flags
    EXTRA, EXTRA_SOLUTION = "extra", "extra-solution"  # short ones, with other flags
    # Two epochs of few images, in float32: the trainee's, done again, and the solution's.
    EPOCHS, EPOCHS_SOLUTION = "two-epochs", "two-epochs-solution"

    @property
    def mine(self) -> bool:
        """Return whether it is a run of the trainee's trainer."""
        return self in (Role.YOURS, Role.AFTER, Role.EXTRA, Role.EPOCHS)

    def named(self, number: int = 0) -> str:
        """Return the name of such a run's folder."""
        return f"{self}-{number}" if number else str(self)


PAIR = (Role.BEFORE, Role.AFTER)


@dataclass(frozen=True)
class EndedRun:
    """A run of a check that has ended. Its files are read once."""

    folder: Path
    entry: series.Entry | None = None  # its place in the plan; None: the job itself, or a replay
    trainer: str = "dlojz.py"  # the user's name for the trainer

    @cached_property
    def end(self) -> Ending:
        return of(self.folder, self.trainer)

    @cached_property
    def log(self) -> log.Run:
        return log.read(self.folder)

    @cached_property
    def summary(self) -> stats.Summary:
        return stats.summary(self.log)

    @cached_property
    def replay(self) -> "EndedRun":
        return EndedRun(self.folder / series.REPLAY, trainer="the check's replay")


def of(folder: Path, trainer: str = "dlojz.py") -> Ending:
    """Return the ending of the run in a folder.

    trainer: the user's name for it; a folder holds a copy, trainer.py.
    """
    codes = _exit_codes(folder)
    if not codes:
        return Ending(How.UNFINISHED, "it did not run to its end")
    ends = _ends(folder)
    outcomes = [end.get("outcome") for end in ends]
    if not any(codes):
        if outcomes and all(o == "completed" for o in outcomes):
            return Ending(How.COMPLETED, "completed")
        return Ending(How.FAILED, NO_END)
    if series.TOO_LONG in codes:
        text = f"TIMEOUT: {Cause.TOO_LONG}{_stood(folder, trainer)}"
        return Ending(How.FAILED, text, Cause.TOO_LONG)
    message = error(folder, trainer)
    if "out_of_memory" in outcomes:
        return Ending(How.OUT_OF_MEMORY, f"out of memory: {message}")
    if FULL.search(message):
        return Ending(How.KILLED, f"{Cause.NO_ROOM}: {message}", Cause.NO_ROOM)
    alone = max(codes) <= 0 or outcome.only_waited(folder)
    if alone and -min(codes) in FROM_OUTSIDE:
        return Ending(How.KILLED, f"killed by {_name(-min(codes))}")
    if max(codes) <= 0:
        return Ending(How.FAILED, f"ended by {_name(-min(codes))}")
    cause = Cause.UNKNOWN_FLAG if Cause.UNKNOWN_FLAG in message else None
    return Ending(How.FAILED, message or f"exit code {max(codes)}", cause)


def _stood(folder, trainer):
    """Return the trainer's lines in which its processes stood, by their stacks, in words."""
    text = outcome.tail(folder / "stderr.txt")
    _, *stacks = re.split(r"^(?:Current )?[Tt]hread 0x.*$", text, flags=re.M)
    lines = [re.search(STOOD, each) for each in stacks]
    found = dict.fromkeys(f"{trainer}:{line[1]} ({line[2]})" for line in lines if line)
    return f", and stood at {' and '.join(found)}" if found else ""


def stood_still(folder: Path) -> bool:
    """Return whether a run that took too long had logged nothing for half of its time."""
    written = {file.name: file.stat().st_mtime for file in folder.iterdir()}
    begun, ended = min(written.values()), max(written.values())
    last = max((at for name, at in written.items() if name.startswith("events")), default=begun)
    return ended - last > (ended - begun) / 2


def _name(number):
    """Return the name of a signal; most real-time signals have none."""
    names = {int(known): known.name for known in signal.Signals}
    return names.get(number, f"signal {number}")


def error(folder: Path, trainer: str = "dlojz.py") -> str:
    """Return the error of a run or job in one line, with the line of the trainer that raised it."""
    errors = outcome.errors(folder)
    last = {rank: str(e["error"]) for rank, e in enumerate(_ends(folder)) if e.get("error")}
    # A process that only waited comes last.
    rank = min(last, key=lambda rank: bool(re.search(outcome.GONE, last[rank])), default=None)
    message = last.get(rank, "")
    if not message or WORKERS in message:
        message = next((line for line in reversed(errors.splitlines()) if line.strip()), message)
    words = harmless(" ".join(message.split()))
    words = words if len(words) <= MOST else f"{words[:MOST]} ..."
    return ", at ".join(filter(None, (words, _place(errors, trainer, rank))))


# The line of a trainer, or of another program, in which a process stood.
STOOD = r'File ".*/(?:trainer\.py|program/[^"]*)", line (\d+) in (\w+)'
# A frame of a traceback: the process, the file, the number of its line, and the line itself.
FRAME = r'(?m)^(?:\[rank(\d+)\]:)? *File "[^"\n]*\b(%s)", line (\d+).*\n(.*)'


def _place(errors, trainer, rank):
    """Return the last line of a traceback in the trainer: "dlojz.py:142: scaler.step(...)".

    rank: the process that raised the error, None if unknown.
    """
    names = {"trainer.py": trainer} | {name: name for name in course.BESIDE.values()}
    frames = re.findall(FRAME % "|".join(map(re.escape, names)), errors)
    if not frames:
        return ""
    _, file, number, code = ([f for f in frames if f[0] == str(rank)] or frames)[-1]
    return f"{names[file]}:{number}: {re.sub(r'^.rank[0-9]+.:', '', code).strip()}"


def _exit_codes(folder) -> list[int]:
    if not (folder / "exit_code").exists():
        return []
    files = sorted(folder.glob("exit_code.rank*")) or [folder / "exit_code"]
    return [int(file.read_bytes()) for file in files]


def _ends(folder) -> list[dict]:
    """Return the end of each process's log, {} for a log without one; [] if there are no logs."""
    found = []
    with suppress(OSError):
        first, _ = by_hand.ends(events_file(folder))
        for rank in range((first or {}).get("size", 1)):
            found.append({})  # stays, if there is no such file
            _, last = by_hand.ends(events_file(folder, rank))
            found[-1] = last if last and last.get("event") == "end" else {}
    return found


def with_role(ended, *roles) -> list[EndedRun]:
    """Return the runs with these roles, ordered by role and number."""
    runs = [run for run in ended.values() if run.entry.role in roles]
    return sorted(runs, key=lambda run: (roles.index(run.entry.role), run.entry.number))
