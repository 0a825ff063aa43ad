"""The speed of square matrix products, for sizes around a round number.

Submitted by a notebook: submit("dlojz/chapters/n02b_formats/experiments/sizes.py --size 512").
"""

import argparse
import statistics
from functools import partial

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
            products = {
                n: partial(torch.matmul, *torch.randn(2, n, n, device=device).to(dtype))
                for n in sizes
            }
            for size, ms in session.in_turn(products, device, ROUNDS, warm_up=WARM_UP).items():
                speed = 2 * size**3 / statistics.median(ms)
                run.measure(name, speed / 1e9, "TFLOP/s", x=size)


if __name__ == "__main__":
    main()
