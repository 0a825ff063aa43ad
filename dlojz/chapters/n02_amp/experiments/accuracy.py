"""Whole training runs of a small task, clean and with one change: its cost in accuracy.

Submitted by a notebook:

    dlojz/chapters/n02_amp/experiments/accuracy.py
    --seeds 5 --variants fp16 bf16

The trainer is the solution of notebook 03, in a copy of its own for each training. A variant gives
it other flags, replaces one of its parts, or makes its images in another way; the loop stays the
trainer's. All images are on the device. Seed and epoch alone determine their order and their crops,
so that all variants of a seed see the same images. Every variant is trained with seed 0, then with
seed 1, and so on: a job that is cut off can still be compared.

In a job of several processes, submit(..., n_gpu=2), some variants share each batch among them, with
the trainer of notebook 06. The others are trained whole in each process, as in a job of one. If no
variant is shared, the trainings are dealt out among the processes, and each logs its own.
"""

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, wraps
from itertools import product

import torch
from tqdm import tqdm

from dlojz import course, idr_torch
from dlojz.chapters import resident, session
from dlojz.chapters.resident import USUAL_CROP, VAL_BATCH, Crop, Resident
from dlojz.training import flags, mixing
from dlojz.training.chronometer import NoMarks
from dlojz.training.replaced import replaced
from dlojz.watch import replay

# Defaults of the flags, with which the clean variant ends between 60 and 90 %. On a processor it
# takes about half a minute.
ON_GPU = {"image_size": 48, "batch_size": 64, "epochs": 10, "lr": 0.1}
ON_GPU |= {"classes": 24, "images_per_class": 60, "val_per_class": 100}
ON_CPU = {"image_size": 32, "batch_size": 16, "epochs": 6, "lr": 0.01}
ON_CPU |= {"classes": 8, "images_per_class": 50, "val_per_class": 25}


# The variants ------------------------------------------------------------------------------------
# A patch changes one part of the trainer, which is a module of its own for each training.


def replacing(name):
    """Return a decorator, for a function to call in place of the trainer's, which it gets first."""

    def decorated(change):
        def patch(trainer):
            own = getattr(trainer, name)
            setattr(trainer, name, wraps(change)(lambda *args: change(own, *args)))

        return patch

    return decorated


def after_building(change):
    """Return a patch that calls `change` with the training's parts once they are built."""

    @replacing("build_training")
    def patch(build, args, device, *sizes):
        training = build(args, device, *sizes)
        change(training, device)
        return training

    return patch


@replacing("build_model")
def pure_bf16(build, args, num_classes):
    """Keep weights, gradients and momenta in bf16."""
    model = build(args, num_classes).to(torch.bfloat16)
    model.register_forward_pre_hook(lambda _, inputs: (inputs[0].bfloat16(),))
    return model


def no_scaler(training, device):
    """Leave out the scaler."""
    training.scaler = torch.amp.GradScaler(device.type, enabled=False)


def not_unscaled(training, device):
    """Forget to unscale before clipping; the scaler's step unscales afterwards."""
    training.scaler.unscale_ = lambda optimizer: None


def loss_outside(training, device):
    """Compute the loss outside autocast, from the fp16 logits."""
    training.criterion = torch.autocast(device.type, enabled=False)(training.criterion)


@replacing("evaluate")
def training_only(evaluate, loader, training, device, args):
    """Validate without autocast."""
    without = argparse.Namespace(**vars(args) | {"precision": "tf32"})
    return evaluate(loader, training, device, without)


@replacing("train_one_epoch")
def fresh_scaler(train, epoch, loader, training, device, args, chrono):
    """Begin with another scaler at half time, like a resume from a checkpoint without it."""
    if epoch == args.epochs // 2:
        training.scaler = torch.amp.GradScaler(device.type)
    return train(epoch, loader, training, device, args, chrono)


def longer_warm_up(training, device):
    """Warm up for half of the updates instead of 30 %, linearly (Goyal et al., 2017).

    It begins at the learning rate of the small batch, 25 / 4 times as high as the trainer's first.
    """
    clean = training.scheduler
    training.scheduler = torch.optim.lr_scheduler.OneCycleLR(
        training.optimizer,
        training.optimizer.param_groups[0]["max_lr"],
        clean.total_steps,
        pct_start=0.5,
        div_factor=4,
        anneal_strategy="linear",
        cycle_momentum=False,
    )


