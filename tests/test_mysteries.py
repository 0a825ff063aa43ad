"""The mysteries of notebook 04."""

import pytest

from dlojz import detective, progress
from dlojz.figures import timeline
from dlojz.runs import suspects


def test_each_fault_is_one_mystery_and_its_name_does_not_tell():
    assert sorted(map(detective.truth, detective.MYSTERIES)) == sorted(suspects.FAULTS)
    for letter in detective.MYSTERIES:
        assert detective.truth(letter) not in str(detective.mystery(letter).path)
    assert set(detective.LOOK) == set(suspects.FAULTS)


def test_all_are_shown_by_letter_and_each_process_by_itself():
    found = detective.mysteries()
    assert list(found) == [*"ABCDEFGH", "I, process 0", "I, process 1"]
    assert found["A"].path.name == "mystery A"
    assert len(timeline.plot_shares({"A": found["A"]}).patches) > 3


def test_an_unknown_mystery_names_the_others():
    with pytest.raises(KeyError, match="no mystery 'Z': expected one of A, B"):
        detective.mystery("Z")
    with pytest.raises(ValueError, match="no process 2 of mystery I: it has 2, from 0"):
        detective.mystery("I", 2)


def test_hints_say_first_where_to_look_and_then_the_evidence(course_folder, monkeypatch):
    monkeypatch.setattr(detective, "evidence", lambda letter: "this proves it")
    assert not detective.answer("A", "none")
    assert detective.hint("A") == detective.LOOK[detective.truth("A")]
    assert not detective.answer("A", "print")
    assert detective.hint("A") == "The evidence: this proves it."
    with pytest.raises(ValueError, match="no fault 'x': expected one of none, item"):
        detective.answer("A", "x")


def test_the_score_counts_first_answers(course_folder):
    assert "0 of 9 right at the first attempt" in str(detective.score())
    detective.answer("B", detective.truth("B"))
    detective.answer("C", "none")
    detective.answer("C", detective.truth("C"))
    detective.answer("D", "none")
    text = str(detective.score())
    assert "1 of 9 right at the first attempt" in text
    lines = {line[0]: line for line in text.splitlines()}
    assert lines["B"].split()[-2:] == ["yes", "1"]
    assert lines["C"].split()[-2:] == ["no", "2"]
    assert lines["D"].split()[-3:] == ["no", "not", "yet"]
    assert suspects.FAULTS["garbage"] not in lines["D"], "what is not found yet stays a mystery"
    assert progress.load()["mysteries"]["C"][0]["value"] == "none"
