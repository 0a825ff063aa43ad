"""The shared parts of experiments: log, flags, precision, waiting, processes.

The trainer has its own code for them, in the paragraphs of steps 02 and 06a.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import torch

from dlojz import idr_torch
from dlojz.runs import log
from dlojz.training import distributed, private

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}  # autocast's, by --precision
TIMES = 5  # calls in a row, whose median over the rounds counts
COPY_BYTES = {"cpu": 512 << 20, "cuda": 1 << 30}  # larger than the caches
MATRIX = {"cpu": 1536, "cuda": 8192}  # rows of a large matrix product


@contextmanager
def begin(args, device: torch.device | None = None):
    """Begin the log of an experiment and end it; yield the log and the device.

    device: by default this process's GPU, or else its processor.
    """
    run, device = log.open_run(args), device or idr_torch.device()
    run.experiment(device)
    yield run, device
    run.end()  # after an error it has ended already: see RunLog


def add_sizes(parser: argparse.ArgumentParser, batch_size: int, precision: str = "fp32"):
    """Add the flags of an experiment that trains a torchvision model, with these defaults."""
    add = parser.add_argument
    add("--model", default="resnet50", help="a classifier of torchvision")
    add("--image-size", type=int, default=224, help="pixels")
    add("-b", "--batch-size", type=int, default=batch_size, help="images per process")
    add("--precision", choices=("fp32", "tf32", *DTYPES), default=precision)


def add_images(parser: argparse.ArgumentParser, count: int):
    """Add the flags of an experiment that reads the first `count` training images of a folder."""
    folder = os.environ.get("DLOJZ_DATA") or "data"
    parser.add_argument("--data", default=folder, help="a folder of images, as the trainer's")
    parser.add_argument("--images", type=int, default=count, help="number of images")


def jpegs(args) -> list[Path]:
    """Return the images of `add_images`, sorted by path. Raises SystemExit if there are none."""
    found = sorted(
        path
        for path in Path(args.data, "train").rglob("*")
        if path.suffix.lower() in (".jpeg", ".jpg") and not path.name.startswith("._")
    )[: args.images]
    if not found:
        raise SystemExit(
            f"no *.JPEG or *.jpg in {args.data}/train: make some with `dlojz data {args.data}`"
        )
    return found


def set_float32(precision: str):
    """Use TF32 for matrix products and convolutions in float32, unless the precision is "fp32"."""
    float32 = "ieee" if precision == "fp32" else "tf32"
    torch.backends.cuda.matmul.fp32_precision = float32
    torch.backends.cudnn.conv.fp32_precision = float32
    tell_the_older_switch()


def tell_the_older_switch():
    """Set torch's older switch of TF32 to the value of the newer one, which does not set it.

    torch 2.11's max-autotune reads the older one, and raises an error if they differ:
    https://github.com/pytorch/pytorch/issues/166387
    """
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")


def batch(args, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random images of the sizes of `add_sizes`, and labels, all of them 0."""
    shape = (args.batch_size, 3, args.image_size, args.image_size)
    return torch.randn(shape, device=device), torch.zeros(shape[0], dtype=int, device=device)


def one_step(model, optimizer, images, labels, dtype):
    """Train on a batch; in fp16 without a scaler, because only the time of the step matters."""
    with torch.autocast(images.device.type, dtype, enabled=dtype is not None):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def wait(device):
    """Wait until the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def process_group(device):
    """Open a process group of all processes of this job, even of a single one, on `device`."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",  # shards may be offloaded to the processor
        rank=idr_torch.rank,
        world_size=idr_torch.size,
        device_id=device if on_gpu else None,
    )
    distributed.keep_group()
    yield
    distributed.leave_group()  # not after an error: NCCL would wait for the others, and they for us


def seconds(call: Callable, device, times: int = 1, clock: Callable = time.perf_counter) -> float:
    """Return the mean time of a call with its kernels, over a few in a row."""
    wait(device)
    begin = clock()
    for _ in range(times):
        call()
    wait(device)
    return (clock() - begin) / times


def milliseconds(call: Callable, device, times: int = 1) -> float:
    """Return the mean milliseconds of a call, over a few in a row.

    In a process group all processes begin together, and the slowest one counts.
    """
    if not torch.distributed.is_initialized():
        return 1000 * seconds(call, device, times)
    torch.distributed.barrier()
    spent = torch.tensor(1000 * seconds(call, device, times), device=device)
    torch.distributed.all_reduce(spent, torch.distributed.ReduceOp.MAX)
    return spent.item()


def in_turn(calls: Mapping[str, Callable], device, rounds: int, times=1, warm_up=0) -> dict:
    """Return the milliseconds of each call by round, without those of the first `warm_up` rounds.

    The calls take turns, so that a disturbance affects all.
    """
    spent = {name: [] for name in calls}
    for turn in range(warm_up + rounds):
        for name, call in calls.items():
            ms = milliseconds(call, device, times)
            spent[name] += [ms] * (turn >= warm_up)
    return spent


def median_ms(call: Callable, device, rounds: int) -> float:
    """Return the median milliseconds of one call, among several in a row."""
    call()
    return statistics.median(milliseconds(call, device, TIMES) for _ in range(rounds))


def measure_memory(run, device, rounds: int):
    """Measure the best speed of memory: bytes read and written by a large copy.

    The bytes are random: pages that nothing was written to are one page of zeros, in the cache.
    """
    size = COPY_BYTES[device.type]
    a, b = (torch.empty(size // 8, dtype=torch.int64, device=device).random_() for _ in range(2))
    run.measure("memory", 2 * size / median_ms(lambda: b.copy_(a), device, rounds) / 1e6, "GB/s")


def measure_product(run, device, precision: str, rounds: int, **where):
    """Measure the best speed of arithmetic in a format."""
    set_float32(precision)
    dtype, n = DTYPES.get(precision, torch.float32), MATRIX[device.type]
    x, y = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    speed = 2 * n**3 / median_ms(lambda: x @ y, device, rounds) / 1e9
    run.measure("matrix product", speed, "TFLOP/s", **where)


class Operations(private.dispatch_mode()):
    """The called eager operations but for views, and the bytes that they read and write."""

    count = moved = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        if not operation.is_view:
            self.count += 1
            self.moved += sum(map(size, chain(private.tree_leaves(args), private.tree_leaves(out))))
        return out


def size(x):
    """Return the bytes of a tensor, and 0 for anything else."""
    return x.numel() * x.element_size() if isinstance(x, torch.Tensor) else 0


def away(tensors, others) -> float:
    """Return the relative distance of these tensors from others, over all of them together."""
    pairs = list(zip(tensors, others, strict=True))
    apart = sum((a - b).double().square().sum().item() for a, b in pairs)
    return (apart / sum(b.double().square().sum().item() for _, b in pairs)) ** 0.5
