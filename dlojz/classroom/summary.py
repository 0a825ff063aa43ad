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
from contextlib import suppress
from datetime import UTC, datetime

from dlojz.course import table_of

SCHEMA = 1
MOST = 400  # entries or runs in a file, the newest; a trainee of the whole course has about 300
LARGEST = 256 * 1024  # bytes of a file that is read
PSEUDONYM = re.compile(r"(?!.*  )[A-Za-z0-9][A-Za-z0-9 ._-]{0,23}(?<! )")  # blanks within only
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _-]{0,39}")  # no "/", so never a path
STATES = {"QUEUED", "RUNNING", "COMPLETED", "FAILED", "OUT_OF_MEMORY", "CANCELLED", "TIMEOUT"}
STATES |= {"NODE_FAIL", "PREEMPTED"}


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


FIELDS = {  # what is shared of each kind, besides its time and its key
    "predictions": {"name": _is_name, "predicted": _is_number},
    "scores": {"name": _is_name, "predicted": _is_number, "measured": _is_number},
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
RUN = {
    "state": lambda value: isinstance(value, str) and value in STATES,
    **dict.fromkeys(("submitted", "started", "ended"), _or_none(_is_time)),
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
    kind = _get(found, "kind")
    fields = FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None or not _is_name(_get(found, "key")) or not _is_time(_get(found, "time")):
        return None
    if not all(has_form(found.get(name)) for name, has_form in fields.items()):
        return None
    return {name: found.get(name) for name in ("time", "kind", "key", *fields)}


def run_of(found) -> dict | None:
    """Return the fields that a run may have; None if it is none, or one has another form."""
    if not isinstance(found, dict):
        return None
    if not all(has_form(found.get(name)) for name, has_form in RUN.items()):
        return None
    return {name: found.get(name) for name in RUN}


def _get(found, name):
    return found.get(name) if isinstance(found, dict) else None


# What a trainee has ------------------------------------------------------------------------------


def of(kept: dict, jobs: Iterable[tuple[dict, dict]], pseudonym: str) -> dict:
    """Return the shared facts. kept: progress.json; jobs: job.json and the status of each job."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    entries = [
        made
        for kind in _SPLIT
        for key, given in _of_type(dict, kept.get(kind)).items()
        for one in _of_type(list, given)
        for made in _entries(kind, key, one)
    ]
    entries.sort(key=lambda entry: seconds(entry["time"]))
    runs = [made for info, status in jobs if (made := run_of(_run(info, status)))]
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


def _of_type(kind, found):
    """Return a part of progress.json; an empty one if that is damaged."""
    return found if isinstance(found, kind) else kind()


def _entries(kind, key, entry) -> list[dict]:
    """Return the shared facts of an entry of progress.json; none of a damaged one."""
    head = {"kind": kind, "key": key}
    with suppress(AttributeError, LookupError, TypeError, ValueError):
        rows = [head | {"time": entry["time"]} | row for row in _SPLIT[kind](key, entry)]
        return [made for row in rows if (made := entry_of(row))]
    return []


def _predicted(key, entry):
    return [{"name": name, "predicted": value} for name, value in entry["value"].items()]


def _scored(key, entry):
    return entry["value"]  # rows; `entry_of` leaves out those without a number, and the words


def _judged(key, entry):
    comparison = entry["value"].get("comparison") or {}
    speed = {name: comparison.get(name) for name in ("ratio", "low", "high")}
    return [{name: entry["value"].get(name) for name in ("passed", "hint")} | speed]


def _hinted(key, entry):
    step, hint, _ = key.split("/")  # the last is a digest of the trainer
    return [{"key": step, "hint": hint, "rung": entry["value"]}]


def _answered(key, entry):
    return [{"right": entry.get("right")}]


_SPLIT = {  # for each kind, what to take from an entry of progress.json
    "predictions": _predicted,
    "scores": _scored,
    "verdicts": _judged,
    "hints": _hinted,
    "quizzes": _answered,
    "mysteries": _answered,
    "answers": lambda key, entry: [{}],
}


def _run(info, status):
    """Return the shared facts of a job; None if its files are damaged."""
    times = {"submitted": info.get("submitted")}
    times |= {name: status.get(name) for name in ("started", "ended")}
    with suppress(TypeError, ValueError, OverflowError, OSError):
        return {"state": status.get("state")} | {
            name: datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds") if at else None
            for name, at in times.items()
        }


# What an instructor reads ------------------------------------------------------------------------


def parse(content: bytes) -> tuple[dict, int]:
    """Return a summary, and how many of its entries and runs were left out. Raises ValueError."""
    found = table_of(content)
    if found.get("schema") != SCHEMA:
        raise ValueError(f"no summary of schema {SCHEMA}")
    if not isinstance(found.get("as"), str) or not PSEUDONYM.fullmatch(found["as"]):
        raise ValueError("no pseudonym")
    lists = {name: found.get(name) for name in ("entries", "runs")}
    if not all(isinstance(rows, list) for rows in lists.values()) or not _is_time(
        found.get("time")
    ):
        raise ValueError("no lists, or no time")
    entries = [made for row in lists["entries"][-MOST:] if (made := entry_of(row))]
    runs = [made for row in lists["runs"][-MOST:] if (made := run_of(row))]
    left_out = sum(map(len, lists.values())) - len(entries) - len(runs)
    head = {name: found[name] for name in ("schema", "as", "time")}
    return head | {"entries": entries, "runs": runs}, left_out
