"""The state of a run without a launcher, from the first and the last line of its log."""

import json
import os
import socket
import time
from datetime import datetime
from pathlib import Path

from dlojz.course import open_regular
from dlojz.runs.folder import events_file

LINE = 1 << 16  # bytes: longer than either of those two lines
STATES = {"completed": "COMPLETED", "out_of_memory": "OUT_OF_MEMORY"}  # by outcome; else FAILED
SLACK_S = 60  # how far apart two clocks may be
SILENT_S = 86400  # a run writes to its log far more often


def status(run: Path) -> dict:
    """Return the state of a trainer that was run by hand, with its times and the reason."""
    try:
        first, last = ends(events_file(run))
    except OSError:
        return {"state": "FAILED", "reason": "no log"}
    if first is None and _silent_s(run) < SLACK_S:
        return {"state": "RUNNING"}  # it has only just begun
    if first is None:
        return {"state": "FAILED", "reason": "its log has no beginning: did the disk fill up?"}
    begun = _seconds(first.get("time"))
    if not last or last.get("event") != "end":
        if reason := _gone(run, first, begun):
            return {"state": "FAILED", "started": begun, "reason": reason}
        return {"state": "RUNNING", "started": begun}
    state = STATES.get(str(last.get("outcome")), "FAILED")
    ended, error = _seconds(last.get("time")), last.get("error")
    return {"state": state, "started": begun, "ended": ended, "reason": error and str(error)}


def ends(file: Path) -> tuple[dict | None, dict | None]:
    """Return the first and the last event of a log; None for one that is missing or torn."""
    with open_regular(file) as log:
        first = _event(log.readline(LINE))
        log.seek(max(0, os.fstat(log.fileno()).st_size - LINE))
        lines = log.read().splitlines()
    return first, _event(lines[-1]) if lines else None


def _event(line):
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _gone(run, start, begun) -> str:
    """Return the reason that the process which began this log is gone; "" if it may still run."""
    if start.get("hostname") != socket.gethostname() or not isinstance(start.get("pid"), int):
        # Another machine, or a container that was made again: only the log can tell.
        return "nothing in its log for a day" if _silent_s(run) > SILENT_S else ""
    import psutil  # a keeper needs the rest of this module, and is started for each job

    try:
        reused = psutil.Process(start["pid"]).create_time() > (begun or 0) + SLACK_S
    except psutil.Error:
        return "killed"
    return "killed" if reused else ""


def _silent_s(run):
    return time.time() - events_file(run).stat().st_mtime


def _seconds(text):
    try:
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError):
        return None
