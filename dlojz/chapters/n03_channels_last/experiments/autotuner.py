"""The time of each step with cuDNN's autotuner off or on, for images of one size and of many.

Submitted by a notebook:

    dlojz/chapters/n03_channels_last/experiments/autotuner.py
    --autotuner -b 256


Off and on are two jobs, because PyTorch keeps its choice for a convolution until the process ends.
Each step is synchronised, so that its time is its own. One step on other images comes first, so
that no case pays for starting the libraries.
"""

import argparse
from functools import partial

import torch
import torchvision

from dlojz.chapters import session

SIZES, APART = 6, 16  # the number of sizes of images, and the pixels between two of them


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--autotuner", action=argparse.BooleanOptionalAction, default=True)
    session.add_sizes(parser, 256)
    parser.add_argument("--steps", type=int, default=3 * SIZES, help="steps of each case")
    args = parser.parse_args()
    with session.begin(args) as (run, device):
        session.set_float32(args.precision)
        step = training(args, device)
        size = args.image_size
        step(size + APART)
        torch.backends.cudnn.benchmark = args.autotuner
        many = [max(32, size - APART * n) for n in range(1, SIZES + 1)]
        for case, sizes in {"one size": [size], f"{SIZES} sizes in turn": many}.items():
            for number in range(args.steps):
                one = partial(step, sizes[number % len(sizes)])
                run.measure(case, session.milliseconds(one, device), "ms")


def training(args, device):
    """Return step(pixels), a training step on images of any size."""
    torch.manual_seed(0)
    model = torchvision.models.get_model(args.model, weights=None).to(device)
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    labels = torch.zeros(args.batch_size, dtype=int, device=device)
    dtype = session.DTYPES.get(args.precision)

    def step(pixels):
        images = torch.randn((args.batch_size, 3, pixels, pixels), device=device)
        images = images.to(memory_format=torch.channels_last)
        session.one_step(model, optimizer, images, labels, dtype)

    return step


if __name__ == "__main__":
    main()
