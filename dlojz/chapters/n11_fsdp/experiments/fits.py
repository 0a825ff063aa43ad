"""The memory of a training step on 1 to 1,024 GPUs, as `dlojz estimate` predicts it.

Submitted by a notebook: submit("dlojz/chapters/n11_fsdp/experiments/fits.py --model vit_6b").

No GPU is needed. Each prediction runs steps of two short versions of the model, on tensors without
memory, and adds the missing blocks, which are all equal.
"""

import argparse
import time
import warnings
from dataclasses import asdict
from itertools import product
from pathlib import Path

import torch

from dlojz import course
from dlojz.chapters import session
from dlojz.estimate import estimate
from dlojz.runs import memory
from dlojz.training import imports, models


def main():
    args = parse_args()
    with session.begin(args, torch.device("cpu")) as (run, _):
        warnings.filterwarnings("ignore")  # DDP's on tensors without values
        trainer = imports.trainer(args.trainer or course.solution(course.CHAIN[-1]))
        for plan in dict.fromkeys(plans(args)):
            begin = time.perf_counter()
            row = estimate.result(trainer, plan, by_blocks=True)
            seconds = round(time.perf_counter() - begin, 2)
            run.case(memory.means(asdict(plan)), **row, seconds=seconds)
            most = max(sum(parts.values()) for parts in row["peaks"].values())
            run.measure(memory.means(asdict(plan)), most, "bytes on each GPU")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default="vit_6b", choices=models.LARGER)
    add("--image-size", type=int, default=224, help="pixels")
    add("-b", "--batch-size", type=int, default=32, help="images per GPU")
    add("--precision", choices=memory.PRECISIONS, default="bf16")
    add("--gpus", type=int, nargs="+", default=[1, 2, 8, 64, 1024])
    add("--copies", type=int, nargs="+", default=[1], help="copies of the model, each in shards")
    add("--ways", nargs="+", default=[*estimate.WAYS], choices=estimate.WAYS, help="(default: all)")
    add("--trainer", type=Path, help="trainer to take (default: the last solution)")
    return parser.parse_args()


def plans(args):
    """Yield the plans to predict, without shards on one GPU."""
    for gpus, way, copies in product(args.gpus, args.ways, args.copies):
        sharding, checkpointing = estimate.WAYS[way]
        sharding = sharding if gpus > 1 else "ddp"
        yield estimate.Plan(
            model=args.model,
            gpus=gpus,
            sharding=sharding,
            batch=args.batch_size,
            image_size=args.image_size,
            checkpointing=checkpointing,
            precision=args.precision,
            copies=copies if sharding == "fsdp" else 1,
        )


if __name__ == "__main__":
    main()
