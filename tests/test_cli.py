"""The command `dlojz`, as one types it."""

import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dlojz import check, cli, course, launch
from dlojz.course import progress
from dlojz.launch import series
from dlojz.launch.request import Request

REPOSITORY = Path(__file__).parent.parent
FAST = (
    "dlojz/dlojz.py --test --test-nsteps 4 --data synthetic --model resnet18 --image-size 32 -b 2"
)


def test_help_is_there(capsys):
    for command in ("", *cli.COMMANDS):
        with pytest.raises(SystemExit, match="0"):
            cli.main([*command.split(), "--help"])
        assert f"usage: dlojz {command}" in capsys.readouterr().out


def test_the_command_starts_without_what_a_figure_or_a_training_needs():
    code = "import sys; from dlojz import cli; print([*sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert "'dlojz.cli.tools'" in loaded
    assert [m for m in ("matplotlib", "numpy", "torch") if f"'{m}'" in loaded] == []


def test_in_a_terminal_long_lines_go_on_below_their_beginning(monkeypatch, capsys):
    from dlojz.cli.course import _wrapped

    text = f"one\n    two {'word ' * 12}--a-long-flag"
    assert _wrapped(text) == text, "a file has its lines as they are"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "50")
    first, second, third = _wrapped(text).splitlines()
    assert (first, second.index("two"), third.index("word")) == ("one", 4, 6)
    assert third.endswith("--a-long-flag")


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
        (["report", ""], "no job ''"),
        (["submit", "nowhere.py"], "no trainer"),
        (["submit", "a'; echo foo"], "can't read the command"),
        (["cancel", "5"], "no job '5'"),
        (["solution", "99"], "expected one of"),
        (["data", "."], "dlojz: "),
        (["report", "t.py"], "not a JSON object"),
        (["report", "runs/9"], "no runs/9: expected a job's number, a run's folder or its log"),
        (["restore"], "nothing to restore"),
        (["report", "--all", "--png", "a.png"], "--png draws the runs that you name"),
        (["restore", "x.py"], "no saved file 'x.py'"),
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
    out = capsys.readouterr().out
    assert "yours was saved" in out
    undo = out.split("`")[1]
    assert undo == f"dlojz restore {course.saved()[0].name}"
    assert cli.main(undo.split()[1:]) == 0
    assert course.trainer().read_text() == "mine"
    assert cli.main(["restore", "--list"]) == 0
    assert capsys.readouterr().out.endswith(f"{course.saved()[0]}\n")


@pytest.mark.parametrize("command", [["catch-up", "01"], ["restore"]])
def test_a_trainer_that_is_a_link_is_replaced_and_the_file_behind_it_named(
    command, course_folder, capsys
):
    (course_folder / "mine.py").write_text("mine")
    course.trainer().write_text("saved before")
    course.catch_up(1)
    course.trainer().unlink()
    course.trainer().symlink_to(course_folder / "mine.py")
    assert cli.main(command) == 0
    behind = course_folder / "mine.py"
    assert f"; it was a link to {behind}, which is as it was\n" in capsys.readouterr().out
    assert behind.read_text() == "mine"
    assert not course.trainer().is_symlink()


def test_a_difference_cannot_control_the_terminal(course_folder, capsys):
    course.trainer().write_text("\tx = '\x1b[2J\u202e'\n")
    assert cli.main(["diff", "01"]) == 0
    out = capsys.readouterr().out
    assert "-\tx = '\\x1b[2J\\u202e'\n" in out


