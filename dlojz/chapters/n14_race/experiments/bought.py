"""The epochs and the accuracy that each step of the course buys in a budget of seconds.

Submitted by a notebook: submit("dlojz/chapters/n14_race/experiments/bought.py").

Each rung is a trainer of the course with its flags, run as a process of its own. The clock runs
from the process's start to its end, with imports and compilation, whose cache is empty. A pilot of
a few epochs says how many fit in the budget. Trainings of that length follow, with other seeds, in
turn: rung by rung, seed by seed. One that takes too long is repeated, an epoch shorter. The saved
weights are judged on images of their own. Sizes and rungs suit the device.
"""

import argparse
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from tqdm import tqdm

from dlojz import course, idr_torch, images
from dlojz.chapters import session
from dlojz.chapters.n14_race import oneself
from dlojz.machine import cpus, meters
from dlojz.runs import derived, log
from dlojz.runs.folder import events_file
from dlojz.training import data, imports, models, shards

RUNGS = {  # title: the trainer's step, and its flags
    "00 starter": ("00", ""),
    "01 GPU": ("01", ""),
    "02 AMP": ("02", "--precision bf16"),
    "03 channels_last": ("03", "--precision bf16"),
    "05 loader": ("05", "--precision bf16"),
    "06 one process": ("06", "--precision bf16"),
    "09 compile": ("09", "--precision bf16 --compile default"),
    "05, validated once": ("05", "--precision bf16"),
    "05, images kept": ("05", "--precision bf16 --num-workers 1"),  # one worker sees them all
}
EDITED = {  # of the trainer: one of oneself.EDITS
    "05, validated once": "validated-once",
    "05, images kept": "images-kept",
}
SIZES = {  # of --help, with the defaults on a GPU and on a processor
    "model": ("a classifier of torchvision", "resnet50", "resnet18"),
    "image-size": ("pixels", 128, 24),
    "batch-size": ("images", 64, 32),
    "lr": ("the highest learning rate", 0.1, 0.02),
    "num-workers": ("at most one per CPU", 16, 2),
    "classes": ("classes of the images, which are drawn first", 24, 8),
    "images-per-class": ("images of each class to train on", 100, 24),
    "val-per-class": ("images of each class to validate on, within the budget", 20, 10),
    "judged": ("images of each class that judge, after the clock has stopped", 50, 25),
    "seconds": ("budget of a training, from its process's start to its end", 15.0, 7.0),
    "seeds": ("trainings of each rung", 3, 1),
}
LEFT_OUT = ("06 one process", "05, images kept")  # as 05, and one worker is too slow for a GPU
ON_GPU = [rung for rung in RUNGS if rung not in LEFT_OUT]
ON_CPU = ["00 starter", "05 loader", "05, images kept"]  # there 01 and 02 change nothing
PILOT = 5  # epochs: the first two are slower, and the last one may validate, so two are timed
MOST, MOST_COMPILED = 2, 6  # budgets: a pilot that takes longer is ended
IDLE_S = 2.0
TICK_S = 0.01  # between two looks at a log
JUDGE = 2026  # seed of the images that judge


def flags_of(device) -> argparse.ArgumentParser:
    """Return the flags, with defaults that suit the device."""
    parser, gpu = (
        argparse.ArgumentParser(description=__doc__.splitlines()[0]),
        device.type == "cuda",
    )
    for name, (help, on_gpu, on_cpu) in SIZES.items():
        default = on_gpu if gpu else on_cpu
        parser.add_argument(f"--{name}", type=type(default), default=default, help=help)
    rungs = {"choices": [*RUNGS], "default": ON_GPU if gpu else ON_CPU, "metavar": "RUNG"}
    parser.add_argument("--rungs", nargs="+", help=f"some of {', '.join(RUNGS)}", **rungs)
    return parser


def main():
    device = idr_torch.device()
    args = flags_of(device).parse_args()
    with session.begin(args, device) as (run, _), tempfile.TemporaryDirectory() as folder:
        folder, sizes = Path(folder), (args.images_per_class, args.val_per_class)
        images.generate(folder / "data", args.classes, *sizes)
        images.generate(folder / "judge", args.classes, 0, args.judged, judge=JUDGE)
        if (watts := idle(device)) is not None:
            run.measure("idle", watts, "W")
        race(run, Track(args, folder, device, judges(args, folder / "judge")))


def race(run, track):
    """Find the epochs of each rung, and train with each seed."""
    args, epochs = track.args, {}
    with tqdm(total=len(args.rungs) * (1 + args.seeds), unit="run") as bar:
        for rung in args.rungs:
            most = MOST_COMPILED if "--compile" in RUNGS[rung][1] else MOST
            found = track.run(rung, PILOT, 0, most * args.seconds)
            epochs[rung] = fitting(found, args.seconds)
            run.case(f"{rung}, pilot", phase="pilot", fitting=epochs[rung], **found)
            bar.update()
        for seed in range(args.seeds):
            for rung in args.rungs:
                for number in range(epochs[rung], 0, -1):
                    found = track.run(rung, number, seed, 2 * args.seconds)
                    phase = "training" if found["seconds"] <= args.seconds else "too long"
                    run.case(f"{rung}, seed {seed}, {number} epochs", phase=phase, **found)
                    if phase == "training":
                        break
                bar.update()


def fitting(pilot, budget: float) -> int:
    """Return the epochs that fit in a budget of seconds, by a pilot; 0 for one that was ended."""
    if "epoch_s" not in pilot:
        return 0
    left = budget * (1 - oneself.SPARE) - pilot["seconds"]
    return max(0, PILOT + math.floor(left / pilot["epoch_s"]))


