"""The reason why a job ended as it did, from its exit code, its logs and its stderr."""

import re
import signal
from contextlib import suppress
from pathlib import Path

from dlojz.course import FileError, open_regular, read_table
from dlojz.runs import by_hand, source
from dlojz.runs.folder import events_file

# Errors are for people to read: only the end of a long file, and the beginning of a long line.
MOST_BYTES, MOST_CHARACTERS = 2**20, 500
# Sequences that would steer a reader's terminal: colours, moves of the cursor, titles.
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*.?)")
CONTROLS = {code: None for code in (*range(32), 127, *range(128, 160)) if chr(code) not in "\t\n"}

# On stderr, when one of several processes has failed: the start of torchrun's messages, and a row
# of its table of failures. Its last row is the failure that torchrun saw first.
TORCHRUN = re.compile(r"^[A-Z]\d{4} \S+ \d+ \S*torch/distributed/(elastic|run)", re.M)
ENDED = f"got signal: {signal.SIGTERM:d}\n"  # torchrun's last word when we end it
FAILED = re.compile(r"^  rank +: (\d+) .*\n  exitcode +: (-?\d+) ", re.M)
# The message of a process whose peer was gone, or did not come.
GONE = r"(?:Connection (?:closed|reset) by peer|Broken pipe|remote process exited|Timed out wait)"
PEER_GONE = re.compile(rf"^\[rank(\d+)\]:.*{GONE}", re.M)
ERROR = re.compile(r"^\[rank(\d+)\]: (?:Traceback|\w+Error: )", re.M)  # ours have no traceback
# The last words of a program that Python or C++ ended, and of which process.
LAST_WORDS = re.compile(
    r"^(?:\[rank(\d+)\]: )?([\w.]*(?:Error|Exception)\b.*|terminate called .*)", re.M
)
# torch's allocators, the CUDA runtime, cuBLAS and cuDNN, the operating system, Python and C++
OUT_OF_MEMORY = re.compile(
    r"OutOfMemory|out of memory|ALLOC_FAILED|can('|no)t allocate memory|MemoryError|bad_alloc", re.I
)
# torch's message about each process that did not reach its end.
NOT_PARTED = re.compile(r"^.*destroy_process_group\(\) was not called.*\n?", re.M)
# argparse's list of all flags, printed before the one line that matters.
USAGE = re.compile(r"^usage: .*\n(?: .*\n|\n)*(?=\S+: error: )", re.M)


def from_exit(run: Path, exit_code: int, memory_was_full: bool) -> tuple[str, str | None]:
    """Return (state, reason) of a job that ended on its own, from exit code, logs and errors."""
    if exit_code == 0:
        return "COMPLETED", _early(run)
    for file in sorted(run.glob("events*.jsonl")):
        with suppress(OSError, FileError):
            _, end = by_hand.ends(file)
            if end and end.get("outcome") == "out_of_memory":
                return "OUT_OF_MEMORY", str(end.get("error"))
    said = tail(run / "stderr.txt")
    killed = exit_code == -signal.SIGKILL or re.search(r"Signal 9|signal: Killed", said)
    if killed and memory_was_full:
        return "OUT_OF_MEMORY", "killed by the kernel: the machine's memory was full"
    for words in dict(LAST_WORDS.findall(errors(run))).values():  # of each process
        if OUT_OF_MEMORY.search(words):
            return "OUT_OF_MEMORY", words
    if failed := FAILED.findall(said.rpartition("ChildFailedError")[2]):
        rank, code = _first_to_fail(run, said, {int(r): int(c) for r, c in failed})
        return "FAILED", f"process {rank}: {_ending(code)}"
    return "FAILED", _ending(exit_code) + _elsewhere(run)


def _elsewhere(run) -> str:
    """Return advice if a file that a program did not find is beside it, else ""."""
    with suppress(FileError, IndexError, KeyError, OSError, TypeError, ValueError):
        job = read_table(run / "job.json")
        home = Path(job["folder"], job["command"][0]).parent
        absent = re.findall(r"^FileNotFoundError: .*: '([^']+)'$", errors(run), re.M)[-1]
        if job["folder"] and not Path(absent).is_absolute() and (home / absent).exists():
            return f": {absent} is in {home}, and not in the current folder; submit it there"
    return ""


