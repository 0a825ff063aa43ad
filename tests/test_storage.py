"""Files and shards hold the same images; what reading them asks of the file system is counted."""

import io
import random
import time

import pytest
from PIL import Image
from programs import load

pytest.importorskip("webdataset")


@pytest.fixture(scope="module")
def storage():
    return load("storage")


@pytest.fixture(scope="module")
def metadata(storage):
    return storage.Metadata()


@pytest.fixture
def copies(storage, images, tmp_path):
    """The training images as files and as shards of ten."""
    sources = sorted((images / "train").rglob("*.JPEG"))
    storage.write_files(sources, tmp_path / "files", None)
    storage.write_shards(sources, tmp_path / "shards", 10)
    return tmp_path / "files", tmp_path / "shards", [path.read_bytes() for path in sources]


def test_files_and_shards_hold_the_same_images(storage, copies):
    files, shards, expected = copies
    assert sorted(storage.read_files(files)) == sorted(expected)
    assert sorted(storage.read_shards(shards)) == sorted(expected)


def test_images_come_in_another_order_in_each_pass(storage, copies):
    for read, folder in zip((storage.read_files, storage.read_shards), copies, strict=False):
        random.seed(0)
        assert list(read(folder)) != list(read(folder))


def test_opened_files_are_counted_and_others_are_not(storage, metadata, copies, tmp_path):
    files, shards, expected = copies
    assert metadata.count(files, lambda: len(list(storage.read_files(files))))[1] == {
        "open": len(expected),
        "list": 1 + 4,  # the folder of the classes, and each class
    }
    _, operations = metadata.count(shards, lambda: len(list(storage.read_shards(shards))))
    assert operations["open"] == 7  # of 64 images, ten in a shard
    assert metadata.count(files, lambda: len(list(storage.read_shards(shards))))[1] == {}


def test_an_image_is_made_smaller_and_never_larger(storage, copies):
    jpeg = copies[2][0]
    for side in (20, 10_000):
        size = Image.open(io.BytesIO(storage.smaller(jpeg, side))).size
        assert min(size) == min(side, *Image.open(io.BytesIO(jpeg)).size)


def test_what_was_forgotten_is_not_in_memory(storage, copies):
    kept = storage.forget(copies[0])
    assert kept is None or kept < 0.5
    with next(copies[0].rglob("*.JPEG")).open("rb") as file:
        for _ in range(5):  # to look does not fetch it
            assert storage.cached(file) in (False, None)
            time.sleep(0.05)
    list(storage.read_files(copies[0]))
    with next(copies[0].rglob("*.JPEG")).open("rb") as file:
        assert storage.cached(file) in (True, None)
