"""The verdict: what it runs, uses again, and says. Wrong answers are in test_wrong.py."""

import json
import shutil

import numpy as np
import pytest
from test_stats import write_log

from dlojz import cli, course, launch, progress
from dlojz.check import bars, check, exercises, is_open, judge, plan, run
from dlojz.check.exercises import FASTER, MECHANISM, SAME, Finding, State
from dlojz.check.verdict import Verdict
from dlojz.runs import log, stats

SMALL = "--test --data synthetic --model shufflenet_v2_x0_5 --image-size 32 -b 4 --test-nsteps 5"
H100, EPYC = "cuda: NVIDIA H100 80GB HBM3", "cpu: AMD EPYC"
RESNET = {"model": "resnet50", "image_size": 224, "batch_size": 256}


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


def verdict(*findings):
    return Verdict("02_amp", list(findings), exercises.find("02_amp").hints)


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


def test_the_hardware_of_a_verdict_is_the_gpu_though_the_job_did_not_use_it(job, monkeypatch):
    assert plan.hardware_here(job).startswith("cpu: ")
    monkeypatch.setattr(plan.presets, "gpus", lambda: ("GPU-1",))
    monkeypatch.setattr(plan.facts, "gpus", lambda: {"cards": [{"name": "NVIDIA H100"}]})
    assert plan.hardware_here(job) == "cuda: NVIDIA H100"


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
    assert plan._without(flags.split(), {"--precision": 1}) == known.split()


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


def test_hints_climb_a_ladder(course_folder, tmp_path):
    found = verdict(Finding(MECHANISM, "dtype", False, "float32", "bfloat16", "autocast"))
    found.job = launch.Job(tmp_path)
    (tmp_path / "trainer.py").write_text(course.solution("01").read_text())
    first, second, third = found.hint(), found.hint(), found.hint()
    assert "Hint 1 of 3" in repr(first)
    assert second.link.startswith("https://docs.pytorch.org/")
    assert "+    with torch.autocast" in third.diff
    assert "Hint 1 of 3" in repr(found.hint()), "and begins again"


def test_the_first_hint_is_the_exercises_first(course_folder):
    late = Finding(SAME, "losses", False, "1", "2", "losses")
    early = Finding(SAME, "images", False, "1", "2", "images")
    own = Finding(MECHANISM, "dtype", False, "1", "2", "autocast")
    assert verdict(late, own, early).hint_key == "images"
    assert verdict(late, own).hint_key == "autocast"
    assert verdict(late).hint_key == "losses"


def test_what_is_not_asked_does_not_fail():
    asked = Finding(SAME, "images", True, "1", "1")
    found = verdict(asked, Finding(FASTER, "speed", State.NOT_ASKED, "0.4 times", "no gain asked"))
    assert found.passed
    assert found.part(FASTER) == State.NOT_ASKED
    assert "no gain asked" in repr(found)


def test_the_card_shows_hostile_text_as_text():
    found = verdict(Finding(SAME, "<script>", False, "<b>yours</b>", "1", "images"))
    assert "<script>" not in found._repr_html_()
    assert "&lt;b&gt;yours" in found._repr_html_()


@pytest.mark.parametrize(
    ("step", "hardware", "changes", "at_least"),
    [
        ("01_gpu", H100, {}, 8.0),
        ("01_gpu", EPYC, {}, None),
        ("02_amp", H100, {"precision": "fp16"}, 1.5),
        ("02_amp", H100, {"precision": "fp16", "batch_size": 8}, None),
        ("02_amp", "cuda: Some Card", {"precision": "fp16"}, None),
        ("02_amp", EPYC, {"precision": "bf16"}, None),
        ("03_channels_last", H100, {"precision": "fp16"}, 1.15),
        ("03_channels_last", H100, {"precision": "fp16", "batch_size": 128}, None),
        ("03_channels_last", H100, {"precision": "fp16", "model": "vgg19", "batch_size": 64}, 1.15),
        ("03_channels_last", H100, {"precision": "fp32"}, None),
        ("03_channels_last", EPYC, {"precision": "fp32"}, 1.0),
        ("03_channels_last", EPYC, {"precision": "fp32", "image_size": 64}, None),
        ("06_ddp", H100, {"precision": "bf16"}, 0.9),
        ("06_ddp", H100, {"precision": "bf16", "batch_size": 128}, None),
        ("06_ddp", EPYC, {}, None),
    ],
)
def test_each_hardware_has_its_bar(step, hardware, changes, at_least):
    assert bars.bar(step, hardware, RESNET | changes).at_least == at_least


