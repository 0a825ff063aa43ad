"""The search for the images of a folder, by class, in the order of torchvision's ImageFolder.

No file is opened, and only links are followed with a system call: ImageNet has 1.28 million images,
and the entries of a folder already say which of them are files.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from dlojz.images.dataset import DataError

EXPECTED = "Expected one folder of JPEG files for each class"


def class_names(folder) -> list[str]:
    """Return the sorted names of the class folders; a class's index is its label."""
    names = sorted(entry.name for entry in _entries(folder) if _is(entry.is_dir))
    if not names:
        raise DataError(f"{folder}: no class folder in it. {EXPECTED}{_flat(folder)}")
    return names


def check_same_classes(root):
    """Raise DataError unless train/ and val/ have the same classes: else labels would shift."""
    train, val = (set(class_names(Path(root, split))) for split in ("train", "val"))
    if train != val:
        text = "; ".join(
            f"only in {split}/: {_some(names)}"
            for split, names in (("train", train - val), ("val", val - train))
            if names
        )
        raise DataError(
            f"{root}: train/ and val/ have different class folders ({text}), so that a label would "
            "not mean the same class in both. Make them alike, then submit again"
        )


def samples(
    folder, labels: Mapping[str, int], extensions
) -> tuple[list[tuple[str, int]], list[str]]:
    """Return (path, label) of each image of the classes in `labels`; links are followed.

    Also return the paths of files that are left out because macOS has made them: `._x.JPEG` beside
    `x.JPEG`, for what other systems do not store.
    """
    inside = (os.path.realpath(folder),)
    found, empty, left_out = [], [], []
    for name in sorted(labels):
        paths = _images(os.path.join(folder, name), inside, tuple(extensions), left_out)
        found += [(path, labels[name]) for path in paths]
        if not paths:
            empty.append(name)
    if empty:
        raise DataError(f"{folder}: no image in {_some(empty)}. {EXPECTED}{_flat(folder)}")
    return found, left_out


def _images(folder, inside, extensions, left_out):
    """Return the paths of the images in a class's folder and below it."""
    if os.path.islink(folder):
        inside = _enter(folder, inside)
    # torchvision's order: by folder, then by name.
    folders = sorted(_walk(folder, inside, extensions, left_out))
    return [os.path.join(place, name) for place, names in folders for name in sorted(names)]


def _walk(folder, inside, extensions, left_out) -> Iterator[tuple[str, list[str]]]:
    """Yield (folder, names of its images) for `folder` and those below it.

    inside: the real paths of the folders whose links led here.
    """
    names, below = [], []
    for entry in _entries(folder):
        if _is(entry.is_dir):
            link = entry.is_symlink()
            below.append((entry.path, _enter(entry.path, inside) if link else inside))
        elif entry.name.lower().endswith(extensions):
            if entry.name.startswith("._"):
                left_out.append(entry.path)
                continue
            if not _is(entry.is_file):
                raise DataError(
                    f"{entry.path} is not a file: a broken link, a pipe or a device. Expected "
                    "a JPEG file: remove or repair it, then submit again"
                )
            names.append(entry.name)
    yield folder, names
    for path, links in below:
        yield from _walk(path, links, extensions, left_out)


def _enter(link, inside):
    """Return `inside` with this link's folder added. Raises DataError if the link makes a loop."""
    target = os.path.realpath(link)
    inside = (*inside, os.path.realpath(os.path.dirname(link)))
    if any(os.path.commonpath([target, place]) == target for place in inside):
        raise DataError(
            f"{link} is a link to {target}, which leads back to the link: its images would be "
            "read over and over. Remove the link, then submit again"
        )
    return inside


def _entries(folder):
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError as error:
        raise DataError(
            f"{folder}: {error.strerror}. Expected a folder that you can read"
        ) from error


def _is(question):
    try:
        return question()
    except OSError:  # a link to itself
        return False


def _flat(folder):
    return "; ImageNet's val/ comes flat and must be sorted" if Path(folder).name == "val" else ""


def _some(names):
    return ", ".join(repr(name) for name in sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
