"""A probe of the data set: the images that it makes of a file of our own.

The pixels of that file encode their position: red grows from left to right, green from top to
bottom, blue is noise of all sizes. So the images show which part of the file was cropped, whether
it was flipped, and the detail that is left. Halfway through, the file is rewritten with more blue,
which exposes a data set that caches. Its size and time stay, so that only its bytes differ.
"""

import builtins
import gc
import io
import os
import statistics
import tempfile
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, get_worker_info

from dlojz.training import data, private
from dlojz.training.replaced import replaced

DRAWS = 32  # images that are made from the file
WIDTH, HEIGHT = 500, 375  # pixels of the file, like most of ImageNet's
LABEL = 1  # the file's
TURNED = 0x0112  # EXIF's number for how a viewer should turn the image
SYSTEM = ("/proc/", "/sys/", "/dev/null")


class _Probed(Dataset):
    """A data set of one item, the result of `look` in a worker."""

    def __init__(self, loader):
        self._dataset, self._init = loader.dataset, loader.worker_init_fn

    def __getitem__(self, _):
        # The trainee's function and the data set see a worker of the loader.
        here, dataset = get_worker_info(), self._dataset
        private.be_worker_of(dataset, here.seed)
        if self._init:
            self._init(0)
        return look(dataset)


def look_within(loader) -> dict:
    """Return the result of `look`, in a worker like the loader's if it has any."""
    if not (getattr(loader, "num_workers", 0) and _can_be_probed(loader.dataset)):
        return look(loader.dataset)
    probing = DataLoader(
        _Probed(loader),
        batch_size=None,
        sampler=[0],
        num_workers=1,
        collate_fn=_as_it_is,
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator(),  # leaves the training's generator alone
    )
    (found,) = probing
    return found


def _as_it_is(item):
    return item


def _is_resident(dataset):
    return getattr(dataset, "resident", False)


def _can_be_probed(dataset):
    return _with(dataset, []) is not None


def _with(dataset, samples):
    """Return a copy of a data set with these samples in the course's one, which it is or is around.

    None if it has none: then nothing is known of its files.
    """
    if isinstance(dataset, data.Images):
        return _changed(dataset, samples=samples)
    held = vars(dataset) if isinstance(dataset, Dataset) else {}
    for name, value in held.items():
        inside = _with(value, samples)
        if inside is not None:
            return _changed(dataset, **{name: inside})
    return None


def _changed(dataset, **attributes):
    # `copy.copy` would look for its methods in a `__getattr__` that hands on.
    copied = object.__new__(type(dataset))
    vars(copied).update(vars(dataset) | attributes)
    return copied


def look(dataset) -> dict:
    """Return facts on the data set's way from a file to an image; {} for synthetic images.

    pil: files opened by PIL. others: the number of files that Python opened beside ours. grey: the
    channels of an image made from a file without colours. red: the channel of this colour. boxes:
    [left, right, top, bottom] of each crop, as shares of the file; left > right: flipped.
    detail: mean difference between neighbours, 0 to 1. fresh: the number of later images that show
    the rewritten file. kept_objects, kept_bytes: objects that outlive these images. The draws
    depend on the seed and the index, so they are the same in each run.
    """
    unknown = {"set": type(dataset).__name__}
    if not _can_be_probed(dataset):
        return {} if _is_resident(dataset) else unknown
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "probe.JPEG")
        probe = _with(dataset, [(str(file), LABEL)] * DRAWS)
        opened, others, real, usual = [0], set(), Image.open, builtins.open

        def counting(*args, **kwargs):
            opened[0] += 1
            return real(*args, **kwargs)

        def noting(path, *args, **kwargs):
            if isinstance(path, (str, bytes, os.PathLike)):
                others.add(os.path.realpath(os.fsdecode(path)))
            return usual(path, *args, **kwargs)

        file.write_bytes(jpeg(blue=0))
        try:
            probe[0, 0]  # a library's first reads do not count
            with (
                replaced(Image, open=counting),
                replaced(builtins, open=noting),
                replaced(io, open=noting),
            ):
                seen = _draw(probe, file)
        except LookupError:  # a list of its own has as many items as there are files
            seen = {}
        if isinstance(dataset, data.Images) or seen.get("label") == LABEL:
            others -= {os.path.realpath(file)}
            read = sum(not path.startswith(SYSTEM) for path in others)
            return {"set": data.Images.__name__, "pil": opened[0], "others": read, **seen}
        return unknown  # it is around the course's, and does not read the files through it


