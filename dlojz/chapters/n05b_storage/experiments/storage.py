"""The same images as files and as shards, full size and smaller, from disk and from memory.

Submitted by a notebook: submit("dlojz/chapters/n05b_storage/experiments/storage.py").

Four copies are written into the run's folder, and removed at the end: files and WebDataset's tar
archives, with the images as they are and with a shorter side of 256 pixels. One thread reads each
of them in random order (shards: in random order, through a buffer), and then reads and
decodes. Before a cold pass the kernel is asked to drop the files from its cache
(POSIX_FADV_DONTNEED); the share that stays cached is logged.

Python's audit hook counts its metadata operations: files opened, and folders listed. It misses
the system calls that follow them (on Linux, Python's `open` adds an fstat, a seek and a close, as
`strace` shows) and files that a library opens without Python.
"""

import argparse
import ctypes
import io
import mmap
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
import webdataset
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_jpeg

from dlojz.chapters import session

OPERATIONS = {"open": "open", "os.scandir": "list", "os.listdir": "list"}


class Metadata:
    """A counter of Python's metadata operations below a folder."""

    def __init__(self):
        self.folder, self.counts = None, Counter()
        sys.addaudithook(self._see)  # it can't be removed again

    def _see(self, event, arguments):
        if self.folder and event in OPERATIONS and str(arguments[0]).startswith(self.folder):
            self.counts[OPERATIONS[event]] += 1

    def count(self, folder, call):
        """Return the result of `call()`, and the number of its operations below `folder`."""
        self.folder, self.counts = str(folder), Counter()
        result = call()
        self.folder = None
        return result, dict(self.counts)


def write_files(sources, folder, side):
    """Write the images as files, in a folder for each class, perhaps with a smaller `side`."""
    for source in sources:
        target = folder / source.parent.name / source.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(smaller(source.read_bytes(), side) if side else source.read_bytes())


def smaller(jpeg, side):
    """Return the JPEG, with a shorter side of at most `side` pixels."""
    image = Image.open(io.BytesIO(jpeg)).convert("RGB")
    factor = min(1, side / min(image.size))
    size = tuple(round(factor * s) for s in image.size)
    file = io.BytesIO()
    image.resize(size, Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


def write_shards(files, folder, per_shard):
    """Write the files as tar archives of `per_shard` images each."""
    folder.mkdir(parents=True)
    pattern, order = str(folder / "%05d.tar"), sorted(files)
    random.Random(0).shuffle(order)  # else a shard would hold one class
    with webdataset.ShardWriter(pattern, maxcount=per_shard, verbose=0) as writer:
        for number, file in enumerate(order):
            writer.write({"__key__": f"{number:07d}", "jpg": file.read_bytes()})


def read_files(folder):
    """Yield the bytes of each image: list the folders, then open the files in random order."""
    found = [path for path, _ in ImageFolder(folder).samples]
    random.shuffle(found)
    for path in found:
        with open(path, "rb") as file:
            yield file.read()


def read_shards(folder):
    """Return the bytes of each image, one shard after the other, shuffled in a buffer."""
    shards = sorted(str(path) for path in folder.glob("*.tar"))
    random.shuffle(shards)
    samples = webdataset.WebDataset(shards, shardshuffle=False).shuffle(100)
    return (sample["jpg"] for sample in samples)


def decode(jpeg):
    return decode_jpeg(torch.frombuffer(bytearray(jpeg), dtype=torch.uint8), ImageReadMode.RGB)


def forget(folder):
    """Make the kernel drop these files from its cache; return the share that it kept.

    None if unknown.
    """
    kept = []
    for path in (p for p in folder.rglob("*") if p.is_file()):
        with path.open("rb") as file:
            os.fsync(file)  # unwritten pages can't be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            kept.append(cached(file))
    return None if None in kept else sum(kept) / len(kept)


def cached(file):
    """Return whether the file's beginning is cached; None if unknown.

    It uses mincore: a read that must not wait (RWF_NOWAIT) would make the kernel fetch the file.
    """
    libc, answer = ctypes.CDLL(None, use_errno=True), ctypes.c_ubyte()
    try:
        with mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_COPY) as pages:
            first = ctypes.c_char.from_buffer(pages)
            failed = libc.mincore(ctypes.byref(first), ctypes.c_size_t(1), ctypes.byref(answer))
            del first  # a map with references can't be closed
    except (OSError, ValueError, AttributeError):  # an empty file, another kernel
        return None
    return None if failed else bool(answer.value & 1)


def timed(images, work):
    """Return the images per second, and their number."""
    begin, count = time.perf_counter(), 0
    for jpeg in images:
        work(jpeg)
        count += 1
    return count / (time.perf_counter() - begin), count


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    session.add_images(parser, 400)
    parser.add_argument("--per-shard", type=int, default=100, help="images in a shard")
    parser.add_argument("--side", type=int, default=256, help="pixels, of the smaller images")
    parser.add_argument("--rounds", type=int, default=3, help="timings of each case")
    args = parser.parse_args()
    with session.begin(args, torch.device("cpu")) as (run, _):
        torch.set_num_threads(1)
        sources = session.jpegs(args)
        metadata = Metadata()
        with tempfile.TemporaryDirectory(dir=run.folder) as folder:
            for size, side in (("full size", None), (f"{args.side} px", args.side)):
                files, shards = Path(folder, size, "files"), Path(folder, size, "shards")
                write_files(sources, files, side)
                write_shards([p for p in files.rglob("*") if p.is_file()], shards, args.per_shard)
                for kind, where, read in (
                    ("files", files, read_files),
                    ("shards", shards, read_shards),
                ):
                    run.case(
                        f"{kind}, {size}", kind=kind, **measure(metadata, where, read, args.rounds)
                    )


def measure(metadata, folder, read, rounds):
    """Return the measurements of one copy of the images, read in each way."""
    speeds, kept = {"cold": [], "warm": [], "decoded": []}, []
    for again in range(rounds):
        random.seed(again)
        kept.append(forget(folder))
        for way, work in (("cold", len), ("warm", len), ("decoded", decode)):
            speed, count = timed(read(folder), work)
            speeds[way].append(speed)
    _, operations = metadata.count(folder, lambda: timed(read(folder), len))
    files = [p for p in folder.rglob("*") if p.is_file()]
    return {
        "images": count,
        "files": len(files),
        "bytes": sum(p.stat().st_size for p in files),
        "images_per_s": speeds,
        "still_cached": kept,
        "operations": operations,
    }


if __name__ == "__main__":
    main()
