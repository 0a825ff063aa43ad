"""A timed run is measured from outside: no look, no gap, and no step under a profiler."""

import time
from types import SimpleNamespace

import pytest
import torch

from dlojz.watch import stopwatch


class Run:
    def __init__(self):
        self.ended = False

    def end(self):
        self.ended = True


def timed(steps, accumulate=1, epochs=1, settled=True, pause_s=0.0, validates=False):
    """The windows of a run whose last step is profiled."""
    model, run = torch.nn.Linear(2, 2), Run()
    witness = SimpleNamespace(last=steps - 1, settled=settled)
    args = SimpleNamespace(epochs=epochs, accumulate=accumulate)
    watch = stopwatch.Stopwatch(run, model, args, witness, steps)
    for step in range(steps):
        model(torch.ones(4, 2))
        time.sleep(pause_s)
        if (step + 1) % (steps // epochs) == 0 and validates:
            model.eval()(torch.ones(4, 2))
            model.train()
    return watch.finish().windows


def spans(windows):
    return [(w["first_step"], w["steps"], w["images"]) for w in windows]


def test_the_window_has_no_gaps_and_ends_well_before_the_step_under_the_profiler():
    (window,) = timed(8, pause_s=0.02)
    assert spans([window]) == [(3, 3, 12)]
    assert 0.06 <= window["wall_s"] < 0.2


def test_a_window_begins_with_an_update_and_when_all_is_compiled():
    assert spans(timed(12, accumulate=2)) == [(4, 6, 24)]
    assert spans(timed(20, settled=False))[0][0] > 4


def test_no_window_waits_for_the_first_batch_of_a_validation():
    with pytest.raises(SystemExit):  # and the run ends where its training does
        timed(12, epochs=2, validates=True)
    assert spans(timed(12, epochs=2)) == [(3, 2, 8), (6, 4, 16)]


def test_a_call_that_is_no_training_neither_counts_nor_closes_the_window():
    """As of a trainer that looks at its model within the epoch."""
    model, run = torch.nn.Linear(2, 2), Run()
    witness, args = SimpleNamespace(last=9, settled=True), SimpleNamespace(epochs=1)
    watch = stopwatch.Stopwatch(run, model, args, witness, 10)
    for _ in range(9):
        model(torch.ones(4, 2))
        with torch.no_grad():
            model(torch.ones(4, 2))
    assert spans(watch.finish().windows) == [(3, 5, 20)]
    assert not run.ended


def test_steps_under_the_trainers_profiler_are_not_timed(monkeypatch):
    monkeypatch.setattr("sys.argv", ["dlojz.py", "--profile"])
    assert timed(8) == []
