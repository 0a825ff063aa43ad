"""The verdict: what it runs, uses again, and says. Wrong answers are in test_wrong.py."""

import contextlib
import dataclasses
import io
import json
import os
import re
import shutil
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import made
import numpy as np
import pytest
from logs import write_log

from dlojz import cli, course, launch
from dlojz.check import CheckError, bars, check, ending, gain, is_open, judge, plan, reuse, run
from dlojz.check import exercise as exercises
from dlojz.check.ending import Cause, Ending, How, Role
from dlojz.check.exercise import MECHANISM, SAME, Finding, State
from dlojz.check.verdict import Verdict
from dlojz.course import progress
from dlojz.launch import series
from dlojz.runs import derived, log, stats
from dlojz.runs.folder import events_file

SMALL = "--test --data synthetic --model shufflenet_v2_x0_5 --image-size 32 -b 4 --test-nsteps 8"


def paired(job=None):
    """The verdict of a check that also runs the step before: where no gain is asked, none does."""
    return check("01", job, pairs=1)


@pytest.fixture(scope="module")
def ran():
    """The solution of 01, submitted and ended."""
    submitted = launch.submit(f"solutions/dlojz_01_gpu.py {SMALL}", name="mine")
    submitted.wait()
    return submitted


@pytest.fixture(scope="module")
def first_checks(ran):
    """Its first check, which an interrupt ends, and the second: what they said, submitted, found.

    It takes seconds of a core, so several tests look at this one.
    """

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    said, submitted = io.StringIO(), [len(launch.jobs())]
    with contextlib.redirect_stderr(said):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run, "doing", interrupted)
            with pytest.raises(KeyboardInterrupt):
                paired(ran)
        submitted.append(len(launch.jobs()))
        found = paired(ran)
        submitted.append(len(launch.jobs()))
    return SimpleNamespace(said=said.getvalue(), submitted=submitted, found=found)


@pytest.fixture(scope="module")
def checked(first_checks):
    """The series of its check."""
    assert first_checks.found.passed, first_checks.found
    return launch.latest("check-01_gpu")


def kept(job, course_folder, number=None):
    """A copy of a job that has ended, as if it had been run in this course folder."""
    return launch.Job(shutil.copytree(job.directory, course_folder / "runs" / (number or job.id)))


@pytest.fixture
def job(ran, course_folder):
    return kept(ran, course_folder)


@pytest.fixture
def checked_job(job, checked, course_folder):
    kept(checked, course_folder)
    return job


def test_a_check_submits_once_and_then_knows(first_checks, checked_job):
    assert "8 runs" in first_checks.said
    submitted = len(launch.jobs())
    found = paired(checked_job)
    assert found.passed
    assert len(launch.jobs()) == submitted, "finished runs are used again"
    kept = progress.last("verdicts", "01_gpu")
    assert (kept["passed"], list(kept["reached"])) == (True, ["00_start", "01_gpu"])
    json.dumps(found.to_dict())


def test_the_last_job_is_the_trainees_not_the_checks(checked_job):
    assert launch.latest() == checked_job
    assert launch.latest("check-01_gpu") != checked_job
    assert paired().job == checked_job


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
    assert paired(edited).passed
    # The pair, and the other three of the trainee; the solution's runs are known.
    assert "5 runs" in capsys.readouterr().err


def test_a_check_goes_on_with_the_job_that_an_interrupt_left(first_checks):
    assert "of this check goes on, and the next check finds it: `dlojz cancel" in first_checks.said
    before, interrupted, ended = first_checks.submitted
    assert (interrupted, ended) == (before + 1, before + 1)
    assert first_checks.found.passed, first_checks.found


def test_where_no_gain_is_asked_nothing_is_compared(job):
    """On this processor: a single ratio has no spread."""
    names = [e.name for e in plan.of(exercises.find("01_gpu"), job).entries]
    pairs = [("solution", "yours"), ("two-epochs-solution", "two-epochs")]
    assert names == [*sum(pairs, ()), "rehearsal-solution", "rehearsal"]
    found = check("01", job)
    assert found.passed
    assert "– speed: not compared\n" in repr(found)
    assert "no gain asked: both sides compute on this processor" in repr(found)
    (speed,) = [f for f in found.findings if f.what == "speed"]
    assert speed.state == State.NOT_ASKED
    series = launch.latest("check-01_gpu")
    assert check("01", job).passed
    assert launch.latest("check-01_gpu") == series, "the next check needs no run"


@pytest.mark.parametrize("step", exercises.STEPS)
def test_updates_that_are_done_again_are_not_made_of_other_roundings(step):
    """A GPU has many ways to sum; batch normalization of few images magnifies what is between them.

    In TF32 a solution was refused: with 3 images in the last batch a gradient was 8 times as large.
    """
    exercise = exercises.find(step)
    for entry in plan.two_epochs(exercise, "mine.py", "solution.py", [], Path("images")):
        assert "--deterministic" in entry.flags
        assert step == "01_gpu" or "--precision fp32" in " ".join(entry.flags)


