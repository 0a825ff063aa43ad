"""The loss and the gradient of one batch, beside those accumulated from its parts.

Submitted by a notebook:

    dlojz/chapters/n01b_memory/experiments/accumulated.py
    -b 32 --accumulate 4


Both are computed twice: with batch normalization as in training, where each part has its own
statistics, and with the running statistics, which are the same for all parts.
"""

import argparse

import torch
import torchvision

from dlojz.chapters import session

CASES = {"batch normalization in training": True, "the same statistics for all": False}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet18", help="a classifier of torchvision")
    parser.add_argument("--image-size", type=int, default=64, help="pixels")
    parser.add_argument("-b", "--batch-size", type=int, default=32, help="images of an update")
    parser.add_argument("--accumulate", type=int, default=4, help="parts of equal size")
    args = parser.parse_args()
    if args.batch_size % args.accumulate:
        parser.error(f"-b {args.batch_size} is not a multiple of --accumulate {args.accumulate}")
    with session.begin(args) as (run, device):
        session.set_float32("fp32")
        torch.manual_seed(0)
        model = torchvision.models.get_model(args.model, weights=None).to(device)
        shape = (args.batch_size, 3, args.image_size, args.image_size)
        images = torch.randn(shape, device=device)
        labels = torch.randint(1000, shape[:1], device=device)
        for case, training in CASES.items():
            model.train(training)
            whole, gradient = of(model, images, labels, 1)
            mean, accumulated = of(model, images, labels, args.accumulate)
            run.measure(case, abs(mean / whole - 1), "relative distance", variant="loss")
            apart = session.away(accumulated, gradient)
            run.measure(case, apart, "relative distance", variant="gradient")


def of(model, images, labels, parts):
    """Return the mean loss of equal parts, and their mean gradient, weight by weight."""
    model.zero_grad()
    mean = 0.0
    for some, which in zip(images.chunk(parts), labels.chunk(parts), strict=True):
        loss = torch.nn.functional.cross_entropy(model(some), which) / parts
        loss.backward()
        mean += loss.item()
    return mean, [weight.grad.clone() for weight in model.parameters()]


if __name__ == "__main__":
    main()
