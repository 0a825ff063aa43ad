"""The images that the trainer sees: from files, or synthetic.

A sample is the same for any number of workers or processes, and after a resume: its random draws
depend only on (seed, epoch, index). The sampler hands epoch and index to the worker, and the data
set seeds the generator for this one sample, then restores it.
"""

import hashlib
import math
import shlex
import struct
import zlib
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import ClassVar

import torch
import torchvision
from PIL import Image
from torchvision.datasets.folder import pil_loader

from dlojz import idr_torch
from dlojz.images import DataError, header, scan, unfinished

MEAN = (0.485, 0.456, 0.406)  # ImageNet's red, green and blue, from 0 to 1, as in torchvision
STD = (0.229, 0.224, 0.225)
# Errors of torchvision's decoder and PIL for a damaged file.
UNREADABLE = (OSError, RuntimeError, ValueError, SyntaxError, Image.DecompressionBombError)
CHECKED_BATCHES = 8  # first batches whose indices are checksummed, to compare two runs


def open_set(args, split: str, decode, transform):
    """Return the split "train" or "val" of the images in the folder `args.data`, or synthetic ones.

    decode: from a file's path to an image; transform: from that image to a sample.
    """
    if args.data == "synthetic":
        return Synthetic(split, args)
    return Images(args.data, split, args.seed, decode, transform)


@contextmanager
def draws_of(seed: int, epoch: int, index: int):
    """Make torch's random draws on the CPU depend on these three numbers alone.

    It takes about 10 microseconds; `torch.manual_seed` would reseed every device as well.
    """
    digest = hashlib.blake2b(struct.pack("<qqq", seed, epoch, index), digest_size=8).digest()
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(int.from_bytes(digest, "little", signed=True))
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


class Images(torchvision.datasets.ImageFolder):
    """JPEG files in `root/<split>/<class>/`, as in ImageNet; a key is (epoch, index)."""

    resident = False

    def __init__(self, root, split, seed, decode=pil_loader, transform=None):
        folder = Path(root).expanduser()
        if not (folder / split).is_dir():
            raise DataError(
                f"no images in {str(root)!r}: expected {folder / split}/<class>/*.JPEG. Make a "
                f"small set with `dlojz data {shlex.quote(str(root))}`, or give ImageNet's folder "
                "with --data or $DLOJZ_DATA, or use --data synthetic"
            )
        if command := unfinished(folder):
            raise DataError(f"{root} is not finished: `{command}` makes the rest")
        if split == "val" and (folder / "train").is_dir():
            scan.check_same_classes(folder)
        super().__init__(folder / split, transform, loader=self._open)
        self.seed, self.decode = seed, decode

    def find_classes(self, directory):
        names = scan.class_names(directory)
        return names, {name: label for label, name in enumerate(names)}

    @staticmethod
    def make_dataset(directory, class_to_idx, extensions, **_):
        found, left_out = scan.samples(directory, class_to_idx, extensions)
        if left_out and idr_torch.is_master:
            print(
                f"note: {directory}: {len(left_out)} files whose names begin with ._ are left out, "
                f"such as {left_out[0]}: macOS writes them beside copies of others, and they hold "
                "no image",
                flush=True,
            )
        return found

    def __getitem__(self, key):
        epoch, index = key
        with draws_of(self.seed, epoch, index):
            return super().__getitem__(index)

    def _open(self, path):
        try:
            header.check(path)
            return self.decode(path)
        except UNREADABLE as error:  # without the file's name
            raise DataError(f"{path}: not decoded: {error}") from error

    collate = staticmethod(torch.utils.data.default_collate)


class Synthetic(torch.utils.data.Dataset):
    """Random uint8 images in memory, to measure training without the loading of its data.

    It has as many classes and images as ImageNet, but keeps only two batches: each batch is a view
    of them that starts at its first index. So nothing is decoded, copied or collated, and yet
    batches differ. They teach a model nothing.
    """

    resident = True  # already in memory: workers would only slow it down
    LENGTHS: ClassVar = {"train": 1_281_167, "val": 50_000}

    def __init__(self, split, args):
        self.split, self.seed, self.batch_size = split, args.seed, args.batch_size
        self.image_size, self.pin_memory = args.image_size, args.pin_memory
        self.classes = [f"synthetic {i}" for i in range(1000)]
        self._pool = None

    def __len__(self):
        return self.LENGTHS[self.split]

    def __getitems__(self, keys):
        """Return a batch (uint8 [N, 3, H, W], int64 [N]), chosen by its first key."""
        images, labels = self._resident()
        first = keys[0][1] % (self.batch_size + 1)
        return images[first : first + len(keys)], labels[first : first + len(keys)]

    @staticmethod
    def collate(batch):
        return batch

    def _resident(self):
        if self._pool is None:
            generator = torch.Generator().manual_seed(self.seed)
            shape = (2 * self.batch_size, 3, self.image_size, self.image_size)
            images = _random_bytes(shape, generator)
            labels = torch.randint(len(self.classes), shape[:1], generator=generator)
            if self.pin_memory and torch.cuda.is_available():
                images, labels = images.pin_memory(), labels.pin_memory()
            self._pool = images, labels
        return self._pool


