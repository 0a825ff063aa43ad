"""The verdict: what it runs, uses again, and says. Wrong answers are in test_wrong.py."""

import json
import shutil

import numpy as np
import pytest

from dlojz import cli, course, launch, progress
from dlojz.check import bars, check, exercises, is_open, judge, plan, run
from dlojz.check.exercises import MECHANISM, Finding, State
from dlojz.check.verdict import Verdict
from dlojz.runs import log, stats

SMALL = "--test --data synthetic --model shufflenet_v2_x0_5 --image-size 32 -b 4 --test-nsteps 5"


@pytest.fixture(scope="module")
def ran():
    """The solution of 01, submitted and ended."""
    submitted = launch.submit(f"solutions/dlojz_01_gpu.py {SMALL}", name="mine")
    submitted.wait()
    return submitted


@pytest.fixture(scope="module")
def checked(ran):
    """The series of its check."""
    assert check("01", ran).passed
    return launch.latest("check-01_gpu")


def kept(job, course_folder):
    """A copy of a job that has ended, as if it had been run in this course folder."""
    return launch.Job(shutil.copytree(job.directory, course_folder / "runs" / job.id))


@pytest.fixture
def job(ran, course_folder):
    return kept(ran, course_folder)


@pytest.fixture
def checked_job(job, checked, course_folder):
    kept(checked, course_folder)
    return job


def test_a_check_submits_once_and_then_knows(job, capsys):
    found = check("01", job)
    assert found.passed, found
    assert "5 runs" in capsys.readouterr().err
    submitted = len(launch.jobs())
    assert check("01", job).passed
    assert len(launch.jobs()) == submitted, "finished runs are used again"
    assert progress.last("verdicts", "01_gpu")["passed"]
    json.dumps(found.to_dict())


def test_the_last_job_is_the_trainees_not_the_checks(checked_job):
    assert launch.latest() == checked_job
    assert launch.latest("check-01_gpu") != checked_job
    assert check("01").job == checked_job


def test_the_hardware_of_a_verdict_is_the_gpu_though_the_job_did_not_use_it(ran, monkeypatch):
    found = log.read(ran.directory)
    assert plan.hardware_here(found).startswith("cpu: ")
    monkeypatch.setattr(plan.presets, "gpus", lambda: ("GPU-1",))
    monkeypatch.setattr(plan.facts, "gpus", lambda: {"cards": [{"name": "NVIDIA H100"}]})
    assert plan.hardware_here(found) == "cuda: NVIDIA H100"


def test_an_edit_makes_new_runs_of_what_it_touches(checked_job, course_folder, capsys):
    trainer = course_folder / "mine.py"
    trainer.write_text(course.solution(1).read_text() + "# another text\n")
    edited = launch.submit(f"{trainer} {SMALL}")
    edited.wait()
    assert check("01", edited).passed
    # The pair and the rehearsal of the trainee; the solution's runs are known.
    assert "3 runs" in capsys.readouterr().err


