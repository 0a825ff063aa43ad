"""Series: several runs one after the other in one job, on the same devices in the same hour.

Small ones may go on beside others. The runs after the last of these are alone, for their timing.

    entries = [Entry("before-1", solution, flags), Entry("after-1", mine, flags)]
    job = series.submit(entries, Request(name="pair"))
    series.folders(job)         # {"before-1": runs/0007/before-1, ...}: each with a log of its own

The program that the job runs is `dlojz.jobs.several`.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from dlojz.course import FileError, read_small
from dlojz.jobs import several
from dlojz.launch import beside
from dlojz.launch.job import Job
from dlojz.launch.request import Request, send

IMAGES = several.IMAGES  # in a run's folder: its own copy of some images
REPLAY = several.REPLAY  # in a run's folder: that of the run that follows it
TOO_LONG = several.TOO_LONG


@dataclass(frozen=True)
class Entry:
    """One run of a series."""

    name: str  # its folder's
    trainer: Path
    flags: Sequence[str]  # in them, {run} is the folder of this run, {job} that of the job
    rehearse: bool = False  # on the meta device: tensors with shapes and devices, without values
    audit: dict | None = None  # what a check keeps of it: see `dlojz.watch.auditor.begin`
    replay: "Entry | None" = None  # a run that follows, if this one succeeds, in its folder
    environment: Mapping[str, str] = field(default_factory=dict)  # beside that of the job
    watch: bool = False  # whether our log is written of a program of any make
    fresh: bool = False  # a process of its own from the start, as a job's: it imports torch itself
    images: str = ""  # a folder of images, to be copied into the run's as IMAGES while it runs
    aside: bool = False  # small: it goes on beside those that are not
    most_s: float | None = None  # after these it is ended, and its stderr says where it stood
    # What the run is for, which of several, and the name of the run that it is compared with.
    role: str = ""
    number: int = 0
    reference: str = ""


def submit(entries: Sequence[Entry], request: Request) -> Job:
    """Submit the runs as one job, with copies of the trainers and their modules as they are now.

    request: all but the job's command. Its n_gpu is the number of GPUs, and processes, of each run.
    """
    every = [*entries, *(e.replay for e in entries if e.replay)]
    files, programs = {}, {}
    for i, (trainer, watch) in enumerate(dict.fromkeys((Path(e.trainer), e.watch) for e in every)):
        program = beside.program(trainer)
        program = beside.watched(program) if watch else program
        copies = {path: f"source-{i}.{j}" for j, path in enumerate(program.copies)}
        files |= {copies[path]: content for path, content in program.copies.items()}
        found = {"start": program.start, "copies": copies, "links": dict(program.links)}
        programs[trainer, watch] = found | {"folder": program.folder}
    plan = [_planned(e, programs) for e in entries]
    files[several.PLAN] = json.dumps(plan, indent=1).encode()
    program = (several.__file__,)
    (job,) = send([replace(request, command=program, files={**request.files, **files})])
    return job


def _planned(entry, programs):
    replay = entry.replay and _planned(entry.replay, programs)
    return asdict(entry) | {
        "trainer": programs[Path(entry.trainer), entry.watch],
        "replay": replay,
    }


def entries(job: Job) -> list[Entry]:
    """Return the runs of a series, in order, as the job holds them."""
    file = job.directory / several.PLAN
    try:
        return [Entry(**entry) for entry in json.loads(read_small(file))]
    except (FileError, RecursionError, TypeError, ValueError) as error:
        raise FileError(f"{file} can't be read, expected the runs of a series: {error}") from None


def folders(job: Job) -> dict[str, Path]:
    """Return the folder of each run of a series, by name and in order; some may not exist yet."""
    return {entry.name: job.directory / entry.name for entry in entries(job)}


def unfinished(job: Job) -> list[str]:
    """Return the names of the runs of the series that have not ended, in order."""
    return [name for name, folder in folders(job).items() if not (folder / "exit_code").exists()]


def as_they_end(job: Job) -> Iterator[tuple[str, Path]]:
    """Yield the name and folder of each run of a series, in order, as soon as it has ended.

    Raises RuntimeError, with the job's explanation, if the job ends before one of them.
    """
    for name, folder in folders(job).items():
        while not (folder / "exit_code").exists():
            if job.state.final and not (folder / "exit_code").exists():
                raise RuntimeError(f"the series ended before {name}: {job.explain()}")
            time.sleep(0.2)
        yield name, folder
