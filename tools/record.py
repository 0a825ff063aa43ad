"""Make the recorded runs of `reference/` again: `python tools/record.py 01 reference/h100`.

Submits a step's solution over models and batch sizes on this machine, one job after the other, and
copies each log, without the machine's name. A run out of memory is a result and is kept.
"""

import argparse
import json
import sys
from itertools import product
from pathlib import Path

from dlojz import course, launch, report

SYNTHETIC = "--image-size 224 --test --data synthetic"
IMAGES_PER_RUN = 12_800  # seconds of work for each batch size: the energy counter needs them


def _sweep(step, models, batch_sizes):
    """One run for each model and batch size, by the recording's name."""
    trainer = f"solutions/dlojz_{course.step(step)}.py"
    for model, batch in product(models, batch_sizes):
        nsteps = max(15, min(200, IMAGES_PER_RUN // batch))
        name = f"{step}-{model}-fp32-b{batch:04d}"
        yield name, f"{trainer} --model {model} -b {batch} --test-nsteps {nsteps} {SYNTHETIC}"


RECORDINGS = {
    "00": {
        "00-resnet50-cpu-b0032": "solutions/dlojz_00_start.py --model resnet50 -b 32 "
        f"--test-nsteps 12 {SYNTHETIC}",
    },
    "01": {
        **dict(_sweep("01", ("resnet50", "resnet152"), (8, 16, 32, 64, 128, 256, 512, 1024))),
        "01-memory": "notebooks/experiments/memory.py --model resnet50 -b 64",
        "01-tensors": "notebooks/experiments/tensors.py -b 256",
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("step", choices=sorted(RECORDINGS))
    parser.add_argument("folder", type=Path, help="such as reference/h100; files there are kept")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    plan = RECORDINGS[args.step]
    wanted = {n: c for n, c in plan.items() if not (args.folder / f"{n}.jsonl").exists()}
    jobs = launch.submit(list(wanted.values()), name=f"record-{args.step}") if wanted else []
    for name, job in zip(wanted, jobs, strict=True):
        state = job.wait()
        print(f"{name}: {state}", flush=True)
        if state not in ("COMPLETED", "OUT_OF_MEMORY"):
            sys.exit(job.explain())
        text = (job.directory / "events.jsonl").read_text()
        (args.folder / f"{name}.jsonl").write_text(anonymous(text, wanted[name]))
    print(report.compare_runs([args.folder / f"{name}.jsonl" for name in plan]))


if __name__ == "__main__":
    main()
