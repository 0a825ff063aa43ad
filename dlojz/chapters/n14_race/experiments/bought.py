"""What each step of the course buys: epochs and accuracy in a budget of seconds.

Submitted by a notebook: submit("dlojz/chapters/n14_race/experiments/bought.py").

Each rung is a trainer of the course with its flags, run as a process of its own. The clock runs
from the start of the process to its end, with imports and compilation, whose cache is empty. A
pilot of two epochs says how many epochs fit in the budget; trainings of that length follow, with
other seeds, in turn: rung by rung, seed by seed. One that takes too long is repeated, one epoch
shorter. Sizes and rungs suit the device.
"""

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from dlojz import course, idr_torch, images
from dlojz.chapters import session
from dlojz.machine import meters
from dlojz.runs import derived, log
from dlojz.runs.folder import events_file

RUNGS = {  # title: the trainer's step, and its flags
    "00 starter": ("00", ""),
    "01 GPU": ("01", ""),
    "02 AMP": ("02", "--precision bf16"),
    "03 channels_last": ("03", "--precision bf16"),
    "05 loader": ("05", "--precision bf16"),
    "06 DDP, one process": ("06", "--precision bf16"),
    "09 compile": ("09", "--precision bf16 --compile default"),
}
ON_GPU = {"rungs": [*RUNGS], "model": "resnet50", "image_size": 128, "batch_size": 64}
ON_GPU |= {"classes": 24, "images_per_class": 100, "val_per_class": 20}
ON_GPU |= {"lr": 0.1, "seconds": 15.0, "seeds": 3}
# A processor takes its own precision: fp32. There 01 and 02 change nothing.
ON_CPU = {"rungs": ["00 starter", "03 channels_last", "05 loader"]}
ON_CPU |= {"model": "resnet18", "image_size": 32, "batch_size": 16}
ON_CPU |= {"classes": 4, "images_per_class": 40, "val_per_class": 25}
ON_CPU |= {"lr": 0.02, "seconds": 10.0, "seeds": 1}
PILOT = 2  # epochs
MOST = 4  # budgets: a pilot that takes longer is ended
SPARE = 0.02  # of the budget, so that few trainings have to be repeated
IDLE_S = 2.0
TICK_S = 0.01  # between two looks at a log


