"""The actual resources of the tasks of a Slurm job, written by each task to its own file.

    srun python -P -m dlojz.chapters.n00c_cluster.seen FOLDER   # in a batch script, on a cluster
    python -m dlojz.chapters.n00c_cluster.seen FOLDER           # by hand: one task, this process

A batch script holds the request; the result shows in the task: the cores that it may use, the GPUs
that it sees, its variables. The step's number of cores is Slurm's, because not every cluster binds
its tasks. A file, `seen-3.json` of task 3:

    {"task": 3, "local": 1, "tasks": 4, "node": "node2", "cores": [4, 5], "host_cores": 64,
     "step_cores": 8, "gpus": "0,1", "began_s": 1.5, "environment": {"MASTER_ADDR": "node1"},
     "heard_s": 0.1, "ended": true}

`heard_s`: the time until the batch script reacted to a signal, if one was sent. `ended` is written
last: a task that was killed has none.
"""

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from dlojz.course import write_atomically

# The variables that a batch script sets for its tasks, and those that Slurm sets.
VARIABLES = (
    *("MASTER_ADDR", "OMP_NUM_THREADS", "SLURM_EXPORT_ENV", "SLURM_CPUS_PER_TASK"),
    *("SLURM_CPUS_ON_NODE", "SLURM_JOB_CPUS_PER_NODE", "SLURM_GPUS_ON_NODE", "SLURM_JOB_NODELIST"),
    *("SLURM_JOB_NUM_NODES", "SLURM_RESTART_COUNT", "SLURM_CPU_BIND_LIST"),
)
PATIENCE_S = 5.0  # the longest wait for a batch script's reaction to a signal


@dataclass(frozen=True)
class Task:
    """The cores, GPUs and variables of one task."""

    task: int
    local: int  # among the tasks of its node
    tasks: int
    node: str
    cores: list[int]  # the task's, by its affinity
    host_cores: int
    step_cores: int | None  # of all tasks together, by Slurm; None if unknown
    gpus: str | None  # CUDA_VISIBLE_DEVICES, None if it is not set
    began_s: float  # in seconds since 1970
    environment: dict[str, str] = field(default_factory=dict)
    heard_s: float | None = None
    ended: bool = False

    @property
    def gpu_list(self) -> list[str]:
        return [gpu for gpu in (self.gpus or "").split(",") if gpu]

    @property
    def bound(self) -> bool:
        """Return whether this task may use only some of the cores, and they are real."""
        claimed = int(self.environment.get("SLURM_CPUS_ON_NODE") or 0)
        return len(self.cores) < self.host_cores and claimed <= self.host_cores


def share(task: Task) -> float:
    """Return the number of cores for this task, its own or shared."""
    return task.step_cores / task.tasks if task.step_cores else len(task.cores)


def own_cores(task: Task, tasks: list[Task]) -> int | None:
    """Return the number of cores that only this task may use; None if tasks are not bound."""
    if not task.bound:
        return None
    others = {c for t in tasks if t.node == task.node and t.task != task.task for c in t.cores}
    return len(set(task.cores) - others)


def read(folder: Path) -> list[Task]:
    """Return the tasks of a job, by number; [] if none began."""
    files = Path(folder).glob("seen-*.json")
    return sorted((Task(**json.loads(f.read_bytes())) for f in files), key=lambda task: task.task)


def look() -> Task:
    """Return the present task."""
    env = os.environ
    return Task(
        # torchrun's names come first: each of its agents is one of Slurm's tasks.
        task=int(env.get("RANK") or env.get("SLURM_PROCID") or 0),
        local=int(env.get("LOCAL_RANK") or env.get("SLURM_LOCALID") or 0),
        tasks=int(env.get("WORLD_SIZE") or env.get("SLURM_STEP_NUM_TASKS") or 1),
        node=env.get("SLURMD_NODENAME") or socket.gethostname(),
        cores=sorted(os.sched_getaffinity(0)),
        host_cores=os.cpu_count() or 1,
        step_cores=step_cores(),
        gpus=env.get("CUDA_VISIBLE_DEVICES", env.get("ROCR_VISIBLE_DEVICES")),
        began_s=time.time(),
        environment={k: v for k, v in sorted(env.items()) if k in VARIABLES},
    )


def step_cores() -> int | None:
    """Return the number of cores of this step, by Slurm; None if unknown."""
    step = "{SLURM_JOB_ID}.{SLURM_STEP_ID}"
    if not shutil.which("scontrol") or "SLURM_STEP_ID" not in os.environ:
        return None
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["scontrol", "-o", "show", "step", step.format_map(os.environ)],
            capture_output=True,
            encoding="utf-8",
            timeout=20,
            check=True,
        )
        if found := re.search(r"\bCPUs=(\d+)", done.stdout):
            return int(found[1])
    return None


def hear(file: Path, tasks: int) -> float | None:
    """Signal the batch script, as Slurm does near the time limit, and wait for its file.

    Return the seconds that it took; None if the script did not react while the tasks ran. The
    signal is sent once all tasks have begun, because the script may end them.
    """
    _until(lambda: len(read(file.parent)) >= tasks)
    started = time.monotonic()
    if os.environ.get("SLURM_PROCID") == "0":
        job = os.environ["SLURM_JOB_ID"]
        subprocess.run(["scancel", "--batch", "--signal=USR1", job], timeout=20, check=False)
    return round(time.monotonic() - started, 2) if _until(file.exists) else None


def _until(true) -> bool:
    """Return whether `true()` holds in time."""
    end = time.monotonic() + PATIENCE_S
    while not (found := true()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def main(argv=None):
    """Write this task to its file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="existing folder to write into")
    parser.add_argument("--hears", metavar="FILE", help="signal the script, and wait for its FILE")
    parser.add_argument("--fails", type=int, metavar="TASK", help="this task ends with code 7")
    parser.add_argument("--seconds", type=float, default=0.0, help="seconds to stay")
    args = parser.parse_args(argv)
    if not args.folder.is_dir():
        parser.error(f"{args.folder} is not a folder: expected that of a run, such as runs/0001")
    found = vars(look())
    file = args.folder / f"seen-{found['task']}.json"
    write_atomically(file, json.dumps(found))
    print(f"task {found['task']} on {found['node']}")
    if found["task"] == args.fails:
        sys.exit(7)
    if args.hears:
        found["heard_s"] = hear(args.folder / args.hears, found["tasks"])
        time.sleep(1)  # for a script that ends too early, and its tasks with it
    time.sleep(args.seconds)
    write_atomically(file, json.dumps(found | {"ended": True}))


if __name__ == "__main__":
    main()
