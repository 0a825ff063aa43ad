"""The record of a trainee's predictions, answers and verdicts, in progress.json.

from dlojz.course import progress; progress.overview()     # a table; `dlojz progress` in a terminal
"""

import json
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

from dlojz import course
from dlojz.course import MEND, FileError, course_root
from dlojz.table import Table

# The calls with which a notebook asks for something, and the kind of the answer.
KINDS = {"predict": "predictions", "check": "verdicts", "quiz": "quizzes", "accuse": "mysteries"}
SHARE_S = 60  # between two reports of a job that waits or runs
listeners: list[Callable[[], None]] = []  # `classroom` shares what is kept with the class
_shared = {}  # folder of a job: the state that was shared, and when
CALL = re.compile(rf"""^\s*(?:\w+ = |mysteries\.)?({"|".join(KINDS)})\(["']?([^"',)]+)""", re.M)


def file() -> Path:
    """Return the path of progress.json; a trainee's other records are beside it."""
    return Path(os.environ.get("DLOJZ_PROGRESS") or course_root() / "progress.json")


def load(path: Path | None = None) -> dict:
    """Return the record: {"predictions": {...}, "quizzes": {...}, ...}. Raises FileError."""
    path = path or file()
    return _checked(path, course.read_table(path, advice=MEND))