def test_the_runs_of_a_pair_come_a_b_b_a(job):
    names = [e.name for e in plan.of(exercises.find("01_gpu"), job, pairs=3).entries]
    pairs = ["before-1", "after-1", "after-2", "before-2", "before-3", "after-3"]
    assert names[-6:] == pairs
    assert names[0] == "solution"


def test_timed_runs_are_only_timed_and_the_models_links_replayed_in_two_epochs(job):
    found = {e.name: e for e in plan.of(exercises.find("01_gpu"), job, pairs=3).entries}
    timed = [found[f"{side}-{i}"] for side in ("before", "after") for i in (1, 2, 3)]
    assert [(e.audit, e.replay) for e in timed] == [(plan.TIMED, None)] * 6
    again = {name: found[name].replay.audit for name in ("yours", "two-epochs")}
    rewritten = plan.REWRITTEN
    assert again == {"yours": {"replays": "exact"}, "two-epochs": {"replays": "all"} | rewritten}
    assert {e.name for e in found.values() if (e.audit or {}).get("rewritten")} == {
        "two-epochs",
        "two-epochs-solution",
    }


@pytest.mark.parametrize(
    ("source", "fresh"),
    [
        ("import os\nos.environ['A'] = '1'\nimport torch\n", True),
        ("import os\n\nif True:\n    os.putenv('A', '1')\n\nfrom torch import nn\n", True),
        ("import my_settings\nimport torch\n", True),
        ("'''About it.'''\nimport os\nimport torch\nos.environ['A'] = '1'\n", False),
        ("from dlojz import course\nimport os\nos.environ['A'] = '1'\n", False),
        ("import torchvision.models\nprint()\n", False),
    ],
)
def test_what_a_trainer_does_before_it_imports_torch_acts_in_all_its_runs(job, source, fresh):
    (job.directory / "trainer.py").write_text(source)
    entries = plan.of(exercises.find("01_gpu"), job, pairs=1).entries
    asked = ["yours", "two-epochs", "after-1"]
    assert [entry.name for entry in entries if entry.fresh] == asked * fresh


def test_no_trainer_of_the_course_needs_processes_of_its_own():
    for trainer in (course.before("01_gpu"), *map(course.solution, exercises.STEPS)):
        assert not plan.begins_otherwise(trainer), trainer


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


def test_what_resumes_and_saves_is_left_out_in_each_form():
    flags = "--test --resume a.pt --checkpoint=b.pt -b 8 --checkpoint-every 2"
    assert plan.without(flags.split(), plan.LEFT_OUT) == ["--test", "-b", "8"]
    flags = "--test --resu a.pt --checkpoint-e=2 -b 8 --res b.pt --"
    assert plan.without(flags.split(), plan.LEFT_OUT) == ["--test", "-b", "8", "--"]


def test_a_run_that_is_no_test_or_not_ended_is_refused(course_folder):
    submitted = launch.submit(f"solutions/dlojz_01_gpu.py {SMALL}")
    with pytest.raises(CheckError, match=r"wait until it has ended, with job\.wait"):
        check("01", submitted)
    submitted.cancel()
    long = launch.submit("solutions/dlojz_01_gpu.py --data a'; echo foo'")
    long.wait()
    with pytest.raises(CheckError, match="submit it again with --test"):
        check("01", long)


@pytest.mark.parametrize("command", ["gpt.py", "gpt.py --test"])
def test_a_program_that_is_no_trainer_of_the_course_is_refused(command, course_folder):
    (course_folder / "gpt.py").write_text("print(1)")
    foreign = launch.submit(command)
    foreign.wait()
    with pytest.raises(CheckError, match=r"ran gpt\.py, which does not take the flags of the cour"):
        check("01", foreign)


def broken(course_folder):
    """The job of a trainer that fails: its verdict needs no runs."""
    trainer = course_folder / "broken.py"
    text = course.solution(1).read_text()
    trainer.write_text(text.replace("    chrono.forward()\n", "    planted\n"))
    job = launch.submit(f"{trainer} {SMALL}")
    job.wait()
    return job


def test_a_trainer_that_fails_gets_a_verdict(course_folder):
    found = check("01", broken(course_folder))
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


@pytest.mark.parametrize("step", ["99", "gpu", "a'; echo foo", "00"])
def test_an_unknown_exercise_names_those_that_exist(step, course_folder):
    with pytest.raises(LookupError, match="expected one of"):
        check(step)


