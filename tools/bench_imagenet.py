"""The course's last step beside pytorch/examples' imagenet/main.py, on the same image files.

    python tools/bench_imagenet.py main.py data

A is main.py, unchanged, B the solution of notebook 09, compiled; they run in turn, A B B A ...
Both train resnet50 at 224 px on random crops of the same JPEG files, with the same batch size and
number of workers. main.py prints how far it is: the clock runs between two of these lines, and then
it is stopped. The result is the ratio of the speeds, ours over main.py's, with its 95 % interval;
the goal is reached if the whole interval is there.

main.py: https://github.com/pytorch/examples/blob/77f55b912142e11fcfdf5b530231fb9c52f181e8/imagenet/main.py
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from bench_gpu import outcome
from tqdm import tqdm

from dlojz import course, launch
from dlojz.runs import stats

GOAL = 2.8
WARM_UP = 20  # batches: the workers fill their queues
PROGRESS = re.compile(r"Epoch: \[0\]\[ *(\d+)/")


def speed(lines: Iterable[tuple[float, str]], batch: int, last: int) -> float:
    """Return images per second between two lines of main.py's progress.

    lines: each with its arrival in seconds, up to that of batch `last` or a later one.
    """
    begin = None
    for at, line in lines:
        if not (found := PROGRESS.match(line)):
            continue
        done = int(found[1])
        if begin is None and done > WARM_UP:
            begin = at, done
        elif begin and done >= last:
            return batch * (done - begin[1]) / (at - begin[0])
    raise EOFError


def theirs(args) -> float:
    """Run main.py for enough batches; return its images per second."""
    command = [sys.executable, "-u", str(args.main.resolve()), str(args.data.resolve())]
    command += ["-a", args.model, "-b", str(args.batch), "-j", str(args.workers), "-p", "5"]
    with tempfile.TemporaryDirectory() as folder, open(Path(folder, "errors"), "w+") as errors:
        running = subprocess.Popen(
            command,
            cwd=folder,  # it writes checkpoints
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        try:
            lines = ((time.monotonic(), line) for line in running.stdout)
            return speed(lines, args.batch, args.steps)
        except EOFError:
            errors.seek(0)
            sys.exit(f"{args.main} ended before batch {args.steps}:\n{errors.read()[-2000:]}")
        finally:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()


def ours(args) -> float:
    """Run the solution; return its images per second."""
    words = [str(course.solution("09")), "--data", str(args.data.resolve())]
    flags = f"--model {args.model} -b {args.batch} --image-size 224 --num-workers {args.workers} "
    flags += f"--precision {args.precision} --compile {args.compile} "
    flags += f"--prefetch-factor 1 --test --test-nsteps {args.steps}"
    job = launch.submit((*words, *flags.split()), name="bench-imagenet")
    if job.wait() != launch.State.COMPLETED:
        sys.exit(job.explain())
    return stats.summary(job.directory).images_per_s


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("main", type=Path, help="pytorch/examples' imagenet/main.py")
    parser.add_argument("data", type=Path, help="folder with train/ and val/: dlojz data")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs (default: 3)")
    parser.add_argument("--batch", type=int, default=256, help="images in a batch (default: 256)")
    parser.add_argument("--steps", type=int, default=160, help="batches of a run (default: 160)")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--compile", default="default", help="the mode (default: default)")
    parser.add_argument("--precision", default="fp16", help="our precision (default: fp16)")
    args = parser.parse_args()
    for path in (args.main, args.data / "train", args.data / "val"):
        if not path.exists():
            parser.error(f"{path} is not there: see --help and `dlojz data --help`")
    speeds = {"main.py": [], "ours": []}
    turns = [("main.py", "ours")[:: (-1) ** i] for i in range(args.rounds)]
    for turn in tqdm(turns, unit="pair"):
        for which in turn:
            speeds[which].append(theirs(args) if which == "main.py" else ours(args))
    ratios = [a / b for a, b in zip(speeds["ours"], speeds["main.py"], strict=True)]
    mean, low, high = stats.interval(ratios)
    for which, found in speeds.items():
        print(f"{which}: {', '.join(f'{value:,.0f}' for value in found)} images/s")
    word = outcome(low, high, GOAL)
    print(f"ours / main.py {mean:.2f} ({low:.2f} to {high:.2f}); goal {GOAL:.2f}: {word}")
    sys.exit(word != "reached")


if __name__ == "__main__":
    main()
