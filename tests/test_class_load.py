"""Many clones that submit at once: none is lost, and only one job runs at a time."""

import subprocess
import sys
from pathlib import Path

import class_load

TOOL = Path(class_load.__file__)


def test_clones_that_submit_at_once_all_get_their_turn():
    command = [sys.executable, TOOL, "--trainees", "3", "--seconds", "0.1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "3 submitted" in done.stdout
    assert "{'COMPLETED': 3}, 0 overlap" in done.stdout


def test_jobs_at_the_same_time_are_counted(monkeypatch):
    times = {"a": (0, 2), "b": (1, 3), "c": (3, 4)}
    found = {name: dict(zip(("started", "ended"), t, strict=True)) for name, t in times.items()}
    monkeypatch.setattr(class_load, "status", found.get)
    assert class_load.overlaps(times) == 1