def jpeg(blue: float) -> bytes:
    """Return the file; blue: its smallest value, 0 to 0.5. The noise is the same in each run."""
    noise = sum(_blocks(size) for size in (2, 4, 8, 16, 32, 64))
    pixels = np.empty((HEIGHT, WIDTH, 3))
    pixels[..., 0] = np.linspace(0, 255, WIDTH)
    pixels[..., 1] = np.linspace(0, 255, HEIGHT)[:, None]
    pixels[..., 2] = 255 * (blue + 0.5 * (noise - noise.min()) / np.ptp(noise))
    out, notes = io.BytesIO(), Image.Exif()
    notes[TURNED] = 6  # a quarter turn, which both decoders of the course ignore
    # Without subsampling, because the colours encode the position.
    image = Image.fromarray(pixels.astype(np.uint8))
    image.save(out, "JPEG", quality=95, subsampling=0, exif=notes)
    return out.getvalue()


def grey() -> bytes:
    """Return a file with one channel, like some of ImageNet's."""
    out = io.BytesIO()
    Image.new("L", (WIDTH, HEIGHT), 128).save(out, "JPEG")
    return out.getvalue()


def _blocks(size):
    """Return noise in squares of `size` pixels."""
    rows, columns = -(-HEIGHT // size), -(-WIDTH // size)
    coarse = np.random.default_rng(size).random((rows, columns))
    return coarse.repeat(size, 0).repeat(size, 1)[:HEIGHT, :WIDTH]


def _draw(probe, file):
    before, after = jpeg(blue=0), jpeg(blue=0.5)
    size = max(len(before), len(after))  # decoders ignore bytes after the end of an image
    file.write_bytes(before.ljust(size, b"\0"))
    times = file.stat()
    image, label = probe[0, 0]
    seen = {"label": int(label)}
    if not isinstance(image, torch.Tensor):
        return seen | {"dtype": type(image).__name__}
    seen |= {"dtype": str(image.dtype).removeprefix("torch."), "shape": list(image.shape)}
    boxes, detail, fresh, across, alive = [], [], 0, torch.zeros(3), []
    for index in range(DRAWS):
        if index == DRAWS // 2:
            file.write_bytes(after.ljust(size, b"\0"))
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        if index >= DRAWS // 2 and index % (DRAWS // 8) == 0:
            alive.append(_alive())
        shown = _unit(probe[0, index][0])
        boxes.append(_box(shown))
        if len(shown) == 3:
            across += (shown[..., -1] - shown[..., 0]).mean(1).abs()  # only red grows that way
        detail.append(float((shown[2, :, 1:] - shown[2, :, :-1]).abs().mean()))
        fresh += index >= DRAWS // 2 and bool(shown[2].mean() > 0.5)
    objects, size = map(_kept, zip(*alive, _alive(), strict=True))
    file.write_bytes(grey())
    return seen | {
        "grey": len(probe[0, 0][0]),
        "red": int(across.argmax()),
        "boxes": boxes,
        "detail": sum(detail) / DRAWS,
        "fresh": fresh,
        "kept_objects": objects,
        "kept_bytes": size,
    }


def _unit(image):
    """Return an image of the data set as [3, H, W] from 0 to 1, its normalization undone."""
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (data.MEAN, data.STD))
    return data.normalize(image[None].cpu())[0] * std + mean


def _box(image):
    across, down = image[0].mean(0), image[1].mean(1)
    # The garbage collector, by which kept objects are counted, does not track a tuple of numbers.
    return tuple(round(float(v), 3) for v in (across[0], across[-1], down[0], down[-1]))


def _kept(counts):
    """Return the growth over all counts, by the usual growth between two of them.

    Anything that a library makes or drops once, somewhere on the way, would hide it.
    """
    growth = [after - before for before, after in pairwise(counts)]
    return int(statistics.median(growth) * len(growth))


def _alive():
    """Return the numbers of Python objects and of bytes of this process (0 if unknown)."""
    gc.collect()
    pages = 0
    with suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return len(gc.get_objects()), pages * os.sysconf("SC_PAGE_SIZE")
