"""The planted faults of recorded traces: the right answers.

Older recordings have the fault in their name, such as 04-trace-held-out-item. The others have
numbers, 04-trace-sealed-07, and a file beside them with the answers, so that rules can be written
before it is read. 04-trace-sealed.toml:

    [04-trace-sealed-07]
    fault = "garbage"
    strength = "weak"
    functions = false  # with Python's functions recorded
    slower = 1.31  # than the same training without the fault
"""

import re
import tomllib
from functools import cache
from pathlib import Path

# The classes of the mysteries, which faults.py plants.
FAULTS = {
    "none": "nothing is wrong",
    "item": "the host reads the norm of each gradient, in each step",
    "unpinned": "the images arrive as float32 in pageable memory, and the host waits for the copy",
    "one-worker": "one process prepares all images",
    "small-batch": "a batch has only two images",
    "nchw": "autocast with the layout NCHW",
    "print": "loss and logits are printed in each step",
    "straggler": "the last process does something else for a while, in each step",
    "garbage": "Python's garbage collector visits a million objects, in each step",
}
# Causes that are no class of their own, with their names in `traces.suspects`.
SHOWN_AS = {
    "sleep": "elsewhere",
    "python": "elsewhere",
    "synchronize": "waits",
    "ask": "waits",
    "empty-cache": "allocator",
    "pin": "copies",
}
IN_NAME = re.compile(r"^04-(?:trace-(?:fault|held-out|unseen)|cpu-trace)-(.+?)(?:-x\d+)?$")
NUMBERED = re.compile(r"^(04-trace-(?:open|sealed))-\d+(?:-x\d+)?$")
UNSEEN = 1.03  # a smaller slow-down need not show


def fault(folder: Path) -> str:
    """Return the planted fault of a recorded run."""
    return _label(folder)["fault"]


def right(folder: Path) -> set[str]:
    """Return the right names for a recorded run, as far as a trace can show them."""
    label = _label(folder)
    names = {SHOWN_AS.get(label["fault"], label["fault"])}
    if label["fault"] == "garbage" and not label.get("functions", True):
        names = {"elsewhere"}  # the collector has a name only with Python's functions recorded
    if label.get("slower", UNSEEN) < UNSEEN:
        names.add("none")
    return names


def is_one(folder: Path) -> bool:
    """Return whether a folder is a recording with a planted fault, by its name."""
    return bool(IN_NAME.match(folder.name) or NUMBERED.match(folder.name))


def _label(folder):
    found = IN_NAME.match(folder.name)
    if found:
        return {"fault": found[1]}
    half = NUMBERED.match(folder.name)[1]
    return _labels(folder.parent / f"{half}.toml")[folder.name]


@cache
def _labels(file):
    return tomllib.loads(file.read_text(encoding="utf-8"))
