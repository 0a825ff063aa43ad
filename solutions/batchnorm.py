"""Batch normalization in several processes, each of which normalizes by its own images only.

Submitted by notebook 06b, from your own copy: batchnorm.py in the course's folder.

A few steps of training in DDP; then `statistics`, which is yours to write, on a batch that is split
between the processes, against what one process computes from the whole batch.
"""

import argparse

import torch
import torchvision

from dlojz import idr_torch
from dlojz.chapters import session


def statistics(x):
    """Return mean and variance of each channel of x, [N, C, H, W], over all processes' images."""
    # 06f: compute both over all processes, by one all_reduce
    channels, values = x.shape[1], x.numel() / x.shape[1]
    mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
    mean, variance = mean.double(), variance.double()  # two large numbers will be subtracted
    sums = torch.cat([mean, variance + mean**2, mean.new_ones(1)]) * values
    torch.distributed.all_reduce(sums)
    sums /= sums[-1].clone()  # by the number of values in all processes
    mean = sums[:channels]
    variance = sums[channels:-1] - mean**2

    return mean, variance


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet18", help="a classifier of torchvision")
    parser.add_argument("--image-size", type=int, default=32, help="pixels")
    parser.add_argument("-b", "--batch-size", type=int, default=8, help="images per process")
    parser.add_argument("--steps", type=int, default=5, help="training steps")
    args = parser.parse_args()
    with session.begin(args) as (run, device), session.process_group(device):
        train(args, device, run)
        compare(device, run)


def train(args, device, run):
    """Train for a few steps, and log this process's running means of the first normalization."""
    torch.manual_seed(0)
    model = torchvision.models.get_model(args.model, weights=None).to(device)
    wrapped = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    generator = torch.Generator().manual_seed(idr_torch.rank)  # its own images
    shape = (args.batch_size, 3, args.image_size, args.image_size)
    for _ in range(args.steps):
        images = torch.randn(shape, generator=generator).to(device)
        optimizer.zero_grad()
        wrapped(images).logsumexp(1).mean().backward()
        optimizer.step()
    first = next(m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d))
    run.case("running means", channels=first.running_mean.tolist())


def compare(device, run):
    """Log the statistics of a batch split between the processes, beside those of the whole."""
    size, rank = idr_torch.size, idr_torch.rank
    # Channels with small values and with large ones. The last has a mean far above its deviation.
    mean = torch.tensor([0.1, 1.0, 10.0, 1000.0]).view(1, 4, 1, 1)
    deviation = torch.tensor([0.1, 1.0, 10.0, 1.0]).view(1, 4, 1, 1)
    generator = torch.Generator().manual_seed(0)
    # One image is missing, so that the processes have unequal shares.
    whole = mean + deviation * torch.randn((8 * size - 1, 4, 5, 5), generator=generator)
    whole = whole.to(device)
    found = statistics(whole[rank::size])
    expected = whole.mean((0, 2, 3)), whole.var((0, 2, 3), unbiased=False)
    for name, yours, one in zip(("mean", "variance"), found, expected, strict=True):
        run.case(name, yours=yours.tolist(), one_process=one.tolist())


if __name__ == "__main__":
    main()
