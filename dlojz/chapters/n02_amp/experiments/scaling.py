"""The loss scale of a real training run in fp16, step by step, beginning far too large.

Submitted by a notebook: submit("dlojz/chapters/n02_amp/experiments/scaling.py"). The network and
the images are small, so that a CPU can run it too.
"""

import argparse

import torch
import torchvision

from dlojz.chapters import session


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="squeezenet1_1", help="a classifier of torchvision")
    parser.add_argument("--image-size", type=int, default=32, help="pixels")
    parser.add_argument("-b", "--batch-size", type=int, default=4, help="images")
    parser.add_argument("--steps", type=int, default=36, help="training steps")
    parser.add_argument("--exponent", type=int, default=26, help="the first scale is 2 to this")
    parser.add_argument("--growth-interval", type=int, default=5, help="good steps to a doubling")
    args = parser.parse_args()
    with session.begin(args) as (run, device):
        torch.manual_seed(0)
        model = torchvision.models.get_model(args.model, weights=None).to(device)
        images = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device)
        labels = torch.randint(1000, (args.batch_size,), device=device)
        optimizer = torch.optim.SGD(model.parameters(), 1e-4, 0.9)
        scaler = torch.amp.GradScaler(
            device.type, init_scale=2.0**args.exponent, growth_interval=args.growth_interval
        )
        for step in range(args.steps):
            run.measure("scale", scaler.get_scale(), "loss scale", x=step)
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.float16):
                loss = torch.nn.functional.cross_entropy(model(images), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)  # skipped if a gradient is infinite or not a number
            scaler.update()
        run.measure("scale", scaler.get_scale(), "loss scale", x=args.steps)


if __name__ == "__main__":
    main()
