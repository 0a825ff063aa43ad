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

RECORDINGS = {
    "01": {
        "models": ("resnet50", "resnet152"),
        "batch_sizes": (8, 16, 32, 64, 128, 256, 512, 1024),
        "flags": "--image-size 224 --test --data synthetic",
        "name": "{model}-fp32-b{batch:04d}",
    },
}
IMAGES_PER_RUN = 20_000  # large batches take fewer steps: seconds are enough for the energy counter


def commands(step: str) -> dict[str, str]:
    """The command of each recording of a step, by the recording's name."""
    plan = RECORDINGS[step]
    found = {}
    for model, batch in product(plan["models"], plan["batch_sizes"]):
        nsteps = max(15, min(50, IMAGES_PER_RUN // batch))
        found[plan["name"].format(model=model, batch=batch)] = (
            f"{course.solution(step)} --model {model} -b {batch} --test-nsteps {nsteps} "
            + plan["flags"]
        )
    return found


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
    wanted = {n: c for n, c in commands(args.step).items() if not _path(args, n).exists()}
    jobs = launch.submit(list(wanted.values()), name=f"record-{args.step}") if wanted else []
    for name, job in zip(wanted, jobs, strict=True):
        state = job.wait()
        print(f"{name}: {state}", flush=True)
        if state not in ("COMPLETED", "OUT_OF_MEMORY"):
            sys.exit(job.explain())
        again = f"python tools/record.py {args.step} {args.folder}"
        text = (job.directory / "events.jsonl").read_text()
        _path(args, name).write_text(anonymous(text, again))
    print(report.compare_runs([_path(args, n) for n in commands(args.step)]))


def _path(args, name):
    return args.folder / f"{args.step}-{name}.jsonl"


if __name__ == "__main__":
    main()
