"""Convolutions of several shapes: dense and depthwise, by width, and wide against deep.

Submitted by a notebook: submit("dlojz/chapters/n10_kernels/experiments/shapes.py").

A depthwise convolution has as many times fewer operations as there are channels. And one layer of
256 channels has as many operations as 4 of 128, or 16 of 64. The times do not follow either.
"""

import argparse
from functools import partial

import torch
from torch.nn import functional

from dlojz import idr_torch
from dlojz.chapters import session
from dlojz.chapters.n10_kernels import timing
from dlojz.training import flags

ON_GPU = {"batch_size": 64, "widest": 1024, "precision": "bf16"}
ON_CPU = {"batch_size": 4, "widest": 64, "precision": "fp32"}
SIDE = 28
NARROWEST, HALVINGS = 16, 2  # of the widths; of the wide layer, for the deep ones


def doubled(first: int, last: int) -> list[int]:
    """Return the powers of two times `first`, up to `last`."""
    return [first << n for n in range((last // first).bit_length())]


def chain(images, *weights, depthwise=False):
    """Return the images after a convolution by each of these weights."""
    for weight in weights:
        groups = images.shape[1] if depthwise else 1
        images = functional.conv2d(images, weight, padding=1, groups=groups)
    return images


def operands(batch, channels, layers, depthwise, device, dtype) -> tuple:
    """Return random images, and the weights of each layer, in channels_last."""
    inputs = 1 if depthwise else channels
    shapes = [(batch, channels, SIDE, SIDE), *[(channels, inputs, 3, 3)] * layers]
    # Weights of this size keep the numbers of a long chain near 1.
    scales = [1.0, *[(9 * inputs) ** -0.5] * layers]
    made = [
        scale * torch.randn(shape, device=device)
        for shape, scale in zip(shapes, scales, strict=True)
    ]
    return tuple(x.to(dtype, memory_format=torch.channels_last) for x in made)


def moved(given) -> int:
    """Return the bytes that a chain moves at least: each layer reads and writes its images."""
    images, *weights = given
    return 2 * len(weights) * session.size(images) + sum(map(session.size, weights))


def wanted(widest: int):
    """Yield the kind, channels and layers of each case."""
    for channels in doubled(NARROWEST, widest):
        yield "dense", channels, 1
        yield "depthwise", channels, 1
    for halvings in range(HALVINGS + 1):
        yield "as many operations", widest >> halvings, 4**halvings


def measured(args, device, dtype):
    """Yield the name and the fields of each case."""
    for kind, channels, layers in wanted(args.widest):
        depthwise = kind == "depthwise"
        make = partial(operands, args.batch_size, channels, layers, depthwise, device, dtype)
        copies = timing.copies(make, device)
        images, *weights = copies[0]
        cycle = timing.Cycle(partial(chain, depthwise=depthwise), copies)
        flops = 2 * images.numel() * sum(weight[0].numel() for weight in weights)
        about = {"shape": kind, "channels": channels, "layers": layers, "flops": flops}
        about |= {"bytes": moved(copies[0])}
        ms = timing.by_call({kind: cycle}, device, args.rounds)[kind]
        yield f"{kind}, {layers} of {channels}", about | {"ms": ms}


def main():
    device = idr_torch.device()
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    positive = flags.at_least(1)
    parser.add_argument("-b", "--batch-size", type=positive, help="images")
    parser.add_argument("--widest", type=positive, help="channels of the widest layer")
    parser.add_argument("--precision", choices=("fp32", *session.DTYPES), help="a format")
    parser.add_argument("--rounds", type=flags.at_least(2), default=5, help="timings of each")
    parser.set_defaults(**(ON_GPU if device.type == "cuda" else ON_CPU))
    args = parser.parse_args()
    with session.begin(args, device) as (run, _), torch.no_grad():
        torch.manual_seed(0)
        timing.keep_pages()
        torch.backends.cudnn.benchmark = True
        session.measure_memory(run, device, args.rounds)
        session.measure_product(run, device, args.precision, args.rounds)
        dtype = session.DTYPES.get(args.precision, torch.float32)
        for name, found in measured(args, device, dtype):
            run.case(name, **found)


if __name__ == "__main__":
    main()
