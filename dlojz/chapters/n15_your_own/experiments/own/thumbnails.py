"""Learn to classify small photographs, all kept in memory: thumbnails.py --data FOLDER."""

import argparse
from itertools import chain, islice, repeat
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def thumbnail(file, size):
    """Return a photograph as bytes, decoded small, which is quick."""
    image = Image.open(file)
    image.draft("RGB", (size, size))
    return torch.from_numpy(np.array(image.convert("RGB").resize((size, size)))).permute(2, 0, 1)


def block(inputs, outputs, stride):
    return [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs), nn.ReLU()]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="data")
    parser.add_argument("--size", type=int, default=48)
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    files = sorted(Path(args.data, "train").glob("*/*.JPEG"))
    files = files[:: max(1, len(files) // 256)]
    classes = sorted({file.parent.name for file in files})
    images = torch.stack([thumbnail(file, args.size) for file in files])
    labels = torch.tensor([classes.index(file.parent.name) for file in files])
    keys = {"shuffle": True, "drop_last": True, "pin_memory": on_gpu, "num_workers": args.workers}
    loader = DataLoader(TensorDataset(images, labels), args.batch_size, **keys)
    width = args.width
    layers = [*block(3, width, 1), *block(width, width, 1), *block(width, 2 * width, 2)]
    layers += [*block(2 * width, 2 * width, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(2 * width, len(classes)))
    model = model.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, fused=True)
    batches = chain.from_iterable(repeat(loader))
    for x, y in islice(batches, args.steps):
        x = x.to(device, non_blocking=True, memory_format=torch.channels_last) / 255
        with torch.autocast(device, torch.bfloat16, enabled=on_gpu):
            loss = nn.functional.cross_entropy(model(x), y.to(device, non_blocking=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
