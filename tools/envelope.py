"""Measure how far rounding alone moves the losses: `python tools/envelope.py 01 02 03`.

Runs each step's solution as it is, and with initial weights that are off by one rounding error
(`tools/perturbed.py`), at several sizes. The largest distance seen up to each step, times FACTOR,
is what the verdict tolerates: reference/envelopes/<step>.json, a part for "cpu" and one for "cuda".
Run it on each kind of hardware; it keeps the part of the other. Small batches of small images are
chaotic after two steps; larger ones stay together, so the verdict takes the nearest smaller size.
If a step is about files, the solution before counts too: other decoders round differently.
"""

import argparse
import json
import platform
import sys
from datetime import UTC, datetime
from importlib import metadata

from dlojz import course, presets
from dlojz.check import exercises
from dlojz.launch import Request, series
from dlojz.runs import log

FACTOR = 4  # other processors round differently, and the perturbations are few
FLOOR = 1e-5
PERTURBATIONS = 5
STEPS = 8  # whose losses are compared
SMALL = "--model shufflenet_v2_x0_5 --image-size 32 -b 8"
SIZES = {
    "cpu": (SMALL, "--model resnet18 --image-size 64 -b 32"),
    "cuda": (SMALL, "--model resnet50 --image-size 224 -b 64"),
}
# A CPU without instructions for these formats takes minutes for larger sizes.
EMULATED = {"fp16": (SMALL,), "bf16": (SMALL, "--model shufflenet_v2_x0_5 --image-size 64 -b 16")}
ALL = ("fp32", "tf32", "fp16", "bf16")
PRECISIONS = {step: ("fp32",) if step == "01_gpu" else ALL for step in exercises.MODULES}


def entries(step: str, kind: str, precisions) -> list[series.Entry]:
    """Return the runs of a step, named by precision, size and seed; 0 is the solution as it is."""
    solution, found = course.solution(step), []
    perturbed = course.course_root() / "tools" / "perturbed.py"
    for precision in precisions:
        sizes = EMULATED.get(precision, SIZES["cpu"]) if kind == "cpu" else SIZES[kind]
        for size, flags in enumerate(sizes):
            of_files = exercises.find(step).of_files
            images = str(course.data_folder()) if of_files else "synthetic"
            flags = f"--test --data {images} --test-nsteps {STEPS} {flags}".split()
            flags += [] if step == "01_gpu" else ["--precision", precision]
            for seed in range(PERTURBATIONS + 1):
                name = f"{step}-{precision}-{size}-{seed}"
                if seed == 0:
                    found.append(series.Entry(name, solution, flags))
                else:
                    found.append(series.Entry(name, perturbed, [str(seed), str(solution), *flags]))
            if of_files:
                name = f"{step}-{precision}-{size}-before"
                found.append(series.Entry(name, course.before(step), flags))
    return found


def tolerances(step: str, folders: dict) -> dict[str, list[dict]]:
    """Return by precision and size the tolerance in the first steps, as a share of the loss."""
    found = {}
    for name, folder in folders.items():
        if name.startswith(step) and name.endswith("-0"):  # a solution as it is
            run = log.read(folder)
            arguments, size = run.start["arguments"], name.removesuffix("-0")
            away = [FLOOR / FACTOR] * STEPS
            for other in (f for n, f in folders.items() if n.startswith(f"{size}-")):
                for k, (loss, base) in enumerate(
                    zip(log.read(other).steps.loss, run.steps.loss, strict=True)
                ):
                    away[k] = max(away[k], abs(loss - base) / base)
            largest = [max(away[: k + 1]) for k in range(STEPS)]
            entry = {
                "pixels": arguments["batch_size"] * arguments["image_size"] ** 2,
                "model": arguments["model"],
                "tolerance": [float(f"{FACTOR * a:.3g}") for a in largest],
            }
            found.setdefault(arguments.get("precision", "fp32"), []).append(entry)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("step", nargs="+", type=course.step)
    which = {"choices": ALL, "help": "this one only; the others keep what was measured before"}
    parser.add_argument("--precision", **which)
    args = parser.parse_args()
    kind = "cuda" if presets.gpus() else "cpu"
    for step in args.step:
        precisions = [p for p in PRECISIONS[step] if args.precision in (None, p)]
        plan, n_gpu = entries(step, kind, precisions), exercises.find(step).processes
        print(f"{step}: {len(plan)} runs", flush=True)
        job = series.submit(
            plan, Request(name=f"envelope-{step}", time_max_s=3 * 3600, n_gpu=n_gpu)
        )
        job.wait()
        folders = series.folders(job)
        if any((f / "exit_code").read_text().strip() != "0" for f in folders.values()):
            sys.exit(job.explain())
        first = log.read(folders[f"{step}-{precisions[0]}-0-0"])
        command = f"python tools/envelope.py {step[:2]}"
        command += f" --precision {args.precision}" if args.precision else ""
        write(step, kind, tolerances(step, folders), first, command)


def write(step, kind, tolerance, run, command):
    """Write what was measured here, beside what was measured on other hardware."""
    file = course.course_root() / "reference" / "envelopes" / f"{step}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = json.loads(file.read_text()) if file.exists() else {"tolerance": {}, "measured": {}}
    kept["tolerance"][kind] = kept["tolerance"].get(kind, {}) | tolerance
    kept["measured"][kind] = {
        "hardware": run.setup["device_name"],
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "trainer_sha256": run.start["trainer_sha256"],
        "command": command,
    }
    course.write_atomically(file, json.dumps(kept, indent=1) + "\n")
    for precision, sizes in tolerance.items():
        for size in sizes:
            print(step, kind, precision, size["model"], size["pixels"], size["tolerance"])


if __name__ == "__main__":
    main()
