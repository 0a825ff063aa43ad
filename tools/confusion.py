"""The faults that `traces.suspects` names in the recorded traces: `python tools/confusion.py`.

Prints a table for each set of traces: planted faults against named ones. The thresholds were chosen
on the traces called fault; those called held-out and unseen are of other training runs, cpu of a
processor. Those called open and sealed are numbered, and their faults are in a file.
"""

import argparse
import re
from collections import Counter
from pathlib import Path

from dlojz import course
from dlojz.chapters.n04_profiler import planted
from dlojz.table import Table
from dlojz.traces import breakdown, spans, suspects, trace

SETS = ("fault", "held-out", "unseen", "cpu", "open", "sealed")


def recordings() -> list[Path]:
    """Return the folders of the recorded traces of planted faults."""
    folders = (course.course_root() / "reference").glob("*/04-*trace-*")
    return sorted(folder for folder in folders if folder.is_dir() and planted.is_one(folder))


def which_set(folder: Path) -> str:
    """Return the set of a recording, one of SETS."""
    return next(s for s in SETS if re.match(rf"04-(trace-)?{s}-", folder.name))


def named(folder: Path) -> list[suspects.Suspect]:
    """Return the suspects in the traces of a recording, the likeliest first."""
    return suspects.suspects(trace.open_traces(folder))


def confusion(folders) -> Counter:
    """Return the count of each (set, planted fault, named fault).

    Any right name counts as the fault's, see `right`.
    """
    return Counter((which_set(f), *_pair(f, named(f)[0].fault)) for f in folders)


def right(folder: Path) -> set[str]:
    """Return the right names for a recording.

    Without a visible fault only the launches can keep the device from working. Where they take more
    than half of the step, "small-batch" is right, too.
    """
    names = planted.right(folder)
    if "none" in names and any(map(_idles_for_half, trace.open_traces(folder))):
        names.add("small-batch")
    return names


def _idles_for_half(found):
    return found.on_gpu and spans.length(breakdown.holes(found)) > 0.5 * sum(
        step.ms for step in found.steps
    )


def _pair(folder, said):
    true = planted.fault(folder)
    true = planted.SHOWN_AS.get(true, true)
    return (true, true) if said in right(folder) else (true, said)


def table(counts: Counter, which: str) -> Table:
    """Return a table of the planted faults of a set by row, and the named ones by column.

    Causes that were neither planted nor named are left out.
    """
    seen = {name for of, *names in counts for name in names if of == which}
    faults = [name for name in suspects.WORDS if name in planted.FAULTS or name in seen]
    rows = [(true, *(str(counts[which, true, said] or "·") for said in faults)) for true in faults]
    return Table((which, *faults), rows, "<" + ">" * len(faults))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="only recordings whose name contains this text")
    only = parser.parse_args().only
    counts = confusion(f for f in recordings() if only in f.name)
    for which in dict.fromkeys(which for which, *_ in counts):
        print(f"{table(counts, which)}\n")
    right = sum(n for (_, true, said), n in counts.items() if true == said)
    print(f"{right} of {counts.total()} are right")


if __name__ == "__main__":
    main()
