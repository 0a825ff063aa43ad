"""What bought.py measures of a process, and how many epochs it lets fit."""

import subprocess
import sys
import time

import pytest
from programs import experiment_file, load, run_main

from dlojz import course
from dlojz.chapters.n14_race import oneself
from dlojz.runs import log

WRITER = """
import sys, time
with open(sys.argv[1], "w", buffering=1) as file:
    for event in ("start", "setup", "step", "epoch", "step", "epoch"):
        file.write('{"event": "%s"}\\n' % event)
        time.sleep(0.1)
time.sleep(float(sys.argv[2]))
"""
TINY = "--model shufflenet_v2_x0_5 --image-size 32 --batch-size 8 --num-workers 0 --seconds 30"
TINY += " --classes 2 --images-per-class 8 --val-per-class 4 --judged 4"


@pytest.fixture(scope="module")
def bought():
    return load("bought")


@pytest.mark.parametrize(
    ("seconds", "epoch_s", "budget", "epochs"),
    [(6, 1, 10, 8), (6, 1, 20, 18), (9.6, 1, 10, 4), (12, 2, 10, 3), (60, 10, 10, 0)],
)
def test_as_many_epochs_fit_as_there_are_seconds_left(bought, seconds, epoch_s, budget, epochs):
    assert bought.fitting({"seconds": seconds, "epoch_s": epoch_s}, budget) == epochs


def test_a_pilot_without_two_epochs_says_that_none_fits(bought):
    assert bought.fitting({"seconds": 60}, 10) == 0


def followed(bought, tmp_path, rest, most_s):
    file = tmp_path / "events.jsonl"
    command = [sys.executable, "-S", "-c", WRITER, str(file), str(rest)]
    begin = time.perf_counter()
    process = subprocess.Popen(command)
    return process, bought.followed(process, file, begin, most_s)


def test_a_process_is_timed_from_its_start_to_its_end(bought, tmp_path):
    process, moments = followed(bought, tmp_path, 0.3, 60)
    first, second = moments["epochs"]
    assert process.returncode == 0
    assert 0 < moments["start"] < moments["setup"] < first < second < moments["end"]
    assert moments["end"] - second > 0.3


def test_a_process_is_ended_after_its_time(bought, tmp_path):
    process, moments = followed(bought, tmp_path, 60, 1.5)
    assert process.returncode < 0
    assert 1.5 <= moments["end"] < 10


def test_an_edit_is_made_where_it_belongs(tmp_path):
    before = course.solution("05").read_text()
    text = oneself.edited("validated-once", tmp_path).read_text()
    assert text.count("if epoch + 1 == args.epochs") == 2
    assert len(text.splitlines()) == len(before.splitlines())


def test_an_edit_of_a_trainer_that_has_changed_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(oneself.EDITS, "cheat", {"no such line": ""})
    with pytest.raises(ValueError, match="expected once: 'no such line'"):
        oneself.edited("cheat", tmp_path)


@pytest.mark.slow
def test_two_rungs_are_timed_trained_and_judged(tmp_path, monkeypatch, bought):
    rungs = "--rungs|05 loader|05, validated once".split("|")
    monkeypatch.setattr("programs.load_file", lambda path: bought)
    monkeypatch.setattr(bought, "fitting", lambda pilot, budget: 2)
    run = run_main(experiment_file("bought.py"), tmp_path / "run", *TINY.split(), *rungs)
    cases = log.read(run).cases
    assert [*cases] == [
        "05 loader, pilot",
        "05, validated once, pilot",
        *("05 loader, seed 0, 2 epochs", "05, validated once, seed 0, 2 epochs"),
    ]
    for case in cases.values():
        assert sum(case["parts"].values()) == pytest.approx(case["seconds"], rel=0.05)
        assert 0 <= case["accuracy"] <= 1
        assert "joules" not in case, "a processor has no sensor"
    each, once = (cases[name]["parts"]["validation"] for name in [*cases][2:])
    assert once < each
