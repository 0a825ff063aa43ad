"""The operations of a training step, summed up by name and by the shapes of their inputs.

Submitted by a notebook:

    dlojz/chapters/n04b_roofline/experiments/averages.py
    --model resnet18 -b 32


It is `key_averages` of a torch.profiler with `record_shapes` and `profile_memory`. Times are those
of the computing device; memory is allocated and freed by the operation itself.
"""

import argparse

import torch
import torchvision
from torch.profiler import ProfilerActivity

from dlojz.chapters import session

ROWS, WARM_UP, STEPS = 200, 2, 2


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    session.add_sizes(parser, batch_size=32)
    args = parser.parse_args()
    with session.begin(args) as (run, device):
        step = training(args, device)
        for _ in range(WARM_UP):
            step()
        session.wait(device)
        on_gpu = device.type == "cuda"
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
        with torch.profiler.profile(
            activities=activities, record_shapes=True, profile_memory=True, acc_events=True
        ) as profiler:
            for _ in range(STEPS):
                step()
            session.wait(device)
        for by_shape in (False, True):
            rows = averages(profiler, by_shape, "device" if on_gpu else "cpu")
            run.case("by name and shapes" if by_shape else "by name", rows=rows)


def training(args, device):
    """Return step(), a training step on images in memory."""
    torch.manual_seed(0)
    session.set_float32(args.precision)
    model = torchvision.models.get_model(args.model, weights=None).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    batch, dtype = session.batch(args, device), session.DTYPES.get(args.precision)
    return lambda: session.one_step(model, optimizer, *batch, dtype)


def averages(profiler, by_shape: bool, clock: str) -> list[dict]:
    """Return the operations with most time of their own in a step, the longest first."""
    rows = [
        {
            "op": row.key,
            "shapes": [shape for shape in row.input_shapes or () if shape] if by_shape else [],
            "calls": row.count / STEPS,
            "ms": getattr(row, f"self_{clock}_time_total") / 1000 / STEPS,
            "bytes": getattr(row, f"self_{clock}_memory_usage") / STEPS,
        }
        for row in profiler.key_averages(group_by_input_shape=by_shape)
        if row.key.startswith("aten::")
    ]
    return sorted(rows, key=lambda row: -row["ms"])[:ROWS]


if __name__ == "__main__":
    main()
