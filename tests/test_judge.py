"""The judge: from the logs of finished runs to a verdict, and from nothing else."""

import dataclasses
import json
import os
import random
import shutil
from collections import Counter
from itertools import count
from types import SimpleNamespace

import made
import pytest
from judged import ASKED, made_runs
from logs import write_log
from made import RESNET

from dlojz import course
from dlojz.check import CheckError, bars, common, ending, gain, judge, run
from dlojz.check import exercise as exercises
from dlojz.check.exercise import FASTER, MECHANISM, PARTS, SAME, Finding, Runs, State
from dlojz.check.verdict import Verdict
from dlojz.launch import series
from dlojz.runs import log, records, stats

PASSED, FAILED, NOT_ASKED, UNMEASURED, OPEN = State


def speed(step, folders, run):
    """The finding on the speed of these pairs."""
    return gain.compared(exercises.find(step), made.ended(folders), Runs(run, run), "")[1]


def timed(folder, name, ms, device_name="NVIDIA H100 80GB HBM3", **arguments):
    """The folder of a completed run with this step time, on a GPU."""
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
    (path.parent / "exit_code").write_text("0")
    return path.parent


def judged_speed(tmp_path, before_ms, after_ms, **arguments):
    """The finding on the speed, of six pairs with these times."""
    folders = {}
    for i in range(6):
        wobble = 1 + 0.002 * (-1) ** i
        folders[f"before-{i + 1}"] = timed(tmp_path, f"b{i}", before_ms * wobble, **arguments)
        folders[f"after-{i + 1}"] = timed(tmp_path, f"a{i}", after_ms / wobble, **arguments)
    run = log.read(folders["after-1"])
    return speed("02_amp", folders, run)


def test_a_gain_that_clears_the_bar_passes(tmp_path):
    finding = judged_speed(tmp_path, 200, 100, precision="fp16")
    assert finding.state == State.PASSED
    assert "2.000 times as fast" in finding.yours
    assert "at least 1.5" in finding.expected


def test_a_gain_below_the_bar_fails(tmp_path):
    finding = judged_speed(tmp_path, 140, 100, precision="fp16")
    assert finding.state == State.FAILED
    assert finding.hint == "speed"


NOT_SLOWER = bars.Bar("", 1.0, "a source", not_slower=True)


GAIN = bars.Bar("", 1.5, "a source")


@pytest.mark.parametrize(
    ("bar", "low", "high", "state", "is_open"),
    [
        (GAIN, 1.51, 1.9, PASSED, False),
        (GAIN, 1.1, 1.49, FAILED, False),
        (GAIN, 1.1, 1.9, UNMEASURED, True),
        (NOT_SLOWER, 0.98, 1.1, PASSED, False),
        (NOT_SLOWER, 0.65, 0.96, FAILED, False),
        (NOT_SLOWER, 0.65, 1.48, OPEN, True),
        (NOT_SLOWER, 0.30, 0.99, OPEN, True),
    ],
)
def test_an_interval_that_includes_the_bar_is_open_and_no_green_tick(
    bar, low, high, state, is_open
):
    found = gain.asked(bar, stats.Comparison((low * high) ** 0.5, low, high, 0.03, 6, ""))
    assert (found.state, found.open) == (state, is_open)
    shown = repr(Verdict("02_amp", [found], {})).splitlines()
    assert any("✓" in line for line in shown) == (state == PASSED)


@pytest.mark.parametrize("bar", [GAIN, NOT_SLOWER])
def test_a_single_pair_clears_no_bar(bar):
    found = gain.asked(bar, stats.Comparison(3.0, None, None, 0.03, 1, ""))
    assert found.state == UNMEASURED
    assert "at least 3 pairs" in found.expected


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
        (folder / "exit_code").write_text("0")
    run = log.read(folders["before-1"])
    found = speed("05_dataloader", folders, run)
    assert told in found.expected


def test_without_a_bar_the_speed_is_told_and_not_asked(tmp_path):
    finding = judged_speed(tmp_path, 100, 250, precision="fp16", batch_size=256, image_size=64)
    assert finding.state == State.NOT_ASKED
    assert finding.yours.startswith("0.40")


def test_too_few_pairs_do_not_clear_a_bar(tmp_path):
    folders = {"before-1": timed(tmp_path, "b", 200, precision="fp16")}
    folders["after-1"] = timed(tmp_path, "a", 100, precision="fp16")
    run = log.read(folders["after-1"])
    finding = speed("02_amp", folders, run)
    assert finding.state == State.UNMEASURED