def test_a_terminal_that_lacks_a_letter_shows_another(course_folder, monkeypatch):
    course.trainer().write_text("# é\n", encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert cli.main(["diff", "01"]) == 0
    assert b"-# ?\n" in sys.stdout.buffer.getvalue()


def test_cancel(course_folder, capsys):
    (course_folder / "t.py").write_text("import time; time.sleep(99)")
    job = launch.submit("t.py")
    assert cli.main(["cancel", job.id]) == 0
    assert job.wait(30) == "CANCELLED"


def test_data_makes_a_set_of_the_size_asked_for(course_folder, capsys, monkeypatch):
    words = "data d --preset smoke --classes 2 --images-per-class 3 --val-images-per-class 1"
    assert cli.main([*words.split(), "--workers", "1"]) == 0
    assert len(list((course_folder / "d").rglob("*.JPEG"))) == 8
    assert capsys.readouterr().out == "d has 8 images: train on them with --data d\n"
    assert cli.main([*words.split(), "--workers", "1"]) == 0
    assert capsys.readouterr().out.startswith("d is complete: nothing was made\nd has 8 images")
    monkeypatch.setenv("DLOJZ_DATA", "d")
    assert cli.main([*words.split(), "--workers", "1"]) == 0
    assert capsys.readouterr().out.endswith("--data d (the default)\n")


def test_data_draws_images_for_a_judge(course_folder, capsys):
    words = "data d --judge 7 --classes 2 --val-images-per-class 2 --workers 1"
    assert cli.main(words.split()) == 0
    assert {file.parts[1] for file in Path("d").rglob("*.JPEG")} == {"val"}
    assert capsys.readouterr().out == "d has 4 images in val/, and none to train on\n"


SUBMIT = 'dlojz submit "dlojz/dlojz.py'
USAGE = [  # what was typed, which usage is shown, and what is said
    ("submit dlojz/dlojz.py --test -b 4", "submit", f': {SUBMIT} --test -b 4"'),
    ("submit dlojz/dlojz.py --model vit", "submit", f"{SUBMIT} --model vit"),
    ("submit --wiat dlojz/dlojz.py", "submit", "--wiat; did you mean --wait?\n"),
    ("submit --wiat dlojz/dlojz.py --test", "submit", "--wait?; put the trainer's flags inside"),
    ("submit --wiat dlojz/dlojz.py --test", "submit", f'{SUBMIT} --test"'),
    ("submit -n 2 t.py --test -b 2", "submit", ': dlojz submit -n 2 "t.py --test -b 2"\n'),
    ("worth compile t.py -b 2", "worth", ': dlojz worth compile "t.py -b 2"\n'),
    ("queue --nothing", "queue", "unrecognized arguments: --nothing\n"),
    ("check 01 --jsn", "check", "--jsn; did you mean --json?"),
    ("sumbit dlojz/dlojz.py", "COMMAND", "no command 'sumbit'; did you mean submit?"),
    ("chek 01", "COMMAND", "no command 'chek'; did you mean check?"),
    ("xyz", "COMMAND", "no command 'xyz': doctor, data, submit"),
    ("hint 01", "COMMAND", "no command 'hint'; did you mean check --hint?"),
]


@pytest.mark.parametrize(("words", "usage", "message"), USAGE)
def test_a_typo_is_met_with_the_right_usage_and_a_guess(words, usage, message, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(words.split())
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert message in err
    assert f"{usage} " in err.splitlines()[0]


def test_minutes_are_a_time_limit_and_said_to_be_minutes(course_folder, capsys):
    (course_folder / "t.py").write_text("print(1)")
    assert cli.main(["submit", "--time-max", "5", "t.py"]) == 0
    assert "ended after 5 minutes\n" in capsys.readouterr().out
    assert launch.find(1).info["time_max_s"] == 300
    assert cli.main(["submit", "--time-max", "1:01:05", "t.py"]) == 0
    assert "ended after 1 hour 1 minute 5 seconds\n" in capsys.readouterr().out
    for nothing in ("0", "00:00:00"):
        assert cli.main(["submit", "--time-max", nothing, "t.py"]) == 2
        assert f"'{nothing}': expected a time longer than 0" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["queue", "solution 01"])
def test_a_reader_that_has_ended_is_no_error(words, course_folder):
    line = f"set -o pipefail; {sys.executable} -m dlojz.cli {words} | true"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (141, ""), "as a shell calls the end of `yes | head`"


def test_closed_standard_output_is_no_error(course_folder):
    words = [sys.executable, "-m", "dlojz.cli", "queue"]
    for place, status, told in ((">&-", 0, ""), (">/dev/full", 2, "No space left on device")):
        line = shlex.join(words) + place
        done = subprocess.run(["bash", "-c", line], stderr=subprocess.PIPE, text=True, timeout=60)
        assert done.returncode == status
        assert told in done.stderr
        assert done.stderr.count("\n") == bool(told)


def test_a_dry_run_submits_nothing(course_folder, capsys):
    assert cli.main(["submit", "--dry-run", "dlojz/dlojz.py --test"]) == 0
    assert capsys.readouterr().out.endswith("dlojz.py --test\n")
    assert cli.main(["queue"]) == 0
    assert "no jobs" in capsys.readouterr().out


@pytest.fixture
def sweep(course_folder):
    """Two jobs of one sweep, which have ended."""
    (course_folder / "t.py").write_text("print(1)")
    jobs = launch.submit(["t.py", "t.py --test"], name="sweep")
    for job in jobs:
        job.wait(30)
    return jobs


def test_after_a_sweep_its_last_job_is_checked_and_that_is_said(sweep, monkeypatch, capsys):
    asked = []

    def fake(step, job, pairs):
        asked.append((step, job))
        raise LookupError("enough")

    monkeypatch.setattr(check, "check", fake)
    assert cli.main(["check", "1"]) == 2
    assert asked == [("01_gpu", sweep[1])]
    assert "the last job of the last sweep (0001, 0002)" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["04c_slow", "04_slow"])
