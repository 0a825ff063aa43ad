"""The verdict as a trainee reads it: its states, its text, its card, and the ladder of hints."""

from dataclasses import replace

import numpy as np
import pytest

from dlojz import course, launch
from dlojz.check import bars, exercise, gain
from dlojz.check.exercise import FASTER, MECHANISM, SAME, Finding, State
from dlojz.check.gain import SPEED
from dlojz.check.verdict import Verdict
from dlojz.course import progress
from dlojz.runs import stats


def verdict(*findings):
    return Verdict("02_amp", list(findings), exercise.find("02_amp").hints)


def not_yet(folder, source="a trainer"):
    """A verdict on this trainer, which fails, as `check` returns it."""
    found = verdict(Finding(MECHANISM, "layers", "dtype", False, "float32", "bfloat16", "autocast"))
    found.job = launch.Job(folder)
    (folder / "trainer.py").write_text(source)
    return found


def test_hints_climb_a_ladder(course_folder, tmp_path):
    found = not_yet(tmp_path, course.solution("01").read_text())
    first, second, third = found.hint(), found.hint(), found.hint()
    assert "Hint 1 of 3" in repr(first)
    assert second.link.startswith("https://docs.pytorch.org/")
    assert "+    with torch.autocast" in third.diff
    assert "Hint 3 of 3" in repr(found.hint()), "and stays on the last rung"


def test_the_first_hint_is_the_exercises_first(course_folder):
    late = Finding(SAME, "losses", "losses", False, "1", "2", "losses")
    early = Finding(SAME, "images", "images", False, "1", "2", "images")
    own = Finding(MECHANISM, "layers", "dtype", False, "1", "2", "autocast")
    assert verdict(late, own, early).hint_key == "images"
    assert verdict(late, own).hint_key == "autocast"
    assert verdict(late).hint_key == "losses"


def test_other_rows_that_fail_are_said_to_follow_perhaps():
    images, dtype = (
        Finding(MECHANISM, hint, what, False, "1", "2", hint)
        for what, hint in (("images", "images"), ("dtype", "autocast"))
    )
    unnamed = Finding(*SPEED, State.UNMEASURED, "not timed", "fix that first")
    for text in (repr, Verdict._repr_html_):
        assert "the other rows marked ✗ may follow" in text(verdict(images, dtype))
        assert "the other rows marked ✗" not in text(verdict(images, images, unnamed))
        prepared = replace(verdict(images, dtype), parts=(MECHANISM,))
        assert "the other rows marked ✗ have hints of their own" in text(prepared)


@pytest.mark.parametrize("passed", [True, False])
def test_who_has_passed_need_not_measure_again(passed):
    found = verdict(Finding(SAME, "images", "images", passed, "1", "1", "images"))
    found.cautions = (stats.Caution("disturbed", "stop them", again=True),)
    for text in (repr(found), found._repr_html_()):
        assert ("it passed all the same" in text) == passed


def test_what_is_not_asked_does_not_fail():
    asked = Finding(SAME, "images", "images", True, "1", "1")
    found = verdict(asked, Finding(*SPEED, State.NOT_ASKED, "0.4 times", "no gain asked"))
    assert found.passed
    assert found.part(FASTER) == State.NOT_ASKED
    assert "no gain asked" in repr(found)


def test_the_card_shows_hostile_text_as_text():
    found = verdict(Finding(SAME, "hostile", "<script>", False, "<b>yours</b>", "1", "images"))
    assert "<script>" not in found._repr_html_()
    assert "&lt;b&gt;yours" in found._repr_html_()


def test_a_finding_is_never_undecided_by_accident():
    for state in (None, "1"):
        with pytest.raises(TypeError, match=f"images: {state!r} is no state"):
            Finding(SAME, "images", "images", state, "1", "2")
    assert Finding(SAME, "images", "images", np.bool_(True), "1", "1").state == State.PASSED


def test_a_verdict_without_a_finding_does_not_pass():
    assert not verdict().passed


