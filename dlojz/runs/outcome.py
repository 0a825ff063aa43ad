"""Why a job ended as it did: from its exit code, its logs and what it said on stderr."""

import re
import signal
from contextlib import suppress
from pathlib import Path

from dlojz.runs import by_hand, log
from dlojz.runs.folder import events_file

# Errors are told to people: of a longer file its end is read, and of a longer line its beginning.
MOST_BYTES, MOST_CHARACTERS = 2**20, 500
# What a terminal would obey, and no reader wants to see: colours, moves of the cursor, titles.
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*.?)")
CONTROLS = {code: None for code in (*range(32), 127, *range(128, 160)) if chr(code) not in "\t\n"}

# On stderr, when one of several processes has failed: where torchrun begins to speak, and what its
# table says of each of them; the last in it is the one whose failure it saw first.
TORCHRUN = re.compile(r"^[A-Z]\d{4} \S+ \d+ \S*torch/distributed/(elastic|run)", re.M)
FAILED = re.compile(r"^  rank +: (\d+) .*\n  exitcode +: (-?\d+) ", re.M)
# What a process says that has waited for another, which was gone.
PEER_GONE = re.compile(
    r"^\[rank(\d+)\]:.*(?:Connection (?:closed|reset) by peer|Broken pipe|remote process exited)",
    re.M,
)
# What torch says of each process that did not get to its end.
NOT_PARTED = re.compile(r"^.*destroy_process_group\(\) was not called.*\n?", re.M)
# argparse's list of all flags, which it prints before the one line that matters.
USAGE = re.compile(r"^usage: .*\n(?: .*\n|\n)*(?=\S+: error: )", re.M)


def from_exit(run: Path, exit_code: int, memory_was_full: bool) -> tuple[str, str | None]:
    """Return (state, reason) of a job that ended by itself, from its exit code, logs and errors."""
    if exit_code == 0:
        return "COMPLETED", _early(run)
    for file in sorted(run.glob("events*.jsonl")):
        try:
            end = log.read(file).end
        except log.LogError:
            continue
        if end.get("outcome") == "out_of_memory":
            return "OUT_OF_MEMORY", end["error"]
    said = tail(run / "stderr.txt")
    killed = exit_code == -signal.SIGKILL or re.search(r"Signal 9|signal: Killed", said)
    if killed and memory_was_full:
        return "OUT_OF_MEMORY", "killed by the kernel: the machine's memory was full"
    if failed := FAILED.findall(said.rpartition("ChildFailedError")[2]):
        rank, code = _first_to_fail(run, said, {int(r): int(c) for r, c in failed})
        return "FAILED", f"process {rank}: {_ending(code)}"
    return "FAILED", _ending(exit_code)


def _early(run):
    """Return what is odd about a run that ended with 0 before its log did; None if nothing is."""
    with suppress(OSError):
        _, last = by_hand.ends(events_file(run))
        if not last or last.get("event") != "end":
            return "its log has no end: was run.end() left out, or os._exit() called?"
    return None


def _first_to_fail(run, said, failed):
    """Return (rank, exit code) of the process that failed, not of one that was waiting for it.

    failed: {rank: exit code} as torchrun tells it. It looks ten times a second: the process whose
    failure it sees first may be one that missed another; and one that ended with 0 is not in it.
    """
    waiting = {int(rank) for rank in PEER_GONE.findall(said)}
    waiting |= {rank for rank, code in failed.items() if code == -signal.SIGTERM}
    if culprits := [rank for rank in failed if rank not in waiting]:
        return culprits[-1], failed[culprits[-1]]
    seen = (rank for rank in range(_size(run)) if rank not in failed)
    rank = next(seen, list(failed)[-1])
    return rank, failed.get(rank, 0)


def _size(run):
    """How many processes there were, as far as one of them has told."""
    try:
        return log.read(events_file(run)).start.get("size", 1)
    except log.LogError:
        return 0


def _ending(exit_code):
    if exit_code < 0:
        try:
            return f"ended by signal {signal.Signals(-exit_code).name}"
        except ValueError:  # one of the real-time signals, of which most have no name
            return f"ended by signal {-exit_code}"
    return f"exit code {exit_code}" + ", before the others were done" * (exit_code == 0)


def errors(run: Path) -> str:
    """Return what the programs of a job said on stderr, without what is said at any failure."""
    text = USAGE.sub("", NOT_PARTED.sub("", tail(run / "stderr.txt")))
    own = TORCHRUN.search(text)
    return text[: own.start()] if own and text[: own.start()].strip() else text


def tail(file: Path) -> str:
    """Return the end of a file of messages, harmless to a terminal, its lines cut; "" for none."""
    if not file.exists():
        return ""
    with file.open("rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(max(0, size - MOST_BYTES))
        text = stream.read(MOST_BYTES).decode(errors="replace")
    text = ESCAPES.sub("", text.replace("\r\n", "\n").replace("\r", "\n")).translate(CONTROLS)
    return "".join(map(_shortened, text.splitlines(keepends=True)))


def _shortened(line):
    return line if len(line) <= MOST_CHARACTERS else f"{line[:MOST_CHARACTERS]} ...\n"