def test_a_notebooks_name_is_a_checks_name_too(sweep, monkeypatch, name):
    asked = []
    monkeypatch.setattr(check, "check", lambda step, *_: asked.append(step) or sys.exit(3))
    with pytest.raises(SystemExit):
        cli.main(["check", name, "0001"])
    assert asked == ["04_slow"]


def test_no_pairs_at_all_are_refused(sweep, capsys):
    assert cli.main(["check", "01", "0002", "--pairs", "0"]) == 2
    assert "dlojz: pairs=0: expected at least 1" in capsys.readouterr().err


def test_a_check_after_a_sweep_takes_its_last_job(sweep, monkeypatch):
    monkeypatch.setattr(check.plan.launch, "is_ours", lambda trainer: True)
    assert check.plan.job_of(None) == sweep[1]
    assert check.plan.job_of(sweep) == sweep[1]


def test_trace_after_a_sweep_looks_at_its_last_job(sweep, capsys):
    assert cli.main(["trace"]) == 2
    err = capsys.readouterr().err
    assert "the last job of the last sweep" in err
    assert "runs/0002" in err
    assert "Traceback" not in err


def test_the_report_on_a_series_shows_its_runs(course_folder, capsys):
    flags = FAST.split()[1:]
    entries = [series.Entry(name, course.trainer(), flags) for name in ("before-1", "after-1")]
    job = series.submit(entries, Request(name="check-01_gpu"))
    job.wait(60)
    assert cli.main(["report", job.id]) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["before-1", "after-1"]
    assert all("COMPLETED" in row for row in rows)


def test_all_runs_with_their_speed(sweep, capsys):
    launch.submit(FAST).wait(60)
    (sweep[0].directory / "plan.json").touch()  # as a check's series
    assert cli.main(["report", "--all"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert "images/s" in head
    assert [row.split()[0] for row in rows] == ["0002", "0003"]
    assert "resnet18" in rows[1]


def test_a_failure_is_told_once_and_without_what_is_not_known(course_folder, capsys):
    line = "dlojz/dlojz.py --test --data nowhere --model resnet18 --image-size 64 -b 8"
    assert cli.main(["submit", "--wait", line]) == 1
    out = capsys.readouterr().out
    assert out.count("FAILED") == 1
    assert "?" not in out
    assert "resnet18, 64 px, batch 8\n" in out
    assert "no images in 'nowhere'" in out


def test_what_would_steer_a_terminal_is_shown_as_an_escape(course_folder, capsys):
    (course_folder / "t.py").write_text("import sys; sys.exit('\\033[2Jgone \\u202e \\x9b')")
    assert cli.main(["submit", "--wait", "--name", "a\033[31m\nb", "t.py\033[0m"]) == 2
    assert cli.main(["submit", "--wait", "--name", "a\033[31m\nb", "t.py '\033[0m'"]) == 1
    assert cli.main(["queue"]) == 0
    captured = capsys.readouterr()
    assert "a\\x1b[31m\\nb" in captured.out
    assert "gone \\u202e" in captured.out
    assert not {"\033", "\x9b", "\u202e"} & set(captured.out)
    assert "\\x1b[0m" in captured.err
    assert "\033" not in captured.out + captured.err


def test_progress_is_a_table_and_json(course_folder, capsys):
    (course_folder / "notebooks").symlink_to(REPOSITORY / "notebooks")
    progress.keep("verdicts", "02_amp", {"passed": True, "job": "0007"})
    assert cli.main(["progress"]) == 0
    assert re.search(r"verdict +passed, job 0007", capsys.readouterr().out)
    assert cli.main(["progress", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (amp,) = [i for i in found if (i["kind"], i["key"]) == ("verdicts", "02_amp")]
    assert (amp["done"], amp["job"], amp["notebook"]) == (True, "0007", "02_amp")


@pytest.mark.parametrize(
    ("preset", "flags", "noted"),
    [("cpu", "", True), ("cpu", " --model resnet18", False), ("gpu", "", False)],
)
def test_the_sizes_of_a_gpu_on_a_cpu_are_noted(preset, flags, noted, script, monkeypatch, capsys):
    monkeypatch.setenv("DLOJZ_PRESET", preset)
    script("from dlojz.training import flags\nargs = flags.parse()", "dlojz/dlojz.py")
    assert cli.main(["submit", f"dlojz/dlojz.py --test{flags}"]) == 0
    assert ("sizes for this machine: --model resnet18" in capsys.readouterr().err) == noted


@pytest.mark.parametrize("name", ["DLOJZ_PRESET", "DLOJZ_LAUNCHER"])
def test_an_unknown_value_of_a_variable_is_named(name, course_folder, monkeypatch, capsys):
    monkeypatch.setenv(name, "foo")
    (course_folder / "t.py").write_text("print(1)")
    assert cli.main(["submit", "t.py"]) == 2
    err = capsys.readouterr().err
    assert name in err
    assert "'foo'" in err
    assert not launch.jobs()
