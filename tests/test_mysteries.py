"""The mysteries of notebook 04."""

from collections import Counter

import matplotlib.pyplot as plt
import pytest

from dlojz.chapters.n04_profiler import mysteries, planted
from dlojz.course import progress
from dlojz.figures import timeline
from dlojz.figures.look import KINDS
from dlojz.runs.folder import trace_files
from dlojz.traces import breakdown, trace


@pytest.fixture
def unread(monkeypatch):
    """Recordings whose traces are not read, which takes seconds."""

    def open_traces(folder):
        return [trace.Trace(file, None) for file in trace_files(folder)]

    monkeypatch.setattr(mysteries, "open_traces", open_traces)


def test_no_mystery_is_solved_by_exclusion_and_no_name_tells(unread):
    """Faults come twice, or in pairs without one, and one is outside all classes."""
    truths = Counter(map(mysteries.truth, mysteries.MYSTERIES))
    assert len(mysteries.MYSTERIES) >= 14
    assert set(truths) == set(mysteries.ANSWERS) == set(mysteries.LOOK)
    assert truths["none"] >= 3
    assert truths["else"] >= 1
    assert sum(count > 1 for count in truths.values()) >= 5
    for letter in mysteries.MYSTERIES:
        assert mysteries.truth(letter) not in str(mysteries.mystery(letter).path)


def test_no_figure_prints_the_answer_beside_the_riddle():
    """Neither for a fault with a cause of its own, nor for one of two processes."""
    riddles = {letter: mysteries.mystery(letter) for letter in "BDFHIP"}
    ax = timeline.plot_shares(riddles, verdicts=False)
    labels = {text.get_text() for text in ax.get_legend().get_texts()}
    assert labels <= {*KINDS, timeline.IDLE}
    assert len(ax.texts) == 0
    for riddle in riddles.values():
        found = breakdown.analyse(riddle)
        tables = [timeline.times(riddle, causes=False), timeline.waits(riddle, causes=False)]
        title = timeline.plot_step(riddle, verdict=False).figure.get_suptitle()
        for text in (*map(str, tables), title):
            assert not {*found.idle, found.verdict, "print", "pinned"} & set(text.split("  "))
            assert "print" not in text
            assert "pinned" not in text
    plt.close("all")


def test_all_are_shown_by_letter_and_each_process_by_itself(unread):
    found = mysteries.mysteries()
    assert [name for name in found if "I" in name] == ["I, process 0", "I, process 1"]
    assert len(found) == len(mysteries.MYSTERIES) + 2, "two of them have two processes"
    assert found["A"].path.name == "mystery A"


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
    assert "0 of 16 right at the first attempt, 0 later" in str(mysteries.score())
    mysteries.answer("B", mysteries.truth("B"))
    mysteries.answer("C", "none")
    mysteries.answer("C", mysteries.truth("C"))
    mysteries.answer("D", "none")
    text = str(mysteries.score())
    assert "1 of 16 right at the first attempt, 1 later" in text
    lines = {line[0]: line for line in text.splitlines()}
    assert lines["B"].split()[-2:] == ["yes", "1"]
    assert lines["C"].split()[-2:] == ["no", "2"]
    assert lines["D"].split()[-3:] == ["no", "not", "yet"]
    assert planted.FAULTS["garbage"] not in lines["D"], "what is not found yet stays a mystery"
    assert progress.load()["mysteries"]["C"][0]["value"] == "none"