@replacing("build_model")
def synchronised(build, args, num_classes):
    """Normalize by the statistics of all processes."""
    return torch.nn.SyncBatchNorm.convert_sync_batchnorm(build(args, num_classes))


def mixes(how, alpha):
    """Return a patch that mixes the images of each batch in training, as the trainer of 07 does.

    An update draws what the same update of any other variant of this seed would draw.
    """

    @replacing("forward")
    def patch(forward, training, images, labels, args):
        targets, size = labels, images.shape[-2:]
        if training.model.training:
            update = training.scheduler.last_epoch
            draws = mixing.draws_of(args.seed, 0, update, len(images), size, alpha=alpha)
            draws, classes = draws.to(images.device), training.classes
            images, targets = solved_07().mixed(images, labels, draws, how, classes)
        return forward(training, images, targets, args)

    return patch


@cache
def solved_07():
    """Return the trainer of notebook 07."""
    return replay.imported(course.solution("07"))


@dataclass(frozen=True)
class Variant:
    """One change of the training: flags of the trainer, a patch of one of its parts, its images."""

    title: str
    flags: str = ""
    patch: Callable | None = None
    train: str = "usual"  # one of small.WAYS to make these images
    val: str = "usual"
    crop: Crop = USUAL_CROP
    randaugment: tuple[int, int] | None = None  # its operations for an image, and their strength
    trainer: str = "03"  # the solution of this step
    shared: bool = False  # each process gets its share of every batch

    def wants(self, device, processes: int) -> str:
        """Return this variant's missing requirement; "" if it can be trained here."""
        if self.shared and processes < 2:
            return "several processes: submit it with n_gpu=2"
        if self.patch is synchronised and device.type != "cuda":
            return "GPUs: SyncBatchNorm has no code for a processor"
        return ""


SHARED = {"flags": "-b {share}", "shared": True}
VARIANTS = {  # the first is the clean training; numbers in braces follow from the command line
    "fp32": Variant("fp32"),
    "tf32": Variant("TF32", "--precision tf32"),
    "fp16": Variant("fp16", "--precision fp16"),
    "bf16": Variant("bf16", "--precision bf16"),
    "pure-bf16": Variant("model.to(torch.bfloat16)", patch=pure_bf16),
    "no-scaler": Variant("fp16 without a scaler", "--precision fp16", after_building(no_scaler)),
    "clipped": Variant("fp16, clipped", "--precision fp16 --clip-norm {clip}"),
    "not-unscaled": Variant(
        "fp16, clipped, unscale forgotten",
        "--precision fp16 --clip-norm {clip}",
        after_building(not_unscaled),
    ),
    "loss-outside": Variant(
        "fp16, the loss outside autocast", "--precision fp16", after_building(loss_outside)
    ),
    "training-only": Variant(
        "fp16, autocast around the training only", "--precision fp16", training_only
    ),
    "fresh-scaler": Variant(
        "fp16, the scaler not in the checkpoint", "--precision fp16", fresh_scaler
    ),
    "channels-last": Variant("channels_last", "--channels-last"),
    # Its gradient is that of four processes without SyncBatchNorm: each quarter is normalized by
    # its own statistics. The clean training is that of four with it. Only the running statistics
    # differ: here they see all images, in DDP those of process 0 see a quarter.
    "accumulation": Variant("accumulation: 4 quarters of a batch", "-b {quarter} --accumulate 4"),
    "batch-x4": Variant("batch x 4", "-b {fourfold}"),
    "batch-x4-lr": Variant("batch x 4, learning rate x 4", "-b {fourfold} --lr {fourfold_lr}"),
    # The trainer warms up for 30 % of its updates. On a GPU these are 66 in the clean training, and
    # 15 with a batch x 4, for a learning rate that is four times as high.
    "batch-x4-warm-up": Variant(
        "batch x 4, learning rate x 4, longer warm-up",
        "-b {fourfold} --lr {fourfold_lr}",
        after_building(longer_warm_up),
    ),
    "batch-x4-updates": Variant(
        "batch x 4, as many updates (4 x the images)", "-b {fourfold} -e {more_epochs}"
    ),
    "batch-x4-lr-updates": Variant(
        "batch x 4, learning rate x 4, as many updates (4 x the images)",
        "-b {fourfold} --lr {fourfold_lr} -e {more_epochs}",
    ),
    # PIL and torchvision decode to the same bytes: only the resize differs.
    "torchvision": Variant(
        "decoded and resized by torchvision", train="torchvision", val="torchvision"
    ),
    "no-antialias": Variant("resized without antialias", train="no-antialias", val="no-antialias"),
    "no-antialias-train": Variant("the training resized without antialias", train="no-antialias"),
    "no-flip": Variant("no flips", crop=Crop(flips=False)),
    "no-augmentation": Variant("no augmentation", crop=Crop(flips=False, moves=False)),
    "resized-crop": Variant("RandomResizedCrop", train="large", crop=Crop(area=(0.08, 1))),
    "large-crops": Variant(
        "RandomResizedCrop, scale=(0.5, 1)", train="large", crop=Crop(area=(0.5, 1))
    ),
    "small-copies": Variant(
        "RandomResizedCrop of images made smaller before", crop=Crop(area=(0.08, 1))
    ),
    # Shares, boxes and operations are drawn for each image alone.
    "mixup-0.2": Variant("mixup, alpha 0.2", patch=mixes("mixup", 0.2)),
    "mixup": Variant("mixup, alpha 1", patch=mixes("mixup", 1.0)),
    "cutmix": Variant("CutMix, alpha 1", patch=mixes("cutmix", 1.0)),
    "randaugment-1-5": Variant("RandAugment(1, 5)", randaugment=(1, 5)),
    "randaugment-2-9": Variant("RandAugment(2, 9)", randaugment=(2, 9)),
    "processes": Variant("several processes", trainer="06", **SHARED),
    "sync-batch-norm": Variant(
        "several processes, SyncBatchNorm", patch=synchronised, trainer="06", **SHARED
    ),
    # The solution of 05 wraps nothing: each process trains a model of its own on its share.
    "not-wrapped": Variant("several processes, DDP forgotten", trainer="05", **SHARED),
}


