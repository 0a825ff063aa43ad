"""A histogram of the gradients of a training step by powers of two, in fp32.

Submitted by a notebook:

    dlojz/chapters/n02_amp/experiments/underflow.py
    --model resnet18 -b 32

"""

import argparse
from collections import Counter

import torch
import torchvision

from dlojz.chapters import session

LOWEST = -149  # the exponent of the smallest number of fp32
LEARNING_RATES = (1e-3, 1e-2, 1e-1)
FORMATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def by_exponent(tensor):
    """Return the count of numbers in [2^e, 2^(e+1)), by e, without zeros."""
    numbers = tensor.detach().abs()
    exponents = torch.frexp(numbers[numbers > 0]).exponent - 1  # frexp's mantissa is below 1
    counts = torch.bincount(exponents - LOWEST).tolist()
    return Counter({e: count for e, count in enumerate(counts, LOWEST) if count})


def unchanged(weights, gradients, lr, dtype):
    """Return the share of the weights with a gradient that w - lr * g does not change."""
    same = total = 0
    for w, g in zip(weights, gradients, strict=True):
        w, g = w[g != 0].to(dtype), g[g != 0].to(dtype)
        same += ((w - lr * g) == w).sum().item()
        total += w.numel()
    return same / total


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet50", help="a classifier of torchvision")
    parser.add_argument("--image-size", type=int, default=224, help="pixels")
    parser.add_argument("-b", "--batch-size", type=int, default=32, help="images")
    parser.add_argument("--steps", type=int, default=10, help="training steps before the counting")
    args = parser.parse_args()
    with session.begin(args) as (run, device):
        torch.manual_seed(0)
        model = torchvision.models.get_model(args.model, weights=None).to(device)
        images = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device)
        labels = torch.randint(1000, (args.batch_size,), device=device)
        optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.9)

        def backward():
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels, label_smoothing=0.1).backward()

        for _ in range(args.steps):
            backward()
            optimizer.step()

        for name, found in counted(model, backward).items():
            for exponent, count in sorted(found.items()):
                run.measure(name, count, "gradients", x=exponent)
        weights = list(model.parameters())
        for name, dtype in FORMATS.items():
            for lr in LEARNING_RATES:
                share = unchanged(weights, [w.grad for w in weights], lr, dtype)
                run.measure(name, share, "share of weights that a step does not change", x=lr)


def counted(model, backward) -> dict[str, Counter]:
    """Return the numbers of gradients by exponent in a backward pass: activations', weights'."""
    counts = {"activations": Counter(), "weights": Counter()}

    def count_gradient(layer, inputs, output):
        output.register_hook(lambda g: counts["activations"].update(by_exponent(g)))

    for layer in model.modules():  # autocast would run these backward passes in 16 bits
        if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear):
            layer.register_forward_hook(count_gradient)
    backward()
    for w in model.parameters():
        counts["weights"].update(by_exponent(w.grad))
    return counts


if __name__ == "__main__":
    main()