def flags_of(device) -> argparse.ArgumentParser:
    """Return the flags, with defaults that suit the device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = ON_GPU if device.type == "cuda" else ON_CPU
    add = parser.add_argument
    add("--rungs", nargs="+", choices=[*RUNGS], metavar="RUNG", help=f"of {', '.join(RUNGS)}")
    add("--seconds", type=float, help="budget of a training, from its process's start to its end")
    add("--seeds", type=int, help="trainings of each rung")
    add("--model", help="a classifier of torchvision")
    add("--image-size", type=int, help="pixels")
    add("-b", "--batch-size", type=int, help="images")
    add("--lr", type=float, help="the highest learning rate")
    add("--classes", type=int, help="classes of the images, which are drawn first")
    add("--images-per-class", type=int, help="images of each class to train on")
    add("--val-per-class", type=int, help="images of each class to validate on")
    add("--num-workers", type=int, default=16, help="at most one per CPU")
    parser.set_defaults(**sizes)
    return parser


def main():
    device = idr_torch.device()
    args = flags_of(device).parse_args()
    with session.begin(args, device) as (run, _), tempfile.TemporaryDirectory() as folder:
        counts = args.classes, args.images_per_class, args.val_per_class
        data = images.generate(Path(folder) / "data", *counts)
        idle = _idle(device)
        if idle is not None:
            run.measure("idle", idle, "W")
        race(run, Track(args, data, Path(folder), device))


def race(run, track):
    """Find the epochs of each rung, and train with each seed."""
    args, epochs = track.args, {}
    total = len(args.rungs) * (1 + args.seeds)
    with tqdm(total=total, unit="run") as bar:
        for rung in args.rungs:
            found = track.run(rung, PILOT, 0, MOST * args.seconds)
            epochs[rung] = fitting(found, args.seconds)
            run.case(f"{rung}, pilot", phase="pilot", fitting=epochs[rung], **found)
            bar.update()
        for seed in range(args.seeds):
            for rung in args.rungs:
                bar.set_postfix_str(rung)
                while epochs[rung]:
                    found = track.run(rung, epochs[rung], seed, 2 * args.seconds)
                    fits = found["seconds"] <= args.seconds
                    phase = "training" if fits else "too long"
                    run.case(f"{rung}, seed {seed}, {phase}", phase=phase, **found)
                    if fits:
                        break
                    epochs[rung] -= 1
                bar.update()


def fitting(pilot, budget: float) -> int:
    """Return the epochs that fit in a budget of seconds, by a pilot; 0 for one that was ended."""
    if pilot["epoch_s"] is None:
        return 0
    left = budget * (1 - SPARE) - pilot["seconds"]
    return max(0, PILOT + math.floor(left / pilot["epoch_s"]))


@dataclass(frozen=True)
class Track:
    """The task, and where it is run."""

    args: argparse.Namespace
    data: Path
    folder: Path
    device: torch.device

    def run(self, rung: str, epochs: int, seed: int, most_s: float) -> dict:
        """Train as a process of its own, ended after most_s; return its seconds and results.

        joules: of the GPU, from the process's start to its end; absent without a sensor.
        """
        with tempfile.TemporaryDirectory(dir=self.folder) as place:
            place = Path(place)
            caches = {"DLOJZ_RUN": place / "run", "TORCHINDUCTOR_CACHE_DIR": place / "cache"}
            caches |= {"TRITON_CACHE_DIR": place / "triton"}
            own = os.environ | {name: str(path) for name, path in caches.items()}
            sensors = meters.Sensors(self.device)
            with (place / "errors").open("w") as errors:
                command = self.command(rung, epochs, seed)
                quiet = {"stdout": subprocess.DEVNULL, "stderr": errors}
                begin = time.perf_counter()
                process = subprocess.Popen(command, env=own, **quiet)
                moments = followed(process, events_file(place / "run"), begin, most_s)
            about = {"rung": rung, "epochs": epochs, "seed": seed, "seconds": moments["end"]}
            energy = sensors.window().get("energy_j")
            about |= {} if energy is None else {"joules": energy}
            if process.returncode > 0:
                sys.exit(f"{rung}: {(place / 'errors').read_text()[-2000:]}")
            return about | results(place / "run", moments)

    def command(self, rung, epochs, seed) -> list[str]:
        """Return the command of a training."""
        args, (step, flags) = self.args, RUNGS[rung]
        words = [sys.executable, str(course.solution(step)), "--data", str(self.data)]
        names = ("model", "image_size", "batch_size", "lr", "num_workers")
        for name in names:
            words += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
        precise = flags if self.device.type == "cuda" else flags.replace("bf16", "fp32")
        return [*words, "-e", str(epochs), "--seed", str(seed), *precise.split()]


def followed(process, file: Path, begin: float, most_s: float) -> dict:
    """Return the seconds at which the first lines of each kind came, and the end of the process.

    epochs: of each epoch's line.
    """
    moments, size = {"epochs": []}, 0
    while process.poll() is None:
        now = time.perf_counter() - begin
        if now > most_s:
            process.kill()
            process.wait()
            break
        if file.exists() and file.stat().st_size > size:
            with file.open("rb") as lines:
                lines.seek(size)
                new = lines.read()
            size += len(new)
            for event in ("start", "setup"):
                if f'{{"event": "{event}"'.encode() in new:
                    moments.setdefault(event, now)
            moments["epochs"] += [now] * new.count(b'{"event": "epoch"')
        time.sleep(TICK_S)
    return moments | {"end": time.perf_counter() - begin, "killed": process.returncode < 0}


def results(folder: Path, moments) -> dict:
    """Return the accuracy of a training, and the parts of its seconds; None for one cut short."""
    if moments["killed"] or not moments["epochs"]:
        return {"accuracy": None, "epoch_s": None, "parts": None}
    run = log.read(folder)
    ends = moments["epochs"]
    compiling = derived.compile_seconds(run)
    training = sum(map(sum, run.steps.host_ms.values())) / 1000
    waiting = sum(run.steps.host_ms["data"]) / 1000
    validating = sum(event["seconds"] for event in run.validations)
    between = ends[-1] - moments["setup"]
    parts = {
        "imports": moments["start"],
        "data and model": moments["setup"] - moments["start"],
        "compiling": compiling,
        "waiting for images": waiting,
        "training": max(0.0, training - waiting - compiling),
        "validation": validating,
        "saving": max(0.0, between - training - validating),
        "ending": moments["end"] - ends[-1],
    }
    return {
        "accuracy": run.epochs[-1]["val_accuracy"],
        "epoch_s": ends[-1] - ends[-2] if len(ends) > 1 else None,
        "parts": parts,
    }


def _idle(device):
    """Return the power of the idle GPU in watts; None without a sensor."""
    session.wait(device)
    sensors = meters.Sensors(device)
    if device.type == "cuda":
        time.sleep(IDLE_S)
    energy = sensors.window().get("energy_j")
    return None if energy is None else energy / IDLE_S


if __name__ == "__main__":
    main()
