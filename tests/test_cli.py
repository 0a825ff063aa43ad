"""The command `dlojz`, as one types it."""

import subprocess
import sys

import pytest

from dlojz import cli, course, launch

FAST = (
    "dlojz/dlojz.py --test --test-nsteps 4 --data synthetic --model resnet18 --image-size 32 -b 2"
)


@pytest.mark.parametrize("command", ["", "submit", "data", "report", "catch-up"])
def test_help_is_there(command):
    words = [sys.executable, "-m", "dlojz.cli", *command.split(), "--help"]
    assert "usage: dlojz" in subprocess.run(words, capture_output=True, text=True).stdout


def test_submit_wait_report(course_folder, capsys, tmp_path):
    assert cli.main(["submit", "--wait", FAST]) == 0
    out = capsys.readouterr().out
    assert "job 0001: dlojz/dlojz.py" in out
    assert "throughput" in out
    assert cli.main(["report", "1", "--png", str(tmp_path / "r.png")]) == 0
    assert (tmp_path / "r.png").stat().st_size > 10_000
    assert cli.main(["queue"]) == 0
    assert "COMPLETED" in capsys.readouterr().out
    assert cli.main(["diff", "01", "--job", "1"]) == 0
    assert "+    device = idr_torch.device()" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["report"], "submit one first"),
        (["report", "77"], "no job '77'"),
        (["report", "a'; echo foo"], "no job"),
        (["submit", "nowhere.py"], "no trainer"),
        (["submit", "a'; echo foo"], "can't read the command"),
        (["cancel", "5"], "no job '5'"),
        (["solution", "99"], "expected one of"),
        (["data", "."], "dlojz: "),
        (["report", "t.py"], "not a JSON object"),
    ],
)
def test_bad_input_is_one_clear_line_and_status_2(words, message, course_folder, capsys):
    (course_folder / "t.py").write_text("print(1)\n")
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.startswith("dlojz: ")
    assert "Traceback" not in err


def test_a_failed_job_gives_status_1(course_folder, capsys):
    (course_folder / "t.py").write_text("raise ValueError('why')")
    assert cli.main(["submit", "--wait", "t.py"]) == 1
    assert "ValueError: why" in capsys.readouterr().out


def test_solution_and_catch_up(course_folder, capsys):
    assert cli.main(["solution", "01"]) == 0
    assert capsys.readouterr().out == course.solution(1).read_text()
    course.trainer().write_text("mine")
    assert cli.main(["catch-up", "01"]) == 0
    assert "yours was saved" in capsys.readouterr().out


def test_cancel(course_folder, capsys):
    (course_folder / "t.py").write_text("import time; time.sleep(99)")
    job = launch.submit("t.py")
    assert cli.main(["cancel", job.id]) == 0
    assert job.wait(30) == "CANCELLED"


def test_data_makes_a_set_of_the_size_asked_for(course_folder, capsys):
    words = "data d --preset smoke --classes 2 --images-per-class 3 --val-images-per-class 1"
    assert cli.main([*words.split(), "--workers", "1"]) == 0
    assert len(list((course_folder / "d").rglob("*.JPEG"))) == 8


def test_flags_outside_the_quotes_are_told_where_they_belong(course_folder, capsys):
    with pytest.raises(SystemExit):
        cli.main(["submit", "dlojz/dlojz.py", "--test", "-b", "4"])
    assert 'dlojz submit "dlojz/dlojz.py --test -b 4"' in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["queue", "--nothing"])
    assert "unrecognized arguments: --nothing\n" in capsys.readouterr().err


def test_a_dry_run_submits_nothing(course_folder, capsys):
    assert cli.main(["submit", "--dry-run", "dlojz/dlojz.py --test"]) == 0
    assert capsys.readouterr().out.endswith("dlojz.py --test\n")
    assert cli.main(["queue"]) == 0
    assert "no jobs" in capsys.readouterr().out
