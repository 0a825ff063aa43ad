"""A test of the verdict itself: `python tools/verify.py --minutes 9`, again until nothing is left.

Checks the solutions, which must pass, over seeds, models and sizes, and every wrong answer, which
must fail with its own hint. Every verdict has fresh runs. It is appended to a file as soon as it is
made: a later call goes on where the last one stopped. --summary adds up.

On a GPU each step has the notebook's size first, then small ones, and only those wrong answers
whose hint depends on the device.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path

import wrong
from tqdm import tqdm

from dlojz import course, launch
from dlojz.check import check, exercise, plan, reuse
from dlojz.course import presets
from dlojz.machine import cpus, facts
from dlojz.table import Table

TEST = "--test --data synthetic"
FOLDER = course.data_folder()
FILES = f"--data {FOLDER} --num-workers"  # the last --data counts
SEEDS = range(5)
MODELS = ("shufflenet_v2_x0_5", "mobilenet_v3_small", "resnet18")
TRANSFORMER = "vit_tiny"  # for a step that needs blocks
# By step: two batch sizes with 32 and 64 pixels, and the step's own flags.
SMALL = {
    "01_gpu": (8, 16, ""),
    "02_amp": (8, 16, "--precision {half}"),
    "03_channels_last": (16, 8, "--precision fp32"),
    "04_profiler": (8, 16, "--precision fp32 --profile"),
    # Epochs whose last batch is smaller, which shows a trainer that drops it.
    "05_dataloader": (12, 24, f"--precision fp32 {FILES} 1"),
    "06_ddp": (8, 16, "--precision fp32"),
    "07_augmentation": (8, 16, "--precision fp32 --mix cutmix"),
    "08_large_batch": (
        *(8, 16, "--precision fp32 --optimizer lamb --warm-up 0.1 --schedule cosine"),
    ),
    "09_compile": (8, 16, "--precision fp32 --compile {mode}"),
    "10_kernels": (8, 16, "--precision {half} --normalize triton --compile off"),
    "11_fsdp": (8, 16, "--precision bf16 --sharding fsdp --checkpointing blocks"),
}
LARGE = {  # on a GPU; 01 compares with the processor, so it gets less work
    "01_gpu": "--model resnet18 -b 16 --test-nsteps 10",
    # Large steps in 16 bits hide the processor's share, and what disturbs it.
    "02_amp": "--model resnet50 -b 256 --test-nsteps 30 --precision fp16",
    "03_channels_last": "--model resnet50 -b 256 --test-nsteps 30 --precision fp16",
    "04_profiler": "--model resnet50 -b 256 --test-nsteps 60 --precision bf16 --profile",
    "05_dataloader": f"--model resnet50 -b 64 --test-nsteps 400 {FILES} 16",
    "06_ddp": "--model resnet50 -b 256 --test-nsteps 20 --precision bf16",
    "07_augmentation": "--model resnet50 -b 256 --test-nsteps 30 --precision bf16 --mix cutmix",
    "08_large_batch": "--model resnet50 -b 256 --test-nsteps 12 --precision bf16 --optimizer lamb "
    "--warm-up 0.1 --schedule cosine",
    "09_compile": "--model resnet50 -b 256 --test-nsteps 30 --precision bf16",
    "10_kernels": "--model resnet50 -b 256 --test-nsteps 30 --precision bf16 --normalize triton "
    "--compile off",
    "11_fsdp": "--model vit_l_16 -b 32 --test-nsteps 24 --precision bf16 --optimizer adamw "
    "--lr 0.001 --sharding fsdp --checkpointing blocks",
}
ON_THE_DEVICE = {  # hints that another device may change
    "01_gpu": {*exercise.read_hints("01_gpu"), "item"},
    "02_amp": {"scaler", "scaler-step", "scaler-update", "unscale", "tf32", "format", "item"},
    "03_channels_last": {"autotuner"},
    "06_ddp": {"device", "backend"},
    "08_large_batch": {"item"},
    "09_compile": {*exercise.read_hints("09_compile")},
    "10_kernels": {*exercise.read_hints("10_kernels")},
}


@dataclass(frozen=True)
class Case:
    """One verdict to make; two cases with equal fields are the same one."""

    step: str
    kind: str  # "solution", "wrong", "museum", "right"
    name: str  # of the answer, or of the solution's verdict
    seed: int
    model: str
    sizes: str  # flags
    device: str  # "processor", of any make, or "1 x NVIDIA H200"
    expected: str | None  # a hint; None: it must pass

    @property
    def flags(self) -> list[str]:
        """Return the flags of the job to check."""
        model = f"--model {self.model}"
        return [*f"{TEST} {model} --seed {self.seed}".split(), *self.sizes.split()]


def device() -> str:
    """Return the device that computes here: "processor", or such as "2 x NVIDIA H200"."""
    cards = presets.gpus()
    return f"{len(cards)} x {facts.gpus()['cards'][0]['name']}" if cards else "processor"


def hardware() -> str:
    """Return the device that computes here, with the make of a processor."""
    return device() if presets.gpus() else f"{cpus.count()} x {cpus.name()}"


def _small(step, i, on_gpu):
    """Return (model, sizes) of the i-th small job of a step."""
    small, large, own = SMALL[step]
    batch, pixels = ((small, 32), (large, 64))[i % 2]
    steps = 12 if on_gpu else 8  # in fp16 the first updates are skipped
    sizes = f"--image-size {pixels} -b {batch} --test-nsteps {steps} {own}"
    return _model(step, i), _filled(sizes, on_gpu, "bf16")


def _model(step, i):
    return TRANSFORMER if step == "11_fsdp" else MODELS[i % len(MODELS)]


def _filled(flags, on_gpu, half):
    """Return the flags, completed for the device; half: 16 bits on a processor."""
    mode = "default" if on_gpu else "aot_eager"
    return flags.format(half="fp16" if on_gpu else half, mode=mode)


def solutions(steps: Sequence[str], times: int, on_gpu: bool, here: str) -> list[Case]:
    """Return `times` verdicts of each step, with different seeds, models and sizes.

    As 5, 3 and 2 have no common factor, 30 verdicts of a step have all combinations.
    """
    found = []
    for i in range(times):
        for step in steps:
            if on_gpu and i == 0:
                model, sizes = LARGE[step].removeprefix("--model ").split(" ", 1)
                sizes = f"--image-size 224 {sizes}"
            else:
                model, sizes = _small(step, i - on_gpu, on_gpu)
            seed = SEEDS[i % len(SEEDS)]
            found.append(Case(step, "solution", str(i), seed, model, sizes, here, None))
    return found


def wrong_answers(steps: Sequence[str], on_gpu: bool, here: str) -> list[Case]:
    """Return a verdict on each wrong answer: on a GPU, those whose hint depends on the device."""
    found = []
    for step in steps:
        for answer in wrong.judged_here(step):
            depends = answer.needs_gpu or answer.expect in ON_THE_DEVICE.get(step, ())
            if depends or not on_gpu:
                model, sizes = _small(step, 0, on_gpu)
                sizes = f"{sizes} {answer.flags}".strip()
                expected = (on_gpu and answer.on_gpu) or answer.expect
                found.append(Case(step, "wrong", answer.name, 0, model, sizes, here, expected))
    return found


def museum(steps: Sequence[str], on_gpu: bool, here: str) -> list[Case]:
    """Return a verdict on each trick of the museum, and on each right answer of another make.

    On a GPU: those that need one, and the right answers.
    """
    found = []
    for answer in (*wrong.museum(), *wrong.right()):
        right = answer.path.parent.name == wrong.RIGHT
        if answer.step in steps and (right or answer.needs_gpu == on_gpu):
            _, _, own = SMALL[answer.step]
            own = _filled(own, on_gpu, "tf32")  # float32 on a processor
            sizes = f"--image-size 32 -b 8 --test-nsteps 12 {own} {answer.flags}"
            kind, expected = ("right", None) if right else ("museum", answer.expect)
            found.append(
                Case(
                    *(answer.step, kind, answer.name, 0, _model(answer.step, 0), sizes.strip()),
                    *(here, expected),
                )
            )
    return found


def read(file: Path) -> list[dict]:
    """Return the verdicts in a file, without a line that was cut off; [] if there is no file."""
    if not file.exists():
        return []
    whole, _, _ = file.read_text().rpartition("\n")
    try:
        return [json.loads(line) for line in whole.splitlines()]
    except ValueError as error:
        raise SystemExit(
            f"{file} is not a file of verdicts, one JSON object in a line ({error}): name another "
            "with --file"
        ) from error


def append(file: Path, row: dict):
    """Add a verdict to a file, in place of a line that was cut off."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+b") as stream:
        stream.seek(0)
        stream.truncate(stream.read().rfind(b"\n") + 1)
        stream.write(json.dumps(row).encode() + b"\n")


