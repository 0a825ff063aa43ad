"""The tensors that are alive in an update of the weights, as `dlojz estimate` counts them.

Submitted by a notebook: submit("notebooks/experiments/alive.py --model resnet50 -b 256").

No GPU is needed: the trainer's own step runs on tensors without memory, in the order in which a GPU
would get them. With --accumulate 1 4 an update of the same images is counted in two ways.
"""

import argparse
import warnings
from pathlib import Path

import torch

from dlojz import course
from dlojz.course import UserError
from dlojz.runs import log, memory
from dlojz.training import estimate
from dlojz.training.worth import imported


def main():
    args = parse_args()
    run = log.open_run(args)
    run.experiment(torch.device("cpu"))
    warnings.filterwarnings("ignore")  # of the fake process group
    trainer = imported(args.trainer or course.solution("01_gpu"))
    for batches in args.accumulate:
        plan = planned(args, batches)
        estimate.check(trainer, plan)
        with estimate.shown(plan):
            ledger, last = estimate.counted(trainer, plan, accumulate=batches)
        moments = memory.over_time(ledger.events, ledger.parts, last)
        of = {"precision": args.precision, "events": len(last)}
        run.case(named(plan.batch, batches), **of, at=moments)
        most = max(sum(moment["parts"].values()) for moment in moments)
        run.measure(named(plan.batch, batches), most, "bytes")
    run.end()


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default="resnet50", help="as the trainer's")
    add("--image-size", type=int, default=224, help="pixels")
    add("-b", "--batch-size", type=int, default=256, help="images of an update")
    add("--accumulate", type=int, nargs="+", default=[1], help="batches of an update")
    add("--precision", choices=memory.PRECISIONS, default="fp32")
    add("--trainer", type=Path, help="whose step it is (default: the solution of step 01)")
    return parser.parse_args()


def planned(args, batches) -> estimate.Plan:
    """Return what is counted: one batch of an update on one GPU."""
    if batches < 1 or args.batch_size % batches:
        raise UserError(
            f"--accumulate {batches}: expected a divisor of -b {args.batch_size}, such as 1"
        )
    return estimate.Plan(
        model=args.model,
        gpus=1,
        sharding="ddp",
        batch=args.batch_size // batches,
        image_size=args.image_size,
        checkpointing="off",
        precision=args.precision,
    )


def named(batch, batches) -> str:
    """Return how an update gets its images: "4 x 64 images"."""
    return f"{batch:,} images at once" if batches == 1 else f"{batches} x {batch:,} images"


if __name__ == "__main__":
    main()
