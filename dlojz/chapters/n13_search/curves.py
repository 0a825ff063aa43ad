"""The trainings of a search's trials: the course's own trainer, on images that are on the device.

A trial is what a job would be: flags of the trainer. It is trained here, in the process that asks
for it, because a job's start would take longer than the training.
"""

import argparse
import copy
import sys
import time
from collections.abc import Iterator

from dlojz import course, idr_torch
from dlojz.chapters import resident
from dlojz.chapters.resident import VAL_BATCH, Resident
from dlojz.training import flags, imports
from dlojz.training.chronometer import NoMarks
from dlojz.training.replaced import replaced

# Defaults of the flags, with which trials end anywhere between chance and nine of ten images.
ON_GPU = {"image_size": 32, "batch_size": 64, "epochs": 9, "precision": "bf16"}
ON_GPU |= {"classes": 20, "images_per_class": 60, "val_per_class": 50}
ON_CPU = {"image_size": 16, "batch_size": 32, "epochs": 9, "precision": "fp32"}
ON_CPU |= {"classes": 4, "images_per_class": 32, "val_per_class": 50}

UNSEEN = "unseen"  # validation images on which nothing is chosen


def space(trial) -> dict[str, float]:
    """Return the flags that an Optuna trial suggests, by name."""
    return {
        "lr": trial.suggest_float("lr", 1e-3, 1.0, log=True),
        "mom": trial.suggest_float("mom", 0.5, 0.99),
        "wd": trial.suggest_float("wd", 1e-5, 1e-2, log=True),
    }


class Unmarked(NoMarks):
    """A stand-in for the Chronometer, which measures nothing."""

    profiler = None

    def transfer(self):
        """Begin the copy to the device."""

    def next_iter(self, **_):
        """End a step."""


class Curves:
    """Trains with the flags of a trial, epoch by epoch.

    A completed training is not repeated: its curve is yielded again, with its seconds. All of a
    model share one module on the device, so that it is compiled once.
    """

    def __init__(self, args, device, data):
        """data: of `draw`."""
        self.args, self.device, self.data = args, device, data
        # That of 05, as later ones would share a training among the processes of a job.
        self.trainer = imports.from_file(course.solution("05"), "solution")
        self.complete, self.drawn, self.modules = {}, {}, {}
        build, place = self.trainer.build_model, self.trainer.placed

        def built(given, classes):
            key = given.model, given.seed  # drawing the first weights takes a tenth of a second
            if key not in self.drawn:
                self.drawn[key] = build(given, classes)
            return self.drawn[key]

        def placed(model, given, device):
            module = self.modules.get(given.model)
            if module is None:
                module = self.modules[given.model] = place(copy.deepcopy(model), given, device)
                if self.args.compile != "off":
                    module.compile(mode=self.args.compile)
            else:
                module.load_state_dict(model.state_dict())
            return module

        self.trainer.build_model, self.trainer.placed = built, placed

    def epochs(self, suggested: dict, seed: int, model: str = "") -> Iterator[dict]:
        """Yield `accuracy` and `seconds` of each epoch, and with the last one `unseen`.

        suggested: values of the trainer's flags, by name; {}: its defaults. seconds: of training
        and validation, on a processor those of all its cores; without building the model. unseen:
        the accuracy on images that no search sees.
        """
        model = model or self.args.model
        if model not in self.modules:
            next(self._train({}, seed, model))  # compiles, and chooses kernels, before any clock
        key = (*suggested.items(), seed, model)
        if key not in self.complete:
            curve = []
            for epoch in self._train(suggested, seed, model):
                curve.append({name: round(value, 4) for name, value in epoch.items()})
                yield curve[-1]
            self.complete[key] = curve
            return
        yield from self.complete[key]

    def whole(self, suggested: dict, seed: int, model: str = "") -> dict:
        """Return `accuracies`, `seconds`, and `accuracy` and `unseen` after the last epoch."""
        curve = [*self.epochs(suggested, seed, model)]
        seconds = round(sum(epoch["seconds"] for epoch in curve), 4)
        accuracies = [epoch["accuracy"] for epoch in curve]
        return curve[-1] | {"accuracies": accuracies, "seconds": seconds}

    def _train(self, suggested, seed, model):
        given = self._arguments(suggested, seed, model)
        self.trainer.set_numerics(given)
        loader = self._loader("train", seed)
        updates = given.epochs * len(loader)
        training = self.trainer.build_training(given, self.device, self.args.classes, updates)
        own = training, self.device, given
        clock = time.perf_counter if self.device.type == "cuda" else time.process_time
        for loader.epoch in range(given.epochs):
            begin = clock()
            self.trainer.train_one_epoch(loader.epoch, loader, *own, Unmarked())
            found = self.trainer.evaluate(self._loader("val"), *own)  # waits for the device
            found["seconds"] = clock() - begin
            if loader.epoch == given.epochs - 1:
                found[UNSEEN] = self.trainer.evaluate(self._loader(UNSEEN), *own)["accuracy"]
            del found["loss"]
            yield found

    def _arguments(self, suggested, seed, model):
        """Return the trainer's arguments, parsed by the trainer."""
        a = self.args
        words = f"--model {model} --image-size {a.image_size} -b {a.batch_size} -e {a.epochs}"
        words += f" --precision {a.precision} --seed {seed}"
        words += "".join(f" --{name} {value}" for name, value in suggested.items())
        with replaced(sys, argv=[self.trainer.__file__, *words.split()]):
            return self.trainer.parse_args()

    def _loader(self, split, seed=None):
        images, labels = self.data[split]
        batch = self.args.batch_size if split == "train" else VAL_BATCH
        return Resident(images["usual"], labels, self.args.image_size, batch, seed)


def draw(args, device) -> dict:
    """Return {split: (images by way, labels)} on the device: "train", "val" and "unseen"."""
    both = argparse.Namespace(**vars(args) | {"val_per_class": 2 * args.val_per_class})
    data = resident.draw(both, device)
    (ways, labels), n = data.pop("val"), args.val_per_class
    by_class = ways["usual"].unflatten(0, (args.classes, 2 * n)), labels.view(args.classes, 2 * n)
    for split, part in (("val", slice(n)), (UNSEEN, slice(n, None))):
        images, own = (whole[:, part].flatten(0, 1) for whole in by_class)
        data[split] = {"usual": images}, own
    return data


def parser(text: str, device, **defaults) -> argparse.ArgumentParser:
    """Return the parser of a program with this docstring, with sizes that suit the device."""
    found = argparse.ArgumentParser(
        description=text.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, positive = found.add_argument, flags.at_least(1)
    add("--model", default="resnet18", help="a classifier of torchvision")
    add("--image-size", type=positive, help="pixels")
    add("-b", "--batch-size", type=positive, help="images per update")
    add("-e", "--epochs", type=positive, help="training passes of a whole trial")
    add("--classes", type=positive, help="number of classes to draw")
    add("--images-per-class", type=positive, help="images of each class for training")
    add("--val-per-class", type=positive, help="images of each class for validation")
    add("--precision", help="format of matrix products and convolutions")
    add("--compile", help="mode of torch.compile: off, default or reduce-overhead")
    sizes = ON_GPU if device.type == "cuda" else ON_CPU
    found.set_defaults(**sizes | {"compile": "off"} | defaults)
    return found


def mine(items) -> list:
    """Return this process's part of what the processes of a job share."""
    return list(items)[idr_torch.rank :: idr_torch.size]
