"""A training run with a planted fault, and a trace of a few steps: trace.json.gz in its folder.

Submitted by a notebook: submit("notebooks/experiments/faults.py --fault unpinned").

Without a fault: images in pinned memory, channels_last, a batch that fills the device, nothing read
back. Each fault changes one thing. Nothing is learned here, so fp16 needs no scaler.
"""

import argparse
import gc
import io
import time
from contextlib import nullcontext

import torch
import torchvision
from PIL import Image
from torch._C._profiler import _ExperimentalConfig  # to see the garbage collector, with --stack
from torchvision import transforms

from dlojz import idr_torch
from dlojz.runs import log
from dlojz.runs.suspects import FAULTS
from dlojz.training import experiments

WAIT, WARM_UP = 3, 2  # steps before the trace: cuDNN picks kernels, the profiler starts
DELAY_S = 0.02  # the straggler's
OBJECTS = 1_000_000
IMAGES = 512


class Prepared(torch.utils.data.Dataset):
    """Batches that are ready in memory, in uint8 or float32."""

    def __init__(self, shape, dtype):
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randint(256, shape, dtype=torch.uint8, generator=generator).to(dtype)
        self.labels = torch.randint(1000, shape[:1], generator=generator)

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return self.images, self.labels


class Decoded(torch.utils.data.Dataset):
    """A photo of 1000 x 750 pixels that PIL decodes, crops and flips for each image."""

    def __init__(self, size):
        image = torch.randint(256, (3, 750, 1000), dtype=torch.uint8)
        self.jpeg = bytes(torchvision.io.encode_jpeg(image).numpy())
        self.transform = transforms.Compose(
            [
                transforms.RandomResizedCrop(size),
                transforms.RandomHorizontalFlip(),
                transforms.PILToTensor(),
            ]
        )

    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        image = Image.open(io.BytesIO(self.jpeg)).convert("RGB")
        return self.transform(image), index % 1000


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fault", choices=FAULTS, default="none", help="which")
    experiments.add_sizes(parser, 128, "bf16")
    parser.add_argument("--steps", type=int, default=3, help="steps in the trace")
    parser.add_argument(
        "--stack", action="store_true", help="Python's functions, and its garbage collector"
    )
    args = parser.parse_args()
    run = log.open_run(args)
    device = idr_torch.device()
    run.experiment(device)
    experiments.set_float32(args.precision)
    torch.backends.cudnn.benchmark = True
    several = idr_torch.size > 1
    with experiments.process_group(device) if several else nullcontext():
        train(args, device, run, several)
    run.end()


def loader(args, size):
    """Return the loader of the batches, with this fault."""
    pinned = args.fault != "unpinned" and torch.cuda.is_available()
    if args.fault == "one-worker":
        return torch.utils.data.DataLoader(
            Decoded(args.image_size), size, num_workers=1, pin_memory=pinned
        )
    dtype = torch.float32 if args.fault == "unpinned" else torch.uint8
    batches = Prepared((size, 3, args.image_size, args.image_size), dtype)
    return torch.utils.data.DataLoader(batches, batch_size=None, pin_memory=pinned)


def train(args, device, run, several):
    """Train for a few steps, and profile the last of them."""
    torch.manual_seed(0)
    layout = torch.contiguous_format if args.fault == "nchw" else torch.channels_last
    model = torchvision.models.get_model(args.model, weights=None).to(device, memory_format=layout)
    if several:
        ids = [device] if device.type == "cuda" else None
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=ids)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    dtype = experiments.DTYPES.get(args.precision)
    size = 2 if args.fault == "small-batch" else args.batch_size
    held = [[] for _ in range(OBJECTS)] if args.fault == "garbage" else []
    profiler = torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=WAIT, warmup=WARM_UP, active=args.steps, repeat=1),
        on_trace_ready=run.save_trace,
        with_stack=args.stack,
        experimental_config=_ExperimentalConfig(record_python_gc_info=True),
    )
    profiler.start()
    for step, (images, labels) in enumerate(loader(args, size)):
        if step == WAIT + WARM_UP + args.steps:
            break
        images = images.to(device, non_blocking=True).contiguous(memory_format=layout)
        labels = labels.to(device, non_blocking=True)
        if args.fault == "straggler" and idr_torch.rank == idr_torch.size - 1:
            time.sleep(DELAY_S)
        autocast = torch.autocast(device.type, dtype, enabled=dtype is not None)
        with torch.profiler.record_function("forward"), autocast:
            logits = model(images.float() / 255)
            loss = torch.nn.functional.cross_entropy(logits, labels)
        with torch.profiler.record_function("backward"):
            optimizer.zero_grad()
            loss.backward()
        with torch.profiler.record_function("update"):
            optimizer.step()
        plant(args.fault, model, loss, logits, held)
        profiler.step()
    profiler.stop()


def plant(fault, model, loss, logits, held):
    """Run the part of the fault that comes at the end of a step."""
    if fault == "item":
        max(p.grad.norm().item() for p in model.parameters())
    if fault == "print":
        print(f"loss {loss}, logits {logits}")
    if fault == "garbage":
        held[0] = [held]  # a cycle, which only the collector can free
        gc.collect()


if __name__ == "__main__":
    main()