# What could not be measured does not pass --------------------------------------------------------


def plan_of(exercise, names):
    """What `run` needs of the plan of these runs."""
    return SimpleNamespace(exercise=exercise, entries=[made.entry(name) for name in names])


def rewrite(folder, change):
    """Change the events of a run's log: `change(event)` returns an event, or None to drop it."""
    file = folder / "events.jsonl"
    events = [change(json.loads(line)) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(event) + "\n" for event in events if event))


@pytest.mark.parametrize(
    ("precision", "mine", "hint"),
    [
        ("fp16", 10, "skipped"),
        ("fp16", 12, "backward"),
        ("fp16", 4, "backward"),
        ("bf16", 10, "backward"),
    ],
)
def test_updates_that_a_scaler_would_have_skipped_have_a_hint_of_their_own(
    tmp_path, precision, mine, hint
):
    reference = log.read(timed(tmp_path, "solution", 20, precision=precision))
    runs = [
        dataclasses.replace(reference, whole=records.WholeRun(backward=10, optimizer_steps=n))
        for n in (mine, 7)
    ]
    (found,) = (f for f in common.same_work(*runs) if f.what == "updates of the weights")
    assert found.fails
    assert found.hint == hint


def scaled(reference, tried, made, rates=(), **more):
    """A run with a gradient scaler, whose optimizer is fused: each update tried has a rate."""
    rates = list(rates) or [0.1] * tried
    whole = records.WholeRun(backward=tried, optimizer_steps=made, rates=rates, **more)
    return dataclasses.replace(reference, whole=whole)


@pytest.mark.parametrize(
    ("tried", "made", "scale", "right"),
    [(10, 10, 4096.0, True), (10, 3, 2.0**20, True), (5, 5, 4096.0, False), (10, 10, None, False)],
)
def test_a_scaler_that_begins_with_another_factor_skips_other_updates(
    tmp_path, tried, made, scale, right
):
    reference = log.read(timed(tmp_path, "solution", 20, precision="fp16"))
    runs = scaled(reference, tried, made, scale=scale), scaled(reference, 10, 7, scale=8192.0)
    (found,) = (f for f in common.same_work(*runs) if f.key == "updates")
    assert found.fails != right


@pytest.mark.parametrize(
    ("rates", "found"),
    [([1, 1, 2, 3], [True]), ([1, 2, 3, 4], [False]), ([1, 1, 1, 1], [False])],
)
def test_a_schedule_goes_on_after_an_update_that_was_skipped(tmp_path, rates, found):
    reference = log.read(timed(tmp_path, "solution", 20, precision="fp16"))
    run = scaled(reference, 4, 3, rates)
    assert [f.fails for f in common.schedule_goes_on(run)] == found
    assert not common.schedule_goes_on(scaled(reference, 4, 4, rates))


def test_updates_by_other_optimizers_have_a_hint_of_their_own(tmp_path):
    reference = log.read(timed(tmp_path, "solution", 20))
    whole, audit = records.WholeRun(backward=10, optimizer_steps=0), records.Audit(updates=800)
    mine = dataclasses.replace(reference, whole=whole, audit=audit)
    (found,) = (f for f in common.same_work(mine, reference) if f.key == "updates")
    assert found.hint == "optimizers"


def too_short(folder, folders):
    def change(event):
        return event | {"windows": []} if event.get("when") == "stopwatch" else event

    rewrite(folder, lambda e: change(e) if e["event"] != "window" else None)


def out_of_memory(folder, folders):
    (folder / "exit_code").write_text("1")
    error = {"outcome": "out_of_memory", "error": "CUDA out of memory"}
    rewrite(folder, lambda e: e | error if e["event"] == "end" else e)


def killed(folder, folders):
    (folder / "exit_code").write_text("-9")
    rewrite(folder, lambda e: None if e["event"] in ("end", "window") else e)


def killed_after_its_end(folder, folders):
    (folder / "exit_code").write_text("-9")


def without_an_end(folder, folders):
    rewrite(folder, lambda e: e if e["event"] != "end" else None)


def failed_in_its_end(folder, folders):
    rewrite(folder, lambda e: e | {"outcome": "failed"} if e["event"] == "end" else e)


def not_ended(folder, folders):
    (folder / "exit_code").unlink()


def without_a_log(folder, folders):
    (folder / "events.jsonl").unlink()


def not_run(folder, folders):
    del folders[folder.name]


DAMAGES = (
    *(too_short, out_of_memory, killed, killed_after_its_end, without_an_end),
    *(failed_in_its_end, not_ended, without_a_log, not_run),
)


