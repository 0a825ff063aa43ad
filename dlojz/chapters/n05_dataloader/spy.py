"""The command line of py-spy, which samples a program from outside, and its output.

py-spy reads the stack of each process some hundred times a second, without the program's help. In
its raw format a stack is a line: the functions from the outermost to the innermost, and the
number of samples:

_worker_loop (torch/utils/data/_utils/worker.py:335);fetch (...);load (PIL/ImageFile.py:395) 57
"""

import re
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

RATE = 200  # samples per second
FRAME = re.compile(r"(.+) \((.+?)(?::\d+)?\)$")
REFUSED = re.compile(r"permission denied|not permitted|EPERM|SYS_PTRACE|as root", re.I)


def program() -> str | None:
    """Return the path of py-spy, beside this Python or in $PATH; None if it is not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def command(spy: str, output: Path, watched: Sequence[str]) -> list[str]:
    """Return the command that runs `watched`, with its children, under py-spy."""
    options = f"record --format raw --subprocesses --function --rate {RATE} --output".split()
    return [spy, *options, str(output), "--", *watched]


def missing() -> str:
    """Return the remedy if py-spy is not installed."""
    return "py-spy was not found: type `pip install -c constraints.txt py-spy`, and try again"


def trouble(stderr: str) -> str:
    """Return the reason why py-spy saw nothing, with the remedy, from its output."""
    last = (stderr.strip().splitlines() or ["nothing"])[-1]
    if REFUSED.search(stderr):
        return (
            f"py-spy may not look at other processes ({last}): type `sudo sysctl "
            "kernel.yama.ptrace_scope=0`, or begin the container with `--cap-add SYS_PTRACE`"
        )
    return f"py-spy saw nothing; expected stacks of a loader's workers. It said: {last}"


def innermost(text: str, within: str, depth: int = 3) -> list[tuple[list[str], int]]:
    """Return (the innermost functions below `within`, their samples), the most frequent first.

    text: py-spy's output. In the result, the innermost function comes first.
    """
    seen = Counter()
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        frames = [name(frame) for frame in stack.split(";")]
        if any(frame.endswith(f": {within}") for frame in frames):
            seen[tuple(frames[: -depth - 1 : -1])] += int(count)
    return [(list(frames), count) for frames, count in seen.most_common()]


def name(frame: str) -> str:
    """Return a frame of py-spy as "file: function", without its line."""
    found = FRAME.match(frame)
    return f"{Path(found[2]).name}: {found[1]}" if found else frame
