"""How far a job is, and what a trainee said."""

import pytest

from dlojz import launch, progress
from dlojz.launch import submit
from dlojz.launch.follow import _after


def test_a_job_is_followed_to_its_end(course_folder):
    flags = "--test --test-nsteps 5 -e 2 --data synthetic --model resnet18 --image-size 32 -b 2"
    seen = list(launch.follow(submit(f"dlojz.py {flags}"), every_s=0.02))
    assert seen[0].state in ("QUEUED", "RUNNING")
    assert (seen[-1].state, seen[-1].done, seen[-1].total) == ("COMPLETED", 10, 10)
    assert [n.done for n in seen] == sorted(n.done for n in seen)
    assert seen[-1].images_per_s > 0


def test_the_rate_is_that_of_all_processes():
    now = launch.Now("RUNNING")
    step = {"event": "step", "images": 8, "loss": 2.0, "host_ms": {"forward": 60, "backward": 40}}
    for event in ({"event": "start", "size": 4}, {"event": "setup", "steps": 9}, step):
        now = _after(now, event)
    assert (now.done, now.total, now.images_per_s) == (1, 9, 320)


def test_answers_are_kept_with_their_history(course_folder):
    progress.keep("quizzes", "gpu", 2)
    progress.keep("quizzes", "gpu", 1)
    progress.keep("predictions", "gpu", {"ms": 3})
    assert progress.last("quizzes", "gpu") == 1
    assert progress.last("predictions", "gpu") == {"ms": 3}
    assert progress.last("quizzes", "other") is None
    assert len(progress.load()["quizzes"]["gpu"]) == 2


def test_a_broken_file_is_not_overwritten(course_folder, tmp_path):
    (tmp_path / "progress.json").write_text("{broken")
    with pytest.raises(ValueError, match="move it away"):
        progress.keep("quizzes", "gpu", 1)
    assert (tmp_path / "progress.json").read_text() == "{broken"