def go_on(cases: Sequence[Case], file: Path, minutes: float, make, clock=time.monotonic) -> int:
    """Make the verdicts that `file` lacks until the time is over; return the number left.

    make: from a case to its verdict as a dict. No verdict begins after `minutes`.
    """
    known = {tuple(row[f.name] for f in fields(Case)) for row in read(file)}
    left = [case for case in cases if astuple(case) not in known]
    begin, done = clock(), 0
    with tqdm(total=len(left), unit="verdict") as bar:
        while done < len(left) and clock() - begin < 60 * minutes:
            case = left[done]
            bar.set_description(f"{case.step} {case.kind} {case.name}")
            row = asdict(case) | make(case)
            append(file, row)
            if is_false(row):
                tqdm.write(told(row))
            done += 1
            bar.update()
    return len(left) - done


def verdict_on(case: Case, pairs: int | None = None) -> dict:
    """Return the verdict on a case as a dict, with fresh runs.

    pairs: for a solution; None: the number that its bar asks for.
    """
    folders = {
        "wrong": wrong.FOLDER / case.step,
        "museum": wrong.FOLDER / wrong.MUSEUM,
        "right": wrong.FOLDER.parent / wrong.RIGHT,
    }
    if folder := folders.get(case.kind):
        answer = wrong.read(folder / f"{case.name}.diff")
        pairs = 1 if presets.gpus() else None  # small jobs on a processor are asked for no gain
    else:
        answer = None
    begin = time.monotonic()
    job = trainees_job(case, answer)
    forget()
    try:
        verdict = check(case.step, job, pairs)
        found = {"passed": verdict.passed, "hint": verdict.hint_key, "text": str(verdict)}
    except plan.CheckError as error:
        found = {"passed": False, "hint": None, "text": f"no verdict: {error}"}
    seconds = round(time.monotonic() - begin, 1)
    return found | {"seconds": seconds, "commit": commit(), "hardware": hardware()}


