"""The image files of a check's run, which change once their first epoch is over."""

import os
from pathlib import Path

TRAIN, VAL = "train", "val"  # folders of an image set


class Changing:
    """The files of a run: each gets the bytes of another before the second epoch reads it.

    Their sizes, which are equal, and their times stay. Those of the training change as the first
    validation begins, those of the validation as the next training does.
    """

    def __init__(self, folder):
        self._folder = Path(folder)
        self._next = [TRAIN, VAL]  # to be changed, in this order

    def enter(self, mode: str):
        """Note that a batch of this mode enters the model."""
        if self._next and mode != self._next[0]:
            change(self._folder / self._next.pop(0))


def change(folder: Path):
    """Give each file in this folder the bytes of the next one."""
    files = sorted(folder.rglob("*.JPEG"))
    first, *others = (file.read_bytes() for file in files)
    for file, content in zip(files, [*others, first], strict=True):
        _write(file, content)


def _write(file, content):
    """Write to a file in place, as another process may have it mapped; its time stays."""
    times = file.stat()
    with file.open("r+b") as there:
        there.write(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
