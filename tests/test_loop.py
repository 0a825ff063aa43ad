"""The training loop is drawn as the trainer's file has it."""

from pathlib import Path

import pytest

from dlojz import course, runs
from dlojz.chapters.n00_start import figures
from dlojz.course import UserError
from dlojz.runs.columns import PHASES

SOLUTIONS = sorted((Path(__file__).parent.parent / "solutions").glob("dlojz_*.py"))


@pytest.mark.parametrize("path", [course.trainer(), *SOLUTIONS], ids=lambda path: path.stem)
def test_each_phase_of_every_trainer_has_its_statements(path):
    source = path.read_text()
    found = figures.lines(source)
    assert tuple(dict.fromkeys(line.phase for line in found)) == PHASES
    for line in found:  # cut after the longest line, and joined with the next one for an `if`
        begin = source.splitlines()[line.number - 1].partition("  #")[0].strip()
        assert line.text.startswith(begin[: figures.LONGEST - 2])
    by_phase = {phase: [x.text for x in found if x.phase == phase] for phase in PHASES}
    assert "enumerate" in by_phase["data"][0]
    assert any("training.model(" in text for text in by_phase["forward"])
    assert any(text.endswith(".backward()") for text in by_phase["backward"])
    assert any("scheduler.step()" in text for text in by_phase["update"])
    assert not any("save(" in line.text for line in found), "a checkpoint is not part of a step"


def test_functions_are_followed_in_the_order_of_the_calls():
    source = """
def inner():
    with context:
        chrono.forward()
        b = model(a)
    return b


def train_one_epoch():
    for a in batches:
        chrono.transfer()
        a = a.to(device)  # a comment
        if ready:
            b = inner()
        chrono.backward()
        b.backward()
        chrono.next_iter()
        print(b)
"""
    found = [(line.phase, line.depth, line.text) for line in figures.lines(source)]
    assert found == [
        ("data", 0, "for a in batches:"),
        ("transfer", 0, "a = a.to(device)"),
        ("transfer", 0, "if ready: b = inner()"),
        ("transfer", 1, "with context:"),
        ("forward", 2, "b = model(a)"),
        ("backward", 0, "b.backward()"),
    ]


def test_a_trainer_without_the_loop_is_refused():
    with pytest.raises(UserError, match="no train_one_epoch in this trainer"):
        figures.lines("def main():\n    pass\n")
    with pytest.raises(UserError, match="2 loops in train_one_epoch: expected one"):
        figures.lines("def train_one_epoch():\n    for a in b: a()\n    for a in b: a()\n")


def test_the_figure_shows_the_lines_the_phases_and_the_recorded_shares():
    ax = figures.plot_loop(runs.recorded("h100/00-resnet50-cpu-b0032"))
    shown = [text.get_text() for text in ax.texts]
    assert set(PHASES) <= set(shown)
    assert {line.text for line in figures.lines(course.trainer().read_text())} <= set(shown)
    shares = [float(text[:-1]) for text in shown if text.endswith("%")]
    assert len(shares) == 5
    assert sum(shares) == pytest.approx(100, abs=0.3)
