"""The table of the operations that wait for the GPU, of notebook 04."""

from dlojz.figures import report
from dlojz.table import Table


def host_waits(run) -> Table:
    """Return a table of a run of experiments/host_waits.py: what the host must know, and waits."""
    cases = report.measured(run).cases
    on_gpu = any("waits" in case for case in cases.values())
    said = {True: "waits", False: "goes on", None: "-"}
    rows = [(name, case["needs"], said[case.get("waits")]) for name, case in cases.items()]
    head = ("operation", "the host needs", "on this GPU the host")
    if not on_gpu:
        return Table(head[:2], [row[:2] for row in rows], "<<")
    return Table(head, rows, "<<<")
