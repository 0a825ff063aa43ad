"""A class on one machine: clones that submit at once, and share one queue."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from waiting import until

DLOJZ = Path(sys.executable).with_name("dlojz")


def test_clones_that_submit_at_once_all_get_their_turn(tmp_path):
    clones = [tmp_path / name for name in "abc"]
    for clone in clones:
        clone.mkdir()
        (clone / ".course-root").touch()
        (clone / "job.py").write_text("import time\ntime.sleep(0.1)\n")
    own = {"DLOJZ_QUEUE": str(tmp_path / "queue")}
    submitting = [
        subprocess.Popen(
            [DLOJZ, "submit", "job.py"],
            cwd=clone,
            env=os.environ | own | {"DLOJZ_ROOT": str(clone)},
        )
        for clone in clones
    ]
    assert [process.wait(60) for process in submitting] == [0, 0, 0]

    def ended():
        files = tmp_path.glob("*/runs/0001/state.json")
        found = [state for file in files if "ended" in (state := json.loads(file.read_text()))]
        return found if len(found) == 3 else None

    states = sorted(until(ended), key=lambda state: state["started"])
    assert [state["state"] for state in states] == ["COMPLETED"] * 3
    assert all(before["ended"] <= after["started"] for before, after in pairwise(states))
