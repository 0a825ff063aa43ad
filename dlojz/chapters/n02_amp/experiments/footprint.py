"""The memory of a training step by precision: bytes per parameter and bytes per image.

They are counted on tensors with a shape and a type but no values, so any machine can count any
model. Submitted by a notebook:

    dlojz/chapters/n02_amp/experiments/footprint.py --model resnet50

"""

import argparse

import torch
import torchvision
from torch._subclasses.fake_tensor import FakeTensorMode

from dlojz.chapters import session

OPTIMIZERS = {
    "SGD": lambda weights: torch.optim.SGD(weights, 0.1, 0.9),
    "Adam": lambda weights: torch.optim.AdamW(weights),
}
RECIPES = ("fp32", "autocast", "pure bf16")


def size(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def kept_bytes(model, recipe, shape):
    """Return the loss of one batch, and the bytes that autograd keeps for it, without weights."""
    images = torch.randn(shape)
    labels = torch.zeros(shape[0], dtype=int)
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage  # several views of one storage count once
        return tensor

    autocast = torch.autocast("cpu", torch.bfloat16, enabled=recipe == "autocast")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
        loss = torch.nn.functional.cross_entropy(model(images), labels)
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    return loss, sum(s.nbytes() for at, s in kept.items() if at not in weights)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet50", help="a classifier of torchvision")
    parser.add_argument("--image-size", type=int, default=224, help="pixels")
    args = parser.parse_args()
    with session.begin(args, torch.device("cpu")) as (run, _):
        shape = (3, args.image_size, args.image_size)
        for recipe in RECIPES:
            # It applies to all weights and images from here on.
            torch.set_default_dtype(torch.bfloat16 if recipe == "pure bf16" else torch.float32)
            with torch.device("meta"):  # torch 2.15 looks at the initial weights that it draws
                model = torchvision.models.get_model(args.model, weights=None)
            with FakeTensorMode(allow_non_fake_inputs=True):
                model.to_empty(device="cpu")
                _, few = kept_bytes(model, recipe, (8, *shape))
                loss, many = kept_bytes(model, recipe, (16, *shape))
                loss.backward()
                per_image = (many - few) / 8
                run.measure(recipe, per_image, "activations (bytes per image)")
                weights = list(model.parameters())
                count = sum(w.numel() for w in weights)
                for name, build in OPTIMIZERS.items():
                    optimizer = build(weights)
                    optimizer.step()
                    state = [v for s in optimizer.state.values() for v in s.values() if v.ndim]
                    parts = {
                        "weights": size(weights),
                        "gradients": size(w.grad for w in weights),
                        "optimizer": size(state),
                        "weights in 16 bits, during a step": few - 8 * per_image,
                    }
                    case = f"{recipe}, {name}"
                    for part, total in parts.items():
                        run.measure(part, total / count, "bytes per parameter", x=case)
        torch.set_default_dtype(torch.float32)


if __name__ == "__main__":
    main()