def test_a_notebook_that_is_run_again_climbs_no_rung(course_folder, tmp_path):
    """Run All makes a new verdict and asks for one hint; only the trainee asks twice."""
    for _ in range(3):
        assert "Hint 1 of 3" in repr(not_yet(tmp_path).hint())
    again = not_yet(tmp_path)
    again.hint()
    assert "Hint 2 of 3" in repr(again.hint())
    assert "Hint 2 of 3" in repr(not_yet(tmp_path).hint()), "and it is not forgotten"


def test_in_a_terminal_each_call_climbs_a_rung(course_folder, tmp_path):
    said = [repr(not_yet(tmp_path).hint(climb=True)) for _ in range(2)]
    assert ["Hint 1 of 3" in said[0], "Hint 2 of 3" in said[1]] == [True, True]


def test_another_trainer_begins_with_the_first_hint(course_folder, tmp_path):
    first = not_yet(tmp_path, "one trainer")
    first.hint(), first.hint()
    assert "Hint 1 of 3" in repr(not_yet(tmp_path, "another trainer").hint())


def test_hints_come_even_if_the_progress_cannot_be_read(course_folder, tmp_path):
    progress.file().write_text("{")
    found = not_yet(tmp_path)
    assert ["Hint 1 of 3" in repr(found.hint()), "Hint 2 of 3" in repr(found.hint())] == [True] * 2


def test_a_verdict_names_its_job(tmp_path):
    folder = tmp_path / "0012"
    folder.mkdir()
    found = not_yet(folder)
    assert repr(found).startswith("02_amp: not yet (job 0012)")
    assert "job 0012" in found._repr_html_()


def test_where_only_no_loss_is_asked_an_open_speed_passes_and_the_headline_says_so():
    right = Finding(SAME, "images", "images", True, "1", "1")
    shown = stats.Comparison(1.02, 0.83, 1.22, 0.03, 12, stats.NO_DIFFERENCE)
    speed = gain.asked(bars.Bar("", 1.0, "a source", not_slower=True), shown)
    found = verdict(right, speed)
    assert found.passed
    assert found.hint_key is None
    assert repr(found).startswith("02_amp: passed, speed not measured\n")
    for text in (repr(found), found._repr_html_().replace("&nbsp;", " ")):
        assert "? faster (not measured)" in text
        assert "not measured; 1.02 times as fast (95 % interval 0.83 to 1.22, 12 pairs)" in text
        assert "faster (nothing asked" not in text
    assert ">passed, speed not measured</span>" in found._repr_html_()
    told = found.to_dict()
    assert (told["passed"], told["headline"]) == (True, "passed, speed not measured")
    assert told["parts"][FASTER] == "open"


def test_of_a_prepared_file_the_next_line_names_its_part():
    task = exercise.find("12_parallel")
    found = [
        Finding(part, "x", "x", False, "1", "2", hint)
        for part, hint in (("by hand", "copy"), ("in a ring", "waited"))
    ]
    both = Verdict(task.step, found, task.hints, parts=task.parts)
    assert "next: in a ring: A process waited" in repr(both)
    assert "in a ring: A process waited" in both._repr_html_()
    assert "next: A process waited" in repr(Verdict(task.step, found[1:], task.hints))


def test_where_a_gain_is_asked_an_open_speed_has_not_passed_and_the_next_line_says_what_to_do():
    right = Finding(SAME, "images", "images", True, "1", "1")
    shown = stats.Comparison(1.26, 1.10, 1.45, 0.03, 12, stats.FASTER)
    found = verdict(right, gain.asked(bars.Bar("", 1.15, "a source"), shown))
    assert not found.passed
    assert found.hint_key == "open"
    assert "not measured; 1.26 times as fast" in repr(found)
    for text in (repr(found), found._repr_html_()):
        assert "Close other programs, then check again" in text
    assert found.to_dict()["headline"] == "not yet"
    wrong = Finding(MECHANISM, "layers", "dtype", False, "float32", "bfloat16", "autocast")
    assert verdict(wrong, *found.findings).hint_key == "autocast"
