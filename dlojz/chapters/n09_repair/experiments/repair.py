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
        self.calls = 0

    def forward(self, x):
        x = torch.relu(self.first(x))
        print("a batch of", len(x))
        if x.mean() > 0.5:
            x = x - x.mean()
        self.calls += 1
        return self.last(x * min(1, self.calls / 10))


if __name__ == "__main__":
    job.examine(Net)