def test_every_bar_has_a_source():
    assert all(bar.source for bar in bars.BARS)


def recorded_gains(step):
    """Runs recorded on an H100, and how many times as fast as the step before each was."""
    for file in sorted((course.course_root() / "reference" / "h100").glob("03-*16-nhwc-b*.jsonl")):
        precision = file.name.split("-")[2]
        before = file.name.replace("nhwc", "nchw")
        if step == "02_amp":
            file = file.with_name(before)
            before = before.replace(precision, "fp32")
        slow = stats.summary(file.with_name(before)) if file.with_name(before).exists() else None
        fast = stats.summary(file)
        if slow and slow.images_per_s and fast.images_per_s:
            yield fast, fast.images_per_s / slow.images_per_s


@pytest.mark.parametrize("step", ["02_amp", "03_channels_last"])
def test_what_was_recorded_clears_each_bar_by_far(step):
    asked = 0
    for recorded, gain in recorded_gains(step):
        at_least = bars.bar(step, f"cuda: {recorded.device_name}", recorded.arguments).at_least
        if at_least is not None:
            asked += 1
            assert gain > 1.1 * at_least, f"{recorded.name}: {gain:.2f} times"
    assert asked > 8


def timed(folder, name, ms, device_name="NVIDIA H100 80GB HBM3", **arguments):
    """The log of a run with this step time, on a GPU."""
    start = {"schema": 2, "time": "2026-01-02T03:04:05", "rank": 0, "size": 1,
             "versions": {}, "arguments": RESNET | {"data": "synthetic"} | arguments}  # fmt: skip
    path = write_log(
        folder / name / "events.jsonl",
        batch=256,
        device=True,
        ms=dict.fromkeys(("data", "transfer", "forward", "backward", "update"), ms / 5),
        start=start,
        setup={"device": "cuda:0", "device_name": device_name, "warmup_steps": 3, "steps": 10},
    )
    return path.parent


def judged_speed(tmp_path, before_ms, after_ms, **arguments):
    """The finding on the speed, of six pairs with these times."""
    folders = {}
    for i in range(6):
        wobble = 1 + 0.002 * (-1) ** i
        folders[f"before-{i + 1}"] = timed(tmp_path, f"b{i}", before_ms * wobble, **arguments)
        folders[f"after-{i + 1}"] = timed(tmp_path, f"a{i}", after_ms / wobble, **arguments)
    run = log.read(folders["after-1"])
    return judge._speed(exercises.find("02_amp"), folders, exercises.Runs(run, run))[1]


def test_a_gain_that_clears_the_bar_passes(tmp_path):
    finding = judged_speed(tmp_path, 200, 100, precision="fp16")
    assert finding.state == State.PASSED
    assert "2.000 times as fast" in finding.yours
    assert "at least 1.5" in finding.expected


NOT_SLOWER = bars.Bar("03_channels_last", "", 1.0, "a source", not_slower=True)
GAIN = bars.Bar("02_amp", "", 1.5, "a source")
PASSED, FAILED, NOT_ASKED, UNMEASURED = State


@pytest.mark.parametrize(
    ("bar", "low", "high", "state", "is_open"),
    [
        (GAIN, 1.51, 1.9, PASSED, False),
        (GAIN, 1.1, 1.49, FAILED, False),
        (GAIN, 1.1, 1.9, UNMEASURED, True),
        (NOT_SLOWER, 0.98, 1.1, PASSED, False),
        (NOT_SLOWER, 0.65, 0.96, FAILED, False),
        (NOT_SLOWER, 0.65, 1.48, NOT_ASKED, True),
    ],
)
def test_an_interval_that_includes_the_bar_is_open_and_no_green_tick(
    bar, low, high, state, is_open
):
    found = judge._asked(bar, stats.Comparison(1, low, high, 0.03, 6, ""))
    assert (found.state, found.open) == (state, is_open)
    assert ("✓" in repr(verdict(found)).splitlines()[2]) == (state == PASSED)


@pytest.mark.parametrize("bar", [GAIN, NOT_SLOWER])
def test_a_single_pair_clears_no_bar(bar):
    found = judge._asked(bar, stats.Comparison(3.0, None, None, 0.03, 1, ""))
    assert found.state == UNMEASURED
    assert "at least 6 pairs" in found.expected


def test_a_finding_is_never_undecided_by_accident():
    with pytest.raises(TypeError, match="None is no state"):
        Finding(SAME, "images", None, "1", "2")
    assert Finding(SAME, "images", np.bool_(True), "1", "1").state == PASSED