# The images --------------------------------------------------------------------------------------


def draw(args, device):
    """Return {split: (images by way, labels)} on the device, in all ways that a variant needs."""
    variants = [VARIANTS[name] for name in args.variants]
    ways = {split: [getattr(v, split) for v in variants] for split in ("train", "val")}
    return resident.draw(args, device, ways)


# A training --------------------------------------------------------------------------------------


class FirstLoss(NoMarks):
    """A stand-in for the Chronometer, which keeps the first loss, on the device."""

    value = None
    profiler = None

    def transfer(self):
        """Begin the copy to the device."""

    def idle(self):
        """Begin work that is not a step."""

    def next_iter(self, loss=None, **_):
        """End a step."""
        if self.value is None:
            self.value = loss


def copy_of_trainer(variant: Variant):
    """Return the trainer, patched."""
    trainer = replay.imported(course.solution(variant.trainer))
    if variant.patch:
        variant.patch(trainer)
    return trainer


def arguments(trainer, variant: Variant, args, seed: int):
    """Return the trainer's arguments for this variant, parsed by the trainer."""
    b, lr = args.batch_size, args.lr
    more = {"clip": args.clip_norm, "quarter": b // 4, "share": b // idr_torch.size}
    more |= {"fourfold": 4 * b, "fourfold_lr": 4 * lr}
    # The clean variant's number of updates. An epoch leaves out an incomplete batch.
    images = args.classes * args.images_per_class
    more["more_epochs"] = round(args.epochs * (images // b) / max(1, images // (4 * b)))
    words = f"--model {args.model} --image-size {args.image_size} -e {args.epochs} --seed {seed}"
    words += f" -b {b} --lr {lr} --no-channels-last --precision fp32 {variant.flags.format(**more)}"
    with replaced(sys, argv=[trainer.__file__, *words.split()]):
        return trainer.parse_args()


def loaders(variant: Variant, given, data):
    """Return the loaders of this variant, for training and validation."""
    size, (ways, labels), (val_ways, val_labels) = given.image_size, data["train"], data["val"]
    images, batch, share = ways[variant.train], given.batch_size, (0, 1)
    if variant.shared:
        batch, share = batch * idr_torch.size, (idr_torch.rank, idr_torch.size)
    loader = Resident(
        images, labels, size, batch, given.seed, variant.crop, share, variant.randaugment
    )
    val_images = val_ways[variant.val]
    return loader, Resident(val_images, val_labels, size, VAL_BATCH, share=share)


def train(variant: Variant, args, seed: int, data, device) -> dict:
    """Train once, and return the results."""
    trainer = copy_of_trainer(variant)
    given = arguments(trainer, variant, args, seed)
    trainer.set_numerics(given)
    session.wait(device)
    begin = time.perf_counter()
    loader, val_loader = loaders(variant, given, data)
    updates = given.epochs * (len(loader) // given.accumulate)
    training = trainer.build_training(given, device, args.classes, updates)
    training.classes = args.classes
    first = FirstLoss()
    for loader.epoch in range(given.epochs):
        trainer.train_one_epoch(loader.epoch, loader, training, device, given, first)
    found = trainer.evaluate(val_loader, training, device, given)
    return {
        "accuracy": found["accuracy"],
        "loss": found["loss"],
        "first_loss": first.value.item(),
        "scale": training.scaler.get_scale() if training.scaler.is_enabled() else None,
        "updates": updates,
        "seconds": time.perf_counter() - begin,
    }


def parse_args(device):
    """Return the arguments, with default sizes that suit the device."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, positive = parser.add_argument, flags.at_least(1)
    add("--variants", nargs="+", default=["all"], metavar="NAME", help=", ".join(VARIANTS))
    add("--seeds", type=positive, default=5, help="trainings of each variant")
    add("--model", default="resnet18", help="a classifier of torchvision")
    add("--image-size", type=positive, help="pixels")
    add("-b", "--batch-size", type=positive, help="images per update")
    add("-e", "--epochs", type=positive, help="training passes")
    add("--classes", type=positive, help="number of classes to draw")
    add("--images-per-class", type=positive, help="images of each class for training")
    add("--val-per-class", type=positive, help="images of each class for validation")
    add("--lr", type=float, help="the highest learning rate")
    add("--clip-norm", type=float, default=1.0, help="largest norm, in the variants that clip")
    parser.set_defaults(**(ON_GPU if device.type == "cuda" else ON_CPU))
    args = parser.parse_args()
    here = [name for name, v in VARIANTS.items() if not v.wants(device, idr_torch.size)]
    wanted = [name for word in args.variants for name in (here if word == "all" else [word])]
    # The clean variant is always there, since all others are compared with it.
    args.variants = list(dict.fromkeys([next(iter(VARIANTS)), *wanted]))
    if text := problem(args, device):
        parser.error(text)
    return args


def problem(args, device) -> str:
    """Return the first fault of the arguments, with what was expected; "" if there is none."""
    for name in args.variants:
        if name not in VARIANTS:
            known = ", ".join(VARIANTS)
            return f"--variants {name}: not known; expected some of {known}, or all"
        if missing := VARIANTS[name].wants(device, idr_torch.size):
            return f"--variants {name}: needs {missing}"
    images, largest = args.classes * args.images_per_class, args.batch_size
    largest *= 4 if any(name.startswith("batch-x4") for name in args.variants) else 1
    more = "give more --images-per-class or a smaller -b"
    if images < largest:
        return f"{images} images are less than a batch of {largest}: {more}"
    if args.batch_size % 4 and "accumulation" in args.variants:
        return f"-b {args.batch_size}: expected a multiple of 4, for 4 quarters of a batch"
    shared = any(VARIANTS[name].shared for name in args.variants)
    if shared and args.batch_size % idr_torch.size:
        return f"-b {args.batch_size}: expected a multiple of {idr_torch.size} processes"
    return ""


def dealt(args) -> list[tuple[int, str]]:
    """Return the trainings of this process, by seed and variant.

    If a variant shares its batches, all processes train all, in step; else each its part.
    """
    everything = list(product(range(args.seeds), args.variants))
    if any(VARIANTS[name].shared for name in args.variants):
        return everything
    return everything[idr_torch.rank :: idr_torch.size]


def train_all(run, args, device):
    """Train every variant with every seed, and log each training as it ends."""
    data = draw(args, device)
    mine, quiet = dealt(args), not idr_torch.is_master
    with tqdm(total=len(mine), unit="training", disable=quiet) as bar:
        for seed, name in mine:
            bar.set_description(f"{name}, seed {seed}")
            found = train(VARIANTS[name], args, seed, data, device)
            about = {"variant": name, "title": VARIANTS[name].title, "seed": seed}
            run.case(f"{name}, seed {seed}", **about, **found)
            bar.set_postfix(accuracy=f"{found['accuracy']:.1%}")
            bar.update()


def main():
    device = idr_torch.device()
    args = parse_args(device)
    shared = any(VARIANTS[name].shared for name in args.variants)
    group = session.process_group(device) if shared else nullcontext()
    with session.begin(args, device) as (run, _), group:
        train_all(run, args, device)


if __name__ == "__main__":
    main()
