"""A test of the verdict itself: `python tools/verify.py --times 100`.

Checks the solution of each exercise many times, each time with fresh runs: all must pass. Then runs
every wrong answer, as often as `--wrong` says: none may pass, and each must get its own hint.
Prints each verdict that was wrong, and the counts.
"""

import argparse
import math
import sys
import tempfile
from pathlib import Path

import wrong
from tqdm import tqdm

from dlojz import course, launch, presets
from dlojz.check import check, exercises, run

SMALL = "--test --data synthetic --model shufflenet_v2_x0_5 --image-size 32 --test-nsteps 8"
LARGE = "--test --data synthetic --image-size 224"
FILES = f"--data {course.data_folder()} --num-workers"  # the last --data counts
SIZES = {  # by preset and step: the flags of the job to check
    "smoke": {
        "01_gpu": f"{SMALL} -b 8",
        "02_amp": f"{SMALL} -b 8 --precision bf16",
        "03_channels_last": f"{SMALL} -b 16 --precision fp32",
        "04_profiler": f"{SMALL} -b 8 --precision fp32 --profile",
        # An epoch whose last batch is smaller, which shows a trainer that drops it.
        "05_dataloader": f"{SMALL} -b 12 --precision fp32 {FILES} 1",
        "06_ddp": f"{SMALL} -b 8 --precision fp32",
    },
    "gpu": {  # 01 compares with the processor, so it gets less work
        "01_gpu": f"{LARGE} --model resnet18 -b 16 --test-nsteps 10",
        # Large steps in 16 bits hide the processor's share, and what disturbs it.
        "02_amp": f"{LARGE} --model resnet50 -b 256 --test-nsteps 30 --precision fp16",
        "03_channels_last": f"{LARGE} --model resnet50 -b 256 --test-nsteps 30 --precision fp16",
        "04_profiler": f"{LARGE} --model resnet50 -b 256 --test-nsteps 60 --precision bf16 "
        "--profile",
        "05_dataloader": f"{LARGE} --model resnet50 -b 64 --test-nsteps 400 {FILES} 16",
        "06_ddp": f"{LARGE} --model resnet50 -b 256 --test-nsteps 20 --precision bf16",
    },
}


def flags(step: str) -> list[str]:
    """Return the flags of a step's job, for this machine."""
    return SIZES["gpu" if presets.gpus() else "smoke"][step].split()


def trainees_job(step: str, source: str) -> launch.Job:
    """Return a job as a trainee would have submitted it, with this trainer."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Path(folder, "dlojz.py")
        trainer.write_text(source)
        n_gpu = exercises.find(step).processes
        job = launch.submit((str(trainer), *flags(step)), n_gpu, name=f"verify-{step}")
    job.wait()
    return job


def forget():
    """Forget the runs of earlier checks, so that the next verdict makes its own."""
    for job in launch.jobs():
        (job.directory / run.CHECK_FILE).unlink(missing_ok=True)


def solutions(steps, times, pairs=None) -> int:
    """Return how many verdicts on solutions were wrong; print the speed of each."""
    failed = 0
    for step in steps:
        job = trainees_job(step, course.solution(step).read_text())
        for _ in tqdm(range(times), desc=f"solution {step}", unit="verdict"):
            forget()
            verdict = check(step, job, pairs)
            print(f"{step}: {verdict.comparison}", flush=True)
            if not verdict.passed:
                failed += 1
                print(verdict, flush=True)
    print(f"solutions: {times * len(steps)} verdicts, {failed} wrong", flush=True)
    return failed


def wrong_answers(steps, times) -> int:
    """Return how many wrong answers passed, or got another hint than their own."""
    failed = count = 0
    for step in steps:
        for answer in tqdm(wrong.judged_here(step) * times, desc=f"wrong {step}", unit="verdict"):
            job = trainees_job(step, wrong.source(answer))
            verdict = check(step, job, pairs=1)
            count += 1
            if verdict.passed or verdict.hint_key != answer.expect:
                failed += 1
                print(f"{step}/{answer.name}: expected {answer.expect}\n{verdict}", flush=True)
    print(f"wrong answers: {count} verdicts, {failed} wrong", flush=True)
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("step", nargs="*", help="default: all exercises")
    parser.add_argument("--times", type=int, default=10, help="verdicts on each solution")
    parser.add_argument("--wrong", type=int, default=1, help="verdicts on each wrong answer")
    pairs = "pairs of runs, before and after, for a solution; default: what its bar asks for"
    parser.add_argument("--pairs", type=int, metavar="N", help=pairs)
    args = parser.parse_args()
    # Without a GPU, any number of processes can share the processor.
    most = len(presets.gpus()) or math.inf
    steps = [course.step(s) for s in args.step] or [
        s for s in exercises.MODULES if exercises.find(s).processes <= most
    ]
    failed = solutions(steps, args.times, args.pairs) + wrong_answers(steps, args.wrong)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