def test_in_a_terminal_the_exit_code_tells(checked_job, course_folder, capsys):
    assert cli.main(["check", "01", checked_job.id]) == 0
    assert "passed" in capsys.readouterr().out
    assert cli.main(["check", "01", checked_job.id, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parts"]["mechanism"] == "passed"
    assert cli.main(["check", "01", broken(course_folder).id, "--hint"]) == 1
    assert "Hint 1 of 3" in capsys.readouterr().out
    assert cli.main(["check", "99"]) == 2


PASSED, FAILED, NOT_ASKED, UNMEASURED, OPEN = State


def speeds(job, *intervals, pairs=None, mechanism=True):
    """Check a job whose pairs give these intervals, one after the other, at a bar of 1.15.

    Returns how many pairs were made in all, and whether it passed.
    """
    count, given = [], iter(intervals)

    def make(planned, standards):
        count.append(sum(e.role == Role.AFTER for e in planned.entries))
        return {e.name: None for e in planned.entries}

    def found(exercise, runs, standards, timed):
        low, high = next(given)
        shown = stats.Comparison((low * high) ** 0.5, low, high, 0.01, count[-1], stats.FASTER)
        seen = Finding(MECHANISM, "layout", "layout", mechanism, "a", "b", "input")
        speed = gain.asked(bars.Bar("", 1.15, "a source"), shown)
        return Verdict("01_gpu", [seen, speed], exercise.hints, shown)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "finished", make)
        patch.setattr(judge, "judge", found)
        patch.setattr("dlojz.check._reached", lambda *_: {})  # there are no runs to read
        patch.setattr(bars, "bar", lambda *_: bars.Bar("", 1.15, "a source"))
        passed = check("01", job, pairs=pairs).passed
    return count[-1], passed


def test_pairs_that_leave_it_open_are_doubled_twice(job, capsys):
    left_open = (1.10, 1.45)
    assert speeds(job, left_open, (1.16, 1.35)) == (6, True)
    assert "1.26 times as fast (99 % interval" in (said := capsys.readouterr().err)
    assert "3 more pairs" in said
    assert speeds(job, left_open, left_open, (1.16, 1.35)) == (12, True)
    assert "1.26 times as fast (95 % interval" in (said := capsys.readouterr().err)
    assert "6 more pairs" in said
    assert speeds(job, left_open, left_open, (1.12, 1.35)) == (12, False)


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
    usual = asked.get("pairs", stats.EARLY_PAIRS)
    assert speeds(job, *asked.pop("intervals"), **asked)[0] == usual


def test_a_gain_just_at_the_bar_passes_in_about_5_percent():
    random = np.random.default_rng(0)
    bar, passed = bars.Bar("", 1.0, "a source"), 0
    for ratios in np.exp(random.normal(0, 0.05, (4000, 12))).tolist():
        for pairs in (3, 6, 12):
            low, high = stats.interval(ratios[:pairs], stats.level(pairs))[1:]
            found = stats.Comparison(1, low, high, 0.01, pairs, "")
            if not is_open(Verdict("01_gpu", [gain.asked(bar, found)], {}, comparison=found)):
                break
        passed += low >= 1
    assert 0.03 < passed / 4000 < 0.055


def test_a_run_that_ends_with_its_profiler_is_told_to_be_longer(course_folder):
    submitted = launch.submit(f"solutions/dlojz_04_profiler.py {SMALL} --profile --test-nsteps 5")
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
    assert series_job.status["reason"].startswith("ended early"), "of 28 runs a few were made"
    assert check("01", submitted, pairs=12).hint_key == found.hint_key
    assert launch.jobs()[-1] == series_job, "it is known, and not run again"


# Runs that did not complete ----------------------------------------------------------------------


@pytest.fixture
def forged(job, checked, course_folder, monkeypatch):
    """Let the next check "submit" the runs of an earlier one, changed by `change(job's folder)`."""

    def forge(change):
        def submit(planned, missing, found):
            folder = shutil.copytree(checked.directory, course_folder / "runs" / "0099")
            (folder / reuse.CHECK_FILE).write_text(json.dumps(missing))
            change(folder)
            return launch.Job(folder)

        monkeypatch.setattr(run, "_submit", submit)
        return job

    return forge


def ended_with(name, code, stderr=""):
    def change(folder):
        for file in folder.glob(f"{name}/exit_code*"):
            file.write_text(f"{code}\n")
        lines = (folder / name / "events.jsonl").read_text().splitlines(keepends=True)
        (folder / name / "events.jsonl").write_text("".join(lines[:-1]))
        (folder / name / "stderr.txt").write_text(stderr)

    return change


def test_forged_runs_are_judged_like_others(forged):
    """Else the tests below could not fail."""
    assert paired(forged(lambda folder: None)).passed


@pytest.mark.parametrize(
    ("name", "code", "stderr", "said"),
    [
        ("solution", -9, "", "run solution, of the solution,.*killed by SIGKILL. Check again"),
        ("before-1", -15, "", "run before-1, of the step before,.*killed by SIGTERM"),
        ("before-1", 0, "", "run before-1, of the step before,.*its log has no end"),
        ("yours", -9, "", "run yours did not complete, which says nothing.*SIGKILL"),
        ("rehearsal-solution", 1, "no space left", "rehearsal-solution.*no space left"),
        ("solution", 2, "dlojz: error: unrecognized arguments: --mine", "Submit without that"),
    ],
)
def test_a_run_that_says_nothing_about_the_trainer_is_an_error(forged, name, code, stderr, said):
    """And no verdict, which would be kept; the run is made again by the next check."""
    job = forged(ended_with(name, code, stderr))
    with pytest.raises(CheckError, match=said):
        paired(job)
    planned = plan.of(exercises.find("01_gpu"), job, pairs=1)
    assert name not in reuse.known(planned)


def test_so_is_a_run_of_the_solutions_that_was_killed(tmp_path):
    (tmp_path / "exit_code").write_text("-9\n")
    with pytest.raises(CheckError, match=r"run solution, of the solution,.*SIGKILL. Check again"):
        run.refuse(made.ended({"solution": tmp_path}))


TRACEBACK = """Traceback (most recent call last):
  File "/runs/0099/yours/trainer.py", line 250, in main
    train_one_epoch(training)
  File "/runs/0099/yours/trainer.py", line 142, in train_step
    training.scaler.step(training.optimizer)
  File "/torch/amp/grad_scaler.py", line 461, in step
    raise RuntimeError("unscale_() is being called after step().")
RuntimeError: unscale_() is being called after step().
"""


def test_a_run_that_the_trainer_fails_shows_its_error_and_line(forged):
    found = paired(forged(ended_with("yours", 1, TRACEBACK)))
    assert not found.passed
    assert (
        "run yours: RuntimeError: unscale_() is being called after step()., at "
        "dlojz_01_gpu.py:142: training.scaler.step(training.optimizer)"
    ) in repr(found)
    assert "explain" not in found.hints[found.hint_key].api, "the job itself completed"


def test_a_failing_extra_run_names_its_flags(forged):
    found = paired(forged(ended_with("rehearsal", 1, TRACEBACK)))
    assert "dlojz_01_gpu.py:142" in repr(found)
    assert "expected: completed, with --test --data synthetic" in repr(found)


@pytest.mark.parametrize(
    ("codes", "how", "said"),
    [
        ([-9], How.KILLED, "killed by SIGKILL"),
        ([0, -15], How.KILLED, "killed by SIGTERM"),
        ([-11], How.FAILED, "ended by SIGSEGV"),
        ([-9, 3], How.FAILED, "exit code 3"),  # the series killed the first because of the second
        ([-40], How.FAILED, "ended by signal 40"),
        ([0, 0], How.FAILED, "its log has no end"),
        ([], How.UNFINISHED, "did not run to its end"),
    ],
)
def test_how_a_run_ended_is_told_by_its_exit_codes(tmp_path, codes, how, said):
    for rank, code in enumerate(codes):
        (tmp_path / f"exit_code.rank{rank}").write_text(f"{code}\n")
        (tmp_path / "exit_code").write_text("1\n")
    end = ending.of(tmp_path)
    assert end.how == how
    assert said in end.text


def test_an_error_that_would_steer_a_terminal_is_shown_as_text(tmp_path):
    error = {"outcome": "failed", "error": "ValueError: \x1b[31mred\nin two lines"}
    write_log(tmp_path / "events.jsonl", end=error)
    assert ending.error(tmp_path) == "ValueError: \\x1b[31mred in two lines"


def test_of_an_error_in_a_loaders_worker_the_cause_is_shown(tmp_path):
    """Its message is a traceback, whose end the log cuts."""
    inner = "RuntimeError: stack expects each tensor to be equal size"
    text = "RuntimeError: Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback"
    write_log(tmp_path / "events.jsonl", end={"outcome": "failed", "error": text + " ..."})
    (tmp_path / "stderr.txt").write_text(f"{text} ...\n  File x, line 3, in fetch\n{inner}\n")
    assert ending.error(tmp_path) == inner


@pytest.mark.parametrize(("step", "hint"), [("06_ddp", "together"), ("01_gpu", "failed")])
def test_processes_that_reach_the_time_limit_may_wait_for_each_other(step, hint, tmp_path):
    found = judge.crashed(
        exercises.find(step), tmp_path, Ending(How.FAILED, "its 600 s were over", Cause.TOO_LONG)
    )
    assert found.hint_key == hint


def test_of_two_processes_the_error_of_the_one_that_waited_is_not_shown(tmp_path):
    said = ("RuntimeError: Connection closed by peer", "ValueError: once")
    for rank, text in enumerate(said):
        file = events_file(tmp_path, rank)
        write_log(file, size=2, end={"outcome": "failed", "error": text})
    assert ending.error(tmp_path) == "ValueError: once"


def test_a_process_that_was_killed_while_the_other_waited_says_nothing_of_the_trainer(tmp_path):
    write_log(events_file(tmp_path), size=2)
    for name, code in (("exit_code", 1), ("exit_code.rank0", 1), ("exit_code.rank1", -9)):
        (tmp_path / name).write_text(str(code))
    gone = "[rank0]: Traceback (most recent call last):\n[rank0]: RuntimeError: Broken pipe\n"
    (tmp_path / "stderr.txt").write_text(gone)
    assert ending.of(tmp_path) == ending.Ending(How.KILLED, "killed by SIGKILL")


def test_a_run_of_two_processes_completed_if_both_logs_have_an_end(tmp_path):
    (tmp_path / "exit_code").write_text("0\n")
    for rank in (0, 1):
        assert not ending.of(tmp_path).completed
        write_log(events_file(tmp_path, rank), rank=rank, size=2)
    assert ending.of(tmp_path).completed


def test_only_runs_that_completed_are_used_again(checked_job, course_folder, capsys):
    folder = course_folder / "runs" / launch.latest("check-01_gpu").id
    ended_with("solution", -9)(folder)
    ended_with("before-1", 0)(folder)
    ended_with("yours", 1, "ValueError: once")(folder)
    assert paired(checked_job).passed
    assert "3 runs" in capsys.readouterr().err


def test_a_check_file_that_was_torn_costs_no_check(checked_job, course_folder):
    folder = course_folder / "runs" / launch.latest("check-01_gpu").id
    (folder / reuse.CHECK_FILE).write_text("")
    planned = plan.of(exercises.find("01_gpu"), checked_job)
    assert reuse.known(planned) == {}


def test_a_run_on_other_hardware_is_not_used_again(checked_job, monkeypatch):
    planned = plan.of(exercises.find("01_gpu"), checked_job, pairs=1)
    keys = reuse.keys_of(planned)
    assert set(reuse.known(planned)) >= set(keys)
    elsewhere = dataclasses.replace(planned, hardware=("Another CPU", ""))
    assert not set(reuse.keys_of(elsewhere).values()) & set(keys.values())
    monkeypatch.setattr(reuse, "keys_of", lambda _: keys)
    assert reuse.known(elsewhere) == {}, "nor if its key were the same"


def planned_of(names):
    """A plan of runs with these names."""
    entries = [made.entry(name) for name in names]
    return SimpleNamespace(exercise=exercises.find("01_gpu"), entries=entries)


class Underway:
    """A job of a check that runs on."""

    state = SimpleNamespace(final=False)
    ended = None

    def end_early(self, why):
        self.ended = why


def test_a_job_under_way_counts_if_it_is_of_this_trainer(monkeypatch):
    """A job for another trainer may end early, before it makes the missing runs."""
    keys = {"solution": "s", "before-1": "b", "yours": "mine", "extra": "n"}
    others, own = Underway(), Underway()
    jobs = [(others, keys | {"yours": "other"}), (own, {"yours": "mine", "extra": "n"})]
    monkeypatch.setattr(reuse, "_checks", lambda: iter(jobs))
    planned = planned_of(keys)
    assert reuse.under_way(planned, keys, ["n"]) is own
    assert reuse.under_way(planned, keys, ["b", "n"]) is None


@pytest.mark.parametrize("told", [None, {"yours": "folder"}])
def test_what_an_interrupted_check_left_is_ended_once_it_tells_enough(monkeypatch, told):
    keys = {"solution": "s", "before-1": "b", "yours": "mine", "extra": "n"}
    job, found = Underway(), {name: name for name in keys if name != "extra"}
    for name, value in {
        "keys_of": keys,
        "known": found,
        "telling": told,
        "under_way": job,
        "_wait": {"yours": "later"},
    }.items():
        room = run if hasattr(run, name) else reuse
        monkeypatch.setattr(room, name, lambda *_, value=value: value)
    planned = planned_of(keys)
    assert run.finished(planned, judge.Standards()) == (told or {"yours": "later"})
    assert job.ended == (run.ENOUGH if told else None)


def test_what_is_before_the_pairs_is_judged_once_and_by_itself(monkeypatch):
    """While runs are timed, the check leaves the processor alone."""
    keys = dict.fromkeys(["solution", "yours", "before-1", "after-1", "after-2", "before-2"])
    judged = []

    def found_out(exercise, ended, standards, timed):
        judged.append((list(ended), timed))
        return SimpleNamespace(findings=[Finding(SAME, "images", "images", True, "1", "1")])

    def wait(job, planned, enough, failing):
        for name in left:
            found[name] = ended_run(name)
            if answer := enough():
                return answer

    monkeypatch.setattr(judge, "judge", found_out)
    monkeypatch.setattr(run, "_wait", wait)
    for room, name in ((reuse, "made"), (reuse, "under_way"), (run, "refuse"), (run, "_submit")):
        monkeypatch.setattr(room, name, lambda *_: None)
    monkeypatch.setattr(reuse, "keys_of", lambda _: keys)
    planned = planned_of(keys)
    for known in (0, 4):
        found, left = {n: ended_run(n) for n in [*keys][:known]}, [*keys][known:]
        monkeypatch.setattr(reuse, "known", lambda *_, found=found: found)
        judged.clear()
        assert run.finished(planned, judge.Standards()).keys() == keys.keys()
        assert judged == [(["solution", "yours"], False)]


def ended_run(name, completed=True):
    """A run of a check that has ended, of which only its place in the plan and its end are read."""
    how = How.COMPLETED if completed else How.FAILED
    return SimpleNamespace(entry=made.entry(name), end=Ending(how, ""))


@pytest.mark.parametrize(("crashed", "enough"), [("yours", True), ("two-epochs", False)])
def test_a_crash_that_no_other_run_can_explain_ends_the_check_at_once(crashed, enough):
    """A run with other flags may crash for a reason that another one names better."""
    names = ["solution", "yours", "two-epochs", "accumulates", "before-1", "after-1"]
    found = {name: ended_run(name, name != crashed) for name in names[:3]}
    told = run.telling(planned_of(names), found, judge.Standards())
    assert told == ({n: found[n] for n in names[:2]} if enough else None)


def test_a_row_that_fails_is_shown_while_the_other_runs_go_on(monkeypatch):
    criterion, images = (
        Finding(SAME, key, key, False, "1", "2", key) for key in ("criterion", "images")
    )
    open_yet = Finding(SAME, "audit", "audit", State.UNMEASURED, "not made", "made", "audit")
    found = {name: ended_run(name) for name in ("solution", "yours", "before-1")}
    planned = planned_of([*found, "two-epochs"])
    seen = []

    def judged(exercise, ended, standards, timed):
        seen.append(list(ended))
        return Verdict("01_gpu", [open_yet, criterion, images], exercise.hints)

    monkeypatch.setattr(judge, "judge", judged)
    (line,) = run.first_failing(planned, found, judge.Standards())
    assert line.startswith("  ✗ images: 1, expected: 2. The other runs show whether")
    assert seen == [["solution", "yours"]]
    assert run.first_failing(planned, {"yours": found["yours"]}, judge.Standards()) == []


def test_what_measures_is_the_trainer_and_all_rooms_that_it_imports():
    package = Path(course.__file__).parents[1]
    assert [p for p in reuse.MEASURING if not [*package.glob(p)]] == []
    measuring = {file for pattern in reuse.MEASURING for file in package.glob(pattern)}
    for room in ("training", "watch", "runs", "traces"):
        assert measuring >= {*(package / room).glob("*.py")}


def test_a_run_of_another_version_of_what_measures_is_not_used_again(tmp_path, monkeypatch):
    (tmp_path / "training").mkdir()
    file = tmp_path / "training" / "audit.py"
    seen = []
    for text, torch, vision in ("abc", "abc", "xbc", "ayc", "abz"):
        file.write_text(text)
        monkeypatch.setattr(reuse.metadata, "version", {"torch": torch, "torchvision": vision}.get)
        seen.append(reuse._measuring.__wrapped__(tmp_path))
    assert seen[0] == seen[1]
    assert len(set(seen)) == 4


@pytest.mark.parametrize("field", ["account", "module", "n_gpu"])
def test_a_run_on_another_kind_of_node_is_not_used_again(checked_job, field):
    planned = plan.of(exercises.find("01_gpu"), checked_job)
    request = dataclasses.replace(planned.request, **{field: 2 if field == "n_gpu" else "x"})
    other = reuse.keys_of(dataclasses.replace(planned, request=request))
    assert not set(other.values()) & set(reuse.keys_of(planned).values())


def test_two_gpus_of_one_name_are_the_same_hardware_in_any_host():
    h100, other = ("EPYC", "H100"), ("Xeon", "H100")
    assert reuse.same_hardware(h100, other)
    assert not reuse.same_hardware(h100, ("EPYC", "A100"))
    assert reuse.same_hardware(h100, ("EPYC", "")), "the step before computes on the processor"


@pytest.mark.parametrize(
    ("low", "high", "measured_again"), [(0.5, 0.9, True), (0.9, 1.4, True), (1.2, 1.4, False)]
)
def test_a_speed_that_did_not_pass_is_measured_again_by_the_next_check(
    checked_job, monkeypatch, low, high, measured_again
):
    """Otherwise a machine that was busy once would refuse this trainer for ever."""
    bar = bars.Bar("", 1.15, "a source")
    found = stats.Comparison(1.0, low, high, 0.01, 1, "")
    monkeypatch.setattr(gain, "compared", lambda *_: (found, gain.asked(bar, found)))
    assert check("01", checked_job, pairs=1).passed != measured_again
    planned = plan.of(exercises.find("01_gpu"), checked_job, pairs=1)
    keys = reuse.keys_of(planned)
    forgotten = {"before-1", "after-1"} if measured_again else set()
    assert set(keys) - set(reuse.known(planned)) == forgotten


# Which jobs can be checked -----------------------------------------------------------------------


def test_a_job_whose_folder_was_removed_was_not_run_by_hand(job):
    shutil.rmtree(job.directory)
    with pytest.raises(CheckError, match="is gone: submit the trainer again"):
        check("01", job)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no log to read"),
        ("", "does not say what it trained"),
        ('{"event": "start"\n{}\n', r"events\.jsonl:1"),
    ],
    ids=["no log", "empty", "damaged"],
)
def test_a_job_whose_log_is_damaged_is_an_error_that_says_so(job, text, said):
    file = job.directory / "events.jsonl"
    file.unlink() if text is None else file.write_text(text)
    with pytest.raises(CheckError, match=said):
        check("01", job)