def test_each_bar_that_asks_for_a_speed_is_tried_here():
    tried = {
        bars.bar(exercises.find(step), f"{device.split(':')[0]}: {name}", sizes | {"precision": p})
        for step, p, device, name, sizes in ASKED.values()
    }
    every = (bar for step in exercises.STEPS for bar in exercises.find(step).bars)
    assert {bar for bar in every if bar.at_least is not None} == tried


@pytest.mark.parametrize("asked", ASKED)
def test_whole_runs_with_a_gain_pass_each_bar(tmp_path, asked):
    """Else the tests below could not fail."""
    exercise, folders = made_runs(tmp_path, asked)
    found = judge.judge(exercise, made.ended(folders), judge.Standards())
    assert found.passed, found
    assert found.part(FASTER) == PASSED


def test_a_verdict_reads_each_log_once(tmp_path, monkeypatch):
    """Also if the first pair is judged while the others run, and all of them at the end."""
    exercise, folders = made_runs(tmp_path, "02")
    parsed, opened = Counter(), course.open_regular
    monkeypatch.setattr(course, "open_regular", lambda f: parsed.update([f]) or opened(f))
    planned, ended = plan_of(exercise, folders), made.ended(folders)
    first = {n: r for n, r in ended.items() if r.entry.number < 2}
    assert run.telling(planned, first, judge.Standards()) is None
    assert judge.judge(exercise, ended, judge.Standards()).passed
    logs = {*tmp_path.rglob("events.jsonl")}
    assert {file: parsed[file] for file in logs} == dict.fromkeys(logs, 1)


NAMES = ("solution", "before-1", "before-4", "yours", "after-6")


@pytest.mark.parametrize("damage", DAMAGES)
def test_where_a_bar_asks_for_a_speed_a_damaged_run_never_passes(tmp_path, damage):
    """Each damage meets each bar and each run, and each run each bar: all pairs."""
    for i, asked in enumerate(ASKED):
        name = NAMES[(i + DAMAGES.index(damage)) % len(NAMES)]
        if damage == too_short and name in ("solution", "yours"):
            continue  # they are not timed
        exercise, folders = made_runs(tmp_path / str(i), asked)
        damage(folders[name], folders)
        found = judge.judge(exercise, made.ended(folders), judge.Standards())
        assert not found.passed, f"{asked}, {name}: {found}"
        assert found.part(FASTER) == UNMEASURED
        assert found.hint_key, f"{asked}, {name}: without a hint"


@pytest.mark.parametrize("seed", range(8))
def test_no_set_of_logs_without_a_measured_speed_passes_where_a_bar_asks_for_one(tmp_path, seed):
    chance = random.Random(seed)
    exercise, folders = made_runs(tmp_path, chance.choice(list(ASKED)), chance.uniform(0.5, 9))
    sides = [n for n in folders if "-" in n]
    damaged = {n for n in sides if chance.choice(["before-", "after-", "-"]) in n}
    for name in sorted(damaged | {chance.choice(sides)}):
        chance.choice(DAMAGES)(folders[name], folders)
    assert not judge.judge(exercise, made.ended(folders), judge.Standards()).passed


BEFORE_THE_PAIRS = ("solution", "yours", "two-epochs-solution", "two-epochs")


def test_runs_that_were_not_timed_do_not_pass(tmp_path):
    exercise, folders = made_runs(tmp_path, "02")
    first = {n: folders[n] for n in BEFORE_THE_PAIRS}
    assert not judge.judge(exercise, made.ended(first), judge.Standards(), timed=False).passed


@pytest.mark.parametrize(("pixels", "told"), [(0.0, False), (1.0, True)])
def test_the_runs_before_the_pairs_are_enough_if_something_in_them_is_wrong(tmp_path, pixels, told):
    exercise, folders = made_runs(tmp_path, "05 on a CPU")
    again, other = folders["yours"] / "replay", {"pixels": [pixels] * 10}
    rewrite(again, lambda e: e | {"every": e["every"] | other} if "every" in e else e)
    first = {n: folders[n] for n in BEFORE_THE_PAIRS}
    known = first | {n: folders[n] for n in ("before-2", "before-3")}  # of an earlier check
    found = run.telling(plan_of(exercise, folders), made.ended(known), judge.Standards())
    assert found == (made.ended(first) if told else None)


