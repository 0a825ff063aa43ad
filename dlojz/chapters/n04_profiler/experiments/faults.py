"""A training run with a planted fault, and a trace of a few steps: trace.json.gz in its folder.

Submitted by a notebook:

    dlojz/chapters/n04_profiler/experiments/faults.py
    --fault unpinned


Without a fault: images in pinned memory, channels_last, a batch that fills the device, no reads by
the host. Each fault changes one thing. The model need not learn, so fp16 has no scaler.
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
from dlojz.chapters import session

WAIT, WARM_UP = 3, 2  # steps before the trace: cuDNN picks kernels, the profiler starts
# The size of each fault, weak and strong.
MUCH = {
    "item": (8, 1),  # every eighth gradient is read
    "unpinned": (torch.uint8, torch.float32),
    "one-worker": (500, 1000),  # pixels of a photo's width
    "small-batch": (8, 2),  # images
    "nchw": (2, 1),  # the last half of the convolutions, or all
    "print": (4, 1000),  # logits
    "straggler": (0.008, 0.02),  # seconds
    "garbage": (200_000, 1_000_000),  # objects
    "sleep": (0.008, 0.03),  # seconds
    "python": (200_000, 1_000_000),  # turns of a loop
    "synchronize": (2, 20),  # times a step, between layers
    "empty-cache": (1, 2),  # times a step
    "ask": (2, 20),  # times a step
    "pin": (torch.uint8, torch.float32),
}


class Prepared(torch.utils.data.Dataset):
    """Ready batches in memory, in uint8 or float32."""

    def __init__(self, shape, dtype):
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randint(256, shape, dtype=torch.uint8, generator=generator).to(dtype)
        self.labels = torch.randint(1000, shape[:1], generator=generator)

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return self.images, self.labels


class Decoded(torch.utils.data.Dataset):
    """A photo of this width, decoded, cropped and flipped by PIL for each image."""

    def __init__(self, size, width):
        image = torch.randint(256, (3, 3 * width // 4, width), dtype=torch.uint8)
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
    parser.add_argument("--fault", choices=("none", *MUCH), default="none", help="fault to show")
    parser.add_argument("--strength", choices=("weak", "strong"), default="strong")
    session.add_sizes(parser, 128, "bf16")
    parser.add_argument("--steps", type=int, default=3, help="steps in the trace")
    parser.add_argument(
        "--stack", action="store_true", help="Python's functions, and its garbage collector"
    )
    parser.add_argument("--timed", type=int, default=0, help="steps that are timed afterwards")
    args = parser.parse_args()
    with session.begin(args) as (run, device):
        session.set_float32(args.precision)
        torch.backends.cudnn.benchmark = True
        several = idr_torch.size > 1
        with session.process_group(device) if several else nullcontext():
            train(args, device, run, several)


def loader(args, much, size):
    """Return the loader of the batches, with this fault."""
    pinned = args.fault not in ("unpinned", "pin") and torch.cuda.is_available()
    if args.fault == "one-worker":
        photos = Decoded(args.image_size, much)
        return torch.utils.data.DataLoader(photos, size, num_workers=1, pin_memory=pinned)
    dtype = much if args.fault in ("unpinned", "pin") else torch.uint8
    batches = Prepared((size, 3, args.image_size, args.image_size), dtype)
    return torch.utils.data.DataLoader(batches, batch_size=None, pin_memory=pinned)


def build_model(args, device, much):
    """Return the model, in the fault's layout, with synchronisations if that is the fault."""
    size = {"image_size": args.image_size} if args.model.startswith("vit") else {}
    model = torchvision.models.get_model(args.model, weights=None, **size)
    model = model.to(device, memory_format=torch.channels_last)
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    if args.fault == "nchw":
        layers = [m for m in layers if isinstance(m, torch.nn.Conv2d)]
        for layer in layers[len(layers) - len(layers) // much :]:
            layer.to(memory_format=torch.contiguous_format)
            layer.register_forward_pre_hook(lambda _, inputs: inputs[0].contiguous())
    if args.fault == "synchronize":
        for layer in layers[:: max(1, len(layers) // much)][:much]:
            layer.register_forward_hook(lambda *_: torch.cuda.synchronize())
    return model


def train(args, device, run, several):
    """Train for a few steps and profile the last ones, then time others without a profiler."""
    torch.manual_seed(0)
    much = MUCH[args.fault][args.strength == "strong"] if args.fault in MUCH else None
    model = build_model(args, device, much)
    if several:
        ids = [device] if device.type == "cuda" else None
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=ids)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    held = [[] for _ in range(much)] if args.fault == "garbage" else []
    size = much if args.fault == "small-batch" else args.batch_size
    batches = iter(loader(args, much, size))
    profiler = torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=WAIT, warmup=WARM_UP, active=args.steps, repeat=1),
        on_trace_ready=run.save_trace,
        with_stack=args.stack,
        experimental_config=_ExperimentalConfig(record_python_gc_info=True),
    )

    def step():
        one_step(args, much, next(batches), model, optimizer, device, held)

    profiler.start()
    for _ in range(WAIT + WARM_UP + args.steps):
        step()
        profiler.step()
    profiler.stop()
    if args.timed:
        run.measure("step", 1000 * session.seconds(step, device, args.timed), "ms")


def one_step(args, much, batch, model, optimizer, device, held):
    """Train on one batch, with the parts of the faults inside a step."""
    images, labels = batch
    layout = torch.channels_last
    if args.fault == "nchw" and much == 1:
        layout = torch.contiguous_format
    if args.fault == "pin":
        images = images.pin_memory()
    images = images.to(device, non_blocking=True).contiguous(memory_format=layout)
    labels = labels.to(device, non_blocking=True)
    if args.fault == "straggler" and idr_torch.rank == idr_torch.size - 1:
        time.sleep(much)
    dtype = session.DTYPES.get(args.precision)
    autocast = torch.autocast(device.type, dtype, enabled=dtype is not None)
    with torch.profiler.record_function("forward"), autocast:
        logits = model(images.float() / 255)
        loss = torch.nn.functional.cross_entropy(logits, labels)
    if args.fault == "ask":
        for _ in range(much):
            rows = (labels > 500).nonzero()
            bool(logits[0, 0] > 0)
            rows.cpu()
    if args.fault == "empty-cache" and much > 1:
        torch.cuda.empty_cache()
    with torch.profiler.record_function("backward"):
        optimizer.zero_grad()
        loss.backward()
    with torch.profiler.record_function("update"):
        optimizer.step()
    plant(args.fault, much, model, loss, logits, held)


def plant(fault, much, model, loss, logits, held):
    """Run the part of the fault at the end of a step."""
    if fault == "item":
        max(float(p.grad.norm()) for p in list(model.parameters())[::much])
    if fault == "print":
        print(f"loss {loss}, logits {logits[0, :much] if much < 1000 else logits}")
    if fault == "garbage":
        held[0] = [held]  # a cycle, freed only by the collector
        gc.collect()
    if fault == "sleep":
        time.sleep(much)
    if fault == "python":
        for i in range(much):  # without a call, which recording would slow
            i % 7
    if fault == "empty-cache":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
