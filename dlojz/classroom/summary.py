"""The file that a trainee shares: what was done and when, without code, paths, hosts or free text.

    {"schema": 1,
     "as": "quick-otter",
     "time": "2026-03-02T10:14:00+00:00",
     "entries": [
      {"time": "...", "kind": "predictions", "key": "01 gpu", "name": "step_ms", "predicted": 90},
      {"time": "...", "kind": "verdicts", "key": "01_gpu", "passed": false, "hint": "metrics"}],
     "runs": [
      {"state": "RUNNING", "submitted": "...", "started": "...", "ended": null}]}

Only the fields in FIELDS and RUN leave, and each must have its form: a name is a few letters and
digits, a number is finite. What reads a file asks the same of it, because anybody may write one.
"""

import json
import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime

from dlojz.course import table_of

SCHEMA = 1
MOST = 400  # entries or runs in a file, the newest; a trainee of the whole course has about 300
LARGEST = 256 * 1024  # bytes of a file that is read
PSEUDONYM = re.compile(r"(?!.*  )[A-Za-z0-9][A-Za-z0-9 ._-]{0,23}(?<! )")  # blanks within only
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _-]{0,39}")  # no "/", so never a path
# Lists: one may look in them for what has no hash.
STATES = ["QUEUED", "RUNNING", "COMPLETED", "FAILED", "OUT_OF_MEMORY", "CANCELLED", "TIMEOUT"]
STATES += ["NODE_FAIL", "PREEMPTED"]
HOW = ["measured", "estimated", "counted", None]  # None: measured, by an older version


def _is_name(value):
    return isinstance(value, str) and bool(NAME.fullmatch(value))


def _is_number(value):
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value == 0 or 1e-15 < value < 1e15  # so that a board can divide any two


def _is_flag(value):
    return isinstance(value, bool)


def _is_time(value):
    return isinstance(value, str) and seconds(value) is not None


def _or_none(has_form) -> Callable[[object], bool]:
    return lambda value: value is None or has_form(value)


FIELDS = {  # what is shared of each kind, besides HEAD
    "predictions": {"name": _is_name, "predicted": _is_number},
    "scores": {
        **{"name": _is_name, "predicted": _is_number, "measured": _is_number},
        "how": lambda value: value in HOW,
    },
    "verdicts": {
        "passed": _is_flag,
        "hint": _or_none(_is_name),
        **dict.fromkeys(("ratio", "low", "high"), _or_none(_is_number)),
    },
    "hints": {"hint": _is_name, "rung": _is_number},
    "quizzes": {"right": _or_none(_is_flag)},
    "mysteries": {"right": _or_none(_is_flag)},
    "answers": {},
}
HEAD = {"time": _is_time, "kind": lambda value: value in [*FIELDS], "key": _is_name}
RUN = {
    "state": lambda value: value in STATES,
    **dict.fromkeys(("submitted", "started", "ended"), _or_none(_is_time)),
}
FILE = {
    "schema": lambda value: value == SCHEMA,
    "as": lambda value: isinstance(value, str) and bool(PSEUDONYM.fullmatch(value)),
    "time": _is_time,
    **dict.fromkeys(("entries", "runs"), lambda value: isinstance(value, list)),
}


def seconds(time: str) -> float | None:
    """Return the Unix seconds of a time with its zone, as progress.json has it; None for others."""
    try:
        found = datetime.fromisoformat(time)
        return found.timestamp() if found.tzinfo else None
    except (ValueError, OverflowError, OSError):
        return None


def entry_of(found) -> dict | None:
    """Return the fields that an entry may have; None if it is none, or one has another form."""
    head = _fitting(found, HEAD)
    return head and _fitting(found, HEAD | FIELDS[head["kind"]])


def run_of(found) -> dict | None:
    """Return the fields that a run may have; None if it is none, or one has another form."""
    return _fitting(found, RUN)


def _fitting(found, forms) -> dict | None:
    if isinstance(found, dict) and all(fits(found.get(name)) for name, fits in forms.items()):
        return {name: found.get(name) for name in forms}
    return None


# What a trainee has ------------------------------------------------------------------------------


def of(kept: dict, jobs: Iterable[tuple[float | None, dict]], pseudonym: str) -> dict:
    """Return the shared facts.

    kept: as `progress.load` returns it; jobs: the time of each submission, and the job's status.
    """
    entries = [
        made
        for kind, facts in _FACTS.items()
        for key, given in kept.get(kind, {}).items()
        for entry in given
        for fact in facts(entry, key)
        if (made := entry_of({"kind": kind, "key": key, "time": entry.get("time")} | fact))
    ]
    entries.sort(key=lambda entry: seconds(entry["time"]))
    runs = [made for job in jobs if (made := run_of(_run(*job)))]
    now = datetime.now(UTC).isoformat(timespec="seconds")
    head = {"schema": SCHEMA, "as": pseudonym, "time": now}
    return head | {"entries": entries[-MOST:], "runs": runs[-MOST:]}


def text(summary: dict) -> str:
    """Return a summary as its file has it: one entry in a line, so that it can be read through."""
    lines = [f'{{"schema": {summary["schema"]},']
    lines += [f' "{name}": {json.dumps(summary[name])},' for name in ("as", "time")]
    for name in ("entries", "runs"):
        rows = ",\n".join(f"  {json.dumps(row)}" for row in summary[name])
        lines.append(f' "{name}": [{rows and chr(10)}{rows}]' + "," * (name == "entries"))
    return "\n".join(lines) + "}\n"


def _predicted(entry, key):
    return [{"name": name, "predicted": value} for name, value in entry["value"].items()]


def _scored(entry, key):
    return entry["value"]  # rows; `entry_of` leaves out those without a number, and the words


def _judged(entry, key):
    found = (entry["value"].get("comparison") or {}) | entry["value"]
    return [{name: found.get(name) for name in FIELDS["verdicts"]}]


def _hinted(entry, key):
    step, hint, *_ = key.split("/")  # behind them a digest of the trainer
    return [{"key": step, "hint": hint, "rung": entry["value"]}]


_FACTS = {  # for each kind, what to take from an entry of progress.json
    "predictions": _predicted,
    "scores": _scored,
    "verdicts": _judged,
    "hints": _hinted,
    **dict.fromkeys(("quizzes", "mysteries", "answers"), lambda entry, key: [entry]),
}


def _run(submitted, status):
    found = status | {"submitted": submitted}
    times = {name: found.get(name) for name in ("submitted", "started", "ended")}
    return {"state": found["state"]} | {
        name: at and datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
        for name, at in times.items()
    }


# What an instructor reads ------------------------------------------------------------------------


def parse(content: bytes) -> tuple[dict, int]:
    """Return a summary, and how many of its entries and runs were left out. Raises ValueError."""
    found = _fitting(table_of(content), FILE)
    if found is None:
        raise ValueError("not a summary")
    entries = [made for row in found["entries"][-MOST:] if (made := entry_of(row))]
    runs = [made for row in found["runs"][-MOST:] if (made := run_of(row))]
    left_out = len(found["entries"]) + len(found["runs"]) - len(entries) - len(runs)
    return found | {"entries": entries, "runs": runs}, left_out
