"""The trials of the loader that a trainee made stay for later sessions."""

import json

import pytest
from logs import trial

from dlojz.chapters.n05_dataloader import search


@pytest.fixture
def kept(tmp_path):
    return tmp_path / "trials.json"


def test_trials_stay_for_later_sessions_and_the_fastest_is_marked(tmp_path, kept):
    search.trials([trial(tmp_path / "1.jsonl", workers=0, ms=200)], kept)
    search.trials([trial(tmp_path / "2.jsonl", workers=1, ms=100)], kept)
    search.trials([trial(tmp_path / "2.jsonl", workers=1, ms=100)], kept)  # twice is once
    rows = search.trials(file=kept).rows
    assert [(row[0], row[-1]) for row in rows] == [("1", ""), ("2", "★ fastest")]


def test_trials_of_another_training_are_kept_and_not_shown(tmp_path, kept):
    search.trials(trial(tmp_path / "1.jsonl", 0, batch=8), kept)
    assert [row[0] for row in search.trials(trial(tmp_path / "2.jsonl", 0), kept).rows] == ["2"]
    assert len(json.loads(kept.read_text())) == 2


def test_a_run_under_way_is_shown_and_not_kept(tmp_path, kept):
    run = trial(tmp_path / "1.jsonl", 0, end=None)
    assert search.trials(run, kept).rows[0][-1] == "RUNNING"
    assert json.loads(kept.read_text()) == {}
