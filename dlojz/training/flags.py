"""The trainer's flags that no notebook changes, and what is asked of all of them together."""

import argparse
from pathlib import Path

from dlojz import idr_torch
from dlojz.training import models


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments of this command line, with the flags that no notebook changes."""
    add_common(parser)
    return check(parser, parser.parse_args())


def add_common(parser: argparse.ArgumentParser):
    """The flags of the optimizer, of runs that can be repeated, of short ones, of checkpoints."""
    flag = parser.add_argument_group("the optimizer").add_argument
    flag("--lr", type=float, default=0.1, help="highest learning rate of the one-cycle schedule")
    flag("--wd", type=float, default=5e-4, help="weight decay")
    flag("--mom", type=float, default=0.9, help="momentum")
    flag("--clip-norm", type=float, default=0.0, help="largest norm of the gradients; 0: any")
    flag = parser.add_argument_group("the same again").add_argument
    flag("--seed", type=int, default=0, help="of the weights, the order and the crops")
    flag("--deterministic", action="store_true", help="the same bits in every run; slower")
    flag = parser.add_argument_group("a short run, to see how fast it is").add_argument
    flag("--test", action="store_true", help="a few steps of each epoch, and no checkpoint")
    flag("--test-nsteps", type=positive, default=50, metavar="N", help="how many")
    flag = parser.add_argument_group("stopping and going on").add_argument
    flag("--checkpoint", type=Path, metavar="FILE", help="None: in the run's folder, but for tests")
    flag("--checkpoint-every", type=int, default=0, metavar="STEPS", help="0: at epoch ends only")
    flag("--resume", type=Path, metavar="FILE", help="go on from this checkpoint")


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.Namespace:
    """The arguments, if they fit together; else the parser's error, with what to give instead."""
    if args.model not in models.names():
        parser.error(f"--model {args.model}: not in torchvision.models; try resnet18 or resnet50")
    if args.checkpoint and args.checkpoint.exists() and args.checkpoint != args.resume:
        parser.error(f"--checkpoint {args.checkpoint} exists: name another, or --resume from it")
    if args.num_workers == 0 and idr_torch.is_master:
        print("note: without workers, --persistent-workers and --prefetch-factor mean nothing")
    return args


def positive(text: str) -> int:
    """A type of flag: a whole number from 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number from 1")
    return int(text)
