"""A snapshot of the memory: the lifetime of each tensor in a few updates, with its line.

Submitted by a notebook:

    dlojz/chapters/n01b_memory/experiments/snapshot.py
    --model resnet50 -b 64


It writes `snapshot.pickle` into the run's folder, for https://pytorch.org/memory_viz. On a GPU
torch records it. Without one it is counted on tensors without memory, in the same format, with the
step's phase and the part of memory instead of the line.
"""

import argparse
import pickle
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from dlojz import course
from dlojz.chapters import session
from dlojz.estimate import estimate
from dlojz.runs import memory
from dlojz.training import imports

ENTRIES = 200_000  # the last ones are kept; each takes some kB
POINTS = 2000  # in a drawing


def main():
    args = parse_args()
    with session.begin(args) as (run, device):
        warnings.filterwarnings("ignore")  # the fake process group's
        trainer = imports.trainer(args.trainer or course.solution("01_gpu"))
        plan = estimate.Plan(
            args.model, 1, "ddp", args.batch_size, args.image_size, "off", precision="fp32"
        )
        estimate.check(trainer, plan)
        on_gpu = device.type == "cuda"
        found = recorded(trainer, plan, device) if on_gpu else counted(trainer, plan)
        (run.folder / "snapshot.pickle").write_bytes(pickle.dumps(found))
        curve = traced(next(filter(None, found["device_traces"])))
        every = max(1, -(-len(curve) // POINTS))
        most = [max(curve[i : i + every], key=lambda c: c[1]) for i in range(0, len(curve), every)]
        run.case(
            "recorded" if on_gpu else "counted",
            entries=len(curve),
            allocated=[allocated for _, allocated, _ in most],
            reserved=[reserved for _, _, reserved in most],
        )


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet50", help="model, by the trainer's name for it")
    parser.add_argument("--image-size", type=int, default=224, help="pixels")
    parser.add_argument("-b", "--batch-size", type=int, default=64, help="images")
    parser.add_argument("--trainer", type=Path, help="trainer to take (default: solution 01)")
    return parser.parse_args()


def traced(entries: Iterable[Mapping]) -> list[tuple[str, int, int]]:
    """Return (action, allocated, reserved) after each entry of a snapshot's `device_traces`.

    Both are counted from 0 as the recording begins: what was there before is not in it.
    """
    signs = {"alloc": (1, 0), "free_completed": (-1, 0)}
    signs |= {"segment_alloc": (0, 1), "segment_free": (0, -1)}
    allocated = reserved = 0
    found = []
    for entry in entries:
        tensors, segments = signs.get(entry["action"], (0, 0))
        allocated += tensors * entry["size"]
        reserved += segments * entry["size"]
        found.append((entry["action"], allocated, reserved))
    return found


def recorded(trainer, plan, device) -> dict:
    """Return the snapshot of a few updates on a GPU, which torch records."""
    torch.cuda.memory._record_memory_history(max_entries=ENTRIES, stacks="python")
    args = estimate.parsed(trainer, plan)
    training = trainer.build_training(args, device, estimate.CLASSES, estimate.UPDATES)
    training.model.train()
    for step in range(estimate.STEPS):
        shape = (plan.batch, 3, plan.image_size, plan.image_size)
        images = torch.zeros(shape, dtype=torch.uint8, device=device)
        labels = torch.zeros(plan.batch, dtype=torch.int64, device=device)
        trainer.train_step(step, training, images, labels, args, estimate.marks())
    found = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    return found


def counted(trainer, plan) -> dict:
    """Return such a snapshot without a GPU."""
    with estimate.shown(plan):
        seen, last = estimate.counted(trainer, plan)
    return as_snapshot(seen.events[: last.stop], seen.parts)


def as_snapshot(events, parts) -> dict:
    """Return the events of storages in the format of `torch.cuda.memory._snapshot`."""
    allocator, blocks, trace, reserved = memory.Allocator(), {}, [], 0
    for number, size, phase in events:
        frames = [{"filename": phase or "before the first step", "line": 0}]
        frames[0]["name"] = parts[number]
        entry = {"stream": 0, "frames": frames, "time_us": len(trace)}
        if size < 0:
            block = blocks.pop(number)
            for action in ("free_requested", "free_completed"):
                trace.append(entry | {"action": action, "addr": block.place, "size": -size})
            allocator.give_back(block)
            continue
        blocks[number] = block = allocator.take(size)
        if more := allocator.reserved - reserved:
            trace.append(entry | {"action": "segment_alloc", "addr": reserved, "size": more})
            reserved = allocator.reserved
        trace.append(entry | {"action": "alloc", "addr": block.place, "size": size})
    return {"segments": [], "device_traces": [trace], "allocator_settings": {}}


if __name__ == "__main__":
    main()