def test_a_step_before_that_ran_out_of_memory_says_what_to_submit(tmp_path):
    exercise, folders = made_runs(tmp_path, "02")
    out_of_memory(folders["before-1"], folders)
    said = repr(judge.judge(exercise, made.ended(folders), judge.Standards()))
    assert "? speed: before-1 ran out of memory" in said
    assert "a measured speed: submit with a smaller -b" in said


@pytest.mark.parametrize(
    ("runs", "state", "todo"),
    [
        ("02", "?", "submit with --test-nsteps 30"),
        ("02 on a CPU", "–", "This processor has unknown instructions"),  # no gain is asked
    ],
)
def test_runs_that_are_too_short_say_what_to_submit_or_why_no_speed_is_asked(
    tmp_path, runs, state, todo
):
    exercise, folders = made_runs(tmp_path, runs)
    for folder in folders.values():
        too_short(folder, folders)
    said = repr(judge.judge(exercise, made.ended(folders), judge.Standards()))
    assert f"{state} speed: of 10 steps the first are warm-up, the last is inspected" in said
    assert todo in said
    assert "{" not in said


def test_a_log_without_an_end_is_named(tmp_path):
    exercise, folders = made_runs(tmp_path, "02")
    without_an_end(folders["yours"], folders)
    said = repr(judge.judge(exercise, made.ended(folders), judge.Standards()))
    assert "run yours: its log has no end: was run.end() left out" in said


def test_of_a_run_that_crashed_nothing_counts_as_unasked(tmp_path):
    exercise, folders = made_runs(tmp_path, "02")
    without_an_end(folders["yours"], folders)
    found = judge.judge(exercise, made.ended(folders), judge.Standards())
    assert [found.part(part) for part in PARTS] == [FAILED, UNMEASURED, UNMEASURED]


@pytest.mark.parametrize(
    ("step", "name", "how", "stays"),
    [
        ("06", "accumulates", "FAILED", False),
        ("06", "accumulates", "COMPLETED", True),
        ("01", "rehearsal", "FAILED", True),  # a device that was forgotten makes it crash
    ],
)
def test_what_a_crashed_extra_run_left_undone_is_no_mistake(step, name, how, stays):
    pair = log.Run("mine"), log.Run("solution")
    ended = {name: SimpleNamespace(end=ending.Ending(ending.How[how], ""))}
    found = judge._without_crashed(
        exercises.find(course.step(step)), Runs(*pair, {name: pair}), ended
    )
    assert (name in found.extras) == stays


# Two epochs ---------------------------------------------------------------------------------------


def in_replay_of(folder, change):
    """Change what the replay of this run found: `change(every)` changes the record of all steps."""

    def changed(event):
        if event.get("when") == "replay":
            change(event["every"])
        return event

    rewrite(folder / "replay", changed)


def other_pixels(*steps):
    def change(every):
        every["pixels"] = [9.0 if step in steps else 0.0 for step in range(10)]

    return change


def rows(exercise, folders):
    verdict = judge.judge(exercise, made.ended(folders), judge.Standards())
    return [(f.what, f.hint) for f in verdict.failing]


@pytest.mark.parametrize(
    ("asked", "steps", "row"),
    [
        ("02", (2, 7), ("pixels of the images", "pixels")),
        ("02", (7,), ("pixels of the images, in the second epoch", "later")),
        ("05 on a CPU", (2, 7), ("pixels of the images", "pixels")),
        ("05 on a CPU", (7,), ("pixels of the images, in the second epoch", "cached")),
    ],
)
def test_what_is_wrong_in_the_second_epoch_only_is_a_later_mistake(tmp_path, asked, steps, row):
    exercise, folders = made_runs(tmp_path, asked)
    in_replay_of(folders["two-epochs"], other_pixels(*steps))
    assert rows(exercise, folders) == [row]


def test_what_is_wrong_in_the_job_itself_is_no_later_mistake(tmp_path):
    exercise, folders = made_runs(tmp_path, "05 on a CPU")
    in_replay_of(folders["two-epochs"], other_pixels(7))
    in_replay_of(folders["yours"], other_pixels(7))
    assert rows(exercise, folders) == [("pixels of the images", "pixels")]


def test_other_images_in_the_second_epoch_are_no_sign_of_a_cache(tmp_path):
    exercise, folders = made_runs(tmp_path, "05 on a CPU")
    in_replay_of(folders["two-epochs"], other_pixels(7))
    drawn = {"drawn": [7] * 10}
    rewrite(folders["two-epochs"], lambda e: e | drawn if e.get("when") == "whole" else e)
    assert rows(exercise, folders) == [("pixels of the images, in the second epoch", "later")]


