"""Whole trainings of the small task, over optimizers, batches and learning rates.

The images are on the device, and the images of a seed come in the same order whatever the batch.
On a GPU the forward and backward pass of a batch are recorded once as a CUDA graph: with 64 small
images, launching the kernels would take longer than they do.
"""

import argparse
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from types import SimpleNamespace

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torchvision.transforms.v2 import functional
from tqdm import tqdm

from dlojz import course, idr_torch
from dlojz.chapters import resident, session
from dlojz.chapters.resident import VAL_BATCH, Resident
from dlojz.machine import meters
from dlojz.training import data, flags, imports, models

# Defaults of the flags. On a GPU SGD with batches of 64 ends above 90 %. On two cores all trainings
# of a program take some minutes.
ON_GPU = {"image_size": 32, "classes": 24, "images_per_class": 400, "val_per_class": 100}
ON_GPU |= {"epochs": 8, "batches": [64, 256, 1024, 4096], "at": 1024, "rates": 5, "seeds": 5}
ON_GPU |= {"optimizers": ["sgd", "lamb", "adamw", "lars", "lion", "muon"], "scale": 1.0}
ON_CPU = {"image_size": 24, "classes": 4, "images_per_class": 60, "val_per_class": 50}
ON_CPU |= {"epochs": 4, "batches": [16, 80], "at": 80, "rates": 3, "seeds": 3}
ON_CPU |= {"optimizers": ["sgd"], "scale": 0.16}
TUNING_SEEDS = (100, 101)  # the seeds of `--seeds` count from 0
MOMENTUM = 0.9  # of SGD and LARS
FACTOR = 2.5  # between two learning rates of a grid


@dataclass(frozen=True)
class Kind:
    """An optimizer: the middle of its grid of learning rates, and its weight decay."""

    title: str
    rate: float
    decay: float


KINDS = {
    "sgd": Kind("SGD", 0.1, 5e-4),
    "adamw": Kind("AdamW", 0.01, 0.05),
    "lamb": Kind("LAMB", 0.02, 0.02),
    "lars": Kind("LARS", 12.0, 1e-4),
    "lion": Kind("Lion", 0.001, 0.1),
    "muon": Kind("Muon", 0.02, 0.01),
}


def optimizers():
    """Return the solved optimizers.py."""
    return imports.beside(course.solution("08"), "optimizers")


def built(plan, model):
    """Return the optimizer of a plan, as the trainer of 08 builds it."""
    decay = KINDS[plan.optimizer].decay
    if plan.optimizer == "sgd":
        weights = model.parameters()
        return torch.optim.SGD(weights, plan.rate, MOMENTUM, weight_decay=decay, fused=True)
    given = {"optimizer": plan.optimizer, "lr": plan.rate, "mom": MOMENTUM, "wd": decay}
    return optimizers().build(SimpleNamespace(**given), model)


@dataclass(frozen=True)
class Plan:
    """One training."""

    optimizer: str
    batch: int
    rate: float  # the highest of the schedule
    seed: int
    updates: int | None = None  # by default those of --epochs
    warm_up: float = 0.3  # share of the updates
    constant: bool = False  # after the warm-up; else it falls along a cosine
    ema: float = 0.0  # share of the mean of weights that an update keeps; 0: there is no mean
    growing: bool = False  # images of 3/4 of the side in the first half
    build: Callable = built


def rates(optimizer: str, count: int, scale: float = 1.0) -> list[float]:
    """Return the grid of learning rates of an optimizer: the same budget for each."""
    middle = KINDS[optimizer].rate * scale
    return [float(f"{middle * FACTOR ** (n - (count - 1) / 2):.3g}") for n in range(count)]


# A training --------------------------------------------------------------------------------------


