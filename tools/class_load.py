"""Submit a job from many clones at once, as a class does, and count lost jobs and memory.

python tools/class_load.py --trainees 30

Each trainee has a course folder of their own, and all share one queue of this machine. The jobs
sleep, so only the launcher's own processes are measured, one for each job that waits or runs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import psutil

KEEPER = "dlojz.jobs.waiter"
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY"}
MOST_S = 600


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trainees", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=0.3, help="seconds that each job sleeps")
    args = parser.parse_args()
    if args.trainees < 1:
        parser.error(f"--trainees {args.trainees}: expected at least 1")
    with tempfile.TemporaryDirectory() as folder:
        clones = [made(Path(folder, f"trainee{i:02d}"), args.seconds) for i in range(args.trainees)]
        start = time.monotonic()
        submitted = [submit(clone, Path(folder, "queue")) for clone in clones]
        refused = sum(process.wait() != 0 for process in submitted)
        print(f"{args.trainees} submitted in {time.monotonic() - start:.1f} s, {refused} refused")
        most = {}
        while not set(Counter(map(state, clones))) <= ENDED and time.monotonic() - start < MOST_S:
            most = max(most, keepers(folder), key=lambda found: sum(found.values()))
            time.sleep(0.5)
        states = Counter(map(state, clones))
        print(f"after {time.monotonic() - start:.1f} s: {dict(states)}, {overlaps(clones)} overlap")
        mib = sum(most.values()) / 2**20
        print(f"the launcher's processes: at most {mib:.0f} MiB (PSS) for {len(most)} jobs")
    sys.exit(states != {"COMPLETED": args.trainees})


def made(clone, seconds):
    """Make a course folder with a job that sleeps."""
    clone.mkdir()
    (clone / ".course-root").touch()
    (clone / "job.py").write_text(f"import time\n\ntime.sleep({seconds})\n")
    return clone


def submit(clone, queue):
    """Start the command that submits the job of a clone, and return its process."""
    environment = os.environ | {"DLOJZ_ROOT": str(clone), "DLOJZ_QUEUE": str(queue)}
    command = [Path(sys.executable).with_name("dlojz"), "submit", "job.py"]
    return subprocess.Popen(command, cwd=clone, env=environment, stdout=subprocess.DEVNULL)


def status(clone) -> dict:
    """Return the launcher's status of a clone's job; {} before it begins."""
    found = sorted(clone.glob("runs/[0-9]*/state.json"))
    return json.loads(found[0].read_text()) if found else {}


def state(clone) -> str:
    return status(clone).get("state", "QUEUED")


def overlaps(clones) -> int:
    """Return the number of jobs that began before the previous one had ended."""
    times = sorted((s["started"], s["ended"]) for s in map(status, clones) if "ended" in s)
    return sum(before[1] > after[0] for before, after in pairwise(times))


def keepers(folder) -> dict[int, int]:
    """Return the memory (PSS, bytes) of each of the launcher's processes for these clones."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or [])
        if KEEPER in words and folder in words:
            try:
                found[process.pid] = process.memory_full_info().pss
            except psutil.Error:  # it has just ended
                continue
    return found


if __name__ == "__main__":
    main()
