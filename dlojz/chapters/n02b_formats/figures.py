"""The table of notebook 02b: which matrix kernels use tensor cores, by their names."""

import re
from collections.abc import Mapping

from dlojz.runs import log
from dlojz.table import Table
from dlojz.traces import kinds

WIDTH = 58  # characters of a kernel's name


def by_name(named: Mapping, most: int = 2) -> Table:
    """Return a table of the longest matrix kernels of runs on a GPU: do they use tensor cores?

    named: training runs, as {label: run}; a run on a processor has no kernels, and no rows.
    """
    rows = []
    for label, run in named.items():
        us = log.read(run).last.kernels_us
        found = [n for n in sorted(us, key=us.get, reverse=True) if kinds.kind(n) == kinds.MATRIX]
        for name in found[:most]:
            part = kinds.tells(name)
            cores = "yes" if kinds.on_tensor_cores(name) else "no"
            rows.append((label, _clipped(name, part), part.strip("<"), cores))
    head = ("run", "kernel", "says so", "tensor cores")
    return Table(head, rows, "<<<<", "no kernel of a GPU in these runs")


def _clipped(name, part):
    """Return a name without what follows the part that tells, but with its first words at least."""
    name = re.sub(r"^void |\(.*", "", name)
    end = max(WIDTH, name.find(part) + len(part))
    return name if len(name) <= end + 1 else name[:end] + "…"
