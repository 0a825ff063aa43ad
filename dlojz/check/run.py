"""The runs of a plan: found among those of earlier checks, or submitted."""

import hashlib
import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

from dlojz import launch, presets
from dlojz.check import judge, plan
from dlojz.check.exercises import FASTER
from dlojz.launch import series

IMPORTS_S = 6  # of importing torch: once in a job, however many runs its series has
CHECK_FILE = "check.json"  # in a job's folder: which check it belongs to
# Rooms whose code decides what a run logs: runs of another version of them are not reused.
MEASURING = ("jobs", "machine", "runs", "training")


def finished(entries, exercise, job) -> dict[str, Path]:
    """Return the folder of each entry's finished run; submit those that no earlier check has run.

    If the first of them show that something is wrong, do not wait for the other pairs.
    """
    pair = b"".join(e.trainer.read_bytes() for e in entries if e.name in ("before-1", "after-1"))
    keys = {entry.name: _key(entry, pair, job.info["n_gpu"]) for entry in entries}
    while missing := {n: k for n, k in keys.items() if k not in (known := _known_runs())}:
        if wrong := _wrong_already(exercise, keys):
            return wrong
        active = _active_check(missing.values())
        if active is None:
            places = {n: known.get(k, f"{{job}}/{n}") for n, k in keys.items()}
            wanted = [_placed(e, places) for e in entries if e.name in missing]
            active = _submit(wanted, keys, exercise, job)
        if _wait(active, exercise, lambda: _wrong_already(exercise, keys)):
            continue
        known = _known_runs()
        if still := [n for n, k in missing.items() if k not in known]:
            raise plan.CheckError(
                f"the check's job ended without {', '.join(still)}: {active.explain()}"
            )
    return {name: known[key] for name, key in keys.items()}


def _placed(entry, places):
    """Return an entry whose replay knows where the run of the solution is."""
    if not entry.replay:
        return entry
    named = {f"{{{name}}}": str(place) for name, place in places.items()}
    flags = [named.get(flag, flag) for flag in entry.replay.flags]
    return replace(entry, replay=replace(entry.replay, flags=flags))


def _wrong_already(exercise, keys) -> dict[str, Path] | None:
    """Return the runs up to the first pair, if they already show that something is wrong.

    {} if all is right, or if there are no other pairs; None until all of them have finished.
    """
    first = {n: k for n, k in keys.items() if not re.fullmatch(r"(before|after)-(?!1$)\d+", n)}
    known = _known_runs()
    if not set(first.values()) <= set(known):
        return None
    if len(first) == len(keys):
        return {}
    folders = {name: known[key] for name, key in first.items()}
    findings = judge.judge(exercise, folders, timed=False).findings
    return folders if any(f.fails for f in findings if f.part != FASTER) else {}


def _key(entry, pair: bytes, n_gpu: int) -> str:
    """Return a key that is equal for interchangeable runs: same sources, flags, name and devices.

    pair: the sources of both sides; a run of a pair is compared with its partner only.
    """
    package = Path(__file__).parent.parent
    sources = sorted(f for room in MEASURING for f in (package / room).glob("*.py"))
    replay = [entry.replay] if entry.replay else []
    asked = [[list(e.flags), e.rehearse, e.audit] for e in (entry, *replay)]
    words = json.dumps([entry.name, asked, presets.gpus(), n_gpu])
    in_pair = entry.name.startswith(("before-", "after-"))
    parts = (pair if in_pair else b"", entry.trainer.read_bytes(), words.encode())
    return hashlib.sha256(b"\0".join([*parts, *(f.read_bytes() for f in sources)])).hexdigest()[:20]


def _checks():
    """Yield the jobs that checks submitted, with the key of each run."""
    for job in reversed(launch.jobs()):
        file = job.directory / CHECK_FILE
        if file.exists():
            yield job, json.loads(file.read_text())


def _known_runs() -> dict[str, Path]:
    """Return the finished runs of earlier checks, by key; the latest one counts."""
    known = {}
    for job, keys in _checks():
        for name, key in keys.items():
            folder = job.directory / name
            if (folder / "exit_code").exists():
                known.setdefault(key, folder)
    return known


def _active_check(missing):
    """Return a job of a check under way with all missing runs: another kernel submitted it."""
    for job, keys in _checks():
        if not job.state.final and set(missing) <= set(keys.values()):
            return job
    return None


def _submit(entries, keys, exercise, job):
    status = job.status
    each = max(2.0, status["ended"] - status["started"] - IMPORTS_S)
    about = IMPORTS_S + each * len(entries)
    text = f"{about / 60:.0f} minutes" if about > 100 else f"{about:.0f} s"
    print(f"check {exercise.step}: {len(entries)} runs, about {text}", file=output(), flush=True)
    hours = 1 + int(3 * about // 3600)
    files = {CHECK_FILE: json.dumps({e.name: keys[e.name] for e in entries}).encode()}
    name = f"check-{exercise.step}"
    request = replace(launch.request_of(job), name=name, time_max_s=3600 * hours, files=files)
    return series.submit(entries, request)


def output():
    return (
        sys.stdout if _in_a_notebook() else sys.stderr
    )  # in a terminal, stdout is for the verdict


def _in_a_notebook():
    """Return whether this is a notebook's kernel, without importing IPython."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def _wait(job, exercise, enough) -> bool:
    """Wait until the job has ended; return True if it was cancelled because `enough()` held.

    enough: returns None until it can tell; after that it is not called again.
    """
    from tqdm.auto import tqdm

    total, silent = len(series.folders(job)), False if _in_a_notebook() else None
    with tqdm(total=total, desc=exercise.step, unit="run", leave=False, disable=silent) as bar:
        answer = None
        while not job.state.final:
            if series.finished(job) > bar.n:
                bar.update(series.finished(job) - bar.n)
                if answer is None and (answer := enough()):
                    job.cancel("ended early by the check: the first runs tell enough")
            time.sleep(0.2)
        bar.update(series.finished(job) - bar.n)
        if answer:
            bar.total = bar.n  # no more runs are wanted: a bar that is not full ends in red
    return bool(answer)
