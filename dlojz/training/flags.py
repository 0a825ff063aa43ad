"""The trainer's flags that no notebook changes, and the checks of all flags together."""

import argparse
import os
from pathlib import Path

import torch

from dlojz import idr_torch
from dlojz.training import models


def parser() -> argparse.ArgumentParser:
    """Return the trainer's parser, with the flags of the model and its training."""
    parser = argparse.ArgumentParser(
        prog="dlojz.py",
        description="Train a torchvision classifier on ImageNet-shaped images, and log how fast.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", default="resnet152", help="any classifier of torchvision.models")
    parser.add_argument("--image-size", type=positive, default=224, help="pixels, each side")
    parser.add_argument("-b", "--batch-size", type=positive, default=32, help="per process")
    parser.add_argument("-e", "--epochs", type=positive, default=1, help="training passes")
    parser.add_argument("--accumulate", type=positive, default=1, help="batches per update")
    parser.add_argument("--lr", type=float, default=0.1, help="the highest learning rate")
    parser.add_argument("--mom", type=float, default=0.9, help="momentum")
    parser.add_argument("--wd", type=float, default=5e-4, help="weight decay")
    parser.add_argument("--clip-norm", type=float, default=0.0, help="largest norm; 0: no limit")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the arguments of this command line, with the flags of loading and of short runs.

    Sets what some of them ask of torch.
    """
    add_loading(parser)
    add_running(parser)
    parser.epilog = f"larger models: {models.larger()}"
    args = check(parser, parser.parse_args())
    keep_apart(getattr(args, "precision", ""))
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS
        torch.use_deterministic_algorithms(True)
    return args


def keep_apart(precision: str):
    """Let compiled code be found again only in the precision that it was compiled for.

    The key of torch 2.11's cache holds whether autocast is on, and not its dtype: a run in fp16
    would take the code of an earlier one in bf16 (https://github.com/pytorch/pytorch/pull/181564).
    """
    torch.compiler.config.cache_key_tag = precision


def add_loading(parser: argparse.ArgumentParser):
    """Add the flags that say which images are read, and how."""
    group = parser.add_argument_group("the images and how they are loaded")
    data = os.environ.get("DLOJZ_DATA") or "data"
    group.add_argument("--data", default=data, help="a folder, or 'synthetic'")
    group.add_argument("--num-workers", type=natural, default=10, help="processes; CPUs at most")
    switch(group, "--persistent-workers", True, "keep them between epochs")
    group.add_argument("--prefetch-factor", type=positive, default=3, help="batches ready in each")
    switch(group, "--pin-memory", True, "page-locked batches, for the GPU")
    switch(group, "--non-blocking", True, "do not wait for copies to the GPU")
    switch(group, "--drop-last", False, "leave out a last, smaller batch")


def add_running(parser: argparse.ArgumentParser):
    """Add the flags of runs that are repeated, cut short, or stopped and resumed."""
    group = parser.add_argument_group("reproducing a run")
    group.add_argument("--seed", type=int, default=0, help="for the weights, the order, the crops")
    group.add_argument("--deterministic", action="store_true", help="bit-identical runs; slower")
    group = parser.add_argument_group("a short run, to see how fast it is")
    group.add_argument("--test", action="store_true", help="a few steps an epoch; no checkpoint")
    group.add_argument("--test-nsteps", type=positive, default=50, help="how many")
    group = parser.add_argument_group("stopping and going on")
    group.add_argument("--checkpoint", type=Path, help="file; None: in the run's folder")
    group.add_argument("--checkpoint-every", type=natural, default=0, help="steps; 0: epochs only")
    group.add_argument("--resume", type=Path, help="go on from this checkpoint")


def switch(group, name: str, default: bool, text: str):
    """Add the flag `name`, and its opposite: --pin-memory and --no-pin-memory."""
    group.add_argument(name, action=argparse.BooleanOptionalAction, default=default, help=text)


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments if they are compatible; else exit with what to give instead."""
    if args.model not in models.names():
        parser.error(models.unknown(args.model))
    if args.checkpoint and args.checkpoint.exists() and args.checkpoint != args.resume:
        parser.error(f"--checkpoint {args.checkpoint} exists: name another, or --resume from it")
    if getattr(args, "sharding", "") == "fsdp" and idr_torch.size == 1:
        parser.error(
            "--sharding fsdp: one process has nobody to share with; submit it with n_gpu=2"
        )
    if args.num_workers == 0 and idr_torch.is_master:
        print("note: without workers, --persistent-workers and --prefetch-factor have no effect")
    return args


def positive(text: str) -> int:
    """Return a flag's value, a whole number of at least 1."""
    return _whole_number(text, 1)


def natural(text: str) -> int:
    """Return a flag's value, a whole number of at least 0."""
    return _whole_number(text, 0)


def _whole_number(text, least):
    if int(text) < least:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number of at least {least}")
    return int(text)
