"""A small set of drawn images that is on the device, and the loader that crops them there."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from torchvision import transforms
from torchvision.transforms.v2 import RandAugment, functional
from tqdm import tqdm

from dlojz import idr_torch
from dlojz.chapters import small
from dlojz.training import distributed
from dlojz.training.data import draws_of

MARGIN = 1.25  # side of the stored images, relative to the crop's
VAL_BATCH = 250
RATIO = (3 / 4, 4 / 3)  # of RandomResizedCrop's boxes, as torchvision has it
USUAL = {"train": ["usual"], "val": ["usual"]}


def draw(args, device, ways: Mapping[str, Iterable[str]] = USUAL):
    """Return {split: (images, labels)} on the device, with images by way.

    Processes that are joined in a group draw a part of the classes each, and exchange them.
    args: with --image-size, --classes, --images-per-class and --val-per-class.
    """
    side, found = round(MARGIN * args.image_size), {}
    share = (idr_torch.rank, idr_torch.size) if distributed.are_joined() else (0, 1)
    mine = range(args.classes)[share[0] :: share[1]]
    counts = {"train": args.images_per_class, "val": args.val_per_class}
    total, quiet = len(mine) * sum(counts.values()), not idr_torch.is_master
    with tqdm(total=total, unit="image", desc="drawing", disable=quiet) as bar:
        for split, count in counts.items():
            own = small.images(
                split,
                mine,
                count,
                side,
                [*dict.fromkeys(ways[split])],
                workers=idr_torch.cpus_per_task,
                progress=bar.update,
            )
            images, labels = together(*own) if share[1] > 1 else own
            images = {way: torch.from_numpy(made).to(device) for way, made in images.items()}
            found[split] = images, torch.from_numpy(labels).to(device)
    return found


def together(images: Mapping[str, np.ndarray], labels: np.ndarray):
    """Return the images and labels that all processes have drawn, class by class."""
    parts = [None] * idr_torch.size
    torch.distributed.all_gather_object(parts, (images, labels))
    labels = np.concatenate([part[1] for part in parts])
    order = np.argsort(labels, kind="stable")
    whole = {way: np.concatenate([part[0][way] for part in parts])[order] for way in images}
    return whole, labels[order]


@dataclass(frozen=True)
class Crop:
    """The crop of a training image from one on the device."""

    flips: bool = True
    moves: bool = True  # anywhere in the image; False: its middle
    area: tuple[float, float] | None = None  # of RandomResizedCrop; None: nothing is resized


USUAL_CROP = Crop()


def crops(images, index, top, left, size):
    """Return the images at `index`, each cropped to `size` at its place."""
    along = torch.arange(size, device=images.device)
    rows, columns = top[:, None] + along, left[:, None] + along
    channels = torch.arange(3, device=images.device)[None, :, None, None]
    rows, columns = rows[:, None, :, None], columns[:, None, None, :]
    return images[index[:, None, None, None], channels, rows, columns]


class Resident:
    """A loader of images that are on the device: uint8 [N, 3, side, side], and their labels."""

    def __init__(
        self,
        images,
        labels,
        size,
        batch_size,
        seed=None,
        crop=USUAL_CROP,
        share=(0, 1),
        randaugment=None,
    ):
        """seed: for order, crops and flips; None: the middles, in order.

        batch_size: over all processes. share: rank and number of the processes that share a batch.
        randaugment: None, or its operations for an image and their strength.
        """
        self.randaugment = randaugment and RandAugment(*randaugment)
        # RandAugment takes the images one by one, so they stay on the CPU until it is done.
        self.images, self.labels = images.cpu() if randaugment else images, labels
        self.size, self.batch_size, self.seed = size, batch_size, seed
        self.share = share
        self.crop = Crop(flips=False, moves=False) if seed is None else crop
        self.batch_sampler = SimpleNamespace(first_step=0)  # never resumed in mid-epoch
        self.epoch = 0

    def __len__(self):
        batches = len(self.images) / self.batch_size
        return math.ceil(batches) if self.seed is None else math.floor(batches)

    def draws(self):
        """Return order, top, left and flip for this epoch, [N] each, from seed and epoch alone.

        They are drawn on the CPU, since each device draws other numbers; and all for any crop, so
        that each has the same order.
        """
        count, room = len(self.images), self.images.shape[-1] - self.size
        generator = torch.Generator().manual_seed(1_000_003 * (self.seed or 0) + self.epoch)
        order = torch.randperm(count, generator=generator)
        top, left = torch.randint(room + 1, (2, count), generator=generator)
        flip = torch.rand(count, generator=generator) < 0.5
        if self.seed is None:
            order = torch.arange(count)
        if not self.crop.moves:
            top = left = torch.full((count,), room // 2)
        return order, top, left, flip & self.crop.flips

    def resized(self, index):
        """Return the images at `index`, each cropped by RandomResizedCrop."""
        found = []
        for at in index.tolist():
            image = self.images[at]
            with draws_of(self.seed, self.epoch, at):
                box = transforms.RandomResizedCrop.get_params(image, self.crop.area, RATIO)
            found.append(functional.resized_crop(image, *box, [self.size, self.size]))
        return torch.stack(found)

    def augmented(self, images, index):
        """Return the images, each changed by RandAugment as a PIL image, as in a loader."""
        found = []
        for image, at in zip(images, index.tolist(), strict=True):
            with draws_of(self.seed, self.epoch, at):
                changed = self.randaugment(functional.to_pil_image(image))
            found.append(functional.pil_to_tensor(changed))
        return torch.stack(found)

    def __iter__(self):
        order, *places = self.draws()
        index, top, left, flip = (part.to(self.images.device) for part in (order, *places))
        labels = self.labels[order.to(self.labels.device)]
        for step in range(len(self)):
            rank, processes = self.share
            here = slice(step * self.batch_size + rank, (step + 1) * self.batch_size, processes)
            if self.crop.area:
                images = self.resized(order[here])  # on the CPU, without waiting for the device
            else:
                images = crops(self.images, index[here], top[here], left[here], self.size)
            flipped = torch.where(flip[here, None, None, None], images.flip(-1), images)
            if self.randaugment:
                flipped = self.augmented(flipped, order[here])
            yield flipped.to(labels.device), labels[here]