@pytest.mark.parametrize(
    ("batches", "row"),
    [
        ((1,), ("labels of the validation, in the second epoch", "later")),
        ((0, 1), ("labels of the validation", "evaluation")),
    ],
)
def test_all_validations_are_looked_at(tmp_path, batches, row):
    exercise, folders = made_runs(tmp_path, "02")

    def change(every):
        every["validation"]["labels"] = [batch not in batches for batch in range(2)]

    in_replay_of(folders["two-epochs"], change)
    assert rows(exercise, folders) == [row]


def test_tensors_that_something_else_changed_are_no_later_mistake(tmp_path):
    """Such as the momenta, that a new epoch begins without."""
    exercise, folders = made_runs(tmp_path, "02")
    names = ["fc.weight momentum_buffer in update 5"]
    in_replay_of(folders["two-epochs"], lambda every: every.update(touched=names))
    verdict = judge.judge(exercise, made.ended(folders), judge.Standards())
    (found,) = verdict.failing
    assert (found.key, found.hint) == ("touched", "touched")
    assert found.yours == f"1 changed, such as {names[0]}"


def test_batch_statistics_that_a_validation_changed_are_touched(tmp_path):
    exercise, folders = made_runs(tmp_path, "02")
    in_runs("audit", "two-epochs", kept_buffers=False)(folders)
    assert rows(exercise, folders) == [("weights, momenta, statistics between updates", "touched")]


@pytest.mark.parametrize("name", ["yours", "two-epochs"])
def test_a_run_that_was_not_done_again_is_not_known(tmp_path, name):
    exercise, folders = made_runs(tmp_path, "05 on a CPU")
    shutil.rmtree(folders[name] / "replay")
    verdict = judge.judge(exercise, made.ended(folders), judge.Standards())
    assert [(f.key, f.state, f.hint) for f in verdict.failing] == [("audit", UNMEASURED, "audit")]


@pytest.mark.parametrize("name", ["yours", "two-epochs"])
def test_a_replay_that_failed_is_no_later_mistake(tmp_path, name):
    exercise, folders = made_runs(tmp_path, "05 on a CPU")
    failed_in_its_end(folders[name] / "replay", {})
    assert rows(exercise, folders) == [("audit", "audit")]


def of_another_model(folder):
    """Let the audit of a run say that other weights were validated than those that it trained."""
    seen = {"same_weights": False}
    rewrite(folder, lambda e: e | seen if e.get("when") == "audit" else e)


@pytest.mark.parametrize(
    ("names", "what", "hint"),
    [
        (["two-epochs"], "weights of the validation, in the second epoch", "later"),
        (["yours", "two-epochs"], "weights of the validation", "evaluation"),
    ],
)
def test_another_model_is_validated_in_a_later_epoch_or_from_the_first(tmp_path, names, what, hint):
    exercise, folders = made_runs(tmp_path, "05 on a CPU")
    for name in names:
        of_another_model(folders[name])
    assert rows(exercise, folders) == [(what, hint)]


@pytest.mark.parametrize(
    ("found", "others", "told"),
    [
        (("training-mode", "frozen"), [("epoch", FAILED)], None),
        (("validated", "validation"), [("told", FAILED)], None),
        (("training-mode", "eval-mode"), [("epoch", FAILED)], "eval-mode"),
        (("validated", "train-mode"), [("epoch", FAILED)], "train-mode"),
        (("pixels", "later"), [("epoch", FAILED)], None),  # the sampler's own row says more
        (("pixels", "pixels"), [("epoch", FAILED)], "pixels"),
        (("touched", "touched"), [("epoch", FAILED)], "touched"),
        (("training-mode", "frozen"), [("later", FAILED)], "frozen"),
        (("training-mode", "frozen"), [("batch-norm", UNMEASURED)], "frozen"),
        (("training-mode", "frozen"), [(None, FAILED)], "frozen"),
        (("training-mode", "frozen"), [], "frozen"),
        (("pixels", "later"), [], "later"),
    ],
)
def test_what_follows_from_another_row_has_a_hint_if_nothing_else_has(found, others, told):
    beside = [Finding(SAME, "another", "", state, "", "", hint) for hint, state in others]
    row = Finding(SAME, found[0], "", FAILED, "", "", found[1])
    *rest, last = judge._causes_first(exercises.find("02_amp"), [*beside, row])
    assert (last.hint, rest) == (told, beside)


