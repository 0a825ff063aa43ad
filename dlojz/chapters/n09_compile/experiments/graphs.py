"""One small model with planted faults: torch.compile's result for each, and for its repair.

Submitted by a notebook: submit("dlojz/chapters/n09_compile/experiments/graphs.py").

The backend aot_eager captures graphs and generates no code, so nothing here takes long.
`dlojz.chapters.n09_compile.dynamo` counts Dynamo's graphs, and the calls of each. The recording
has the numbers of lines in this file: an edit that moves them needs a new one.
"""

import argparse
import time

import torch
from torch import nn

from dlojz.chapters import session
from dlojz.chapters.n09_compile.dynamo import Watch, breaks, first_line

WIDTH, BATCH = 16, 4
CALLS = 12  # of each model


class Clean(nn.Module):
    """Two layers with a part between them, which each fault replaces."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(self.between(torch.relu(self.first(x))))

    def between(self, x):
        """Return the second layer's input."""
        return x


class Branch(Clean):
    """The mean is taken off, if it is large."""

    def between(self, x):
        if x.mean() > 0.1:
            x = x - x.mean()
        return x


class Print(Clean):
    """The shape is printed."""

    def between(self, x):
        print("between:", x.shape)
        return x


class Counter(Clean):
    """A factor that grows with the number of calls."""

    def __init__(self):
        super().__init__()
        self.steps = 0

    def between(self, x):
        self.steps += 1
        return x * min(1, self.steps / 100)


# Guess here, before you read on: the same, repaired.


class BranchRepaired(Clean):
    """Both sides are computed, and the values choose on the device."""

    def between(self, x):
        return torch.where(x.mean() > 0.1, x - x.mean(), x)


class PrintRepaired(Clean):
    """The same line, for eager runs only: a compiler leaves it out."""

    def between(self, x):
        if not torch.compiler.is_compiling():
            print("between:", x.shape)
        return x


class CounterRepaired(Clean):
    """The same number as a tensor, a new one in each call: a value that the graph computes with.

    Changed in place, it would be changed before the backward pass of torch 2.11 reads it again.
    """

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def between(self, x):
        self.steps = self.steps + 1
        return x * torch.clamp(self.steps / 100, max=1)


ONE_SIZE, SIZES, MODES = [BATCH] * CALLS, [4, 6, 8, 10] * 3, ["train", "eval"] * 6
# name: the model, the batch size or mode of each call, and torch.compile's options
CASES = {
    "clean": (Clean, ONE_SIZE, {}),
    "branch on data": (Branch, ONE_SIZE, {}),
    "branch on data, repaired": (BranchRepaired, ONE_SIZE, {}),
    "print": (Print, ONE_SIZE, {}),
    "print, repaired": (PrintRepaired, ONE_SIZE, {}),
    "Python counter": (Counter, ONE_SIZE, {}),
    "Python counter, repaired": (CounterRepaired, ONE_SIZE, {}),
    "four batch sizes": (Clean, SIZES, {}),
    "four batch sizes, repaired": (Clean, SIZES, {"dynamic": True}),
    "train and eval": (Clean, MODES, {}),
}
# Modules of torch.nn itself, and one of our own.
MODULES = {
    "Sequential": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, batch_first=True),
    "our own module": Clean,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    with session.begin(parser.parse_args()) as (run, device):
        for name, what in CASES.items():
            begin = time.perf_counter()
            found = watched(*what, device) | {"fullgraph": fullgraph(*what, device)}
            run.measure(name, found["graphs"], "graphs")
            run.case(name, **found, seconds=round(time.perf_counter() - begin, 2))
        for name, make in MODULES.items():
            for way, found in both_ways(make, device).items():
                run.measure(f"{name}, {way}", found["graphs"], "graphs")
                run.case(f"{name}, {way}", **found)


def watched(make, calls, options, device):
    """Return Dynamo's work on a model in these calls."""
    torch.manual_seed(0)
    model = make().to(device)
    with Watch() as watch:
        compiled = torch.compile(model, backend=watch.backend, **options)
        made, ran = [], []
        for call in calls:
            before = (watch.graphs, watch.ran)
            perform(compiled, call, device)
            made.append(watch.graphs - before[0])
            ran.append(watch.ran - before[1])
        seen = {"frames": watch.frames, "recompiles": watch.recompiles}
    first = calls[0] if isinstance(calls[0], int) else BATCH
    return {
        "calls": len(calls),
        "graphs": watch.graphs,
        **seen,
        "breaks": breaks(make().to(device), torch.randn(first, WIDTH, device=device)),
        "graphs_made": made,  # by call
        "graphs_run": ran,  # 0 where all of it was eager
        "warnings": watch.warnings,
    }


def perform(model, call, device):
    """Call a model with a batch of this size, or as in this mode, with backward in training."""
    size = call if isinstance(call, int) else BATCH
    model.train(call != "eval")
    with torch.set_grad_enabled(call != "eval"):
        out = model(torch.randn(size, WIDTH, device=device))
    if call != "eval":
        out.sum().backward()


def fullgraph(make, calls, options, device):
    """Return the first error of fullgraph=True in these calls, and its call."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model = make().to(device)
    compiled = torch.compile(model, backend="eager", fullgraph=True, **options)
    for number, call in enumerate(calls):
        try:
            perform(compiled, call, device)
        except Exception as error:  # Dynamo's errors have no common class that is public
            return {"call": number, "error": type(error).__name__, "says": first_line(error)}
    return {}


def both_ways(make, device):
    """Return the results of two ways to compile a module, which look the same."""
    x, found = torch.randn(BATCH, 3, WIDTH, device=device), {}
    for way in (".compile()", "torch.compile()"):
        with Watch() as watch:
            module = make().to(device)
            if way == ".compile()":
                module.compile(backend=watch.backend)
            else:
                module = torch.compile(module, backend=watch.backend)
            module(x)
        found[way] = {"graphs": watch.graphs, "graphs_run": [watch.ran]}
        found[way] |= {"frames": watch.frames, "warnings": watch.warnings}
    return found


if __name__ == "__main__":
    main()
