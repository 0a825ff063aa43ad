"""Learn to classify photographs: photos.py --data FOLDER."""

import argparse
from itertools import chain, islice, repeat
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

MEAN, STD = (0.24, 0.21, 0.17), (0.22, 0.20, 0.19)  # of light in red, green and blue


class Photos(Dataset):
    """The photographs in a folder, which has a folder for each class."""

    def __init__(self, folder):
        self.files = sorted(Path(folder).glob("*/*.JPEG"))
        self.classes = sorted({file.parent.name for file in self.files})

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        file = self.files[index]
        pixels = middle(np.array(Image.open(file).convert("RGB")), 128)
        light = (pixels / 255) ** 2
        light = (light - MEAN) / STD
        image = torch.tensor(light, dtype=torch.float32).permute(2, 0, 1)
        image = nn.functional.interpolate(image[None], (64, 64), mode="bilinear", antialias=True)
        return image[0], self.classes.index(file.parent.name)


def middle(pixels, most):
    """Return the middle of an image, with at most this height and width."""
    height, width, _ = pixels.shape
    top, left = max(0, height - most) // 2, max(0, width - most) // 2
    return pixels[top : top + most, left : left + most]


def block(inputs, outputs):
    return [nn.Conv2d(inputs, outputs, 3, 2, 1), nn.BatchNorm2d(outputs), nn.ReLU()]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="data")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    photos = Photos(f"{args.data}/train")
    loader = DataLoader(photos, args.batch_size, shuffle=True, drop_last=True)
    layers = [*block(3, 32), *block(32, 64), *block(64, 128), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(128, len(photos.classes))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    batches = chain.from_iterable(repeat(loader))
    for images, labels in islice(batches, args.steps):
        loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