@dataclass(frozen=True)
class Track:
    """The task, and where it is run."""

    args: argparse.Namespace
    folder: Path
    device: torch.device
    judges: list

    def run(self, rung: str, epochs: int, seed: int, most_s: float) -> dict:
        """Train as a process of its own, ended after most_s; return its seconds and results.

        joules: of the GPU, from the process's start to its end; others_cpu: CPUs that others kept
        busy. Both are absent without a sensor.
        """
        with tempfile.TemporaryDirectory(dir=self.folder) as place:
            folder, cache = Path(place, "run"), Path(place, "cache")
            own = {"DLOJZ_RUN": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(cache)}
            command, sensors = self.command(rung, epochs, seed), meters.Sensors(self.device)
            begin = time.perf_counter()
            process = subprocess.Popen(command, env=os.environ | own, stdout=subprocess.DEVNULL)
            moments = followed(process, events_file(folder), begin, most_s)
            about = {"rung": rung, "epochs": epochs, "seed": seed, "seconds": moments["end"]}
            names = {"energy_j": "joules", "others_cpu": "others_cpu"}
            about |= {names[n]: v for n, v in sensors.window().items() if n in names}
            if process.returncode > 0:  # its error is in this job's stderr
                sys.exit(f"{rung} ended with {process.returncode}: {shlex.join(command)}")
            if process.returncode < 0:
                return about
            return about | parts(log.read(folder), moments) | self.judged(folder)

    def command(self, rung, epochs, seed) -> list[str]:
        """Return the command of a training."""
        flags = RUNGS[rung][1]
        words = [str(trainer(rung, self.folder)), "--data", str(self.folder / "data")]
        for name in [*SIZES][:5]:
            words += [f"--{name}", str(getattr(self.args, name.replace("-", "_")))]
        precise = flags if self.device.type == "cuda" else flags.replace("bf16", "fp32")
        words += ["-e", str(epochs), "--seed", str(seed), *precise.split()]
        return [sys.executable, *words]

    @torch.no_grad()
    def judged(self, folder) -> dict:
        """Return the accuracy of the saved weights."""
        args, right, total = self.args, 0, 0
        model = models.build(args.model, args.classes, args.image_size)
        model.load_state_dict(shards.tensors(folder / "checkpoint.pt")["model"])
        model = model.to(self.device).eval()
        for batch, labels in self.judges:
            named = model(data.normalize(batch.to(self.device))).argmax(1).cpu()
            right, total = right + (named == labels).sum().item(), total + len(labels)
        return {"accuracy": right / total}


def judges(args, folder) -> list:
    """Return the batches that judge, as the trainer validates: images and labels."""
    solved = imports.from_file(course.solution("05"), "solution_05")
    given = SimpleNamespace(data=str(folder), seed=0, image_size=args.image_size)
    found = data.open_set(given, "val", solved.decode, solved.build_transforms(given)[1])
    order = torch.utils.data.DistributedSampler(found, 1, 0, shuffle=False)
    how = {"collate_fn": found.collate, "num_workers": min(args.num_workers, cpus.count())}
    return [*torch.utils.data.DataLoader(found, batch_sampler=data.Batches(order, 64), **how)]


def trainer(rung: str, folder: Path) -> Path:
    """Return the trainer of a rung; an edited one is written to this folder."""
    edit = EDITED.get(rung)
    return oneself.edited(edit, folder) if edit else course.solution(RUNGS[rung][0])


def followed(process, file: Path, begin: float, most_s: float) -> dict:
    """Return the seconds at which the lines of a log came, and at which the process ended.

    epochs: of each epoch's line.
    """
    moments, size = {"epochs": []}, 0
    while process.poll() is None and (now := time.perf_counter() - begin) < most_s:
        if file.exists() and file.stat().st_size > size:
            new = file.read_bytes()[size:]
            size += len(new)
            for event in ("start", "setup"):
                if b'{"event": "%s"' % event.encode() in new:
                    moments[event] = now
            moments["epochs"] += [now] * new.count(b'{"event": "epoch"')
        time.sleep(TICK_S)
    process.kill()  # unless it has ended
    process.wait()
    return moments | {"end": time.perf_counter() - begin}


def parts(run: log.Run, moments) -> dict:
    """Return the parts of a training's seconds, and the seconds of an epoch that is not first."""
    ends, compiling = moments["epochs"], derived.compile_seconds(run)
    training = sum(map(sum, run.steps.host_ms.values())) / 1000
    waiting = sum(run.steps.host_ms["data"]) / 1000
    validating = sum(event["seconds"] for event in run.validations)
    found = {
        "imports": moments["start"],
        "data and model": moments["setup"] - moments["start"],
        "compiling": compiling,
        "waiting for images": waiting,
        "training": max(0.0, training - waiting - compiling),
        "validation": validating,
        "saving": max(0.0, ends[-1] - moments["setup"] - training - validating),
        "ending": moments["end"] - ends[-1],
    }
    timed = {"epoch_s": (ends[3] - ends[1]) / 2} if len(ends) >= PILOT else {}
    return {"parts": found} | timed


def idle(device) -> float | None:
    """Return the power of the idle GPU in watts; None without a sensor."""
    session.wait(device)
    sensors = meters.Sensors(device)
    time.sleep(IDLE_S)
    energy = sensors.window().get("energy_j")
    return None if energy is None else energy / IDLE_S


if __name__ == "__main__":
    main()