def commit() -> str | None:
    """Return the commit of this clone, `-dirty` if edited; None outside a clone."""
    ask = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(ask, cwd=wrong.FOLDER, capture_output=True, text=True)
    return done.stdout.strip() or None


def trainees_job(case: Case, answer: wrong.Wrong | None) -> launch.Job:
    """Return a trainee's job, submitted: with this answer, or with the solution."""
    n_gpu, name = exercise.find(case.step).processes, f"verify-{case.step}"
    with tempfile.TemporaryDirectory() as folder:
        trainer = wrong.put(answer, folder) if answer else course.solution(case.step)
        job = launch.submit((str(trainer), *case.flags), n_gpu, name=name)
    job.wait()
    return job


def forget():
    """Forget the runs of earlier checks, so that the next verdict has fresh ones.

    Unfinished ones stay, because another verdict waits for them.
    """
    for job in launch.jobs():
        if job.state.final:
            (job.directory / reuse.CHECK_FILE).unlink(missing_ok=True)


def is_false(row: dict) -> bool:
    """Return whether a verdict is wrong."""
    return row["passed"] != (row["expected"] is None) or row["hint"] != row["expected"]


def told(row: dict) -> str:
    """Return a false verdict in full, with the expected one."""
    job = f"{row['step']} {row['kind']} {row['name']}: --model {row['model']} --seed {row['seed']}"
    expected = row["expected"] or "to pass"
    return f"{job} {row['sizes']}\nFALSE, expected {expected}, got {row['hint']}:\n{row['text']}\n"