def test_a_state_too_large_to_keep_is_audited_with_a_small_model(checked_job, monkeypatch):
    """And only in the run of two epochs: of the job's own model every step is watched."""
    monkeypatch.setattr(plan.audited, "MOST_STATE", 1e6)
    found = check("01", checked_job)
    assert found.passed, found
    assert "GB in a process: whole updates were kept and done again of a run with" in repr(found)
    folders = launch.series.folders(launch.latest("check-01_gpu"))
    small, own = (log.read(folders[name] / "replay").replay for name in ("two-epochs", "yours"))
    assert len(small.updates) == plan.UPDATES
    assert own.updates == []
    assert len(own.every.criterion) == 8
    assert None not in own.every.criterion
    (audit,) = [f for f in found.findings if f.what == "audit"]
    assert audit.yours == f"{plan.UPDATES} updates done again with the solution"


def test_a_large_state_is_never_kept(job):
    file = job.directory / "events.jsonl"
    held = '"held": {"parameters": 2500000000, "gradients": 2500000000, "optimizer": 2500000000}'
    file.write_text(re.sub(r'"held": \{[^}]*\}', held, file.read_text()))
    planned = plan.of(exercises.find("09_compile"), job, pairs=3)
    found = {entry.name: entry for entry in planned.entries}
    assert [name for name, e in found.items() if (e.audit or {}).get("keep")] == ["two-epochs"]
    assert found["yours"].audit["watch"]
    for name in ("two-epochs", "two-epochs-solution"):
        models = [b for a, b in pairwise(found[name].flags) if a == "--model"]
        assert models[-1] == "squeezenet1_1", "argparse takes the last"
    assert "take 7.5 GB in a process" in planned.notes[0]


