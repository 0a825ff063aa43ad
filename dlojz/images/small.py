"""The drawings of `draw`, decoded and made small: a whole set of them fits a GPU's memory."""

import io
import itertools

import numpy as np
from PIL import Image

from dlojz.images import draw
from dlojz.images.folder import default_workers, processes

CHUNK = 25  # images of a class that a worker draws before it hands them over: about a second


def decoded(seed: int, split: str, label: int, index: int, side: int) -> np.ndarray:
    """Return the middle of one drawing, uint8 [3, side, side]: its whole shorter side."""
    with Image.open(io.BytesIO(draw.jpeg(seed, split, label, index))) as image:
        short = min(image.size)
        left, top = ((length - short) // 2 for length in image.size)
        box = (left, top, left + short, top + short)
        small = image.convert("RGB").resize((side, side), Image.Resampling.BOX, box)
    return np.asarray(small).transpose(2, 0, 1)


def _chunk(seed, split, label, indices, side):
    return np.stack([decoded(seed, split, label, index, side) for index in indices])


def images(
    split: str, classes: int, per_class: int, side: int, seed: int = 0, workers=None, progress=None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the first `per_class` images of each class, uint8 [N, 3, side, side], and labels.

    workers: processes that draw; None: as many as this process has CPUs, 1: this process alone.
    progress: called with the number of images that were just drawn.
    """
    starts = itertools.product(range(classes), range(0, per_class, CHUNK))
    tasks = [(k, range(start, min(start + CHUNK, per_class))) for k, start in starts]
    found = []
    for chunk in _drawn(seed, split, tasks, side, workers or default_workers()):
        found.append(chunk)
        if progress:
            progress(len(chunk))
    return np.concatenate(found), np.repeat(np.arange(classes), per_class)


def _drawn(seed, split, tasks, side, workers):
    """Yield the images of each task, in order."""
    if workers == 1 or len(tasks) == 1:
        for task in tasks:
            yield _chunk(seed, split, *task, side)
        return
    with processes(min(workers, len(tasks))) as pool:
        for future in [pool.submit(_chunk, seed, split, *task, side) for task in tasks]:
            yield future.result()
