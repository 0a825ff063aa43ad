"""A small training program with six inefficiencies, which are to be repaired.

Submitted by notebook 04c, from your own copy: slow.py in the course's folder. Six of the seven
functions from `augmented` to `evaluate` have one each.

What must stay:
- the functions, with what they are given and what they return: the job calls and watches them;
- the values: each loss, each count, and the weights in the end, up to rounding;
- the work: each image of `data` passes the model, in this order, in float32.

The goal: the time of a program without them, measured in pairs of runs.
"""

import functools
from typing import NamedTuple

import torch
from torch import nn

from dlojz.chapters.n04c_slow import job

CLASSES = 32
LIMIT = 1.0  # of the norm of all gradients
MEAN, STD = (120.0, 115.0, 105.0), (70.0, 69.0, 72.0)  # of each colour


class Batch(NamedTuple):
    """Images as bytes with their labels, and how each of them is to be augmented."""

    images: torch.Tensor
    labels: torch.Tensor
    flip: torch.Tensor  # whether left and right change places
    light: torch.Tensor  # a factor


def make_data(seed, steps, size, pixels, device):
    """Return batches of images to train with: each class is a pattern, under noise."""
    rng = torch.Generator().manual_seed(seed)
    patterns = torch.randint(0, 200, (CLASSES, 3, 4, 4), generator=rng).float()
    patterns = nn.functional.interpolate(patterns, (pixels, pixels))

    def batch():
        labels = torch.randint(0, CLASSES, (size,), generator=rng)
        noise = torch.randint(0, 56, (size, 3, pixels, pixels), generator=rng)
        images = (patterns[labels] + noise).to(torch.uint8)
        flip = torch.rand(size, generator=rng) < 0.5
        light = 0.8 + 0.4 * torch.rand(size, generator=rng)
        return Batch(*(t.to(device) for t in (images, labels, flip, light)))

    return [batch() for _ in range(steps)]


def build(device):
    """Return a new model and its optimizer."""
    layers, width = [], 3
    for out in (16, 32, 64, 64):
        stride = 1 if out == width else 2
        layers += [nn.Conv2d(width, out, 3, stride, 1), nn.GroupNorm(8, out), nn.ReLU()]
        width = out
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))
    model = model.to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def augmented(batch):
    """Return the images as floats, some of them flipped, each as bright as it is to be."""
    flip, light = batch.flip.view(-1, 1, 1, 1), batch.light.view(-1, 1, 1, 1)
    return torch.where(flip, batch.images.flip(-1), batch.images) * light


def normalised(images):
    """Return the images with a mean of 0 and a spread of 1, in each colour."""
    mean, std = constants(images.device)
    return (images - mean) / std


@functools.cache
def constants(device):
    """Return the mean and the spread on this device, made once."""
    return tuple(torch.tensor(values, device=device).view(-1, 1, 1) for values in (MEAN, STD))


def balanced_loss(logits, labels):
    """Return the mean, over the classes of a batch, of the mean loss of a class."""
    losses = nn.functional.cross_entropy(logits, labels, reduction="none")
    images = torch.zeros_like(logits[0]).index_add(0, labels, torch.ones_like(losses))
    return (losses / images[labels]).sum() / (images > 0).sum()


def clip(model):
    """Scale the gradients so that their norm is at most LIMIT."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)


def train_step(model, optimizer, batch):
    """Train with one batch; return its loss, and how many answers were right before it."""
    images, labels = normalised(augmented(batch)), batch.labels
    optimizer.zero_grad()
    logits = model(images)
    loss = balanced_loss(logits, labels)
    loss.backward()
    clip(model)
    optimizer.step()
    return loss.detach(), (logits.argmax(1) == labels).sum()


def train_epoch(model, optimizer, data):
    """Train with all batches. Return the losses, and the counts of right answers."""
    model.train()
    losses, right = zip(*(train_step(model, optimizer, batch) for batch in data), strict=True)
    return torch.stack(losses), torch.stack(right)


@torch.no_grad()
def evaluate(model, data):
    """Return the mean loss and the count of right answers, without augmentation."""
    model.eval()
    total, right = 0.0, 0
    for batch in data:
        logits = model(normalised(batch.images.float()))
        total = total + nn.functional.cross_entropy(logits, batch.labels)
        right = right + (logits.argmax(1) == batch.labels).sum()
    return total / len(data), right


if __name__ == "__main__":
    job.examine(__file__)