@pytest.mark.parametrize(
    ("name", "seconds", "compile_s", "most_s"),
    [
        ("yours", 4.0, 0.0, 180),
        ("after-1", 60.0, 0.0, 600),
        ("two-epochs", 25.0, 5.0, 1200),  # its cache was warm: the check's is not
        ("two-epochs", 4.0, 0.0, 180),
        ("before-1", 4.0, 0.0, None),  # of 01: on a processor
        ("two-epochs-solution", 4.0, 0.0, None),
        ("beside-ddp", 4.0, 0.0, None),
    ],
)
def test_only_runs_of_the_trainees_trainer_are_ended_if_they_stand_still(
    name, seconds, compile_s, most_s
):
    replay = launch.series.Entry("replay", "r.py", ())
    entry = dataclasses.replace(made.entry(name), replay=replay)
    found = run.limited(entry, SimpleNamespace(seconds=seconds, compile_s=compile_s))
    assert found.most_s == found.replay.most_s == most_s


@pytest.mark.parametrize(
    ("steps", "accumulate", "more"),
    [(8, 1, []), (50, 1, ["--test-nsteps", "12"]), (50, 2, ["--test-nsteps", "24"]), (20, 2, [])],
)
def test_an_audited_run_has_as_many_updates_as_are_done_again(steps, accumulate, more):
    run = log.Run("job", start={"arguments": {"test_nsteps": steps, "accumulate": accumulate}})
    assert plan._few(["--test"], run) == ["--test", *more]


