"""The tensors that autograd keeps in memory, counted while they are alive.

Submitted by a notebook:

    dlojz/chapters/n01_gpu/experiments/memory.py
    --model resnet18 -b 32

"""

import argparse
import gc
import weakref

import torch
import torchvision

from dlojz.chapters import session

STEPS = 3


class Kept:
    """A tensor that autograd keeps for the backward pass."""

    def __init__(self, tensor):
        # Detached, because an output kept with its graph would keep itself alive forever.
        self.tensor = tensor.detach()


class Step:
    """A forward pass on a fixed batch, with a count of autograd's kept tensors."""

    def __init__(self, args, device):
        self.model = torchvision.models.get_model(args.model, weights=None).to(device)
        shape = (args.batch_size, 3, args.image_size, args.image_size)
        self.images = torch.randn(shape, device=device)
        self.labels = torch.zeros(shape[0], dtype=int, device=device)
        self._alive = weakref.WeakSet()

    def loss(self):
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept.tensor):
            return torch.nn.functional.cross_entropy(self.model(self.images), self.labels)

    def _keep(self, tensor):
        kept = Kept(tensor)
        self._alive.add(kept)
        return kept

    def kept_bytes(self):
        """Return the kept bytes without the parameters; a shared storage counts once."""
        gc.collect()
        storages = [kept.tensor.untyped_storage() for kept in self._alive]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        parameters = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        return sum(size for at, size in sizes.items() if at not in parameters)


def main():
    args = parse_args()
    with session.begin(args) as (run, device):
        step = Step(args, device)

        def measure(what):
            run.measure(what, step.kept_bytes(), "bytes")

        loss = step.loss()
        measure("one forward pass, in training")
        loss.backward()
        measure("... and its backward pass")
        del loss
        with torch.no_grad():
            step.loss()
        measure("one forward pass, under no_grad")
        losses = []
        for _ in range(STEPS):
            losses.append(step.loss())
            losses[-1].backward()
        measure(f"{STEPS} losses in a list, each after backward")
        losses = [step.loss() for _ in range(STEPS)]
        measure(f"{STEPS} losses in a list, no backward (a validation)")
        losses = [loss.detach() for loss in losses]
        measure(f"{STEPS} detached losses in a list")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet50", help="a classifier of torchvision")
    parser.add_argument("--image-size", type=int, default=224, help="pixels")
    parser.add_argument("-b", "--batch-size", type=int, default=32, help="images")
    return parser.parse_args()


if __name__ == "__main__":
    main()
