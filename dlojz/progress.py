"""How far a job is; and what a trainee predicted and answered."""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from dlojz import course
from dlojz.course import course_root
from dlojz.runs.folder import events_file

# How far a job is ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Now:
    """A job under way: training steps done, of how many, and its pace.

    total: None before it knows; 0 of a small experiment, which has no steps of training.
    """

    state: str
    done: int = 0
    total: int | None = None
    loss: float | None = None
    images_per_s: float | None = None  # of the last step, all processes together
    processes: int = 1


def follow(job, every_s: float = 0.2) -> Iterator[Now]:
    """What a job is doing, again and again until it has ended; reads each line of its log once."""
    file, partial, now = events_file(job.directory), b"", Now(str(job.state))
    position = 0
    while True:
        state = job.state
        if file.exists():
            with file.open("rb") as stream:
                stream.seek(position)
                lines = (partial + stream.read()).split(b"\n")
                position = stream.tell()
            partial = lines.pop()  # not ended yet
            for line in lines:
                with suppress(ValueError):  # cut when the run was killed, before it went on
                    now = _after(now, json.loads(line))
        now = replace(now, state=str(state))
        yield now
        if state.final:
            return
        time.sleep(every_s)


def _after(now, event):
    kind = event["event"]
    if kind == "start":
        return replace(now, processes=event.get("size", 1))
    if kind == "setup":
        return Now(now.state, 0, event.get("steps", 0), processes=now.processes)
    if kind == "step":
        rate = 1000 * now.processes * event["images"] / sum(event["host_ms"].values())
        return replace(now, done=now.done + 1, loss=event["loss"], images_per_s=rate)
    return now


# What a trainee predicted and answered ---------------------------------------------------------


def file() -> Path:
    """Where it is kept; other things that a trainee made are kept beside it."""
    return Path(os.environ.get("DLOJZ_PROGRESS") or course_root() / "progress.json")


def load(path: Path | None = None) -> dict:
    """All that a file holds; of the default: {"predictions": {...}, "quizzes": {...}}."""
    path = path or file()
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(
            f"{path} is not readable ({error}): repair it, or move it away to begin anew"
        ) from error


@contextmanager
def changing(path: Path) -> Iterator[dict]:
    """What a file holds, to be changed: it is written when the block ends, and others wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two notebooks may answer at once
        kept = load(path)
        yield kept
        course.write_atomically(path, json.dumps(kept, indent=1))


def keep(kind: str, key: str, value):
    """Remember `value` under kind and key, with the time; what was there before stays."""
    entry = {"value": value, "time": datetime.now(UTC).isoformat(timespec="seconds")}
    with changing(file()) as kept:
        kept.setdefault(kind, {}).setdefault(key, []).append(entry)


def last(kind: str, key: str):
    """What was kept last under kind and key, or None."""
    entries = load().get(kind, {}).get(key)
    return entries[-1]["value"] if entries else None