def test_a_job_that_was_cancelled_is_no_verdict(script):
    script("import time; time.sleep(60)")
    submitted = launch.submit("t.py --test")
    submitted.cancel()
    submitted.wait(30)
    with pytest.raises(CheckError, match=r"is CANCELLED.*Submit it again"):
        check("01", submitted)


def test_a_job_of_too_few_processes_is_told_before_anything_is_run(job):
    with pytest.raises(CheckError, match=r"had 1 process.*submit\(.*n_gpu=2\)"):
        check("06", job)


def test_of_a_sweep_the_last_job_is_checked_and_any_by_its_number(checked_job, course_folder):
    other = kept(checked_job, course_folder, "0050")
    assert paired([other, checked_job]).job == checked_job
    assert paired(int(checked_job.id)).job == checked_job


def test_a_check_leaves_out_what_resumes_and_saves(checked_job, course_folder):
    """A run that resumed from a file, or refused to overwrite one, would be another training."""
    info = json.loads((checked_job.directory / "job.json").read_text())
    info["command"] += ["--resume", "kept.pt", "--checkpoint=kept.pt", "--checkpoint-every", "2"]
    (checked_job.directory / "job.json").write_text(json.dumps(info))
    submitted = len(launch.jobs())
    found = paired(checked_job)
    assert found.passed, found
    assert len(launch.jobs()) == submitted, "its runs are those of a job without these flags"
    assert "note: checked without --resume, --checkpoint, --checkpoint-every: " in repr(found)


