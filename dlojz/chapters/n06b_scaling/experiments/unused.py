"""DDP's search for parameters without a gradient: two models, with and without it.

Submitted by a notebook: submit("dlojz/chapters/n06b_scaling/experiments/unused.py", n_gpu=2).

`two heads` uses one head in each step, so the other's weights get no gradient. `stochastic depth`
drops random blocks by a factor of 0, so their weights get a gradient of 0.
"""

import argparse

import torch
from torch import nn
from torchvision.ops import StochasticDepth

from dlojz.chapters import session

WIDTH, DEPTH = 512, 8


class TwoHeads(nn.Module):
    """A trunk and two heads, which take turns from one forward pass to the next."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 10) for _ in range(2))
        self.passes = 0

    def forward(self, x):
        self.passes += 1
        return self.heads[self.passes % 2](self.trunk(x))


class Deep(nn.Module):
    """Residual blocks, half of which are left out in each forward pass."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.drop = StochasticDepth(0.5, "batch")
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x):
        for block in self.blocks:
            x = x + self.drop(block(x))
        return self.head(x)


MODELS = {"two heads": TwoHeads, "stochastic depth": Deep}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-b", "--batch-size", type=int, default=32, help="vectors per process")
    parser.add_argument("--steps", type=int, default=30, help="steps of each case")
    args = parser.parse_args()
    with session.begin(args) as (run, device), session.process_group(device):
        for name, model in MODELS.items():
            for search in (False, True):
                step = training(model(), search, args, device)
                case = f"{name}, {'with' if search else 'without'} the search"
                try:
                    for _ in range(3):
                        step()
                    ms = [session.milliseconds(step, device) for _ in range(args.steps)]
                except RuntimeError as error:  # the same in all processes
                    run.case(case, error=str(error))
                else:
                    run.case(case, step_ms=ms)


def training(model, search, args, device):
    """Return step(), a training step of this model in DDP."""
    ids = [device] if device.type == "cuda" else None
    model = nn.parallel.DistributedDataParallel(
        model.to(device), device_ids=ids, find_unused_parameters=search
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x = torch.randn(args.batch_size, WIDTH, device=device)

    def step():
        optimizer.zero_grad()
        model(x).logsumexp(1).mean().backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    main()