def change(path: Path, edit: Callable[[dict], object]) -> dict:
    """Change the content of a file by `edit`, under a lock; return the content.

    It does not wait for a stopped process that holds the lock. Once that continues, it starts over.
    """
    with course.needs_room(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with course.locked(path.with_suffix(".lock")):  # two notebooks may answer at once
        while True:
            before = _version(path)
            edit(kept := course.read_table(path, advice=MEND))
            text = json.dumps(kept, indent=1, allow_nan=False)  # `load` refuses NaN
            if _version(path) == before:
                course.write_atomically(path, text)
                return kept


def _version(path):
    with suppress(FileNotFoundError):
        found = path.stat()
        return found.st_ino, found.st_mtime_ns, found.st_size


def _is_number(value):
    return value is None or isinstance(value, int | float)


def _is_score(row):
    numbers = _is_number(row["predicted"]) and _is_number(row["measured"])
    return numbers and isinstance(row["word"], str) and "name" in row


FORMS = {  # of an entry, by kind, as the tables can show it
    "predictions": lambda e: all(map(_is_number, e["value"].values())),
    "scores": lambda e: all(map(_is_score, e["value"])),
    "verdicts": lambda e: isinstance(e["value"]["passed"], bool),
    "quizzes": lambda e: isinstance(e["value"], int),
    "mysteries": lambda e: isinstance(e["value"], str) and _is_number(e.get("of")),
    "hints": lambda e: isinstance(e["value"], int),
    "answers": lambda e: isinstance(e["value"], str),
}


def _checked(path, kept):
    """Return the record; raise FileError for a kind with an entry of another form."""
    for kind, fits in FORMS.items():
        try:
            lists = [*kept.get(kind, {}).values()]
            right = all(isinstance(entries, list) for entries in lists)
            right = right and all(fits(e) and _has_time(e) for entries in lists for e in entries)
        except (AttributeError, LookupError, TypeError, ValueError):
            right = False
        if not right:
            raise _damaged(path, kind)
    return kept


def _damaged(path, kind):
    return FileError(f"{path}: its {kind} are not as they were written: {MEND}")


def _has_time(entry):
    return entry.get("time") is None or datetime.fromisoformat(entry["time"])


def now() -> datetime:
    """Return the time, with its zone."""
    return datetime.now(UTC)


def keep(kind: str, key: str, value, **more):
    """Append `value` to the entries under kind and key, with the time.

    more: further fields of the entry, such as right=True for an answer.
    """
    entry = {"value": value, **more, "time": now().isoformat(timespec="seconds")}
    try:
        change(file(), lambda kept: kept.setdefault(kind, {}).setdefault(key, []).append(entry))
    except AttributeError:
        raise _damaged(file(), kind) from None
    share()


def share():
    """Notify the listeners of a change."""
    for listener in listeners:
        listener()


def share_state(job, state: str):
    """Share a job's state if it is new, and once a minute, so that a board shows waiting jobs."""
    before, when = _shared.get(job.directory, (None, 0.0))
    if state != before or time.monotonic() - when > SHARE_S:
        _shared[job.directory] = (state, time.monotonic())
        share()


def last(kind: str, key: str):
    """Return the last value kept under kind and key, or None."""
    entries = load().get(kind, {}).get(key)
    return entries[-1]["value"] if entries else None


def passed() -> dict[str, dict]:
    """Return the last verdict that passed, by step of the course."""
    verdicts = load().get("verdicts", {})
    return {
        step: entry["value"]
        for step, entries in verdicts.items()
        for entry in entries
        if entry["value"]["passed"]
    }


# Progress ---------------------------------------------------------------------------------------


def asked() -> list[tuple[str, str, str]]:
    """Return (notebook, kind, key) of each request in the notebooks of this course folder."""
    found = []
    for path in sorted((course_root() / "notebooks").glob("[0-9]*.ipynb")):
        try:
            cells = json.loads(course.read_small(path, course.LARGE))["cells"]
            code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a notebook ({error!r}): git checkout {path}") from None
        for call, key in CALL.findall("\n".join(code)):
            found.append((path.stem, KINDS[call], key))
    return list(dict.fromkeys(found))


def items() -> list[dict]:
    """Return each request with the trainee's answers, in JSON's types.

    done: a verdict passed, a prediction made, a quiz or a mystery answered correctly.
    """
    kept, found = load(), []
    for notebook, kind, key in asked():
        if kind == "mysteries":  # the notebook asks for them in a loop, without their names
            entries = {key: given for key, given in kept.get(kind, {}).items() if given}
        else:
            entries = {key: kept.get(kind, {}).get(key, [])}
        for name, given in entries.items() or [(None, [])]:
            last = given[-1] if given else {}
            item = {"notebook": notebook, "kind": kind, "key": name, "time": last.get("time")}
            facts, _ = _SHOWN[kind]
            found.append(item | facts(given, kept, name))
    return found


def _verdict_facts(given, kept, key):
    passed = [entry for entry in given if entry["value"]["passed"]]
    job = (passed or given or [{"value": {}}])[-1]["value"].get("job")
    return {"done": bool(passed), "attempts": len(given), "job": job}


def _prediction_facts(given, kept, key):
    values = given[-1]["value"] if given else {}
    values = {name: value for name, value in values.items() if value is not None}
    scores = kept.get("scores", {}).get(key, [])
    score = scores[-1]["value"] if scores else []
    return {"done": bool(values), "predicted": values, "score": score}


def _answer_facts(given, kept, key):
    right = [entry.get("right") for entry in given]  # None: an old entry, without this field
    of = given[-1].get("of") if given else None
    return {"done": True in right, "attempts": len(given), "first": right[:1] == [True], "of": of}


def overview() -> Table:
    """Return a table of completed and open requests, by notebook."""

    def place(item):
        return item["notebook"], [*_SHOWN].index(item["kind"]), item["kind"]

    rows, before = [], None
    for (notebook, _, kind), group in groupby(sorted(items(), key=place), key=place):
        _, rows_of = _SHOWN[kind]
        for row in rows_of([*group]):
            rows.append((notebook if notebook != before else "", *row))
            before = notebook
    head = ("notebook", "what", "done", "last", "left")
    return Table(head, rows, "<<<<<", f"no notebooks in {course_root() / 'notebooks'}")


def _verdict_rows(found):
    for item in found:
        word = "passed" if item["done"] else "not yet" if item["attempts"] else ""
        done = f"{word}, job {item['job']}" if item["job"] else word
        prepared = item["key"] in course.PREPARED  # shown by its whole name
        what = f"verdict {item['key']!r}" if prepared else "verdict"
        if file := course.BESIDE.get(item["key"]):
            what += f" with {file}"
        name = item["key"] if prepared else item["key"][:2]
        yield what, done, _when(item), "" if item["done"] else f"dlojz check {name}"


def _prediction_rows(found):
    for item in found:
        scores = [
            f"{s['name']} {s['predicted']:.3g}, {s.get('how', 'measured')} {s['measured']:.3g} "
            f"{'★' * s['word'].count('★')}".rstrip()
            for s in item["score"]
            if s["predicted"] is not None and s["measured"] is not None
        ]
        given = [f"{name} {value:.3g}, not measured" for name, value in item["predicted"].items()]
        left = "" if item["done"] else "your guess"
        for done in scores or given or [""]:
            yield f"prediction {item['key']!r}", done, _when(item), left


def _quiz_rows(found):
    yield "quizzes", _count(found, len(found)), _when(*found), _left(found)


def _mystery_rows(found):
    answered = [item for item in found if item["key"]]
    if not answered:
        yield "mysteries", "", "", "all"
        return
    of = answered[-1]["of"] or len(answered)
    left = ", ".join([*filter(None, [_left(answered)]), *_others(of - len(answered))])
    yield "mysteries", _count(answered, of), _when(*answered), left


def _count(found, of):
    done, firsts = (sum(item[name] for item in found) for name in ("done", "first"))
    return f"{done} of {of} right" + (f" ({firsts} at the first attempt)" if done else "")


def _left(found):
    """Return the open requests in a few words, so that a row fits a terminal."""
    keys = [item["key"] for item in found if not item["done"]]
    short = len(keys) <= 2 and len(", ".join(keys)) <= 28
    others = 0 if short else len(keys) - 1
    return ", ".join([*keys[: len(keys) - others], *_others(others)])


def _others(count):
    return [f"{count} more"] if count > 0 else []


_SHOWN = {  # of a kind: the facts of an item, and the rows of a notebook's items
    "verdicts": (_verdict_facts, _verdict_rows),
    "predictions": (_prediction_facts, _prediction_rows),
    "quizzes": (_answer_facts, _quiz_rows),
    "mysteries": (_answer_facts, _mystery_rows),
}


def _when(*found):
    times = [item["time"] for item in found if item["time"]]
    return f"{datetime.fromisoformat(max(times)).astimezone():%d %b %H:%M}" if times else ""
