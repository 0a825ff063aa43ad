"""The speed of square matrix products, for sizes around a round number.

Submitted by a notebook: submit("dlojz/chapters/n02b_formats/experiments/sizes.py --size 512").
"""

import argparse
import statistics
import time

import torch

from dlojz.chapters import session

OFFSETS = (-16, -8, -6, -4, -2, -1, 0, 1, 2, 4, 6, 8, 16)
ROUNDS, WARM_UP = 15, 3
FORMATS = {
    "fp32": (torch.float32, "ieee"),
    "tf32": (torch.float32, "tf32"),
    "bf16": (torch.bfloat16, "ieee"),
    "fp16": (torch.float16, "ieee"),
}


def seconds(device, x, y):
    """Return the seconds of one product, with the wait for the device."""
    begin = time.perf_counter()
    x @ y
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=4096, help="rows and columns, give or take 16")
    args = parser.parse_args()
    with session.begin(args) as (run, device):
        # A CPU without 16-bit instructions would take minutes for the others.
        names = FORMATS if device.type == "cuda" else ["fp32"]
        sizes = [args.size + offset for offset in OFFSETS]
        for name in names:
            dtype, torch.backends.cuda.matmul.fp32_precision = FORMATS[name]
            pairs = [[torch.randn(n, n, device=device).to(dtype) for _ in "xy"] for n in sizes]
            # All sizes in turn, in several rounds, so that a disturbance affects all.
            rounds = [[seconds(device, *pair) for pair in pairs] for _ in range(WARM_UP + ROUNDS)]
            for size, times in zip(sizes, zip(*rounds[WARM_UP:], strict=True), strict=True):
                speed = 2 * size**3 / statistics.median(times)
                run.measure(name, speed / 1e12, "TFLOP/s", x=size)


if __name__ == "__main__":
    main()
