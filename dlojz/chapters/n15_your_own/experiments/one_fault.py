"""A training of ResNet-50 on a GPU with one fault that a trainer may have: one_fault.py FAULT."""

import argparse

import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader, Dataset

FAULTS = ("healthy", "loader", "python", "sync", "precision", "optimizer", "layout")
BATCH, STEPS, PX = 160, 60, 224


class Images(Dataset):
    """Images of random numbers; with a slow loader each is decoded from a JPEG file's bytes."""

    def __init__(self, slow):
        self.ready = torch.rand(64, 3, PX, PX)
        self.files = []
        if slow:
            noise = (torch.randint(0, 255, (3, 375, 500), dtype=torch.uint8) for _ in range(8))
            self.files = [torchvision.io.encode_jpeg(image) for image in noise]

    def __len__(self):
        return BATCH * STEPS

    def __getitem__(self, index):
        if not self.files:
            return self.ready[index % 64], index % 100
        image = torchvision.io.decode_image(self.files[index % 8]).float() / 255
        return torchvision.transforms.functional.resize(image, [PX, PX]), index % 100


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fault", choices=FAULTS)
    fault = parser.parse_args().fault
    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = fault != "precision"
    layout = torch.contiguous_format if fault == "layout" else torch.channels_last
    model = torchvision.models.resnet50(num_classes=100).to("cuda", memory_format=layout)
    each = {"foreach": False} if fault == "optimizer" else {}
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, **each)
    workers = 0 if fault == "loader" else 12
    loader = DataLoader(Images(fault == "loader"), BATCH, num_workers=workers, pin_memory=True)
    largest = []
    for images, labels in loader:
        images = images.to("cuda", non_blocking=True).to(memory_format=layout)
        labels = labels.to("cuda", non_blocking=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=fault != "precision"):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        for parameter in model.parameters():
            if fault == "python":
                for _ in range(8):
                    parameter.grad.mul_(1.0)
            if fault == "sync":
                largest.append(parameter.grad.abs().max().item())
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