def test_what_only_follows_is_no_cause():
    """Images in another layout, in a run that asks for NCHW, change its outputs."""
    keys = ("outputs", "outputs"), ("images-otherwise", "not-asked"), ("training-mode", "frozen")
    found = [Finding(SAME, key, "", FAILED, "", "", hint) for key, hint in keys]
    left = judge._causes_first(exercises.find("03_channels_last"), found[1:])
    assert [f.hint for f in left] == ["not-asked", None]
    left = judge._causes_first(exercises.find("03_channels_last"), found)
    assert [f.hint for f in left] == ["outputs", None, None]


def test_a_trainer_that_nothing_watched_has_one_finding(tmp_path):
    exercise, folders = made_runs(tmp_path, "03 on a CPU")
    watched = {"backward": 12}
    rewrite(folders["solution"], lambda e: e | watched if e.get("when") == "whole" else e)
    verdict = judge.judge(exercise, made.ended(folders), judge.Standards())
    assert [f.what for f in verdict.failing if f.state == FAILED] == ["evidence"]
    assert verdict.hint_key == "watched"


def test_the_speed_on_a_gpu_that_nobody_recorded_is_reported(tmp_path):
    finding = judged_speed(tmp_path, 183, 100, precision="fp16", device_name="NVIDIA X1")
    assert finding.state == NOT_ASKED
    assert finding.yours.startswith("1.83")
    assert "no bar is known for NVIDIA X1" in finding.expected


# No decision reads words --------------------------------------------------------------------------


def of_updates(**wrong):
    """A fault in what the replays of the trainee's runs found in each update."""

    def change(event):
        return event | {"updates": [update | wrong for update in event["updates"]]}

    return lambda folders: in_replays(folders, change)


def of_steps(**wrong):
    """The same in every step."""
    return lambda folders: in_replays(
        folders, lambda event: event | {"every": event["every"] | wrong}
    )


def in_replays(folders, change):
    for again in (folder / "replay" for folder in folders.values()):
        if again.exists():
            rewrite(again, lambda e: change(e) if e.get("when") == "replay" else e)


def in_runs(when, *names, **wrong):
    """A fault in this evidence of these runs."""

    def change(folders):
        for name in names:
            rewrite(folders[name], lambda e: e | wrong if e.get("when") == when else e)

    return change


def disturbed(folders):
    """One of the pairs took three times as long."""

    def slow(event):
        return event | {"windows": [w | {"wall_s": 3 * w["wall_s"]} for w in event["windows"]]}

    rewrite(folders["after-2"], lambda e: slow(e) if e.get("when") == "stopwatch" else e)


FAULTS = {
    "none": lambda folders: None,
    "disturbed": disturbed,
    "gradients": of_updates(gradients=3e-2),
    "outputs": of_updates(outputs=0.2),
    "a weight": of_updates(gradients_tensor=5.0),
    "statistics": of_updates(buffers=0.1),
    "the optimizer": of_updates(optimizer_roundings=99.0),
    "pixels": of_steps(pixels=[9.0] * 10),
    "no loss": of_steps(criterion=[None] * 10),
    "a later epoch": lambda folders: in_replay_of(folders["two-epochs"], other_pixels(7)),
    "updates": in_runs("whole", "yours", optimizer_steps=4),
    "another model, later": in_runs("audit", "two-epochs", same_weights=False),
    "another model": in_runs("audit", "yours", "two-epochs", same_weights=False),
    "a full GPU before": lambda folders: out_of_memory(folders["before-4"], folders),
    "a full GPU of the audit": lambda folders: out_of_memory(
        folders["two-epochs"] / "replay", folders
    ),
    "other losses": in_runs("audit", "yours", losses=[2.5] * 10),
} | {
    f"{damage.__name__}: {name}": lambda folders, damage=damage, name=name: damage(
        folders[name], folders
    )
    for damage in DAMAGES
    for name in ("yours", "two-epochs")
}


def decided(folder, fault):
    """What is decided on runs with this fault, without and with a mechanism: no text for people."""
    exercise, folders = made_runs(folder, "02")
    FAULTS[fault](folders)
    ended, found = made.ended(folders), []
    for mechanism in (exercise.mechanism, exercises.find("02_amp").mechanism):
        asked = dataclasses.replace(exercise, mechanism=mechanism)
        verdict = judge.judge(asked, ended, judge.Standards())
        rows = [(f.part, f.key, f.precision, f.state, f.hint, f.open) for f in verdict.findings]
        kinds = [caution.kind for caution in verdict.cautions]
        found.append((verdict.passed, verdict.hint_key, kinds, rows))
    return found


