"""The trainer's normalization in four ways: a loop, PyTorch, compiled, and your kernel.

Submitted by a notebook:

    dlojz/chapters/n10_kernels/experiments/normalize.py --kernels solutions/kernels.py

Random bytes in channels_last become 16 bits, by batch size; no cache holds them. On a GPU each way
is timed twice: as Python calls it, and its kernels alone, in a CUDA graph. Without a GPU the kernel
runs in Triton's interpreter, where it is checked and counted, but not timed.
"""

import argparse
import math
from dataclasses import asdict

import torch
from tqdm import tqdm

from dlojz import course, idr_torch
from dlojz.chapters import session
from dlojz.chapters.n10_kernels import counting, timing
from dlojz.training import data, flags, imports
from dlojz.watch import interpreted

ON_GPU = {"image_size": 224, "batches": [1, 4, 16, 64, 256, 1024]}
ON_CPU = {"image_size": 64, "batches": [1, 8, 64]}
INTERPRETED = 4  # images, for the interpreter
DTYPE = torch.bfloat16


def loop(images):
    """Return the images normalized channel by channel, as a loop in Python has it."""
    shift, scale = data.line(images.device)
    out = torch.empty_like(images, dtype=DTYPE)
    for one, into in zip(images, out, strict=True):
        for channel in range(3):
            each = shift[0, channel], one[channel], scale[0, channel]
            into[channel] = torch.addcmul(*each)
    return out


def eager(images):
    """Return the images normalized as in the trainer: in float32, which autocast then casts."""
    return data.normalize(images).to(DTYPE)


def line(images, shift, scale):
    """Return the same as eager; shift and scale are given, so that the compiler sees no cache."""
    return torch.addcmul(shift, images, scale).to(DTYPE)


def of_file(path):
    """Return the function of a file with a kernel, for the type of this experiment."""
    kernels = imports.from_file(course.course_root() / path, "kernels_of_a_figure")
    return lambda images: kernels.normalize(images, DTYPE)


def drawn(batch, side, device):
    """Return random images, as the only operand."""
    images = torch.randint(256, (batch, 3, side, side), dtype=torch.uint8, device=device)
    return (images.contiguous(memory_format=torch.channels_last),)


def off(out, images) -> float:
    """Return the largest error of an output, in units in the last place of its type.

    Infinity for another shape, type or order in memory.
    """
    if (out.shape, out.dtype) != (images.shape, DTYPE):
        return math.inf
    if not out.is_contiguous(memory_format=torch.channels_last):
        return math.inf
    mean, std = (torch.tensor(v, dtype=torch.float64) for v in (data.MEAN, data.STD))
    expected = (images.cpu().double() / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    exponent = torch.frexp(expected).exponent.double() - 1  # of the leading bit
    unit = torch.finfo(DTYPE).eps * torch.exp2(exponent)
    return ((out.cpu().double() - expected).abs() / unit).max().item()


def least(images) -> int:
    """Return the bytes of one pass: a byte in, and a number of 16 bits out."""
    return images.numel() * (1 + DTYPE.itemsize)


def ways(images, own):
    """Yield the ways that are timed: name, function, number of kernels.

    own: the kernel's function, on a GPU.
    """
    for way, call in (("loop", loop), ("PyTorch", eager)):
        yield way, call, counting.eager(call, images)["kernels"]
    torch.compiler.reset()
    compiled, given = torch.compile(line, dynamic=False), data.line(images.device)

    def call(images):
        return compiled(images, *given)

    try:
        kernels = counting.compiled(call, images)
    except RuntimeError as error:
        print(f"compiled: left out: {imports.first_line(error)}")
    else:
        yield "compiled", call, kernels
    if images.is_cuda:
        yield "Triton", own, counting.launched(own, images)


def in_interpreter(own, side) -> dict:
    """Return the fields of the kernel in the interpreter, on a few images."""
    (images,) = drawn(INTERPRETED, side, "cpu")
    with interpreted.counted() as found:
        out = own(images)
    about = {"batch": INTERPRETED, "units_off": off(out, images), "least": least(images)}
    return about | {"kernels": found.launches, "asked": asdict(found)}


def timed(batch, args, device, own):
    """Yield the way and the fields of each normalization, for one batch size."""
    operands = timing.copies(lambda: drawn(batch, args.image_size, device), device)
    (images,) = operands[0]
    found = list(ways(images, own))
    cycles = {way: timing.Cycle(call, operands) for way, call, _ in found}
    spent = {"ms": timing.by_call(cycles, device, args.rounds, from_python=True)}
    if images.is_cuda:
        spent["kernel_ms"] = timing.by_call(cycles, device, args.rounds)
    for way, call, kernels in found:
        about = {"batch": batch, "kernels": kernels, "units_off": off(call(images), images)}
        about |= {what: ms[way] for what, ms in spent.items()}
        yield way, about | {"least": least(images)}


def main():
    device = idr_torch.device()
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    positive = flags.at_least(1)
    parser.add_argument("--kernels", default="solutions/kernels.py", help="file with normalize()")
    parser.add_argument("--image-size", type=positive, help="pixels")
    parser.add_argument("--batches", type=positive, nargs="+", help="numbers of images")
    parser.add_argument("--rounds", type=flags.at_least(2), default=5, help="timings of each")
    parser.set_defaults(**(ON_GPU if device.type == "cuda" else ON_CPU))
    args = parser.parse_args()
    with session.begin(args, device) as (run, _), torch.no_grad():
        torch.manual_seed(0)
        timing.keep_pages()
        own = of_file(args.kernels)
        session.measure_memory(run, device, args.rounds)
        for batch in tqdm(args.batches, unit="batch"):
            for way, found in timed(batch, args, device, own):
                run.case(f"{way}, {batch} images", way=way, **found)
        if device.type == "cpu":
            run.case("Triton, interpreted", way="Triton", **in_interpreter(own, args.image_size))


if __name__ == "__main__":
    main()