def test_a_check_goes_on_with_the_job_that_an_interrupt_left(job, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run, "_wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            check("01", job)
    submitted = len(launch.jobs())
    assert check("01", job).passed
    assert len(launch.jobs()) == submitted


def test_the_runs_of_a_pair_come_a_b_b_a(job):
    names = [e.name for e in plan.entries(exercises.find("01_gpu"), job, pairs=3)]
    assert names[-6:] == ["before-1", "after-1", "after-2", "before-2", "before-3", "after-3"]
    assert names[0] == "solution"


@pytest.mark.parametrize(
    ("flags", "known"),
    [
        ("--test --precision bf16 -b 8", "--test -b 8"),
        ("--test --precision=bf16 -b 8", "--test -b 8"),
        ("--precision", ""),
        ("--test -b 8", "--test -b 8"),
    ],
)
def test_the_step_before_is_spared_the_flags_it_does_not_know(flags, known):
    assert plan.without(flags.split(), {"--precision": 1}) == known.split()


def test_a_run_that_is_no_test_or_not_ended_is_refused(course_folder):
    submitted = launch.submit(f"solutions/dlojz_01_gpu.py {SMALL}")
    with pytest.raises(plan.CheckError, match=r"wait until it has ended, with job\.wait"):
        check("01", submitted)
    submitted.cancel()
    long = launch.submit("solutions/dlojz_01_gpu.py --data a'; echo foo'")
    long.wait()
    with pytest.raises(plan.CheckError, match="submit it again with --test"):
        check("01", long)


def test_a_trainer_that_fails_gets_a_verdict(course_folder):
    trainer = course_folder / "broken.py"
    text = course.solution(1).read_text()
    trainer.write_text(text.replace("    chrono.forward()\n", "    planted\n"))
    job = launch.submit(f"{trainer} {SMALL}")
    job.wait()
    found = check("01", job)
    assert not found.passed
    assert "NameError: name 'planted' is not defined" in repr(found)
    assert found.hint_key == "failed"


def test_two_processes_on_one_gpu_are_told_by_nccls_own_words(script):
    script(
        """
        raise RuntimeError('''NCCL error in: ProcessGroupNCCL.cpp: ncclInvalidUsage
        Last error:
        Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 3000''')
        """
    )
    submitted = launch.submit(f"t.py {SMALL}")
    submitted.wait()
    assert check("06", submitted).hint_key == "device"


@pytest.mark.parametrize("step", ["9", "gpu", "a'; echo foo", "00"])
def test_an_unknown_exercise_names_those_that_exist(step, course_folder):
    with pytest.raises(LookupError, match="expected one of"):
        check(step)


def test_in_a_terminal_the_exit_code_tells(checked_job, capsys):
    assert cli.main(["check", "01", checked_job.id]) == 0
    assert "passed" in capsys.readouterr().out
    assert cli.main(["check", "01", checked_job.id, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parts"]["mechanism"] == "passed"
    starter = launch.submit(f"solutions/dlojz_00_start.py {SMALL}")
    starter.wait()
    assert cli.main(["check", "01", starter.id, "--hint"]) == 1
    assert "Hint 1 of 3" in capsys.readouterr().out
    assert cli.main(["check", "99"]) == 2


PASSED, FAILED, NOT_ASKED, UNMEASURED = State


def speeds(job, *intervals, pairs=None, mechanism=True):
    """Check a job whose pairs give these intervals, one after the other, at a bar of 1.15.

    Returns how many pairs were made in all, and whether it passed.
    """
    made, given = [], iter(intervals)

    def make(planned, standards):
        made.append(sum(e.name.startswith("after-") for e in planned.entries))
        return {e.name: None for e in planned.entries}

    def found(exercise, runs, standards, timed):
        low, high = next(given)
        shown = stats.Comparison((low * high) ** 0.5, low, high, 0.01, made[-1], stats.FASTER)
        seen = Finding(MECHANISM, "layout", mechanism, "a", "b", "input")
        speed = judge._asked(bars.Bar("01_gpu", "", 1.15, "a source"), shown)
        return Verdict("01_gpu", [seen, speed], exercise.hints, shown)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "finished", make)
        patch.setattr(judge, "judge", found)
        patch.setattr(bars, "bar", lambda *_: bars.Bar("01_gpu", "", 1.15, "a source"))
        passed = check("01", job, pairs=pairs).passed
    return made[-1], passed


def test_pairs_that_leave_it_open_are_doubled_once(job, capsys):
    assert speeds(job, (1.10, 1.45), (1.16, 1.35)) == (12, True)
    assert "1.26 times as fast" in (said := capsys.readouterr().err)
    assert "6 more pairs" in said
    assert speeds(job, (1.10, 1.45), (1.12, 1.35)) == (12, False)


@pytest.mark.parametrize(
    "asked",
    [
        {"intervals": [(1.15, 1.20)]},
        {"intervals": [(1.00, 1.14)]},
        {"intervals": [(1.10, 1.45)], "pairs": 6},
        {"intervals": [(1.10, 1.45)], "mechanism": False},
    ],
    ids=["cleared", "below", "asked for so many", "wrong"],
)
def test_pairs_that_tell_are_not_doubled(job, asked):
    assert speeds(job, *asked.pop("intervals"), **asked)[0] == 6


def test_a_gain_just_at_the_bar_passes_in_less_than_5_percent():
    random = np.random.default_rng(0)
    bar, passed = bars.Bar("01_gpu", "", 1.0, "a source"), 0
    for ratios in np.exp(random.normal(0, 0.05, (4000, 12))).tolist():
        low, high = stats.interval(ratios[:6])[1:]
        found = stats.Comparison(1, low, high, 0.01, 6, "")
        if is_open(Verdict("01_gpu", [judge._asked(bar, found)], {}, comparison=found)):
            low = stats.interval(ratios)[1]
        passed += low >= 1
    assert 0.03 < passed / 4000 < 0.05


def test_a_run_that_ends_with_its_profiler_is_told_to_be_longer(course_folder):
    submitted = launch.submit(f"solutions/dlojz_04_profiler.py {SMALL} --profile")
    submitted.wait(60)
    found = check("04", submitted)
    assert not found.passed
    assert found.hint_key == "short"
    assert "--test-nsteps 12" in str(found.hint()) + str(found.hint())


def test_a_wrong_edit_is_not_timed(course_folder, capsys):
    """The first pair shows what is wrong: the others are not waited for."""
    trainer = course_folder / "mine.py"
    right = course.solution(1).read_text()
    trainer.write_text(right.replace("(loss / args.accumulate).backward()", "pass"))
    assert trainer.read_text() != right
    submitted = launch.submit(f"{trainer} {SMALL}")
    submitted.wait()
    found = check("01", submitted, pairs=12)
    assert not found.passed
    assert found.part("faster") == State.UNMEASURED
    assert "not timed" in repr(found)
    series_job = launch.jobs()[-1]
    assert series_job.state == launch.State.CANCELLED
    assert check("01", submitted, pairs=12).hint_key == found.hint_key
    assert launch.jobs()[-1] == series_job, "it is known, and not run again"