def test_a_verdict_stays_whatever_its_words_are(tmp_path, monkeypatch):
    """Each label, message and reason becomes another word each time that it is written."""
    usual = {fault: decided(tmp_path / f"usual {i}", fault) for i, fault in enumerate(FAULTS)}
    assert usual["none"][0][0], "without a fault it passes"
    assert len({str(found) for found in usual.values()}) > 19, "and the faults differ"
    words, made_finding, ended = map("word {}".format, count()), Finding.__post_init__, ending.of

    def reworded(finding):
        made_finding(finding)
        for name in ("what", "yours", "expected"):
            if not isinstance(getattr(finding, name), exercises.Unseen):
                object.__setattr__(finding, name, next(words))

    monkeypatch.setattr(Finding, "__post_init__", reworded)
    monkeypatch.setattr(stats.Caution, "__str__", lambda _: next(words))
    monkeypatch.setattr(ending, "of", lambda *a: dataclasses.replace(ended(*a), text=next(words)))
    found = {fault: decided(tmp_path / f"reworded {i}", fault) for i, fault in enumerate(FAULTS)}
    assert {f: found[f] for f in FAULTS if found[f] != usual[f]} == {}


# A step in the middle -----------------------------------------------------------------------------


def looked_at(path, middle, last):
    """The mechanism's findings on a run with these regions in the two steps that were profiled."""
    compiled = exercises.find("09_compile")
    run = log.read(timed(path, "run", 10, compile="default"))
    run.last = records.LastStep(step=9, compiled_regions=last)
    if middle is not None:
        run.middle = records.MiddleStep(step=6, compiled_regions=middle)
    return {f.what: f for f in judge._mechanism(compiled, Runs(run, run))}


def test_a_mechanism_that_is_there_only_at_both_ends_is_seen_in_the_middle(tmp_path):
    found = looked_at(tmp_path, middle=0, last=2)
    assert not found["compiled regions"].fails
    missing = found["compiled regions, in the middle"]
    assert missing.fails
    assert missing.hint == "nothing"
    assert missing.yours.endswith("(step 6)")


@pytest.mark.parametrize("last", [0, 2])
@pytest.mark.parametrize("middle", [2, None])
def test_the_middle_adds_nothing_where_it_is_as_good(tmp_path, middle, last):
    found = looked_at(tmp_path, middle, last)
    assert found["compiled regions"].fails == (last == 0)
    assert not any("middle" in what for what in found)


def test_what_fails_in_both_is_told_once(tmp_path):
    found = looked_at(tmp_path, middle=0, last=0)
    assert found["compiled regions"].fails
    assert "compiled regions, in the middle" not in found


# What a trainer could hide behind ---------------------------------------------------------------


def taking(folder, gigabytes):
    """Let a run hold this much of weights, gradients and momenta."""
    held = {"parameter_bytes": gigabytes * 1e9 / 3}
    rewrite(folder, lambda e: e | held if e["event"] == "setup" else e)


@pytest.mark.parametrize(
    ("mine", "solution", "model", "passes"),
    [
        (0.6, 0.55, "small", True),
        (0.6, 0.45, "small", True),  # nearly too large: a right trainer may be
        (0.6, 0.3, "small", False),
        (0.6, 0.3, "resnet50", True),  # audited as it is
        (0.35, 0.3, "small", True),
    ],
)
def test_a_job_is_audited_in_small_only_if_the_solution_is_as_large(
    tmp_path, mine, solution, model, passes
):
    """A trainer that takes memory for nothing would choose how closely it is looked at."""
    exercise, folders = made_runs(tmp_path, "02")
    for name, folder in folders.items():
        taking(folder, mine if name == "yours" else solution)

    def small(event):
        if event["event"] == "start":
            event["arguments"]["model"] = model
        return event

    for name in ("two-epochs", "two-epochs-solution"):
        rewrite(folders[name], small)
    found = judge.judge(exercise, made.ended(folders), judge.Standards())
    assert found.passed == passes, found
    assert ("memory of the job: " in repr(found)) != passes
    assert passes or f"{mine} GB of state" in repr(found)


@pytest.mark.parametrize("name", ["yours", "yours/replay", "two-epochs", "two-epochs/replay"])
def test_a_run_for_which_the_audit_has_no_memory_is_not_held_against_the_trainer(tmp_path, name):
    exercise, folders = made_runs(tmp_path, "02")
    out_of_memory(tmp_path / name, folders)
    if name == "two-epochs":
        shutil.rmtree(tmp_path / name / "replay")
    found = judge.judge(exercise, made.ended(folders), judge.Standards())
    assert not found.passed
    assert FAILED not in [found.part(part) for part in PARTS]
    assert "room for what the check keeps beside it: submit with a smaller -b" in repr(found)


