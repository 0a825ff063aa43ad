"""Run several trainings one after the other in one job: the same devices, the same hour.

    job = series.submit([Entry("before-1", solution, flags), Entry("after-1", mine, flags)], "pair")
    series.folders(job)         # {"before-1": runs/0007/before-1, ...}: each with a log of its own

Each training is a process of its own, forked from one that has already imported torch: a run then
costs its computing, and not the seconds of its imports. A training that fails, or is out of memory,
does not end the series. With several processes (n_gpu) each runs this program: they go from one
training to the next together, and one that fails ends its training in all of them.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dlojz import course, forks, idr_torch, launch, local

PLAN = "plan.json"
POLL_S = 0.02  # between looks at a child
GRACE_S = 3.0  # for a process whose partner has failed


@dataclass(frozen=True)
class Entry:
    """One training of a series."""

    name: str  # of its folder
    trainer: Path
    flags: Sequence[str]  # in them, {run} is the folder of this training
    rehearse: bool = False  # on the meta device: tensors with shapes and devices, without values


def submit(
    entries: Sequence[Entry],
    name: str,
    time_max: str = "01:00:00",
    files: Mapping[str, bytes] | None = None,
    n_gpu: int = 1,
) -> launch.Job:
    """Submit the trainings as one job, with copies of the trainers as they are now, and `files`.

    n_gpu: GPUs, and processes of each training.
    """
    sources = {str(e.trainer): f"source-{i}.py" for i, e in enumerate(entries)}
    files = dict(files or {})
    files |= {copy: Path(trainer).read_bytes() for trainer, copy in sources.items()}
    plan = [asdict(e) | {"trainer": sources[str(e.trainer)]} for e in entries]
    files[PLAN] = json.dumps(plan, indent=1).encode()
    return launch.submit((__file__,), n_gpu, name=name, time_max=time_max, files=files)


def folders(job: launch.Job) -> dict[str, Path]:
    """The folder of each training of a series, by name and in order; not all may exist yet."""
    return {e["name"]: job.directory / e["name"] for e in _plan(job.directory)}


def finished(job: launch.Job) -> int:
    """How many trainings of the series have ended, well or badly."""
    return sum((folder / "exit_code").exists() for folder in folders(job).values())


def as_they_end(job: launch.Job) -> Iterator[tuple[str, Path]]:
    """Name and folder of each training of a series, in order, as soon as it has ended.

    Raises RuntimeError, with what the job said, if the job ends before one of them.
    """
    for name, folder in folders(job).items():
        while not (folder / "exit_code").exists():
            if job.state.final and not (folder / "exit_code").exists():
                raise RuntimeError(f"the series ended before {name}: {job.explain()}")
            time.sleep(0.2)
        yield name, folder


def _plan(folder):
    return json.loads((folder / PLAN).read_text())


def main():
    job = Path(os.environ["DLOJZ_RUN"])
    forks.prepare()  # here, once, for all of them
    for entry in _plan(job):
        folder = job / entry["name"]
        if (folder / "exit_code").exists():  # the job was stopped, and goes on
            continue
        folder.mkdir(exist_ok=True)
        if idr_torch.size > 1:
            _meet(folder)
        child = os.fork()
        if child == 0:
            _become(job, folder, entry)
            return
        course.write_atomically(_code_of(folder, idr_torch.rank), f"{_wait(child, folder)}\n")
        if idr_torch.is_master:
            code = _all_codes(folder)
            course.write_atomically(folder / "exit_code", f"{code}\n")
            print(f"{entry['name']}: exit code {code}", flush=True)
        while not (folder / "exit_code").exists():  # the next training begins in all together
            time.sleep(POLL_S)


def _meet(folder):
    """Tell all processes a free port of the first one, for the store of the next training.

    Not torchrun's store, which outlives a training: the next would find the addresses of the last.
    """
    file = folder / f"port.{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    if idr_torch.is_master:
        with socket.socket() as free:
            free.bind(("", 0))
            course.write_atomically(file, f"{free.getsockname()[1]}\n")
    while not file.exists():
        time.sleep(POLL_S)
    os.environ["MASTER_PORT"] = file.read_text().strip()
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"


def _code_of(folder, rank):
    return folder / f"exit_code.rank{rank}"


def _wait(child, folder) -> int:
    """The exit code of this process's part; ended if another part has failed: it would wait."""
    ends = None
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if ends is None and any(_failed_elsewhere(folder)):
            ends = time.monotonic() + GRACE_S  # it may see by itself, and say so
        if ends and time.monotonic() > ends:
            os.kill(child, signal.SIGKILL)
        time.sleep(POLL_S)


def _failed_elsewhere(folder):
    for rank in range(idr_torch.size):
        file = _code_of(folder, rank)
        if rank != idr_torch.rank and file.exists():
            yield int(file.read_text()) != 0


def _all_codes(folder) -> int:
    """The first exit code that is not 0, when all processes have theirs."""
    files = [_code_of(folder, rank) for rank in range(idr_torch.size)]
    while not all(file.exists() for file in files):
        time.sleep(POLL_S)
    return next((c for c in (int(f.read_text()) for f in files) if c), 0)


def _become(job, folder, entry):
    """Be this training, from here to the end of the process."""
    ctypes.CDLL(None).prctl(local.PR_SET_PDEATHSIG, signal.SIGKILL)  # end with the series
    for stream, file in ((sys.stdout, "stdout.txt"), (sys.stderr, "stderr.txt")):
        stream.flush()
        descriptor = os.open(folder / file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, stream.fileno())
    os.environ["DLOJZ_RUN"] = str(folder)
    if entry["rehearse"]:
        os.environ["DLOJZ_DEVICE"] = "meta"
    trainer = folder / "trainer.py"
    mine = trainer.with_name(f".trainer.py.{os.getpid()}")  # each process brings the same
    mine.write_bytes((job / entry["trainer"]).read_bytes())
    mine.replace(trainer)
    forks.run_script(str(trainer), [f.replace("{run}", str(folder)) for f in entry["flags"]])


if __name__ == "__main__":
    main()
