"""A small vision transformer, trained on drawn images, and the trainer's evaluation of it."""

import argparse
from types import SimpleNamespace

import torch
from torchvision.models import VisionTransformer

from dlojz import course
from dlojz.chapters.resident import VAL_BATCH, Resident
from dlojz.training import data, flags, imports, metrics

ON_GPU = {"image_size": 32, "classes": 24, "images_per_class": 300, "val_per_class": 100}
ON_GPU |= {"epochs": 30, "batch_size": 256, "layers": 6, "width": 192}
ON_CPU = {"image_size": 24, "classes": 4, "images_per_class": 50, "val_per_class": 50}
ON_CPU |= {"epochs": 8, "batch_size": 40, "layers": 3, "width": 64}
PATCH, HEAD, RATE, DECAY = 4, 32, 1e-3, 0.05


def parser(doc: str, device) -> argparse.ArgumentParser:
    """Return the parser of a program that trains this model, with sizes that suit the device."""
    found = argparse.ArgumentParser(
        description=doc.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name in ON_GPU:
        found.add_argument(f"--{name.replace('_', '-')}", type=flags.at_least(1), help=" ")
    found.set_defaults(**(ON_GPU if device.type == "cuda" else ON_CPU))
    return found


def loader(images, split, args, seed=None) -> Resident:
    """Return the loader of a split; without a seed, for evaluation."""
    ways, labels = images[split]
    batch = VAL_BATCH if seed is None else args.batch_size
    return Resident(ways["usual"], labels, args.image_size, batch, seed)


def train(args, images, device, seed: int = 0, watch=None):
    """Return a trained model. watch: called with the model, which returns a call of each step."""
    torch.manual_seed(seed)
    sizes = (args.layers, args.width // HEAD, args.width, 4 * args.width)
    model = VisionTransformer(args.image_size, PATCH, *sizes, num_classes=args.classes).to(device)
    batches = loader(images, "train", args, seed)
    updates = args.epochs * len(batches)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=DECAY, fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, updates, cycle_momentum=False)
    note = watch(model) if watch else None
    for batches.epoch in range(args.epochs):
        for pixels, labels in batches:
            if note:
                note()
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                logits = model(data.normalize(pixels))
                loss = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
    return model.eval()


class Evaluation:
    """The trainer's `evaluate`, of solution 09, on the images for validation."""

    def __init__(self, args, images, device):
        self.trainer, self.device = imports.trainer(course.solution("09")), device
        self.loader = loader(images, "val", args)
        self.parts = {"criterion": torch.nn.CrossEntropyLoss(), "metrics": metrics.build()}
        self.parts["metrics"].to(device)
        self.args = SimpleNamespace(test=False, mix="off", channels_last=False, non_blocking=False)
        self.args.precision = "bf16" if device.type == "cuda" else "fp32"

    def __call__(self, model) -> float:
        """Return the accuracy."""
        training = SimpleNamespace(model=model, **self.parts)
        return self.trainer.evaluate(self.loader, training, self.device, self.args)["accuracy"]