# What the verdict says of its job ----------------------------------------------------------------


def test_an_edit_since_the_job_is_told(checked_job, course_folder, monkeypatch):
    assert "has changed since" not in repr(paired(checked_job))
    (course_folder / "edited" / "solutions").mkdir(parents=True)
    (course_folder / "edited" / "solutions" / "dlojz_01_gpu.py").write_text("a syntax error")
    monkeypatch.chdir(course_folder / "edited")
    said = repr(paired(checked_job))
    assert f"01_gpu: passed (job {checked_job.id})" in said
    assert f"dlojz_01_gpu.py has changed since job {checked_job.id}: submit it" in said


def test_paragraphs_that_are_left_are_listed(checked_job):
    file = checked_job.directory / "trainer.py"
    assert plan.notes(exercises.find("01_gpu"), checked_job) == []
    file.write_text("# TODO 02: a\nx = 1\n    # TODO 01: b\n# TODO 01: c\n")
    (note,) = plan._still_to_do(exercises.find("01_gpu"), checked_job)
    assert note == "`TODO 01` is still in lines 3, 4 of dlojz_01_gpu.py"
    file.write_text("# TODO 02: a\n# 01: b; TODO 06b: c\n")
    (note,) = plan._still_to_do(exercises.find("06_ddp"), checked_job)
    assert note == "`TODO 06` is still in line 2 of dlojz_01_gpu.py"