def train(plan: Plan, args, images, device) -> dict:
    """Train once, and return the results.

    images: of `resident.draw`. accuracy_again: with batch normalization's statistics computed
    again. seconds, joules: of all updates, without recording the graph and without validation;
    joules are absent where no sensor reports them.
    """
    torch.manual_seed(plan.seed)
    model = models.build(args.model, args.classes, args.image_size)
    model = model.to(device, memory_format=torch.channels_last)
    mean = _mean(model, plan.ema) if plan.ema else None
    optimizer = plan.build(plan, model)
    full = loader(images, "train", args.image_size, plan)
    updates = plan.updates or args.epochs * len(full)
    loaders = [full]
    if plan.growing:
        side = args.image_size * 3 // 4
        loaders = [loader(smaller(images, side, args.image_size), "train", side, plan), full]
    graphs = args.graphs and device.type == "cuda"
    sources = [(step_of(model, own, graphs), endless(own)) for own in loaders]
    scheduler = schedule(plan, optimizer, updates)
    session.wait(device)
    sensors, begin = meters.Sensors(device, idr_torch.size), time.perf_counter()
    for update in range(updates):
        step, batches = sources[update * len(sources) // updates]
        step(*next(batches))
        optimizer.step()
        scheduler.step()
        if mean:
            mean.update_parameters(model)
    session.wait(device)
    spent = {"seconds": time.perf_counter() - begin}
    energy = sensors.window().get("energy_j")
    spent |= {} if energy is None else {"joules": energy}
    found = {"updates": updates, "images": updates * plan.batch, **spent}
    return found | accuracies(mean or model, full, images, args)


def loader(images, split, size, plan) -> Resident:
    """Return the loader of a training's images; an epoch leaves out an incomplete batch."""
    ways, labels = images[split]
    return Resident(ways["usual"], labels, size, plan.batch, plan.seed)


def smaller(images, side, size):
    """Return the training images for crops of `side` pixels instead of `size`."""
    ways, labels = images["train"]
    short = round(ways["usual"].shape[-1] * side / size)
    made = functional.resize(ways["usual"], [short, short], antialias=True)
    return {"train": ({"usual": made}, labels)}


def endless(loader):
    """Yield the batches of one epoch after the other."""
    while True:
        yield from loader
        loader.epoch += 1


def schedule(plan, optimizer, updates):
    """Return the schedule of the learning rates: up for a share of the updates, then down."""
    highest = [group["lr"] for group in optimizer.param_groups]
    if plan.constant:
        steps = max(1, round(plan.warm_up * updates))
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1, (n + 1) / steps))
    return torch.optim.lr_scheduler.OneCycleLR(
        optimizer, highest, updates, pct_start=float(plan.warm_up), cycle_momentum=False
    )


def _mean(model, decay):
    """Return the exponential moving average of a model's weights and statistics."""
    average = get_ema_multi_avg_fn(decay)
    return AveragedModel(model, multi_avg_fn=average, use_buffers=True)


# A step ------------------------------------------------------------------------------------------


def run(model, images):
    """Return the logits, of bytes; on a GPU under autocast in bf16."""
    device = images.device.type
    images = data.normalize(images).to(memory_format=torch.channels_last)
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        return model(images)


def backward(model, images, labels):
    """Return the loss of a batch, with its gradients in the weights."""
    loss = torch.nn.functional.cross_entropy(run(model, images), labels, label_smoothing=0.1)
    loss.backward()
    return loss.detach()


def step_of(model, loader, graphs):
    """Return a function that puts the gradients of images and labels into the weights."""
    model.train()
    if graphs:
        return recorded(model, *next(iter(loader)))

    def step(images, labels):
        model.zero_grad()
        return backward(model, images, labels)

    return step


def recorded(model, images, labels):
    """Return the step as a CUDA graph, of batches as large as this one."""
    given, kept = (images.clone(), labels.clone()), [b.clone() for b in model.buffers()]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # libraries choose their kernels, the allocator grows
            model.zero_grad()
            backward(model, *given)
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        loss = backward(model, *given)
    weights = list(model.parameters())
    gradients = [weight.grad for weight in weights]  # the graph writes them to the same memory
    for buffer, before in zip(model.buffers(), kept, strict=True):
        buffer.copy_(before)

    def step(images, labels):
        for own, new in zip(given, (images, labels), strict=True):
            own.copy_(new)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        graph.replay()
        return loss

    return step


# The accuracy ------------------------------------------------------------------------------------


def accuracies(model, loader, images, args) -> dict:
    """Return the accuracy as the model is, and with its statistics computed again."""
    ways, labels = images["val"]
    val = Resident(ways["usual"], labels, args.image_size, VAL_BATCH)
    found = {"accuracy": accuracy(model, val)}
    compute_again(model, loader)
    return found | {"accuracy_again": accuracy(model, val)}


@torch.no_grad()
def accuracy(model, loader) -> float:
    """Return the share of images whose class has the highest logit."""
    model.eval()
    right = sum((run(model, images).argmax(1) == labels).sum() for images, labels in loader)
    return right.item() / len(loader.images)


