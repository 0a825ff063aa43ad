"""The frame of every experiment: a log with its device, and an end only if all went well."""

import json
from types import SimpleNamespace

import pytest
import torch

from dlojz.chapters import session


@pytest.fixture
def events(tmp_path, monkeypatch):
    """The events in the log of an experiment that is run in this process."""
    monkeypatch.setattr("sys.excepthook", None)
    monkeypatch.setenv("DLOJZ_RUN", str(tmp_path))
    return lambda: [json.loads(line) for line in (tmp_path / "events.jsonl").open()]


def test_a_session_logs_the_arguments_the_device_and_the_end(events):
    cpu = torch.device("cpu")
    with session.begin(SimpleNamespace(size=3), cpu) as (run, device):
        run.case("one")
    start, setup, case, end = events()
    assert start["arguments"] == {"size": 3}
    assert (device, setup["device"]) == (cpu, "cpu")
    assert (case["case"], end["outcome"]) == ("one", "completed")


def test_an_experiment_that_fails_is_not_said_to_be_complete(events):
    with pytest.raises(ZeroDivisionError), session.begin(SimpleNamespace()):
        _ = 1 / 0
    assert [event["event"] for event in events()] == ["start", "setup"]


def test_an_experiment_may_return_early(events):
    def main():
        with session.begin(SimpleNamespace()):
            return

    main()
    assert events()[-1]["outcome"] == "completed"


def test_a_time_is_the_mean_of_a_few_calls():
    ticks, calls = iter([10.0, 16.0]), []
    assert (
        session.seconds(lambda: calls.append(1), torch.device("cpu"), 3, lambda: next(ticks)) == 2
    )
    assert len(calls) == 3