def test_a_full_disk_says_nothing_about_the_trainer(tmp_path):
    _, folders = made_runs(tmp_path, "02")
    folder = folders["yours"]
    (folder / "exit_code").write_text("1")
    full = {"outcome": "failed", "error": "OSError: [Errno 28] no room for what a check keeps"}
    rewrite(folder, lambda e: e | full if e["event"] == "end" else e)
    with pytest.raises(
        CheckError, match=r"says nothing about your trainer: there was no room.*du -s"
    ):
        run.refuse(made.ended({"yours": folder}))


# Causes come before their consequences ------------------------------------------------------------


@pytest.mark.parametrize(
    ("rates", "hint"), [([0.1] * 10, "unscale"), ([0.1] * 5 + [0.2] * 5, "rate")]
)
def test_a_consequence_speaks_only_if_its_cause_is_right(tmp_path, rates, hint):
    """As of the linear scaling rule, which changes the losses of an update's batches as well."""
    exercise, folders = made_runs(tmp_path, "02")
    norm = Finding(SAME, "norm-fp16", "norm of the gradients", State.FAILED, "2", "1", "unscale")
    exercise = dataclasses.replace(exercise, mechanism=lambda runs: [norm])

    def change(event):
        updates = [
            u | {"lr": [rate], "lr_off": abs(rate - 0.1)}
            for u, rate in zip(event["every"]["updates"], rates, strict=True)
        ]
        return event | {"every": event["every"] | {"updates": updates}}

    in_replays(folders, change)
    found = judge.judge(exercise, made.ended(folders), judge.Standards())
    assert found.hint_key == hint
    if hint == "rate":
        (row,) = [f for f in found.failing if f.key == "rate"]
        assert (row.yours, row.expected) == ("0.2 in update 5", "0.1")


def took_too_long(run):
    """Let a run end at its limit, 100 s after it began; its log is as old as the end."""
    run.mkdir(exist_ok=True)
    (run / "exit_code").write_text(f"{series.TOO_LONG}")
    (run / "trainer.py").touch()
    now = (run / "exit_code").stat().st_mtime
    os.utime(run / "trainer.py", (now - 100, now - 100))


@pytest.mark.parametrize("asked", ["02", "06"])  # of one process, and of those that may wait
@pytest.mark.parametrize(
    ("name", "place"),
    [(name, "") for name in ("yours", "two-epochs", "rehearsal", "after-2")]
    + [(name, "replay") for name in ("yours", "two-epochs")],
)
def test_a_run_that_took_too_long_is_not_held_against_the_trainer(tmp_path, asked, name, place):
    """The machine may have been busy: nothing that it left undone is a mistake."""
    exercise, folders = made_runs(tmp_path, asked)
    for extra in {name, f"{name}-solution"} - {*folders}:
        folders[extra] = shutil.copytree(folders["yours"], tmp_path / extra)
    took_too_long(folders[name] / place)
    if place:
        (folders[name] / "exit_code").write_text("0")
    else:
        shutil.rmtree(folders[name] / "replay", ignore_errors=True)
    undone = Finding(MECHANISM, "fused", "fused update", False, "False", "True", "fused")
    exercise = dataclasses.replace(
        exercise,
        mechanism=lambda runs: [undone] * (not place and runs.mine.path.parent == folders[name]),
    )
    found = judge.judge(exercise, made.ended(folders), judge.Standards())
    assert FAILED not in [found.part(part) for part in PARTS]
    assert (found.passed, found.hint_key) == (False, "busy"), found


def test_a_process_that_waits_for_another_is_told_by_a_log_that_stands_still(tmp_path):
    exercise, folders = made_runs(tmp_path, "06")
    took_too_long(folders["yours"])
    log_file = folders["yours"] / "events.jsonl"
    begun = log_file.stat().st_mtime - 90
    os.utime(log_file, (begun, begun))
    found = judge.judge(exercise, made.ended(folders), judge.Standards())
    assert (found.part(SAME), found.hint_key) == (UNMEASURED, "together")


def test_a_run_of_the_solution_that_did_not_complete_says_nothing_of_the_trainer(tmp_path):
    _, folders = made_runs(tmp_path, "02")
    for name in ("solution", "before-1"):
        took_too_long(folders[name])
        with pytest.raises(CheckError, match="says nothing about your trainer: TIMEOUT"):
            run.refuse(made.ended({name: folders[name]}))
