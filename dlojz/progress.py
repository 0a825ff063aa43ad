"""What a trainee predicted, answered and passed: progress.json."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from dlojz import course
from dlojz.course import course_root


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
