"""Labels that tell several runs apart: their names, or the flags that not all of them have."""

import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from dlojz.course import read_table
from dlojz.runs import log
from dlojz.runs.folder import path_of
from dlojz.runs.stats import Summary

MOST = 200  # characters of a name, or of a word of a command, which may be megabytes
FLAG = re.compile(r"--?[A-Za-z]")  # a negative number does not match


def labels(runs: Sequence) -> list[str]:
    """Return the names of the runs or, unless all differ, what sets their commands apart."""
    names = [name(run) for run in runs]
    if len(set(names)) == len(names):
        return names if len(runs) > 1 else [""]
    return [" ".join(own) for own in apart(map(command, runs))]


def apart(commands: Iterable[Sequence[str]]) -> list[list[str]]:
    """Return each command's trainer and flags, less those that all of them share."""
    found = [_flags(command) for command in commands]
    common = set.intersection(*map(set, found)) if found else set()
    return [[flag for flag in flags if flag not in common] for flags in found]


def name(run) -> str:
    """Return the name under which a run was submitted; "" for a recording or manual run."""
    return str(_submitted(run).get("name", ""))[:MOST]


def command(run) -> list[str]:
    """Return the trainer and its flags as they were submitted; [] if they were not kept."""
    words = _submitted(run).get("command")
    return [str(word)[:MOST] for word in words] if isinstance(words, list) else []


def _submitted(run):
    if isinstance(run, Summary):  # it has no folder
        return {}
    path = path_of(run)
    try:
        if path.is_dir() and (found := read_table(path / "job.json")):
            return found
        return {"command": shlex.split(log.read(path).start.get("command", ""))}
    except ValueError:
        return {}


def _flags(command):
    """Return ["t.py", "--test", "-b 64"] for ["t.py", "--test", "-b", "64"]."""
    found = [Path(word).name for word in command[:1]]
    for word in command[1:]:
        if len(found) == 1 or FLAG.match(word):
            found.append(word)
        else:
            found[-1] += f" {word}"
    return found
