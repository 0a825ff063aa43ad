"""What stays in memory: the tensors that autograd keeps, counted while they live.

Submitted by a notebook: submit("notebooks/experiments/memory.py --model resnet18 -b 32").
"""

import argparse
import gc
import weakref

import torch
import torchvision

from dlojz import idr_torch, log

STEPS = 3


class Kept:
    """A tensor that autograd keeps for the backward pass."""

    def __init__(self, tensor):
        # Detached: an output that is kept with its graph would keep itself alive for ever.
        self.tensor = tensor.detach()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet50", help="a classifier of torchvision")
    parser.add_argument("--image-size", type=int, default=224, help="pixels")
    parser.add_argument("-b", "--batch-size", type=int, default=32, help="images")
    args = parser.parse_args()
    run = log.open_run(args)
    device = idr_torch.device()
    run.experiment(device)
    model = torchvision.models.get_model(args.model, weights=None).to(device)
    shape = (args.batch_size, 3, args.image_size, args.image_size)
    images, labels = (
        torch.randn(shape, device=device),
        torch.zeros(shape[0], dtype=int, device=device),
    )
    alive = weakref.WeakSet()

    def keep(tensor):
        kept = Kept(tensor)
        alive.add(kept)
        return kept

    def loss_of_a_step():
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept.tensor):
            return torch.nn.functional.cross_entropy(model(images), labels)

    def measure(what):
        gc.collect()
        storages = {
            k.tensor.untyped_storage().data_ptr(): k.tensor.untyped_storage() for k in alive
        }
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        kept = sum(s.nbytes() for at, s in storages.items() if at not in parameters)
        run.measure(what, kept, "bytes")

    loss = loss_of_a_step()
    measure("one forward pass, in training")
    loss.backward()
    measure("... and its backward pass")
    del loss
    with torch.no_grad():
        loss_of_a_step()
    measure("one forward pass, under no_grad")
    losses = []
    for _ in range(STEPS):
        losses.append(loss_of_a_step())
        losses[-1].backward()
    measure(f"{STEPS} losses in a list, each after backward")
    losses = [loss_of_a_step() for _ in range(STEPS)]
    measure(f"{STEPS} losses in a list, no backward (a validation)")
    losses = [loss.detach() for loss in losses]
    measure(f"{STEPS} detached losses in a list")
    run.end()


if __name__ == "__main__":
    main()