def summary(rows: Sequence[dict]) -> Table:
    """Return a table of all verdicts and of the false ones, by step and hardware."""
    groups = {}
    for row in rows:
        key = row["hardware"], row["kind"], row["step"]
        groups.setdefault(key, []).append(row)
        groups.setdefault((row["hardware"], row["kind"], "all"), []).append(row)
    head = ("hardware", "verdicts on", "step", "verdicts", "false", "seconds each", "commits")
    cells = []
    for key in sorted(groups, key=lambda k: (*k[:2], k[2] == "all", k[2])):
        found = groups[key]
        each = sum(row["seconds"] for row in found) / len(found)
        commits = ", ".join(sorted({row["commit"] or "unknown" for row in found}))
        count = str(sum(map(is_false, found)))
        cells.append((*key, str(len(found)), count, f"{each:.0f}", commits))
    return Table(head, cells, "<<<>>><", empty="no verdicts yet")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", nargs="*", help="exercises, such as 02; default: all")
    kept = course.course_root() / "runs" / "verify.jsonl"
    parser.add_argument("--file", type=Path, default=kept, help="file of verdicts (%(default)s)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin none after these")
    parser.add_argument("--times", type=int, help="verdicts on each solution (30; on a GPU 3)")
    pairs = "pairs of runs for a solution, before and after; default: as its bar asks for"
    parser.add_argument("--pairs", type=int, metavar="N", help=pairs)
    only = parser.add_mutually_exclusive_group()
    kinds = ("solutions", "wrong", "museum")
    only.add_argument("--only", choices=kinds, help="make only these")
    only.add_argument("--summary", action="store_true", help="make none, add up those in the file")
    args = parser.parse_args()
    if not args.summary:
        cases = _cases(args)
        if any(case.step == "05_dataloader" for case in cases) and (few := too_few_images()):
            parser.error(few)
        left = go_on(cases, args.file, args.minutes, lambda case: verdict_on(case, args.pairs))
        print(f"{args.file}: {left} verdicts left" if left else f"{args.file}: complete")
    rows = read(args.file)
    print("\n".join(map(told, filter(is_false, rows))) if args.summary else "", end="")
    print(summary(rows))
    sys.exit(any(map(is_false, rows)))


def too_few_images(folder: Path = FOLDER) -> str:
    """Return the lack of images for 05's small jobs, with the remedy; "" if there are enough."""
    _, largest, _ = SMALL["05_dataloader"]
    wanted, found = 8 * largest, sum(file.is_file() for file in folder.glob("train/*/*"))
    if found >= wanted:
        return ""
    return (
        f"05 reads files: {folder} has {found} training images, and {wanted} are needed. Make more "
        f"with `dlojz data --preset cpu {folder}`"
    )


def _cases(args):
    here, on_gpu = device(), bool(presets.gpus())
    # Without a GPU, any number of processes can share the processor.
    most = len(presets.gpus()) or math.inf
    steps = [course.step(step) for step in args.step] or [
        step for step in exercise.STEPS if exercise.find(step).processes <= most
    ]
    times = (3 if on_gpu else 30) if args.times is None else args.times
    makers = {
        "solutions": lambda: solutions(steps, times, on_gpu, here),
        "wrong": lambda: wrong_answers(steps, on_gpu, here),
        "museum": lambda: museum(steps, on_gpu, here),
    }
    wanted = [args.only] if args.only else list(makers)
    return [case for name in wanted for case in makers[name]()]


if __name__ == "__main__":
    main()
