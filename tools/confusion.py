"""The faults that `dlojz.runs.suspects` names in the recorded traces: `python tools/confusion.py`.

Prints, for each set of traces, how often each planted fault was named as each fault. The thresholds
were chosen on the traces called fault; those called held-out and unseen are of other training runs.
"""

from collections import Counter
from pathlib import Path

from dlojz import course
from dlojz.runs import suspects
from dlojz.table import Table

SETS = ("fault", "held-out", "unseen")


def recordings() -> list[Path]:
    """Return the folders of the recorded traces of planted faults."""
    folders = (course.course_root() / "reference").glob("*/04-trace-*")
    return sorted(folder for folder in folders if suspects.PLANTED.search(folder.name))


def planted(folder: Path) -> tuple[str, str]:
    """Return the (set, fault) of a recording."""
    which = next(s for s in SETS if folder.name.startswith(f"04-trace-{s}-"))
    return which, suspects.planted(folder)


def named(folder: Path) -> list[suspects.Suspect]:
    """Return the faults that the traces of a recording point to, the likeliest first."""
    return suspects.suspects(suspects.traces_of(folder))


def confusion(folders) -> Counter:
    """Return how often each (set, planted fault, named fault) was seen."""
    return Counter((*planted(f), named(f)[0].fault) for f in folders)


def table(counts: Counter, which: str) -> Table:
    """Return a table of the planted faults of a set by row, and the named ones by column.

    Causes that nobody planted and that were not named are left out.
    """
    seen = {name for of, *names in counts for name in names if of == which}
    faults = [name for name in suspects.WORDS if name in suspects.FAULTS or name in seen]
    rows = [(true, *(str(counts[which, true, said] or "·") for said in faults)) for true in faults]
    return Table((which, *faults), rows, "<" + ">" * len(faults))


def main():
    counts = confusion(recordings())
    for which in SETS:
        print(f"{table(counts, which)}\n")
    right = sum(n for (_, true, said), n in counts.items() if true == said)
    print(f"{right} of {counts.total()} are right")


if __name__ == "__main__":
    main()
