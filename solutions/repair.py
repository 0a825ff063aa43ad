"""A small network with three faults for torch.compile, which are to be repaired.

Submitted by notebook 09, from your own copy: repair.py in the course's folder.

What must stay, compiled or not:
- the same values and gradients, for small and for large inputs;
- `calls` says how often the network was called, and in the first 10 calls it matters;
- called without a compiler, it prints its line. Compiled, it may be silent.

What must come: one graph, compiled once. Leave the compiling to the job.
"""

import torch
from torch import nn

from dlojz.chapters.n09_repair import job


class Net(nn.Module):
    """Two layers. What is between them is larger with each call, and centred where it is large."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        x = torch.relu(self.first(x))
        if not torch.compiler.is_compiling():
            print("a batch of", len(x))
        x = torch.where(x.mean() > 0.5, x - x.mean(), x)
        self.calls = self.calls + 1  # a new tensor: the backward pass needs the old one
        return self.last(x * torch.clamp(self.calls / 10, max=1))


if __name__ == "__main__":
    job.examine(Net)
