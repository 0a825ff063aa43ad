"""Why a job ended as it did: from its exit code, its logs and what it said on stderr."""

import re
import signal
from pathlib import Path

from dlojz.runs import log

# On stderr, when one of several processes has failed: where torchrun begins to speak, and which of
# them it says was the first.
TORCHRUN = re.compile(r"^[A-Z]\d{4} \S+ \d+ \S*torch/distributed/(elastic|run)", re.M)
# What torch says of each process that did not get to its end.
NOT_PARTED = re.compile(r"^.*destroy_process_group\(\) was not called.*\n?", re.M)
FIRST_FAILURE = re.compile(
    r"^Root Cause.*?^  rank +: (\d+) .*?^  exitcode +: (-?\d+) ", re.M | re.S
)


def from_exit(run: Path, exit_code: int, memory_was_full: bool) -> tuple[str, str | None]:
    """(state, reason) of a job that ended by itself, from its exit code, logs and errors."""
    if exit_code == 0:
        return "COMPLETED", None
    for file in sorted(run.glob("events*.jsonl")):
        try:
            end = log.read(file).end
        except log.LogError:
            continue
        if end.get("outcome") == "out_of_memory":
            return "OUT_OF_MEMORY", end["error"]
    said = (run / "stderr.txt").read_text(errors="replace")
    killed = exit_code == -signal.SIGKILL or re.search(r"Signal 9|signal: Killed", said)
    if killed and memory_was_full:
        return "OUT_OF_MEMORY", "killed by the kernel: the machine's memory was full"
    if first := FIRST_FAILURE.search(said):
        return "FAILED", f"process {first[1]}: {_ending(int(first[2]))}"
    return "FAILED", _ending(exit_code)


def _ending(exit_code):
    if exit_code < 0:
        return f"ended by signal {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"


def errors(run: Path) -> str:
    """What the programs of a job said on stderr, without what is said whenever one has failed."""
    file = run / "stderr.txt"
    text = file.read_text(errors="replace") if file.exists() else ""
    text = NOT_PARTED.sub("", text)
    own = TORCHRUN.search(text)
    return text[: own.start()] if own and text[: own.start()].strip() else text