def _early(run):
    """Return a note on a run that ended with 0 although its log has no end, else None."""
    try:
        _, last = by_hand.ends(events_file(run))
    except FileError as error:
        return str(error)
    except OSError:
        if is_foreign(run):
            return "no Chronometer in it"
        series = (run / "plan.json").exists()  # the logs are those of its runs
        return None if series else "it wrote no log: did it end before it trained?"
    if not last or last.get("event") != "end":
        return "its log has no end: was run.end() left out, or os._exit() called?"
    return None


def is_foreign(run: Path) -> bool:
    """Return whether a job is of a program without our Chronometer, which writes no log."""
    if any(map(Path.exists, (events_file(run), run / "plan.json"))):
        return False
    with suppress(FileError):
        copied = read_table(run / "job.json").get("modules")
        names = map(str, copied if isinstance(copied, list) else ())
        return not any(source.writes_log(run / name) for name in ("trainer.py", *names))
    return False


def _first_to_fail(run, said, failed):
    """Return (rank, exit code) of the process that failed first, not of one that waited for it.

    failed: {rank: exit code} as torchrun reports it. It polls ten times a second, so the failure
    that it sees first may be that of a waiting process; and a process that ended with 0 is missing.
    """
    waiting = {int(rank) for rank in PEER_GONE.findall(said)}
    waiting |= {rank for rank, code in failed.items() if code == -signal.SIGTERM}
    if culprits := [rank for rank in failed if rank not in waiting]:
        return culprits[-1], failed[culprits[-1]]
    seen = (rank for rank in range(_size(run)) if rank not in failed)
    rank = next(seen, list(failed)[-1])
    return rank, failed.get(rank, 0)


def _size(run):
    """Return the number of processes that a job asked for; 0 if that cannot be read."""
    with suppress(KeyError, TypeError, ValueError):
        return int(read_table(run / "job.json")["n_gpu"])
    return 0


def _ending(exit_code):
    if exit_code < 0:
        try:
            return f"ended by signal {signal.Signals(-exit_code).name}"
        except ValueError:  # a real-time signal; most of these have no name
            return f"ended by signal {-exit_code}"
    return f"exit code {exit_code}" + ", before the others were done" * (exit_code == 0)


def errors(run: Path) -> str:
    """Return the stderr of a job, without the boilerplate that accompanies every failure."""
    text = USAGE.sub("", NOT_PARTED.sub("", tail(run / "stderr.txt")))
    if not (launcher := TORCHRUN.search(text)):
        return text
    own = text[: launcher.start()]
    return own if own.strip() or ENDED in text else text


def only_waited(run: Path) -> bool:
    """Return whether the processes with an error had all waited for one that has none."""
    said = tail(run / "stderr.txt")
    codes = (int(code) for _, code in FAILED.findall(said))
    if any(code < 0 and code != -signal.SIGTERM for code in codes):  # torchrun ends the others
        return False
    failed = set(ERROR.findall(said))
    return bool(failed) and failed <= set(PEER_GONE.findall(said))


def tail(file: Path) -> str:
    """Return the end of a text file, safe for a terminal, with long lines cut; "" for no file."""
    try:
        stream = open_regular(file)
    except FileNotFoundError:
        return ""
    except (OSError, FileError) as error:
        return f"{error}\n"
    with stream:
        size = stream.seek(0, 2)
        stream.seek(max(0, size - MOST_BYTES))
        text = stream.read(MOST_BYTES).decode(errors="replace")
    text = ESCAPES.sub("", text.replace("\r\n", "\n").replace("\r", "\n")).translate(CONTROLS)
    return "".join(map(_shortened, text.splitlines(keepends=True)))


def _shortened(line):
    return line if len(line) <= MOST_CHARACTERS else f"{line[:MOST_CHARACTERS]} ...\n"
