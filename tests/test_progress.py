"""How far a job is, and what a trainee said."""

import io
import json
import re
import sys
from pathlib import Path

import pytest
from logs import write_log

from conftest import fill
from dlojz import cli, course, launch, widgets
from dlojz.chapters.n04_profiler import mysteries
from dlojz.course import progress
from dlojz.launch import submit
from dlojz.launch.follow import Bar, _after
from dlojz.widgets.quiz import QUIZZES

REPOSITORY = Path(__file__).parent.parent


FLAGS = "--test --test-nsteps 5 --data synthetic --model shufflenet_v2_x0_5 --image-size 32 -b 2"


def test_a_job_is_followed_to_its_end(course_folder):
    seen = list(launch.follow(submit(f"dlojz.py {FLAGS} -e 2"), every_s=0.02))
    assert seen[0].state in ("QUEUED", "RUNNING")
    assert (seen[-1].state, seen[-1].done, seen[-1].total) == ("COMPLETED", 10, 10)
    assert [n.done for n in seen] == sorted(n.done for n in seen)
    assert seen[-1].images_per_s > 0


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
def test_a_job_that_is_waited_for_shows_its_progress_where_somebody_looks(
    kind, course_folder, monkeypatch
):
    monkeypatch.setattr(sys, "stderr", screen := kind())
    monkeypatch.setattr(Bar, "SOON_S", 0)
    monkeypatch.setattr(Bar, "REFRESH_S", 0)
    job = submit(f"dlojz.py {FLAGS}", name="mine")
    assert job.wait(60) == launch.State.COMPLETED
    drawn = screen.getvalue()
    if kind is Terminal:
        assert re.search(f"job {job.id}, mine, (queued|running), 00:0", drawn)
        assert "| 5/5 steps, 00:0" in drawn
        assert re.search(r"\r +\r?$", drawn), "nothing stays"
    else:
        assert drawn == ""


def test_who_waits_no_longer_than_that_is_told_the_state(course_folder, script):
    job = submit(str(script("import time; time.sleep(60)")))
    with pytest.raises(TimeoutError, match=f"job {job.id} is still (QUEUED|RUNNING) after 0.5 s"):
        job.wait(0.5)
    job.cancel()
    assert job.wait(30) == launch.State.CANCELLED


def test_the_rate_is_that_of_all_processes():
    now = launch.Now("RUNNING")
    step = {"event": "step", "images": 8, "loss": 2.0, "host_ms": {"forward": 60, "backward": 40}}
    for event in ({"event": "start", "size": 4}, {"event": "setup", "steps": 9}, step):
        now = _after(now, event)
    assert (now.done, now.total, now.images_per_s) == (1, 9, 320)


def test_on_a_full_disk_what_was_kept_stays_and_the_trainee_is_told(small_disk, monkeypatch):
    monkeypatch.setenv("DLOJZ_PROGRESS", str(small_disk / "progress.json"))
    progress.keep("quizzes", "gpu", 1)
    fill(small_disk)
    with pytest.raises(course.UserError, match=r"progress.json could not .*disk is full"):
        progress.keep("quizzes", "gpu", 2)
    assert progress.last("quizzes", "gpu") == 1
    assert not list(small_disk.glob(".progress*"))


def test_answers_are_kept_with_their_history(course_folder):
    progress.keep("quizzes", "gpu", 2)
    progress.keep("quizzes", "gpu", 1)
    progress.keep("predictions", "gpu", {"ms": 3})
    assert progress.last("quizzes", "gpu") == 1
    assert progress.last("predictions", "gpu") == {"ms": 3}
    assert progress.last("quizzes", "other") is None
    assert len(progress.load()["quizzes"]["gpu"]) == 2


@pytest.mark.parametrize("text", ["{broken", "[1]"])
def test_a_broken_file_is_not_overwritten(course_folder, tmp_path, text):
    (tmp_path / "progress.json").write_text(text)
    with pytest.raises(ValueError, match=r"progress\.json can't be read.*move it away"):
        progress.keep("quizzes", "gpu", 1)
    assert (tmp_path / "progress.json").read_text() == text


