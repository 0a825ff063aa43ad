"""The time to make a tensor on the host and copy it, or to make it on the device.

Submitted by a notebook: submit("dlojz/chapters/n01_gpu/experiments/tensors.py").
"""

import argparse
import statistics
from functools import partial

import torch

from dlojz.chapters import session

REPEATS, WARM_UP = 20, 3


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--image-size", type=int, default=224, help="pixels")
    parser.add_argument("-b", "--batch-size", type=int, default=256, help="images")
    args = parser.parse_args()
    with session.begin(args) as (run, device):
        shape = (args.batch_size, 3, args.image_size, args.image_size)
        pinned = torch.zeros(shape, pin_memory=device.type == "cuda")

        size = f"{pinned.numel() * 4 // 10**6} MB"
        ways = {f"torch.zeros(...).to(device), {size}": lambda: torch.zeros(shape).to(device)}
        if device.type == "cuda":  # otherwise nothing is copied or pinned
            copy = partial(pinned.to, device, non_blocking=True)
            ways["the copy alone, from pinned memory"] = copy
        ways["torch.zeros(..., device=device)"] = lambda: torch.zeros(shape, device=device)
        for what, ms in session.in_turn(ways, device, REPEATS, warm_up=WARM_UP).items():
            run.measure(what, statistics.median(ms), "ms")


if __name__ == "__main__":
    main()
