import confusion
import pytest

from dlojz.chapters.n04_profiler import planted
from dlojz.traces import suspects, trace

# The numbered ones are too many for each run of the tests: `python tools/confusion.py` reads them.
# Of these some that were misread once: reads that cost little, and a host that its recording slows.
MISREAD = ("open-07", "open-18", "sealed-11")
FOLDERS = [
    folder
    for folder in confusion.recordings()
    if not planted.NUMBERED.match(folder.name) or folder.name.endswith(MISREAD)
]


def test_each_fault_is_recorded_in_three_trainings():
    found = {(confusion.which_set(folder), planted.fault(folder)) for folder in FOLDERS}
    assert found >= {(s, fault) for s in confusion.SETS[:3] for fault in planted.FAULTS}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_planted_fault_is_named(folder):
    found = confusion.named(folder)
    assert found[0].fault in planted.right(folder), [s.evidence for s in found]
    assert len(found) == 1, "nobody else is accused"


@pytest.mark.parametrize(("fault", "named"), [("garbage", "elsewhere"), ("print", "print")])
def test_without_pythons_functions_nothing_wrong_is_named(fault, named):
    """As if the same trace had been recorded without them."""
    (folder,) = (f for f in FOLDERS if f.name == f"04-trace-held-out-{fault}")
    (found,) = trace.open_traces(folder)
    found.lines = []
    found.ranges = [r for r in found.ranges if r.name != trace.GARBAGE]
    (only,) = suspects.suspects([found])
    assert only.fault == named
    assert only.sure == "probable"
    assert "with_stack=True" in only.settle


def test_the_table_has_the_planted_fault_in_its_row_and_the_named_one_in_its_column():
    counts = confusion.Counter({("unseen", "item", "print"): 2})
    text = str(confusion.table(counts, "unseen"))
    row = next(line for line in text.splitlines() if line.startswith("item"))
    assert row.split()[1 + list(planted.FAULTS).index("print")] == "2"
