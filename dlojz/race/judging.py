"""The judge's program: the accuracy of an entry's saved weights on images that nobody has seen.

`dlojz race run` submits it for an entry, after all runs of a round:

    dlojz/race/judging.py --images races/mine/judge-1 --runs runs/0012 runs/0014

It takes `build_model`, `decode` and `build_transforms` of the trainer in a run's folder, counts the
right answers itself, and writes judged.json: a row for each run, and what the floor needs.
"""

import argparse
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.utils.flop_counter import FlopCounterMode

from dlojz import course
from dlojz.machine import hardware
from dlojz.runs import log
from dlojz.training import data, imports, shards

SLACK = 2  # a processor that others slow down while its peak is measured may be faster later
SIDE, TIMES = 1024, 4  # of the matrix product that measures it
BATCH = 64
PREFIXES = ("module.", "_orig_mod.")  # of DDP and torch.compile


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--runs", type=Path, nargs="+", required=True)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trainer = imports.trainer(args.runs[0] / "trainer.py")
    given = SimpleNamespace(**log.read(args.runs[0]).start["arguments"])
    given.data, given.seed = str(args.images), 0
    transform = trainer.build_transforms(given)[1]
    images = data.open_set(given, "val", trainer.decode, transform)
    models, rows = {}, []
    for run in args.runs:
        try:
            models[run] = weighed(trainer.build_model(given, len(images.classes)), run, device)
            rows.append({"why": "", "of": len(images)})
        except Exception as error:  # what build_model or torch raises: it is out, not the race
            why = f"its weights can't be loaded: {' '.join(str(error).split())}"
            rows.append({"why": why[:500]})
    counts = right(models, images, device)
    rows = [row | {"right": counts.get(run)} for run, row in zip(args.runs, rows, strict=True)]
    model = work(trainer, given, len(images.classes)) | best_speed(device)
    told = {"rows": rows, "model": model | {"classes": len(images.classes)}}
    course.write_atomically(Path(os.environ["DLOJZ_RUN"], "judged.json"), json.dumps(told))


def weighed(model, run, device):
    """Return a model with the weights that a run has saved, ready to judge."""
    state = shards.tensors(run / "checkpoint.pt")["model"]
    for prefix in PREFIXES:
        state = {name.removeprefix(prefix): value for name, value in state.items()}
    model.load_state_dict(state)
    return model.to(device).eval()


@torch.no_grad()
def right(models, images, device) -> dict:
    """Return the number of images whose class each model names; each image is decoded once."""
    indices, counts = range(len(images)), dict.fromkeys(models, 0)
    keys = [[(0, i) for i in indices[at : at + BATCH]] for at in indices[::BATCH]]
    for batch, labels in torch.utils.data.DataLoader(
        images, batch_sampler=keys, collate_fn=images.collate
    ):
        batch, labels = data.normalize(batch.to(device)), labels.to(device)
        for run, model in models.items():
            counts[run] += int((model(batch).argmax(1) == labels).sum())
    return counts


def work(trainer, given, classes) -> dict:
    """Return the operations of a training step for an image, and the bytes of the parameters."""
    with torch.device("meta"):
        model = trainer.build_model(given, classes)
        images = torch.empty(2, 3, given.image_size, given.image_size)
    with FlopCounterMode(display=False) as counter:
        model(images).sum().backward()
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    return {"flops_per_image": counter.get_total_flops() / 2, "parameter_bytes": nbytes}


def best_speed(device) -> dict:
    """Return the FLOP/s and the bytes/s that a device does not exceed: as sold, or measured."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    if row := name and hardware.same_as(name, hardware.sold()):
        tflops = max(filter(None, map(row.speed, row.tflops))) / row.devices
        bandwidth = 1e9 * row.memory_gb_per_s / row.devices if row.memory_gb_per_s else None
        cache = 1e6 * row.cache_mb if row.cache_mb else None
        told = {"flops_per_s": 1e12 * tflops, "peak": f"{tflops:,.0f} TFLOP/s, as sold"}
        return told | {"bytes_per_s": bandwidth, "cache_bytes": cache}
    speed = SLACK * max(product(device, dtype) for dtype in (torch.float32, torch.bfloat16))
    peak = f"{speed / 1e12:.2g} TFLOP/s, {SLACK} times what a matrix product reached"
    return {"flops_per_s": speed, "peak": peak, "bytes_per_s": None, "cache_bytes": None}


def product(device, dtype) -> float:
    """Return the FLOP/s of a large matrix product."""
    a, seconds = torch.randn(SIDE, SIDE, device=device).to(dtype), []
    for _ in range(TIMES):
        begin = time.perf_counter()
        (a @ a).sum().item()
        seconds.append(time.perf_counter() - begin)
    return 2 * SIDE**3 / min(seconds)


if __name__ == "__main__":
    main()
