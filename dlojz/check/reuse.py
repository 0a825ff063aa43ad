"""Runs of earlier checks: which of them are as good as those of a plan."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

from dlojz import course, launch
from dlojz.check.ending import PAIR, EndedRun, Role
from dlojz.check.plan import Plan, hardware_of
from dlojz.course import presets
from dlojz.launch import series

CHECK_FILE = "check.json"  # in a job's folder: the check that it belongs to
# The code that measures: a run that older code has measured is made again.
ROOMS = ("jobs", "machine", "runs", "traces", "training", "watch")
MEASURING = (
    "course/__init__.py",
    "course/files.py",
    "idr_torch.py",
    *(f"{room}/*.py" for room in ROOMS),
)


def keys_of(plan: Plan) -> dict[str, str]:
    """Return a key for each run, equal for interchangeable runs.

    It holds the sources, flags, name, devices and kind of node, and the code that measures.
    """
    texts = {trainer: _text(trainer) for trainer in {entry.trainer for entry in plan.entries}}
    first = (e for e in plan.entries if e.role in PAIR and e.number == 1)
    pair = b"".join(texts[entry.trainer] for entry in first)
    return {entry.name: _key(entry, texts[entry.trainer], pair, plan) for entry in plan.entries}


def _text(trainer) -> bytes:
    """Return the sources of a trainer and of the modules beside it, with their paths."""
    source, *modules = launch.sources(trainer).items()
    return b"\0".join([source[1], *(b"\0".join((path.encode(), text)) for path, text in modules)])


def _key(entry, text: bytes, pair: bytes, plan) -> str:
    """Return the key of a run of a trainer with this text.

    pair: the texts of both sides; a run of a pair is compared with its partner only.
    """
    request = plan.request
    where = [launch.launcher().name, request.n_gpu, request.account, request.module]
    where += [*plan.hardware, bool(presets.gpus()), str(course.data_folder())]
    asked = [
        [list(e.flags), e.rehearse, e.audit, Path(e.images).name, e.fresh]
        for e in (entry, entry.replay)
        if e
    ]
    words = json.dumps([entry.name, entry.reference, asked, where])
    parts = (pair if entry.role in PAIR else b"", text, words.encode(), _measuring())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]


@cache
def _measuring(package: Path = Path(__file__).parent.parent) -> bytes:
    """Return a digest of the code that measures, in the package that is installed here."""
    sources = sorted(file for pattern in MEASURING for file in package.glob(pattern))
    found = hashlib.sha256(b"\0".join(file.read_bytes() for file in sources))
    for library in ("torch", "torchvision"):
        try:
            found.update(metadata.version(library).encode())
        except metadata.PackageNotFoundError:  # a login node
            found.update(b"unknown")
    return found.digest()


def _checks() -> Iterator[tuple[launch.Job, dict[str, str]]]:
    """Yield the jobs of checks, newest first, with the key of each run."""
    for job in reversed(launch.jobs()):
        try:
            keys = course.read_table(job.directory / CHECK_FILE)
        except course.FileError:  # a torn write: none of its runs is reused
            continue
        if keys:
            yield job, keys


def known(plan: Plan, trainer: str = "dlojz.py") -> dict[str, EndedRun]:
    """Return the completed runs of earlier checks, by name; the latest one counts."""
    wanted, found = _by_key(plan, keys_of(plan)), {}
    for job, keys in _checks():
        for own, key in keys.items():
            entry = wanted.get(key)
            if entry and entry.name not in found:
                run = EndedRun(job.directory / own, entry, trainer)
                if _is_reusable(run, plan.hardware):
                    found[entry.name] = run
    return found


def _by_key(plan, keys) -> dict[str, series.Entry]:
    return {keys[entry.name]: entry for entry in plan.entries}


def _is_reusable(run, hardware) -> bool:
    """Return whether a run and its replay completed, on the job's hardware."""
    if run.replay.folder.exists() and not run.replay.end.completed:
        return False
    return run.end.completed and same_hardware(hardware_of(run.log), hardware)


def same_hardware(ran: tuple[str, str], wanted: tuple[str, str]) -> bool:
    """Return whether the GPUs are the same; unless both have one, whether the processors are."""
    return ran[1] == wanted[1] if ran[1] and wanted[1] else ran[0] == wanted[0]


def made(job, plan, keys, found: dict[str, EndedRun], trainer):
    """Add the runs of this job that have ended, in any way, to `found`."""
    wanted = _by_key(plan, keys)
    for own, key in course.read_table(job.directory / CHECK_FILE).items():
        folder, entry = job.directory / own, wanted.get(key)
        if entry and (folder / "exit_code").exists():
            found.setdefault(entry.name, EndedRun(folder, entry, trainer))


def forget(plan: Plan):
    """Let the next check run the pairs of this plan again: the machine may have been disturbed."""
    keys = keys_of(plan)
    pairs = {keys[entry.name] for entry in plan.entries if entry.role in PAIR}
    for job, known in _checks():
        kept = {name: key for name, key in known.items() if key not in pairs}
        if kept != known:
            course.write_atomically(job.directory / CHECK_FILE, json.dumps(kept))


def under_way(plan: Plan, keys: Mapping[str, str], missing) -> launch.Job | None:
    """Return a job of a check of this trainer that makes all missing runs.

    Another kernel submitted it, or its check was interrupted. A job that checks another trainer may
    end early, before it makes these runs.
    """
    own = {keys[entry.name] for entry in plan.entries if entry.role == Role.YOURS}
    for job, known in _checks():
        makes = set(known.values())
        if not job.state.final and makes & own and set(missing) <= makes:
            return job
    return None
