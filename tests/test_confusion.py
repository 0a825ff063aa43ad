import confusion
import pytest

from dlojz.runs import suspects

FOLDERS = confusion.recordings()


def test_each_fault_is_recorded_in_three_trainings():
    found = {confusion.planted(folder) for folder in FOLDERS}
    assert found == {(s, fault) for s in confusion.SETS for fault in suspects.FAULTS}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_planted_fault_is_named(folder):
    _, fault = confusion.planted(folder)
    found = confusion.named(folder)
    assert found[0].fault == fault, [s.evidence for s in found]
    assert len(found) == 1, "nobody else is accused"


def test_the_table_has_the_planted_fault_in_its_row_and_the_named_one_in_its_column():
    counts = confusion.Counter({("unseen", "item", "print"): 2})
    text = str(confusion.table(counts, "unseen"))
    row = next(line for line in text.splitlines() if line.startswith("item"))
    assert row.split()[1 + list(suspects.FAULTS).index("print")] == "2"
