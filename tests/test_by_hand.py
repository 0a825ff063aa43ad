"""The state of a run that no launcher started, from its log alone."""

import json
import os
import socket

import pytest

from dlojz.runs import by_hand

HERE, DEAD = socket.gethostname(), 2**22 + 1  # more than the kernel's largest process number


@pytest.mark.parametrize(
    ("start", "silent_s", "state", "reason"),
    [
        (None, 0, "RUNNING", None),
        (None, 120, "FAILED", "its log has no beginning: did the disk fill up?"),
        ({"hostname": HERE, "pid": DEAD}, 0, "FAILED", "killed"),
        ({"hostname": HERE, "pid": os.getpid()}, 0, "FAILED", "killed"),  # now another's
        ({"hostname": "elsewhere", "pid": DEAD}, 3600, "RUNNING", None),
        ({"hostname": "elsewhere", "pid": DEAD}, 90_000, "FAILED", "nothing in its log for a day"),
        ({"schema": 9}, 90_000, "FAILED", "nothing in its log for a day"),
    ],
)
def test_a_run_without_an_end_runs_or_is_known_to_be_gone(tmp_path, start, silent_s, state, reason):
    file = tmp_path / "events.jsonl"
    about = {"event": "start", "time": "2026-01-01T00:00:00+00:00"}
    file.write_text("" if start is None else json.dumps(about | start) + "\n")
    seen = file.stat().st_mtime - silent_s
    os.utime(file, (seen, seen))
    found = by_hand.status(tmp_path)
    assert (found["state"], found.get("reason")) == (state, reason)
