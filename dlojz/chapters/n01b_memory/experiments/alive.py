"""The tensors that are alive in an update of the weights, as `dlojz estimate` counts them.

Submitted by a notebook:

    dlojz/chapters/n01b_memory/experiments/alive.py
    --model resnet50 -b 256


No GPU is needed: the trainer's own step runs on tensors without memory, in the order of a GPU. With
--accumulate 1 4 an update of the same images is counted in two ways, and with --gpus 8 --ways ddp
fsdp blocks for one of eight GPUs.
"""

import argparse
import warnings
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

import torch

from dlojz import course
from dlojz.chapters import session
from dlojz.course import UserError
from dlojz.estimate import estimate
from dlojz.runs import memory
from dlojz.training import imports

POINTS = 400  # of a drawing


def main():
    args = parse_args()
    with session.begin(args, torch.device("cpu")) as (run, _):
        warnings.filterwarnings("ignore")  # the fake process group's
        step = "01_gpu" if args.gpus == 1 else course.CHAIN[-1]
        trainer = imports.trainer(args.trainer or course.solution(step))
        for way, batches in product(args.ways, args.accumulate):
            plan = planned(args, way, batches)
            estimate.check(trainer, plan)
            with estimate.shown(plan):
                storages, last = estimate.counted(trainer, plan, accumulate=batches)
            moments = over_time(storages.events, storages.parts, last)
            of = {"precision": args.precision, "events": len(last)}
            run.case(named(plan, batches), **of, at=moments)
            most = max(sum(moment["parts"].values()) for moment in moments)
            run.measure(named(plan, batches), most, "bytes")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default="resnet50", help="model, by the trainer's name for it")
    add("--image-size", type=int, default=224, help="pixels")
    add("-b", "--batch-size", type=int, default=256, help="images of an update")
    add("--accumulate", type=int, nargs="+", default=[1], help="batches of an update")
    add("--precision", choices=memory.PRECISIONS, default="fp32")
    add("--gpus", type=int, default=1, help="GPUs with -b images each; one is counted")
    add(
        "--ways", nargs="+", default=["ddp"], choices=estimate.WAYS, help="ways to use several GPUs"
    )
    add("--trainer", type=Path, help="trainer to take (default: a solution)")
    return parser.parse_args()


def planned(args, way, batches) -> estimate.Plan:
    """Return the plan to count: one batch of an update on one GPU."""
    sharding, checkpointing = estimate.WAYS[way]
    if sharding == "fsdp" and args.gpus == 1:
        raise UserError(f"--ways {way}: expected --gpus 2 or more")
    if batches < 1 or args.batch_size % batches:
        raise UserError(
            f"--accumulate {batches}: expected a divisor of -b {args.batch_size}, such as 1"
        )
    return estimate.Plan(
        model=args.model,
        gpus=args.gpus,
        sharding=sharding,
        batch=args.batch_size // batches,
        image_size=args.image_size,
        checkpointing=checkpointing,
        precision=args.precision,
    )


def over_time(events: Sequence[tuple], parts: Mapping[int, str], shown: range) -> list[dict]:
    """Return some moments of these events, in their order, the highest ones among them.

    shown: the places of the events that are looked at. Of each moment: event (its place among
        them), phase, reserved, and parts, in bytes, as those of a peak.
    """
    moments = memory.moments(events[: shown.stop], parts)
    seen = [
        (allocator.allocated, place, event[-1], allocator.reserved, dict(live))
        for place, (event, live, allocator) in enumerate(moments)
        if place in shown
    ]
    each = max(1, -(-len(seen) // POINTS))
    highest = (max(seen[at : at + each]) for at in range(0, len(seen), each))
    return [
        {
            "event": place - shown.start,
            "phase": phase,
            "reserved": reserved + memory.CUBLAS_BYTES,
            "parts": dict(memory.peak_of(allocated, live).parts),
        }
        for allocated, place, phase, reserved, live in highest
    ]


def named(plan, batches) -> str:
    """Return the name of a case: its images, "4 x 64 images", and the spread over GPUs."""
    batch = plan.batch
    images = f"{batch:,} images at once" if batches == 1 else f"{batches} x {batch:,} images"
    if plan.gpus == 1:
        return images
    again = ", checkpointing" * (plan.checkpointing != "off")
    return f"{plan.sharding.upper()}{again}: {images}"


if __name__ == "__main__":
    main()
