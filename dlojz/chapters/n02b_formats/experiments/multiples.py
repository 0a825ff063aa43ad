"""The speed of channels, batches and classes around a multiple of 8.

Recorded for notebook 02b:

    dlojz/chapters/n02b_formats/experiments/multiples.py --precision fp16

All sizes are timed in turn, in rounds, so that a disturbance affects all; the median counts.
"""

import argparse
import statistics
from functools import partial

import torch
import torchvision

from dlojz.chapters import session

WARM_UP, ROUNDS = 2, 5
CLASSES = (10, 16, 1000, 1001, 1008, 50257, 50304)
FEATURES = 2048  # inputs of the last layer of a ResNet-50


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    session.add_sizes(parser, 256)  # the middle one
    parser.add_argument("--channels", type=int, default=256, help="the middle one")
    parser.add_argument("--classes", type=int, nargs="+", default=CLASSES, help="output widths")
    parser.add_argument("--rows", type=int, default=16384, help="rows that enter the last layer")
    args = parser.parse_args()
    with session.begin(args) as (run, device):
        session.set_float32(args.precision)
        torch.backends.cudnn.benchmark = True  # each size with its fastest kernels

        for sizes, unit in ((channels, "GFLOP/s"), (batches, "images/s"), (classes, "GFLOP/s")):
            for (what, size), rate in rates(sizes(args, device), args, device).items():
                run.measure(what, rate, unit, x=size)


def channels(args, device):
    """Yield a 3 x 3 convolution of 28 x 28 pixels, as in mid-ResNet, by channels."""
    for c in range(args.channels - 8, args.channels + 9):
        layer = torch.nn.Conv2d(c, c, 3, padding=1, bias=False)
        yield ("channels", c), layer, (args.batch_size, c, 28, 28), 6e-9 * 9 * c * c * 28 * 28


def batches(args, device):
    """Yield the whole model, by batch size."""
    model = torchvision.models.get_model(args.model, weights=None).to(device)
    for offset in (-6, -4, -2, -1, 0, 1, 2, 4, 8):
        batch = args.batch_size + offset
        yield ("batch", batch), model, (batch, 3, args.image_size, args.image_size), 1


def classes(args, device):
    """Yield the last layer alone, by classes: those of images, or the words of a language."""
    for count in args.classes:
        layer = torch.nn.Linear(FEATURES, count)
        yield ("classes", count), layer, (args.rows, FEATURES), 6e-9 * FEATURES * count


def rates(sizes, args, device):
    """Return the speed of a forward and a backward pass, from the work of an image or row."""
    steps, work, dtype = {}, {}, session.DTYPES.get(args.precision)
    for what, layer, shape, for_each in sizes:
        last = torch.channels_last if len(shape) == 4 else torch.contiguous_format
        layer = layer.to(device).to(memory_format=last)
        inputs = torch.randn(shape, device=device).to(memory_format=last)
        steps[what] = partial(one_step, layer, inputs, dtype)
        work[what] = for_each * shape[0]
    spent = session.in_turn(steps, device, ROUNDS, warm_up=WARM_UP)
    return {what: 1000 * work[what] / statistics.median(ms) for what, ms in spent.items()}


def one_step(layer, inputs, dtype):
    layer.zero_grad()
    inputs.requires_grad_(inputs.shape[1] > 3)  # images need no gradient, activations do
    with torch.autocast(inputs.device.type, dtype, enabled=dtype is not None):
        outputs = layer(inputs)
    outputs.backward(outputs.detach())


if __name__ == "__main__":
    main()
