"""The time of an all-reduce by the size of its tensor, and the speed of the link.

Submitted by a notebook: submit("dlojz/chapters/n06_ddp/experiments/all_reduce.py", n_gpu=2).
"""

import argparse

import torch

from dlojz.chapters import session


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smallest", type=int, default=10, help="2 to this many bytes")
    parser.add_argument("--largest", type=int, default=27, help="2 to this many bytes")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each size")
    args = parser.parse_args()
    with session.begin(args) as (run, device), session.process_group(device):
        tensors = {
            2**e: torch.zeros(2**e // 4, device=device)  # float32: four bytes each
            for e in range(args.smallest, args.largest + 1)
        }
        calls = {
            size: lambda tensor=tensor: torch.distributed.all_reduce(tensor)
            for size, tensor in tensors.items()
        }
        session.in_turn(calls, device, rounds=2)  # connections are made on first use
        times = 20 if device.type == "cuda" else 1
        for size, spent in session.in_turn(calls, device, args.rounds, times).items():
            for ms in spent:
                run.measure("all_reduce", ms, "ms", x=size)


if __name__ == "__main__":
    main()