def test_a_verdict_without_a_finding_does_not_pass():
    assert not verdict().passed


def test_a_gain_below_the_bar_fails(tmp_path):
    finding = judged_speed(tmp_path, 140, 100, precision="fp16")
    assert finding.state == State.FAILED
    assert finding.hint == "speed"


def speeds(job, *intervals, pairs=None, mechanism=True):
    """Check a job whose pairs give these intervals, one after the other, at a bar of 1.15.

    Returns how many pairs were made in all, and whether it passed.
    """
    made, given = [], iter(intervals)

    def make(entries, exercise, job):
        made.append(sum(e.name.startswith("after-") for e in entries))
        return {e.name: None for e in entries}

    def found(exercise, runs, job, timed):
        low, high = next(given)
        shown = stats.Comparison((low * high) ** 0.5, low, high, 0.01, made[-1], stats.FASTER)
        seen = Finding(MECHANISM, "layout", mechanism, "a", "b", "input")
        speed = judge._asked(bars.Bar("01_gpu", "", 1.15, "a source"), shown)
        return Verdict("01_gpu", [seen, speed], exercise.hints, job, shown)

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


@pytest.mark.parametrize(
    ("waits_ms", "workers", "told"),
    [
        (0, 1, "no gain asked: the baseline runs"),
        (100, 1, "must not get slower"),
        (0, 2, "must not get slower"),
    ],
)
def test_of_a_loader_that_keeps_up_no_gain_is_asked(tmp_path, waits_ms, workers, told):
    ms = dict.fromkeys(("transfer", "forward", "backward", "update"), 20.0) | {"data": waits_ms}
    arguments = {"model": "shufflenet_v2_x0_5", "image_size": 64, "batch_size": 32, "data": "data"}
    start = {"schema": 2, "time": "2026-01-02T03:04:05", "rank": 0, "size": 1, "versions": {},
             "arguments": arguments, "threads": 2, "cpu_count": 3}  # fmt: skip
    probe = {"when": "probe", "loader": {"num_workers": workers}}
    folders = {
        f"{side}-{i}": tmp_path / f"{side}{i}" for i in range(6) for side in ("before", "after")
    }
    for folder in folders.values():
        write_log(folder / "events.jsonl", ms=ms, start=start, evidence=probe)
    run = log.read(folders["before-1"])
    found = judge._speed(exercises.find("05_dataloader"), folders, exercises.Runs(run, run))[1]
    assert told in found.expected


def test_without_a_bar_the_speed_is_told_and_not_asked(tmp_path):
    finding = judged_speed(tmp_path, 100, 250, precision="fp16", batch_size=256, image_size=64)
    assert finding.state == State.NOT_ASKED
    assert finding.yours.startswith("0.40")


def test_too_few_pairs_do_not_clear_a_bar(tmp_path):
    folders = {"before-1": timed(tmp_path, "b", 200, precision="fp16")}
    folders["after-1"] = timed(tmp_path, "a", 100, precision="fp16")
    run = log.read(folders["after-1"])
    finding = judge._speed(exercises.find("02_amp"), folders, exercises.Runs(run, run))[1]
    assert finding.state == State.UNMEASURED


@pytest.mark.parametrize(("batch", "size", "expected"), [(8, 32, 1), (32, 64, 2), (4, 16, 1)])
def test_the_envelope_of_the_nearest_smaller_size_counts(batch, size, expected, course_folder):
    sizes = [{"pixels": 8 * 32**2, "tolerance": [1]}, {"pixels": 32 * 64**2, "tolerance": [2]}]
    file = course_folder / "reference" / "envelopes" / "02_amp.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"tolerance": {"cpu": {"bf16": sizes}}}))
    run = log.Run(file)
    run.setup = {"device": "cpu"}
    run.start = {"arguments": {"batch_size": batch, "image_size": size, "precision": "bf16"}}
    assert judge.tolerance("02_amp", exercises.Runs(run, run)) == [expected]


def test_every_exercise_has_an_envelope_for_the_cpu():
    folder = course.course_root() / "reference" / "envelopes"
    for step in exercises.MODULES:
        kept = json.loads((folder / f"{step}.json").read_text())
        assert kept["measured"]["cpu"]["command"] == f"python tools/envelope.py {step[:2]}"
        for sizes in kept["tolerance"]["cpu"].values():
            for size in sizes:
                assert all(t > 0 for t in size["tolerance"])


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
