"""A/A recordings and the rate of false alarms, where the answers are known."""

import json
import random
from types import SimpleNamespace

import aa
import pytest
from logs import write_log

from dlojz import launch
from dlojz.launch import series
from dlojz.runs import log
from dlojz.runs.stats import summary


def noisy(runs, share, seed=1):
    draw = random.Random(seed)
    return [100 * (1 + draw.gauss(0, share)) for _ in range(runs)]


def test_equal_runs_with_noise_alarm_in_one_trial_of_twenty_and_a_margin_silences_them():
    speeds = noisy(2000, 0.02)
    count = aa.alarms(speeds, 6, margin=0)
    assert 0.03 < count / aa.TRIALS < 0.07
    assert aa.alarms(speeds, 6, margin=0) == count, "the trials are the same each time"
    assert aa.alarms(speeds, 6, margin=0.03) < count / 5


def test_who_is_before_is_chance():
    # All six pairs must fall the same way round, of 64: one that differs hides the others.
    low, high = aa.wilson(aa.alarms([100, 110] * 20, 6, margin=0), aa.TRIALS)
    assert low < 2 / 64 < high


def test_only_neighbours_are_compared():
    drifting = [100 * 1.01**i for i in range(40)]  # a lot over the hour, little within a pair
    assert aa.alarms(drifting, 6, margin=0.03) == 0
    with pytest.raises(ValueError, match="19 runs, expected at least 20 for 10 pairs"):
        aa.alarms([100.0] * 19, 10, 0.01)


@pytest.mark.parametrize(
    ("count", "low", "high"), [(0, 0, 0.00383), (50, 0.0381, 0.0653), (1000, 0.99617, 1)]
)
def test_wilsons_interval_against_worked_examples(count, low, high):
    assert aa.wilson(count, 1000) == pytest.approx((low, high), abs=5e-5)


@pytest.fixture
def made(tmp_path):
    """Folders of 20 runs, each a little faster than the one before."""
    folders = []
    for i in range(20):
        folders.append(tmp_path / "job" / f"run-{i:03d}")
        window = {"first_step": 3, "steps": 7, "wall_s": 0.7 - 0.001 * i, "others_cpu": 0.5}
        write_log(folders[-1] / "events.jsonl", window=window)
        (folders[-1] / "exit_code").write_text("0\n")
    return folders


def test_a_recording_is_a_log_that_can_be_read(made, tmp_path):
    file = tmp_path / "aa.jsonl"
    file.write_text(aa.recording(made, "solutions/x.py --test"))
    run = log.read(file)
    assert aa.speeds(run)[::19] == pytest.approx([224 / 0.7, 224 / 0.681])
    assert len(aa.speeds(run)) == 20
    measure = json.loads(file.read_text().splitlines()[2])
    assert measure["others_cpu"] == 0.5
    assert not {"power_w", "throttled"} & set(measure), "no sensor is not zero"
    assert run.start["hostname"] == "recorded"
    assert run.start["command"] == "solutions/x.py --test"
    assert summary(file).completed


@pytest.fixture
def no_job(made, monkeypatch):
    """In place of a job: its runs are there already. Holds what was submitted."""
    job = SimpleNamespace(state=launch.State.COMPLETED, cancelled=False)
    job.cancel = lambda: setattr(job, "cancelled", True)

    def submit(entries, name):
        job.entries = entries
        return job

    monkeypatch.setattr(series, "submit", submit)
    monkeypatch.setattr(series, "folders", lambda job: {f.name: f for f in made})
    return job


def call(monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["aa.py", *map(str, words)])
    aa.main()


def test_recording_and_counting_from_the_command_line(no_job, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "reference"
    call(monkeypatch, "record", folder, "--runs", "20", "--model", "vgg11", "--no-channels-last")
    assert len(no_job.entries) == 20
    assert no_job.entries[0].trainer.name == "dlojz_03_channels_last.py"
    flags = no_job.entries[0].flags
    assert flags[:3] == ["--test", "--data", "synthetic"]
    assert flags[-3:] == ["--model", "vgg11", "--no-channels-last"]
    assert f"next: python tools/aa.py alarms {folder / 'aa.jsonl'}" in capsys.readouterr().out
    call(monkeypatch, "alarms", folder / "aa.jsonl")
    text = capsys.readouterr().out
    assert "20 runs of solutions/dlojz_03_channels_last.py --test" in text
    rows = [line.split() for line in text.splitlines() if " to " in line]
    assert [row[:2] for row in rows] == [[m, p] for m in ("3%", "0%") for p in ("6", "8", "10")]
    assert not no_job.cancelled


def test_a_recording_is_never_overwritten(no_job, tmp_path, monkeypatch):
    (tmp_path / "aa.jsonl").write_text("mine")
    with pytest.raises(SystemExit, match="exists: remove it"):
        call(monkeypatch, "record", tmp_path)
    assert (tmp_path / "aa.jsonl").read_text() == "mine"


def test_a_failed_run_ends_the_recording_with_its_error(no_job, made, tmp_path, monkeypatch):
    end = {"outcome": "failed", "error": "Boom", "time": "2026-01-02T03:05:05"}
    write_log(made[4] / "events.jsonl", end=end)
    (made[4] / "stderr.txt").write_text("Boom: said the trainer")
    with pytest.raises(SystemExit, match="Boom: said the trainer"):
        call(monkeypatch, "record", tmp_path, "--runs", "20")
    assert no_job.cancelled
    assert not (tmp_path / "aa.jsonl").exists()
