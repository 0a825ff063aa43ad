"""Has the runs of a plan made, or finds them among those that were made before."""

import hashlib
import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

from dlojz import launch, presets
from dlojz.check import judge, plan
from dlojz.launch import series

IMPORTS_S = 6  # of a job, which the runs of a series do not pay again
CHECK_FILE = "check.json"  # in a job's folder: which check it belongs to
# Rooms whose code decides what a run logs: runs of another version of it are not used again.
MEASURING = ("jobs", "machine", "runs", "training")


def finished(entries, exercise, job) -> dict[str, Path]:
    """The folder of each entry's run, finished; submits those that no earlier check has run.

    Where the first of them show that something is wrong, the other pairs are not waited for.
    """
    pair = b"".join(e.trainer.read_bytes() for e in entries if e.name in ("before-1", "after-1"))
    keys = {entry.name: _key(entry, pair, job.info["n_gpu"]) for entry in entries}
    while missing := {n: k for n, k in keys.items() if k not in (known := _known_runs())}:
        if wrong := _wrong_already(exercise, keys):
            return wrong
        active = _active_check(missing.values())
        if active is None:
            wanted = [e for e in entries if e.name in missing]
            active = _submit(wanted, keys, exercise, job)
        if _wait(active, exercise, lambda: _wrong_already(exercise, keys)):
            continue
        known = _known_runs()
        if still := [n for n, k in missing.items() if k not in known]:
            raise plan.CheckError(
                f"the check's job ended without {', '.join(still)}: {active.explain()}"
            )
    return {name: known[key] for name, key in keys.items()}


def _wrong_already(exercise, keys) -> dict[str, Path] | None:
    """The runs up to the first pair, if they show something wrong without the other pairs.

    {} if all is right, or if there are no other pairs; None while one of them is not finished.
    """
    first = {n: k for n, k in keys.items() if not re.fullmatch(r"(before|after)-(?!1$)\d+", n)}
    known = _known_runs()
    if not set(first.values()) <= set(known):
        return None
    if len(first) == len(keys):
        return {}
    folders = {name: known[key] for name, key in first.items()}
    findings = judge.judge(exercise, folders, timed=False).findings
    return folders if any(finding.ok is False for finding in findings) else {}


def _key(entry, pair: bytes, n_gpu: int) -> str:
    """Equal for runs that may stand for each other: same sources, flags, name and devices.

    pair: the sources of both sides; what ran in a pair is compared with its partner only.
    """
    package = Path(__file__).parent.parent
    sources = sorted(f for room in MEASURING for f in (package / room).glob("*.py"))
    words = json.dumps([entry.name, list(entry.flags), entry.rehearse, presets.gpus(), n_gpu])
    in_pair = entry.name.startswith(("before-", "after-"))
    parts = (pair if in_pair else b"", entry.trainer.read_bytes(), words.encode())
    return hashlib.sha256(b"\0".join([*parts, *(f.read_bytes() for f in sources)])).hexdigest()[:20]


def _checks():
    """The jobs that checks submitted, with the key of each run."""
    for job in reversed(launch.jobs()):
        file = job.directory / CHECK_FILE
        if file.exists():
            yield job, json.loads(file.read_text())


def _known_runs() -> dict[str, Path]:
    """The runs of earlier checks that are finished, by key; the latest first."""
    known = {}
    for job, keys in _checks():
        for name, key in keys.items():
            folder = job.directory / name
            if (folder / "exit_code").exists():
                known.setdefault(key, folder)
    return known


def _active_check(missing):
    """A check under way that will bring all that is missing: another kernel submitted it."""
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
    return sys.stdout if _in_a_notebook() else sys.stderr  # a terminal's stdout is for the verdict


def _in_a_notebook():
    """Is this a notebook's kernel? Without importing IPython for it."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def _wait(job, exercise, enough) -> bool:
    """Wait for the end of the job; True if it was ended because `enough()` was known.

    enough: None until it can tell; then it is asked no more.
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
    return bool(answer)
