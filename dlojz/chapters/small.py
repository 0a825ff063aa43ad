"""The drawings of `draw`, decoded and made small: a whole set of them fits a GPU's memory."""

import functools
import io
import itertools
import sys
from collections.abc import Sequence

import numpy as np
from PIL import Image

from dlojz.images import draw
from dlojz.images.dataset import processes
from dlojz.machine import cpus
from dlojz.training.replaced import replaced

CHUNK = 25  # images of a class that a worker draws before it hands them over: about a second
FEW = 100  # images that are drawn sooner than a process begins
# Even the smallest of torchvision's random crops, 8 % of an image, has more pixels than it needs.
LARGE = 4


# From a file's bytes to the middle of an image ----------------------------------------------------
# Each returns uint8 [3, side, side]: the whole shorter side. PIL and torchvision decode to the same
# bytes; they differ in how they make an image smaller.


def usual(jpeg: bytes, side: int) -> np.ndarray:
    """Return the image by PIL: each pixel is the mean of those that it covers."""
    with Image.open(io.BytesIO(jpeg)) as image:
        short = min(image.size)
        left, top = ((length - short) // 2 for length in image.size)
        box = (left, top, left + short, top + short)
        small = image.convert("RGB").resize((side, side), Image.Resampling.BOX, box)
    return np.asarray(small).transpose(2, 0, 1)


def large(jpeg: bytes, side: int) -> np.ndarray:
    """Return the usual image, but `LARGE` times as high and as wide."""
    return usual(jpeg, LARGE * side)


def by_torchvision(jpeg: bytes, side: int, antialias: bool = True) -> np.ndarray:
    """Return the image by torchvision, as step 05 does; without antialias, no pixel is a mean."""
    import torch
    from torchvision.io import decode_image
    from torchvision.transforms.v2 import functional

    image = decode_image(torch.frombuffer(bytearray(jpeg), dtype=torch.uint8), mode="RGB")
    middle = functional.center_crop(image, 2 * [min(image.shape[1:])])
    return functional.resize(middle, [side, side], antialias=antialias).numpy()


WAYS = {
    "usual": usual,
    "large": large,
    "torchvision": by_torchvision,
    "no-antialias": functools.partial(by_torchvision, antialias=False),
}


# A set of them ------------------------------------------------------------------------------------


def _chunk(seed, split, label, indices, side, ways):
    files = [draw.jpeg(seed, split, label, index) for index in indices]
    return {way: np.stack([WAYS[way](file, side) for file in files]) for way in ways}


def images(
    split: str,
    classes: Sequence[int],
    per_class: int,
    side: int,
    ways=("usual",),
    seed: int = 0,
    workers=None,
    progress=None,
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the first `per_class` images of these classes, made in each of the `ways`, and labels.

    The images are uint8 [N, 3, side, side], by way; each is drawn only once.
    workers: processes that draw; None: as many as this process has CPUs, 1: this process alone,
        which also draws few images: other processes would take seconds to begin.
    progress: called with the number of images that were just drawn.
    """
    starts = itertools.product(classes, range(0, per_class, CHUNK))
    tasks = [(k, range(start, min(start + CHUNK, per_class))) for k, start in starts]
    workers = 1 if len(classes) * per_class <= FEW else workers or cpus.count()
    found = []
    for chunk in _drawn(seed, split, tasks, side, ways, workers):
        found.append(chunk)
        if progress:
            progress(len(chunk[ways[0]]))
    whole = {way: np.concatenate([chunk[way] for chunk in found]) for way in ways}
    return whole, np.repeat(np.asarray(classes), per_class)


def _drawn(seed, split, tasks, side, ways, workers):
    """Yield the images of each task, in order."""
    if workers == 1 or len(tasks) == 1:
        for task in tasks:
            yield _chunk(seed, split, *task, side, ways)
        return
    with processes(min(workers, len(tasks))) as pool:
        with replaced(sys.modules["__main__"], __file__=None, __spec__=None):
            # A worker would run the program's imports, and so load torch, for seconds.
            found = [pool.submit(_chunk, seed, split, *task, side, ways) for task in tasks]
        for future in found:
            yield future.result()
