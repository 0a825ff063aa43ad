"""What the experiments of `notebooks/experiments/` share: flags, precision, waiting, processes.

The trainer does all of it by itself, in the paragraphs of 02 and 06a.
"""

import argparse
import os
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from dlojz import idr_torch

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}  # of autocast, by --precision


def add_sizes(parser: argparse.ArgumentParser, batch_size: int, precision: str = "fp32"):
    """The flags of an experiment that trains a model of torchvision, with these defaults."""
    add = parser.add_argument
    add("--model", default="resnet50", help="a classifier of torchvision")
    add("--image-size", type=int, default=224, help="pixels")
    add("-b", "--batch-size", type=int, default=batch_size, help="images per process")
    add("--precision", choices=("fp32", "tf32", *DTYPES), default=precision)


def add_images(parser: argparse.ArgumentParser, count: int):
    """The flags of an experiment that takes the first `count` training images of a folder."""
    folder = os.environ.get("DLOJZ_DATA") or "data"
    parser.add_argument("--data", default=folder, help="a folder of images, as the trainer's")
    parser.add_argument("--images", type=int, default=count, help="how many")


def jpegs(args) -> list[Path]:
    """Those images, by name. Raises SystemExit where there are none."""
    found = sorted(
        path
        for path in Path(args.data, "train").rglob("*")
        if path.suffix.lower() in (".jpeg", ".jpg")
    )[: args.images]
    if not found:
        raise SystemExit(
            f"no *.JPEG or *.jpg in {args.data}/train: make some with `dlojz data {args.data}`"
        )
    return found


def set_float32(precision: str):
    """TF32 for matrix products and convolutions in float32, unless "fp32" is asked for."""
    float32 = "ieee" if precision == "fp32" else "tf32"
    torch.backends.cuda.matmul.fp32_precision = float32
    torch.backends.cudnn.conv.fp32_precision = float32


def wait(device):
    """Until the device has done all it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def process_group(device):
    """A process group of all processes of this job, on `device`; also of one alone."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "nccl" if on_gpu else "gloo",
        rank=idr_torch.rank,
        world_size=idr_torch.size,
        device_id=device if on_gpu else None,
    )
    try:
        yield
    finally:
        # gloo's thread may still hold the tensor of the last call, and needs Python's lock to let
        # go of it. A DDP model that ends now would hold that lock, and wait for that thread.
        time.sleep(0.1)
        torch.distributed.destroy_process_group()


def milliseconds(call: Callable, device, times: int = 1) -> float:
    """Of one of `times` calls made after each other, in the slowest process.

    All processes begin together; on a GPU the wait for it comes after the last call.
    """
    torch.distributed.barrier()
    wait(device)
    begin = time.perf_counter()
    for _ in range(times):
        call()
    wait(device)
    spent = torch.tensor(1000 * (time.perf_counter() - begin) / times, device=device)
    torch.distributed.all_reduce(spent, torch.distributed.ReduceOp.MAX)
    return spent.item()


def in_turn(calls: Mapping[str, Callable], device, rounds: int, times: int = 1) -> dict:
    """Milliseconds of each call in each round. What disturbs one of them disturbs all."""
    spent = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            spent[name].append(milliseconds(call, device, times))
    return spent
