"""The stacks of a job's processes, from outside: they show what a job that hangs waits for.

py-spy reads the Python stacks of a process without its help. On a cluster, `slurm/job.sbatch` runs
`python -m dlojz.jobs.stacks RUN` on each node shortly before the time limit.
"""

import json
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from dlojz.course import write_atomically
from dlojz.jobs import processes

# In the run's folder: all stacks, here and of a node, and the lines that sum up the nodes'.
FILE, NODE_FILE, STOOD = "stacks.txt", "stacks.{}.txt", "stood.txt"
MOST_S = 10  # for all processes together; one takes some hundredths of a second
EXCHANGES = "torch/distributed/"  # whose innermost function names the collective
WORKER, FETCHES = "_worker_loop", "fetch"  # functions of a loader's worker, which else is idle
TROUBLE = (processes.ProgramError, OSError, ValueError, KeyError, TypeError)
MAIN = ("MainThread", None)  # a program that does not import threading names none
WHOSE = "a loader's worker of "


def keep(run: Path, pids: Iterable[int], file: str = FILE) -> str:
    """Write the stacks of these processes into the run's folder; return where they stand.

    That is one line, which says why if they could not be read.
    """
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    if not (spy := shutil.which("py-spy", path=path)):
        return "where it stood is not known: `pip install py-spy`, and the next time it is"
    threads, trouble, deadline = [], "no process of Python was left", time.monotonic() + MOST_S
    for pid in sorted(pids):
        try:
            dump = processes.ask(spy, "dump", "--json", "-p", str(pid), timeout_s=5)
            threads += [_known(thread) for thread in json.loads(dump)]
        except TROUBLE as error:  # it has ended, is another program, or py-spy is
            trouble = str(error).partition("\n")[0] or trouble
        if time.monotonic() > deadline:
            break
    with suppress(OSError):  # a full disk
        write_atomically(run / file, "\n".join(map(_text, threads)))
    stand = where(run, threads, {t["pid"]: rank_of(t["pid"]) for t in threads})
    if "ermission" in trouble:  # Yama's, which allows it to ancestors alone
        trouble += "; `sudo sysctl kernel.yama.ptrace_scope=0` lets py-spy look"
    return stand or f"where it stood is not known: {trouble}"


def where(run: Path, threads: list[dict], ranks: dict[int, int | None]) -> str:
    """Return in one line where the main threads of a job's processes stand.

    threads: as py-spy dumps them, the innermost frame first. ranks: of each process; None for one
    that only launches others.
    """
    places = {}
    for thread in threads:
        frames, rank = thread["frames"], ranks[thread["pid"]]
        names = {frame["name"].rpartition(".")[2] for frame in frames}
        is_worker, is_idle = WORKER in names, WORKER in names and FETCHES not in names
        if thread["thread_name"] in MAIN and frames and rank is not None and not is_idle:
            places.setdefault((_place(run, frames), is_worker), {})[rank] = True
    said = []
    for (place, is_worker), whose in places.items():
        who = f"process{'es' * (len(whose) > 1)} {', '.join(map(str, sorted(whose)))}"
        said.append(f"{WHOSE * is_worker}{who}: {place}")
    return "; ".join(said)


def _known(thread):
    """Return the known fields of a thread; raise KeyError or TypeError if it is no thread."""
    names = ("name", "filename", "short_filename", "line")
    frames = [{name: frame[name] for name in names} for frame in thread["frames"]]
    return {"frames": frames} | {name: thread[name] for name in ("pid", "thread_name")}


def rank_of(pid: int) -> int | None:
    """Return the rank of a process, from its environment; None for a launcher's own process."""
    about = processes.PROC / str(pid)
    try:
        command, variables = (about / "cmdline").read_bytes(), (about / "environ").read_bytes()
    except OSError:
        return None
    if b"torch.distributed.run" in command:
        return None
    rank = re.search(rb"(?:^|\0)(?:RANK|SLURM_PROCID)=(\d+)", variables)
    return int(rank[1]) if rank else 0


def _place(run, frames):
    """Return the trainer's line at which a stack stands, and the collective, if it is in one."""
    own = next((f for f in frames if f["filename"].startswith(f"{run}/")), None)
    if own is None:
        return f"in {frames[0]['name']} ({frames[0]['short_filename']}:{frames[0]['line']})"
    try:
        lines = Path(own["filename"]).read_text(errors="replace", encoding="utf-8").splitlines()
        place = f"line {own['line']} `{lines[own['line'] - 1].strip()}`"
    except (OSError, IndexError):
        place = f"line {own['line']} of {own['name']}"
    exchange = next((f["name"] for f in frames if EXCHANGES in f["filename"]), None)
    return place + (f", in {exchange}" if exchange else "")


def _text(thread):
    lines = [f"  {f['name']} ({f['filename']}:{f['line']})" for f in thread["frames"]]
    return "\n".join([f"process {thread['pid']}, {thread['thread_name']}", *lines, ""])


def main(run: str):
    """Print the places of this node's processes of the run in this folder."""
    mark = f"DLOJZ_RUN={run}"
    print(keep(Path(run), processes.with_variable(mark), NODE_FILE.format(socket.gethostname())))


if __name__ == "__main__":
    main(sys.argv[1])