def _random_bytes(shape, generator):
    """Return uniform uint8 numbers, eight from each draw; `torch.randint` draws for each one."""
    count = math.prod(shape)
    draws = torch.empty(-(-count // 8), dtype=torch.int64)
    draws.random_(-(2**63), None, generator=generator)
    return draws.view(torch.uint8)[:count].view(shape)


class Batches(torch.utils.data.Sampler):
    """Batches of (epoch, index) from a sampler of indices, beginning at any step of an epoch.

    sampler: a `DistributedSampler`, even for one process, so that the permutation is the same. It
    repeats images so that all processes get equal numbers. One without shuffling is for
    validation, which leaves out the repeated images, so that each counts once.
    accumulate: the batches of an update are interleaved, as DistributedSampler interleaves those
        of several processes: one process that accumulates N batches sees the same N batches as N
        processes.
    """

    def __init__(self, sampler, batch_size: int, drop_last: bool = False, accumulate: int = 1):
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last
        self.accumulate = accumulate
        if len(self) < accumulate:
            raise DataError(
                f"an epoch of this process has {len(self.sampler)} images, which make {len(self)} "
                f"batches of {batch_size}{' with --drop-last' * drop_last}, and an update needs "
                f"{accumulate}: give a smaller --batch-size or --accumulate"
                f"{', or leave out --drop-last' * drop_last}"
            )
        self.epoch = self.first_step = 0
        self.drawn = []  # for each epoch: checksums of the indices in its first batches

    def set_epoch(self, epoch: int, first_step: int = 0):
        """Choose the epoch and its first step. Earlier images are skipped, not decoded."""
        self.epoch, self.first_step = epoch, first_step
        self.sampler.set_epoch(epoch)

    def __len__(self):
        """Return the number of steps in a whole epoch."""
        whole, rest = divmod(len(self.sampler), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self):
        drawn = []
        self.drawn.append(drawn)
        for batch in self._batches():
            if len(drawn) < CHECKED_BATCHES:
                drawn.append(zlib.crc32(struct.pack(f"<{len(batch)}q", *batch)))
            yield [(self.epoch, index) for index in batch]

    def _batches(self):
        indices = list(self.sampler)
        steps = range(self.first_step, len(self))
        for step in steps[:-2]:  # lazily: all of ImageNet's take longer than a step
            yield self._batch(indices, step)
        last = [self._batch(indices, step) for step in range(len(self))[-2:]]
        if self._ends_with_a_repeated_image() and min(len(indices), self.batch_size) > 1:
            last[-1].pop()
            if not last[-1]:  # all processes make the same number of steps, in which they may meet
                last[-1].append(last[-2].pop())
        yield from last[-len(steps) :] if steps else ()

    def _ends_with_a_repeated_image(self):
        sampler = self.sampler
        place = (len(sampler) - 1) * sampler.num_replicas + sampler.rank  # of its last image
        return place >= len(sampler.dataset) and not sampler.shuffle and not self.drop_last

    def _batch(self, indices, step):
        first = step - step % self.accumulate
        if first + self.accumulate > len(indices) // self.batch_size:  # too few to interleave
            return indices[step * self.batch_size : (step + 1) * self.batch_size]
        hand = indices[first * self.batch_size : (first + self.accumulate) * self.batch_size]
        return hand[step % self.accumulate :: self.accumulate]


def normalize(images):
    """Return uint8 images as normalized floats, on the same device; floats stay unchanged.

    images: [N, 3, H, W].
    """
    if images.dtype != torch.uint8:
        return images
    shift, scale = line(images.device)
    return torch.addcmul(shift, images, scale)  # one kernel, from bytes to floats


@cache
def line(device):
    """Return shift and scale, so that (x / 255 - MEAN) / STD is shift + x * scale."""
    # Cached, because a copy in every step would make the host wait for the GPU.
    mean, std = (torch.tensor(v, device=device).view(1, 3, 1, 1) for v in (MEAN, STD))
    return -mean / std, 1 / (255 * std)