def test_a_verdict_that_cannot_be_recorded_is_shown(checked_job):
    progress.file().write_text("{")
    found = paired(checked_job)
    assert found.passed
    assert f"note: this verdict could not be recorded: {progress.file()}" in repr(found)


NAMES = ["solution", "rehearsal", "rehearsal-solution", "two-epochs", "yours"]
NAMES += ["before-7", "after-7", "after-8", "before-8"]


def test_the_progress_bar_says_what_runs():
    entries = [*map(made.entry, NAMES)]
    said = [run.doing(entries, NAMES[done:]) for done in range(len(NAMES) + 1)]
    assert said[:5] == ["the solution", "rehearsal", "rehearsal", "two epochs", "your trainer"]
    assert said[5:] == ["pair 1 of 2"] * 2 + ["pair 2 of 2"] * 3


def test_the_progress_bar_says_which_runs_compile():
    off = dataclasses.replace(made.entry("not-compiled"), flags=["--compile", "off"])
    entries = [made.entry("solution"), off, made.entry("after-1")]
    names = [entry.name for entry in entries]
    said = [run.doing(entries, names[done:], compiles=True) for done in range(3)]
    assert said == ["the solution, which compiles", "not compiled", "pair 1 of 1"]


def test_a_check_says_what_it_will_run_and_how_long():
    entries = [*map(made.entry, NAMES)]
    runs = "the solution, rehearsal, two epochs, your trainer"
    assert run.announced(entries, 90.0) == f"{runs}, 2 pairs: 9 runs, about 90 s"
    assert run.announced(entries[:1], 130.0) == "the solution: 1 run, about 2 minutes"


@pytest.mark.parametrize("notebook", [False, True])
def test_each_run_is_shown_as_it_ends_with_its_seconds(tmp_path, monkeypatch, capsys, notebook):
    monkeypatch.setattr(launch, "in_a_notebook", lambda: notebook)
    with run.Ended(launch.Job(tmp_path), [*map(made.entry, NAMES)]) as ended:
        for name in ("solution", "yours", "before-7", "after-7"):
            (tmp_path / name).mkdir()
            for file, at in (("trainer.py", 100), ("exit_code", 112)):
                (tmp_path / name / file).touch()
                os.utime(tmp_path / name / file, (at, at))
            ended.show()
    said = ["the solution (12 s)", "your trainer (12 s)", "pair 1 of 2 (24 s)"]
    found = capsys.readouterr()
    if notebook:
        assert found.out == f"done: {', '.join(said)}\n"
    else:
        assert found.err == "".join(f"  {text}\n" for text in said)


def test_what_a_job_compiled_is_compiled_once_in_its_check(job, monkeypatch):
    """A job that compiled for minutes does not make its check an hour long."""
    monkeypatch.setattr(derived, "compile_seconds", lambda run: run.seconds - 10)
    found = plan.of(exercises.find("01_gpu"), job)
    assert found.seconds - found.compile_s == 10
    entries = [series.Entry("before-1", "t", []), series.Entry("after-1", "t", [])]
    assert run.about_s(found, entries) == run.IMPORTS_S + found.compile_s + 2 * 10
    small = [series.Entry(str(i), "t", [], aside=True) for i in range(4)]
    assert run.about_s(found, [*entries, *small]) == run.about_s(found, entries)
