"""The mysteries of notebook 04."""

import pytest

from dlojz import progress
from dlojz.figures import timeline
from dlojz.runs import suspects
from dlojz.widgets import mysteries


def test_each_fault_is_one_mystery_and_its_name_does_not_tell():
    assert sorted(map(mysteries.truth, mysteries.MYSTERIES)) == sorted(suspects.FAULTS)
    for letter in mysteries.MYSTERIES:
        assert mysteries.truth(letter) not in str(mysteries.mystery(letter).path)
    assert set(mysteries.LOOK) == set(suspects.FAULTS)


def test_all_are_shown_by_letter_and_each_process_by_itself():
    found = mysteries.mysteries()
    assert list(found) == [*"ABCDEFGH", "I, process 0", "I, process 1"]
    assert found["A"].path.name == "mystery A"
    ax = timeline.plot_shares({"A": found["A"]}, verdicts=False)
    assert len(ax.patches) > 3
    assert len(ax.texts) == 0, "the answer"
    ax = timeline.plot_shares({"D": found["D"]}, verdicts=False)
    assert "garbage" not in str([text.get_text() for text in ax.get_legend().get_texts()])
    assert "garbage" in timeline.plot_step(found["D"]).get_title("left")
    assert "garbage" not in timeline.plot_step(found["D"], verdict=False).get_title("left")


def test_an_unknown_mystery_names_the_others():
    with pytest.raises(KeyError, match="no mystery 'Z': expected one of A, B"):
        mysteries.mystery("Z")
    with pytest.raises(ValueError, match="no process 2 of mystery I: it has 2, from 0"):
        mysteries.mystery("I", 2)


def test_hints_say_first_where_to_look_and_then_the_evidence(course_folder, monkeypatch):
    monkeypatch.setattr(mysteries, "evidence", lambda letter: "this proves it")
    assert not mysteries.answer("A", "none")
    assert mysteries.hint("A") == mysteries.LOOK[mysteries.truth("A")]
    assert not mysteries.answer("A", "print")
    assert mysteries.hint("A") == "The evidence: this proves it."
    with pytest.raises(ValueError, match="no fault 'x': expected one of none, item"):
        mysteries.answer("A", "x")


def test_the_score_counts_first_answers(course_folder):
    assert "0 of 9 right at the first attempt" in str(mysteries.score())
    mysteries.answer("B", mysteries.truth("B"))
    mysteries.answer("C", "none")
    mysteries.answer("C", mysteries.truth("C"))
    mysteries.answer("D", "none")
    text = str(mysteries.score())
    assert "1 of 9 right at the first attempt" in text
    lines = {line[0]: line for line in text.splitlines()}
    assert lines["B"].split()[-2:] == ["yes", "1"]
    assert lines["C"].split()[-2:] == ["no", "2"]
    assert lines["D"].split()[-3:] == ["no", "not", "yet"]
    assert suspects.FAULTS["garbage"] not in lines["D"], "what is not found yet stays a mystery"
    assert progress.load()["mysteries"]["C"][0]["value"] == "none"
