"""An update of all weights, one by one, in groups and fused: its launches, and the host's wait.

Submitted by a notebook: submit("dlojz/chapters/n02_amp/experiments/updates.py --model resnet50").

In each round a GPU gets other work first, in place of the backward pass. An update that asks the
GPU for a number returns only when that work is done, too. All ways take turns.
"""

import argparse
import time
from functools import partial

import torch
import torchvision

from dlojz.chapters import session
from dlojz.watch import profile

WAYS = {"one by one": {"foreach": False}, "in groups": {"foreach": True}, "fused": {"fused": True}}
SCALERS = {"without a scaler": False, "with a scaler": True}
WORK, PRODUCTS = 8192, 16  # float32 matrix products of this size, before an update on a GPU


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default="resnet50", help="a classifier of torchvision, whose weights are used")
    add("--rounds", type=int, default=21, help="timings of each way")
    args = parser.parse_args()
    with session.begin(args) as (run, device):
        session.set_float32("tf32")
        cases = {
            f"{way}, {scaler}": update(args.model, device, how, enabled)
            for scaler, enabled in SCALERS.items()
            for way, how in WAYS.items()
        }
        work = work_for(device)
        spent = {name: [] for name in cases}
        for i in range(args.rounds + 3):
            for name, call in cases.items():
                times = timed(call, work, device)
                if i >= 3:  # the first rounds allocate
                    spent[name].append(times)
        for name, call in cases.items():
            counts = profile.counts(profile.profiled(call))
            host_ms, whole_ms, work_ms = zip(*spent[name], strict=True)
            run.case(
                name,
                **{"host_ms": host_ms, "whole_ms": whole_ms, "work_ms": work_ms},
                launches=counts["kernels" if device.type == "cuda" else "operations"],
                reads=counts["reads"],
            )


def update(model, device, how, scaled):
    """Return a call that updates the weights of a model by constant gradients."""
    weights = list(torchvision.models.get_model(model).to(device).parameters())
    optimizer = torch.optim.SGD(weights, 0.1, 0.9, weight_decay=5e-4, **how)
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
        optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    scaler = torch.amp.GradScaler(device.type, enabled=scaled)
    scaler.scale(torch.ones((), device=device))  # in place of the loss
    return partial(take, optimizer, scaler)


def take(optimizer, scaler):
    """Take one step of the optimizer, as the trainer does."""
    scaler.step(optimizer)
    scaler.update()


def work_for(device):
    """Return a call that keeps a GPU busy for some milliseconds, and a processor not at all."""
    if device.type != "cuda":
        return lambda: None
    a = torch.randn(WORK, WORK, device=device)
    return lambda: [a @ a for _ in range(PRODUCTS)]


def timed(call, work, device) -> tuple[float, float, float]:
    """Return the milliseconds until an update returned, until all was done, and of the work."""
    session.wait(device)
    begin = time.perf_counter()
    work()
    session.wait(device)
    alone = time.perf_counter() - begin
    begin = time.perf_counter()
    work()
    asked = time.perf_counter()
    call()
    returned = time.perf_counter()
    session.wait(device)
    done = time.perf_counter()
    return tuple(round(1000 * s, 4) for s in (returned - asked, done - begin, alone))


if __name__ == "__main__":
    main()