NOW = "2026-01-02T03:04:05+00:00"
HOSTILE = [
    *("", "{broken", "[1]", "[" * 100_000, '{"predictions": NaN}', '{"verdicts": 1e999}'),
    *(
        json.dumps(kept)
        for kept in (
            {"verdicts": []},
            {"verdicts": {"01_gpu": {}}},
            {"verdicts": {"01_gpu": "value"}},
            {"verdicts": {"01_gpu": [3]}},
            {"verdicts": {"01_gpu": [{"time": NOW}]}},
            {"verdicts": {"01_gpu": [{"value": [], "time": NOW}]}},
            {"verdicts": {"01_gpu": [{"value": {"passed": "yes"}, "time": NOW}]}},
            {"verdicts": {"01_gpu": [{"value": {"passed": True}, "time": 3}]}},
            {"verdicts": {"01_gpu": [{"value": {"passed": True}, "time": "yesterday"}]}},
            {"predictions": {"01 gpu": [{"value": 3, "time": NOW}]}},
            {"predictions": {"01 gpu": [{"value": {"step_ms": "fast"}, "time": NOW}]}},
            {"scores": {"01 gpu": [{"value": [{"name": "step_ms"}], "time": NOW}]}},
            {"quizzes": {"start-epoch": [{"value": {}, "time": NOW}]}},
            {"mysteries": {"A": [{"value": "none", "of": "many", "time": NOW}]}},
        )
    ),
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:70])
def test_a_damaged_file_is_named_in_one_sentence_and_left_as_it_is(text, notebooks, capsys):
    progress.file().write_text(text)
    assert cli.main(["progress"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"dlojz: {progress.file()}")
    assert err.endswith("repair it, or move it away to start afresh\n")
    assert err.count("\n") == 1
    assert progress.file().read_text() == text
    folder = progress.file().with_name("class")
    folder.mkdir()
    if cli.main(["share", str(folder), "--as", "ada"]) == 2:  # of another form: the rest is shared
        assert capsys.readouterr().err == err


def test_a_figure_that_is_not_finite_damages_no_file(course_folder):
    progress.keep("scores", "gpu", [])
    with pytest.raises(ValueError, match="Out of range float"):
        progress.keep("scores", "gpu", [{"measured": float("inf")}])
    assert progress.load()["scores"]["gpu"][-1]["value"] == []


def test_an_answer_that_no_table_of_a_kind_could_take_is_refused(course_folder):
    progress.file().write_text('{"quizzes": {"gpu": {}}}')
    with pytest.raises(course.FileError, match="its quizzes are not as they were written"):
        progress.keep("quizzes", "gpu", 1)


@pytest.fixture
def notebooks(course_folder):
    """The notebooks and the recordings, in the course folder of the test."""
    for name in ("notebooks", "reference"):
        (course_folder / name).symlink_to(REPOSITORY / name)


def rows():
    """{(notebook, what): (done, left)} of the overview."""
    found, name = {}, ""
    for row in progress.overview().rows:
        name = row[0] or name
        found[name, row[1]] = row[2], row[4]
    return found


def test_at_first_everything_is_left(notebooks):
    found = rows()
    assert found["01_gpu", "verdict"] == ("", "dlojz check 01")
    assert found["09_compile", "verdict '09_repair'"] == ("", "dlojz check 09_repair")
    assert found["01_gpu", "prediction '01 gpu'"] == ("", "your guess")
    assert found["00_start", "quizzes"] == ("0 of 9 right", "read-cut, 8 more")
    assert found["05_dataloader", "quizzes"] == ("0 of 5 right", "loader-bound, 4 more")
    assert found["04_profiler", "mysteries"] == ("", "all")
    assert {path.stem for path in (REPOSITORY / "notebooks").glob("*.ipynb")} == {
        notebook for notebook, _ in found
    }


def test_each_quiz_and_each_step_is_asked_in_a_notebook():
    asked = {(kind, key) for _, kind, key in progress.asked()}
    assert {key for kind, key in asked if kind == "quizzes"} == set(QUIZZES)
    verdicts = {key for kind, key in asked if kind == "verdicts"}
    assert verdicts == {*course.CHAIN[1:], *course.PREPARED}


def test_what_was_done_is_shown_with_its_score(notebooks, monkeypatch, tmp_path, capsys):
    for module in (sys.modules["dlojz.widgets.quiz"], mysteries):
        monkeypatch.setattr(module, "display", lambda box: None)
    for passed, job in ((False, "0003"), (True, "0004"), (False, "0005")):
        progress.keep("verdicts", "01_gpu", {"passed": passed, "job": job})
    widgets.predict("01 gpu", images_per_s=300, step_ms=None)
    assert rows()["01_gpu", "prediction '01 gpu'"] == ("images_per_s 300, not measured", "")
    widgets.score("01 gpu", write_log(tmp_path / "r.jsonl"))
    progress.keep("quizzes", "start-epoch", 1, right=False)
    progress.keep("quizzes", "start-epoch", 0, right=True)
    progress.keep("quizzes", "start-copy", 0, right=True)
    mysteries.answer("H", "one-worker")
    mysteries.answer("A", "one-worker")
    found = rows()
    assert found["01_gpu", "verdict"] == ("passed, job 0004", "")
    score = "images_per_s 300, measured 320 ★★★"
    assert found["01_gpu", "prediction '01 gpu'"] == (score, "")
    widgets.score_value("01 gpu", how="estimated", images_per_s=320)
    assert rows()["01_gpu", "prediction '01 gpu'"][0] == "images_per_s 300, estimated 320 ★★★"
    once = "right (1 at the first attempt)"
    assert found["00_start", "quizzes"] == (f"2 of 9 {once}", "read-cut, 6 more")
    assert found["04_profiler", "mysteries"] == (f"1 of 16 {once}", "A, 14 more")
    assert json.loads(json.dumps(progress.items())) == progress.items()


def test_a_row_of_the_overview_fits_a_terminal(notebooks, tmp_path, capsys):
    for _, kind, key in progress.asked():
        if kind == "predictions":
            widgets.predict(key, images_per_s=1.2, peak_memory_gb=1.2)
            widgets.score(key, write_log(tmp_path / "r.jsonl"))
    assert max(map(len, repr(progress.overview()).splitlines())) <= 120


def test_what_is_left_is_named_in_a_few_words():
    expected = {
        ("a",): "a",
        ("a", "b"): "a, b",
        ("profile-roofline", "profile-segments"): "profile-roofline, 1 more",
        ("a", "b", "c"): "a, 2 more",
        (): "",
    }
    for keys, left in expected.items():
        assert progress._left([{"key": key, "done": False} for key in keys]) == left


def test_an_answer_in_a_notebook_is_noted_as_right_or_wrong(notebooks, monkeypatch):
    shown = []
    monkeypatch.setattr(sys.modules["dlojz.widgets.quiz"], "display", shown.append)
    widgets.quiz("start-epoch")
    choice = shown[0].children[1]
    for answer in sorted(QUIZZES["start-epoch"].answers, key=lambda answer: answer.right)[-2:]:
        choice.value = answer.text
    assert [e["right"] for e in progress.load()["quizzes"]["start-epoch"]] == [False, True]


def test_a_file_that_is_no_notebook_is_named(course_folder):
    (course_folder / "notebooks").mkdir()
    (course_folder / "notebooks" / "01_gpu.ipynb").write_text("{broken")
    with pytest.raises(ValueError, match=r"01_gpu\.ipynb is not a notebook.*git checkout"):
        progress.overview()
