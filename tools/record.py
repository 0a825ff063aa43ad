"""Make the recorded runs of `reference/` again: `python tools/record.py 01 reference/h100`.

Runs a step's solution over models and batch sizes on this machine, as one job, and copies each log,
without the machine's name. Recordings that are there are kept: to make one again, remove it. A run
out of memory is a result and is kept.
"""

import argparse
import json
import math
import sys
from itertools import product
from pathlib import Path

from tqdm import tqdm

from dlojz import course, log, report, series, stats

SYNTHETIC = "--image-size 224 --test --data synthetic"
WARM_UP_AND_LAST = 4  # steps of a test run that are not measured
WINDOW_S = 2.4  # the energy counter needs windows of seconds
# Roughly, on an H100, by model and precision, in the better layout: how long a window must be.
IMAGES_PER_S = {
    "resnet50": {"fp32": 1000, "tf32": 2500, "fp16": 4600, "bf16": 4100},
    "resnet152": {"fp32": 400, "tf32": 1200, "fp16": 2200, "bf16": 2000},
    "vgg19": {"fp32": 500, "tf32": 1500, "fp16": 2000, "bf16": 2000},
    "densenet121": {"fp32": 900, "tf32": 1700, "fp16": 2600, "bf16": 2600},
}
EXPERIMENTS = "notebooks/experiments"
LAYOUTS = {"nchw": "--no-channels-last", "nhwc": "--channels-last"}


def _flags(model, precision, batch):
    images = WINDOW_S * IMAGES_PER_S[model][precision]
    nsteps = WARM_UP_AND_LAST + max(6, math.ceil(images / batch))
    return f"--model {model} -b {batch} --test-nsteps {nsteps} {SYNTHETIC}"


def _sweep_01():
    for model, batch in product(("resnet50", "resnet152"), (8, 16, 32, 64, 128, 256, 512, 1024)):
        yield f"01-{model}-fp32-b{batch:04d}", f"{_solution('01')} {_flags(model, 'fp32', batch)}"


def _matrix_03():
    for model, precisions in IMAGES_PER_S.items():
        for precision, layout, batch in product(precisions, LAYOUTS, (64, 128, 256, 512, 1024)):
            if precision == "fp32" and batch > 256:
                continue  # the autotuner alone takes minutes
            name = f"03-{model}-{precision}-{layout}-b{batch:04d}"
            how = f"--precision {precision} {LAYOUTS[layout]}"
            yield name, f"{_solution('03')} {_flags(model, precision, batch)} {how}"


def _solution(step):
    return f"solutions/dlojz_{course.step(step)}.py"


RECORDINGS = {
    "00": {
        "00-resnet50-cpu-b0032": f"{_solution('00')} --model resnet50 -b 32 "
        f"--test-nsteps 12 {SYNTHETIC}",
    },
    "01": {
        **dict(_sweep_01()),
        "01-memory": f"{EXPERIMENTS}/memory.py --model resnet50 -b 64",
        "01-tensors": f"{EXPERIMENTS}/tensors.py -b 256",
    },
    "02": {
        "02-underflow": f"{EXPERIMENTS}/underflow.py --model resnet50 -b 256 --steps 20",
        "02-formats": f"{EXPERIMENTS}/formats.py",
        "02-sizes": f"{EXPERIMENTS}/sizes.py --size 8192",
    },
    "03": {
        "03-layouts": f"{EXPERIMENTS}/layouts.py -b 128",
        "03-layouts-fp16": f"{EXPERIMENTS}/layouts.py -b 128 --precision fp16",
        "03-multiples": f"{EXPERIMENTS}/multiples.py --precision fp16",
        "03-autotuner-off": f"{EXPERIMENTS}/autotuner.py --no-autotuner --precision fp16",
        "03-autotuner-on": f"{EXPERIMENTS}/autotuner.py --autotuner --precision fp16",
        **dict(_matrix_03()),
    },
}


def anonymous(log_text: str, command: str) -> str:
    """A log without the host's name and paths, and with the command that makes it again."""
    lines = []
    for line in log_text.splitlines():
        event = json.loads(line)
        if event["event"] == "start":
            event["hostname"] = "recorded"
            event["command"] = command
        lines.append(json.dumps(event))
    return "\n".join(lines) + "\n"


def record(wanted: dict[str, str], folder: Path, name: str):
    """Run the commands as one job, and keep each log as soon as it is complete."""
    entries = []
    for recording, command in wanted.items():
        trainer, *flags = command.split()
        entries.append(series.Entry(recording, course.course_root() / trainer, flags))
    job = series.submit(entries, name, "04:00:00")
    for recording, run in tqdm(series.as_they_end(job), total=len(entries), unit="run"):
        state = stats.summary(run).state
        if state not in ("COMPLETED", "OUT_OF_MEMORY"):
            sys.exit(f"{recording}: {state}\n{(run / 'stderr.txt').read_text()[-2000:]}")
        text = (run / "events.jsonl").read_text()
        log.write_atomically(folder / f"{recording}.jsonl", anonymous(text, wanted[recording]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("step", choices=sorted(RECORDINGS))
    parser.add_argument("folder", type=Path, help="such as reference/h100; files there are kept")
    parser.add_argument("--only", default="", help="those whose name holds this text")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    plan = {n: c for n, c in RECORDINGS[args.step].items() if args.only in n}
    wanted = {n: c for n, c in plan.items() if not (args.folder / f"{n}.jsonl").exists()}
    if wanted:
        try:
            record(wanted, args.folder, f"record-{args.step}")
        except RuntimeError as error:
            sys.exit(str(error))
    print(report.compare_runs([args.folder / f"{name}.jsonl" for name in plan]))


if __name__ == "__main__":
    main()
