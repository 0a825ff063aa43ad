"""Looks into the processes of a program with py-spy, from outside: its command, and what it says.

py-spy reads the stack of each process some hundred times a second, without the program's help. A
stack, in the format that it calls raw, is a line: the functions from the outermost to the
innermost, and how often it was seen:

_worker_loop (torch/utils/data/_utils/worker.py:335);fetch (...);load (PIL/ImageFile.py:395) 57
"""

import re
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

RATE = 200  # looks per second
FRAME = re.compile(r"(.+) \((.+?)(?::\d+)?\)$")
REFUSED = re.compile(r"permission denied|not permitted|EPERM|SYS_PTRACE|as root", re.I)


def program() -> str | None:
    """Where py-spy is: beside this Python, or on the path."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def command(spy: str, output: Path, watched: Sequence[str]) -> list[str]:
    """Run `watched` under py-spy, with all processes that it starts. (Its parent may look.)"""
    options = f"record --format raw --subprocesses --function --rate {RATE} --output".split()
    return [spy, *options, str(output), "--", *watched]


def missing() -> str:
    """What to type where py-spy is not installed."""
    return "py-spy was not found: type `pip install -c constraints.txt py-spy`, and try again"


def trouble(stderr: str) -> str:
    """Why py-spy saw nothing, and what to type, by what it said."""
    last = (stderr.strip().splitlines() or ["nothing"])[-1]
    if REFUSED.search(stderr):
        return (
            f"py-spy may not look at other processes ({last}): type `sudo sysctl "
            "kernel.yama.ptrace_scope=0`, or begin the container with `--cap-add SYS_PTRACE`"
        )
    return f"py-spy saw nothing; expected stacks of a loader's workers. It said: {last}"


def innermost(text: str, within: str, depth: int = 3) -> list[tuple[list[str], int]]:
    """(the innermost functions, how often they were seen) in this function, most often first.

    text: what py-spy wrote; the innermost function comes first.
    """
    seen = Counter()
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        frames = [name(frame) for frame in stack.split(";")]
        if any(frame.endswith(f": {within}") for frame in frames):
            seen[tuple(frames[: -depth - 1 : -1])] += int(count)
    return [(list(frames), count) for frames, count in seen.most_common()]


def name(frame: str) -> str:
    """A frame of py-spy as "file: function", without its line."""
    found = FRAME.match(frame)
    return f"{Path(found[2]).name}: {found[1]}" if found else frame
