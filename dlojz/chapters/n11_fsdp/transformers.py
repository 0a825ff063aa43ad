"""The vision transformers of experiments about large models: their flags, and a small one."""

import argparse

import torchvision

from dlojz.chapters import session
from dlojz.training import models

SMALL = models.ViT(patch=4, layers=4, heads=4, width=128, mlp=512)


def add_flags(parser: argparse.ArgumentParser, on_gpu: bool):
    """Add the flags of an experiment on one, with defaults that suit the device."""
    sizes = ("vit_600m", 224, 32, "bf16") if on_gpu else ("small", 32, 16, "fp32")
    model, image_size, batch_size, precision = sizes
    add = parser.add_argument
    add("--model", default=model, choices=("small", *models.LARGER))
    add("--image-size", type=int, default=image_size, help="pixels")
    add("-b", "--batch-size", type=int, default=batch_size, help="images per process")
    add("--precision", choices=("fp32", "tf32", *session.DTYPES), default=precision)


def build(name: str, image_size: int):
    """Return one with random weights: a larger model, or "small", of four blocks."""
    if name != "small":
        return models.build(name, 1000, image_size)
    patch, *sizes = SMALL
    return torchvision.models.VisionTransformer(image_size, patch, *sizes, num_classes=10)