def compute_again(model, loader):
    """Replace the running statistics of batch normalization by those of the final weights.

    They are means over an epoch of the training's own batches; no weight changes.
    """
    device = loader.labels.device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        update_bn(
            (data.normalize(images).to(memory_format=torch.channels_last) for images, _ in loader),
            model,
        )


# Many trainings ----------------------------------------------------------------------------------


def add_flags(parser, device):
    """Add the flags of a program that trains many times, with sizes that suit the device."""
    add, positive = parser.add_argument, flags.at_least(1)
    add("--model", default="resnet18", help="a classifier of torchvision")
    add("--image-size", type=positive, help="pixels")
    add("--classes", type=positive, help="number of classes to draw")
    add("--images-per-class", type=positive, help="images of each class for training")
    add("--val-per-class", type=positive, help="images of each class for validation")
    add("-e", "--epochs", type=positive, help="training passes")
    add("--batches", type=positive, nargs="+", help="images per update; the first is the small one")
    add("--optimizers", nargs="+", choices=KINDS, help="the first two also with other batches")
    add("--at", type=positive, help="the large batch, of what is trained with one batch only")
    add("--rates", type=positive, help="learning rates that each optimizer may try")
    graphs = argparse.BooleanOptionalAction
    add("--graphs", action=graphs, default=True, help="CUDA graphs of the steps, on a GPU")
    add("--scale", type=float, help="factor of these rates: smaller for smaller batches")
    add("--seeds", type=positive, help="fresh trainings of what was chosen")
    parser.set_defaults(**(ON_GPU if device.type == "cuda" else ON_CPU))


def flags_of(doc, device):
    """Return the parser of a program's flags; doc: the program's docstring."""
    parser = argparse.ArgumentParser(
        description=doc.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_flags(parser, device)
    return parser


def check(parser, args):
    """Return the arguments. Exit with an error if a batch has more images than there are."""
    images, largest = args.classes * args.images_per_class, max([*args.batches, args.at])
    if images < largest:
        more = "give more --images-per-class or smaller --batches and --at"
        parser.error(f"{images} images are less than a batch of {largest}: {more}")
    return args


@contextmanager
def processes(device):
    """Let the processes exchange results, each on its own GPU, where its graphs are recorded.

    Through gloo: NCCL's threads would ask a GPU for its work while a graph is recorded.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with session.process_group(torch.device("cpu")):
        yield


class Trainer:
    """Trains what all processes are to train, each its part, and logs each training as it ends."""

    def __init__(self, run, args, device, progress):
        self.run, self.args, self.device, self.progress = run, args, device, progress
        self.images = resident.draw(args, device)

    def each(self, jobs: list[tuple[dict, Plan]]) -> list[dict]:
        """Train these, of (what to log, plan), and return the cases of all processes.

        Neighbours take equally long, so they are dealt out in turn.
        """
        mine = [self.one(*job) for job in islice(jobs, idr_torch.rank, None, idr_torch.size)]
        found = [None] * idr_torch.size
        torch.distributed.all_gather_object(found, mine)
        return [case for cases in found for case in cases]

    def one(self, about, plan) -> dict:
        """Train once, and log it."""
        about = {"optimizer": plan.optimizer, "batch": plan.batch, "rate": plan.rate, **about}
        about |= {"seed": plan.seed}
        found = about | train(plan, self.args, self.images, self.device)
        self.run.case(", ".join(f"{key} {value}" for key, value in about.items()), **found)
        self.progress.set_postfix(accuracy=f"{found['accuracy']:.1%}")
        self.progress.update()
        return found


@contextmanager
def begin(args, device, number: int):
    """Yield a Trainer of that number of trainings, which the processes deal out."""
    total, hidden = number // idr_torch.size, not idr_torch.is_master
    bar = tqdm(total=total, unit="training", disable=hidden)
    with session.begin(args, device) as (run, _), processes(device), bar:
        yield Trainer(run, args, device, bar)


def best(cases: list[dict], *of: str) -> dict[tuple, float]:
    """Return the learning rate with the highest mean accuracy, by optimizer and batch.

    of: what the trainings differ in, if not in these two.
    """
    of, found = of or ("optimizer", "batch"), {}
    for case in cases:
        key = tuple(case[name] for name in of)
        found.setdefault(key, {}).setdefault(case["rate"], []).append(case["accuracy"])
    mean = {key: {r: sum(a) / len(a) for r, a in by.items()} for key, by in found.items()}
    return {key: max(sorted(by), key=by.get) for key, by in mean.items()}
