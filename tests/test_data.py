"""The same images, whatever loads them."""

import io
import os
import random
import shlex
import shutil
import struct
import zlib
from contextlib import nullcontext, suppress
from itertools import islice
from types import SimpleNamespace

import made
import pytest
import torch
import torchvision
from PIL import Image
from torchvision import transforms
from torchvision.datasets.folder import pil_loader

from dlojz import cli, images
from dlojz.images import dataset as folder
from dlojz.training import data

TRANSFORM = transforms.Compose(
    [transforms.RandomResizedCrop(32), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
)


def batches(folder, workers=0, epoch=0, first_step=0, seed=0, size=1):
    """The batches of an epoch, as lists of (images, labels)."""
    args = SimpleNamespace(data=str(folder), seed=seed, image_size=32, pin_memory=False)
    dataset = data.open_set(args, "train", pil_loader, TRANSFORM)
    sampler = torch.utils.data.DistributedSampler(dataset, size, 0, seed=seed)
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_sampler=data.Batches(sampler, 8, drop_last=False),
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    loader.batch_sampler.set_epoch(epoch)
    if epoch and workers:
        list(loader)  # persistent workers have lived through an epoch before
    loader.batch_sampler.set_epoch(epoch, first_step)
    return list(loader)


def same(a, b):
    assert len(a) == len(b) > 0
    return all(
        torch.equal(x, y) for pair in zip(a, b, strict=True) for x, y in zip(*pair, strict=True)
    )


@pytest.mark.parametrize(("workers", "epoch"), [(1, 0), (3, 0), (2, 1)])
def test_neither_workers_nor_their_second_epoch_change_anything(images, workers, epoch):
    assert same(batches(images, 0, epoch), batches(images, workers, epoch))


def test_epochs_and_seeds_differ(images):
    first = batches(images)
    assert not same(first, batches(images, epoch=1))
    assert not same(first, batches(images, seed=1))


def test_a_resume_in_the_middle_of_an_epoch_is_the_rest_of_it(images):
    assert same(batches(images, epoch=2)[5:], batches(images, epoch=2, first_step=5))


def test_a_resume_decodes_no_skipped_image(images, monkeypatch):
    opened = []
    load = data.Images.__getitem__
    monkeypatch.setattr(
        data.Images, "__getitem__", lambda self, key: opened.append(key) or load(self, key)
    )
    batches(images, first_step=6)
    assert len(opened) == 2 * 8


def test_one_of_two_processes_has_half_of_the_same_permutation(images):
    labels = [label for _, batch in batches(images) for label in batch.tolist()]
    half = [label for _, batch in batches(images, size=2) for label in batch.tolist()]
    assert half == labels[::2]


def test_a_samples_draws_leave_the_generator_as_it_was():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with data.draws_of(0, 1, 2):
        inside = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    with data.draws_of(0, 1, 2):
        assert torch.equal(torch.rand(3), inside)
    before = torch.get_rng_state()
    with suppress(OSError), data.draws_of(0, 2, 1):
        assert not torch.equal(torch.rand(3), inside)
        raise OSError("a broken file")
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [8, 8, 4]), (True, [8, 8])])
def test_the_steps_of_an_epoch_count_the_last_batch(drop_last, sizes):
    sampler = torch.utils.data.DistributedSampler(range(20), 1, 0)
    found = data.Batches(sampler, 8, drop_last)
    assert len(found) == len(sizes)
    assert [len(batch) for batch in found] == sizes


@pytest.mark.parametrize("batch_size", [2, 3, 8])
@pytest.mark.parametrize("images", [10, 11, 12, 13])
def test_each_image_of_a_validation_counts_once_in_as_many_steps(images, batch_size):
    def of(rank, shuffle):
        sampler = torch.utils.data.DistributedSampler(range(images), 3, rank, shuffle)
        return list(data.Batches(sampler, batch_size))

    val = [of(rank, shuffle=False) for rank in range(3)]
    assert sorted(i for own in val for batch in own for _, i in batch) == list(range(images))
    assert len({len(own) for own in val}) == 1
    assert all(0 < len(batch) <= batch_size for own in val for batch in own)
    train = [of(rank, shuffle=True) for rank in range(3)]
    assert len({sum(map(len, own)) for own in train}) == 1, "an update takes as many from each"


def test_a_validation_of_fewer_images_than_processes_still_runs():
    sampler = torch.utils.data.DistributedSampler(range(2), 3, 2, shuffle=False)
    assert list(data.Batches(sampler, 8)) == [[(0, 0)]]


def synthetic(image_size, batch_size):
    args = SimpleNamespace(data="synthetic", seed=0, image_size=image_size, batch_size=batch_size)
    args.pin_memory = False
    return data.open_set(args, "train", pil_loader, None)


def test_synthetic_batches_are_fixed_and_stay_in_memory():
    dataset, again, short = (synthetic(16, 6) for _ in range(3))
    keys = [(0, i) for i in range(6)]
    images, labels = dataset.__getitems__(keys)
    assert (images.dtype, images.shape) == (torch.uint8, (6, 3, 16, 16))
    assert len(labels) == 6
    assert torch.equal(images, again.__getitems__(keys)[0])
    assert images.data_ptr() == dataset.__getitems__(keys)[0].data_ptr()
    assert len(dataset) == 1_281_167
    assert torch.equal(short.__getitems__(keys[:2])[1], labels[:2]), "it begins with a small batch"


def test_synthetic_batches_differ():
    """With two of them, a model sees the same batch in every second step."""
    dataset = synthetic(4, 8)
    sampler = torch.utils.data.DistributedSampler(dataset, 1, 0, seed=0)
    batches = islice(data.Batches(sampler, 8), 30)
    seen = {dataset.__getitems__(keys)[0].numpy().tobytes() for keys in batches}
    assert len(seen) > 6
    images, labels = dataset._resident()
    assert len(images) == len(labels) == 16, "kept in memory: two batches, as large as they are"


def test_synthetic_pixels_are_uniform_in_all_sizes():
    images, _ = synthetic(65, 15)._resident()
    assert images.numel() % 8, "not a whole number of draws"
    counts = torch.bincount(images.flatten().int(), minlength=256).double()
    expected = images.numel() / 256
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    assert 160 < chi_squared < 370, "255 degrees of freedom: six standard deviations"
    places = images.flatten()[: images.numel() // 8 * 8].view(-1, 8).double().mean(0)
    assert places.allclose(torch.tensor(127.5).double(), atol=1.5), "none of the eight differs"


@pytest.mark.parametrize(
    ("batch_size", "drop_last", "accumulate", "message"),
    [
        (21, True, 1, r"20 images, which make 0 batches of 21 with --drop-last.*leave out"),
        (8, False, 4, r"make 3 batches of 8, and an update needs 4: give a smaller"),
        (8, True, 3, r"make 2 batches of 8 with --drop-last, and an update needs 3"),
    ],
)
def test_an_epoch_without_an_update_is_refused(batch_size, drop_last, accumulate, message):
    sampler = torch.utils.data.DistributedSampler(range(20), 1, 0)
    with pytest.raises(data.DataError, match=message):
        data.Batches(sampler, batch_size, drop_last, accumulate)


def test_normalize_does_what_the_float_transforms_do():
    images = torch.randint(256, (2, 3, 4, 4), dtype=torch.uint8)
    expected = transforms.Normalize(data.MEAN, data.STD)(images / 255)
    assert torch.allclose(data.normalize(images), expected, atol=1e-5)
    assert data.normalize(expected) is expected


@pytest.mark.parametrize("name", ["nowhere", "a'; echo foo", "a b/c"])
def test_a_missing_folder_says_what_to_type(tmp_path, name):
    with pytest.raises(data.DataError, match=r"dlojz data .*--data synthetic"):
        data.Images(tmp_path / name, "train", 0)


def test_an_unfinished_set_is_refused_with_the_command_that_finishes_it(tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    root, sizes = tmp_path / "a b", {"classes": 2, "images_per_class": 3, "val_images_per_class": 1}
    with monkeypatch.context() as patch:
        patch.setattr(folder, "jpeg", stop)
        with pytest.raises(KeyboardInterrupt):
            images.generate(root, **sizes, workers=1, progress=False)
    with pytest.raises(data.DataError, match="is not finished: `dlojz data --classes 2") as error:
        data.Images(root, "train", 0)
    command = shlex.split(str(error.value).split("`")[1])
    assert cli.main(command[1:]) == 0
    assert len(data.Images(root, "train", 0)) == 6


@pytest.mark.parametrize("text", ["{}", "{broken", "[1]", '{"complete": false}', "\0"])
def test_a_foreign_file_with_the_markers_name_is_left_alone(folders, text):
    (folders / "dataset.json").write_text(text)
    assert len(data.Images(folders, "train", 0)) == 2


@pytest.fixture
def folders(tmp_path):
    """train/ and val/, each with the classes c0 and c1 of one (empty) file."""
    for split in ("train", "val"):
        for name in ("c0", "c1"):
            (tmp_path / split / name).mkdir(parents=True)
            (tmp_path / split / name / "x.JPEG").touch()
    return tmp_path


def link(path, to):
    return lambda root: (root / path).symlink_to(to)


def two_links(root):
    link("train/c0/a", "../c1")(root)
    link("train/c1/b", "../c0")(root)


def of_macos_alone(root):
    (root / "train/c1/x.JPEG").rename(root / "train/c1/._x.JPEG")


def without_classes(root):
    for name in ("c0", "c1"):
        shutil.rmtree(root / "val" / name)
    (root / "val/ILSVRC2012_val_00000001.JPEG").touch()


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (link("train/c0/loop", ".."), "train/c0/loop is a link to .*train, which leads back to"),
        (link("train/c0/loop", "/"), "loop is a link to /, which leads back"),
        (link("train/c2", "."), "train/c2 is a link to .*train, which leads back"),
        (two_links, "train/c0/a/b is a link to .*c0, which leads back"),
        (lambda root: os.mkfifo(root / "train/c0/y.JPEG"), r"train/c0/y\.JPEG is not a file"),
        (link("train/c0/y.JPEG", "nothing"), r"train/c0/y\.JPEG is not a file: a broken link"),
        (link("train/c0/y.JPEG", "y.JPEG"), r"train/c0/y\.JPEG is not a file: a broken link"),
        (lambda root: (root / "train/c1/x.JPEG").unlink(), r"train: no image in 'c1'\. Expected"),
        (of_macos_alone, "train: no image in 'c1'"),
        (lambda root: os.mkdir(os.fsencode(root) + b"/train/\xff"), r"no image in '\\udcff'"),
        (lambda root: shutil.rmtree(root / "val/c0"), r"class folders \(only in train/: 'c0'\)"),
        (lambda root: (root / "val/c2").mkdir(), r"\(only in val/: 'c2'\).*Make them alike"),
        (without_classes, "one folder of JPEG files for each class.*sorted"),
    ],
)
def test_what_is_wrong_with_a_folder_of_images_is_named(damage, message, folders):
    assert len(data.Images(folders, "train", 0)) == len(data.Images(folders, "val", 0)) == 2
    damage(folders)
    with pytest.raises(data.DataError, match=message):
        [data.Images(folders, split, 0) for split in ("train", "val")]


def test_images_are_found_in_the_order_of_torchvision_and_through_links(folders):
    for path in ("c0/a/b/1.JPEG", "c0/a-b/2.PNG", "c0/a/3.jpeg", "c0/z/4.txt", "c1/x.JPEG/5.jpg"):
        (folders / "train/c0" / path).parent.mkdir(parents=True, exist_ok=True)
        (folders / "train/c0" / path).touch()
    (folders / "elsewhere").mkdir()
    (folders / "elsewhere/6.JPEG").touch()
    (folders / "train/c2").symlink_to("../elsewhere")
    (folders / "train/c0/7.JPEG").symlink_to("../../elsewhere/6.JPEG")
    theirs = torchvision.datasets.ImageFolder(folders / "train")
    ours = data.Images(folders, "train", 0)
    assert ours.samples == theirs.samples
    assert ours.class_to_idx == theirs.class_to_idx
    assert len(ours) == 8


def test_files_of_macos_are_left_out_and_named_once(folders, capsys):
    Image.new("L", (40, 40)).save(folders / "train/c1/x.JPEG")
    usual = data.Images(folders, "train", 0).samples
    assert capsys.readouterr().out == ""
    for name in ("c0/._x.JPEG", "c1/._x.JPEG", "c1/._x"):
        (folders / "train" / name).write_bytes(bytes.fromhex("00051607"))
    found = data.Images(folders, "train", 0)
    assert found.samples == usual
    assert f"{folders}/train: 2 files whose names begin with ._ are left" in capsys.readouterr().out


def test_no_file_is_asked_what_it_is(folders, monkeypatch):
    """ImageNet has 1.28 million: the folders' own entries say it."""
    asked, stat = [], os.stat
    monkeypatch.setattr(os, "stat", lambda path, **_: asked.append(path) or stat(path, **_))
    data.Images(folders, "train", 0)
    assert not [path for path in asked if str(path).endswith(".JPEG")]


def stored(image, kind, **more):
    out = io.BytesIO()
    image.save(out, kind, **more)
    return out.getvalue()


def claims(width, height, bits=8, before=b""):
    """A small JPEG whose header claims another size."""
    mark = b"\xff\xc0\x00\x0b"
    start, rest = stored(Image.new("L", (16, 16)), "JPEG").split(mark)
    size = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    return start + before + mark + bytes([bits]) + size + rest[5:]


def animated(kind):
    pictures = [Image.new("L", (16, 16), grey) for grey in (0, 99)]
    return stored(pictures[0], kind, save_all=True, append_images=pictures[1:])


def png(bits, colours, size=(16, 16), rows=b""):
    def chunk(kind, content):
        check = zlib.crc32(kind + content).to_bytes(4, "big")
        return len(content).to_bytes(4, "big") + kind + content + check

    head = struct.pack(">IIBBBBB", *size, bits, colours, 0, 0, 0)
    content = chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + content


GREY, COLOURS = 0, 2
ODD = {
    "a JPEG that claims 20000 x 20000": (claims(20000, 20000), "found 20,000 x 20,000 pixels"),
    "a large JPEG behind others' data": (
        claims(30000, 30000, before=b"\xff\xe1\xff\xff" + b"\xff\xc0" + bytes(65531)),
        "found 30,000 x 30,000 pixels",
    ),
    "a large JPEG behind a broken segment": (
        claims(30000, 30000, before=b"no segment\xff\xff\xff\x00\xff\xd0"),
        "found 30,000 x 30,000 pixels",
    ),
    "a JPEG of 12 bits": (claims(16, 16, bits=12), "found 12 bits, expected one picture of 8"),
    "a PNG that claims 20000 x 20000": (png(8, GREY, (20000, 20000)), "decompression bomb"),
    "grey of 16 bits": (png(16, GREY, rows=bytes(33 * 16)), "found 16 bits"),
    "colours of 16 bits": (png(16, COLOURS, rows=bytes(97 * 16)), "found 16 bits"),
    "an animated GIF": (animated("GIF"), "found a GIF, expected one picture"),
    "a GIF": (stored(Image.new("L", (16, 16)), "GIF"), "found a GIF, expected one picture"),
    "an animated PNG": (animated("PNG"), "found an animation, expected one picture"),
    "an animated WebP": (animated("WEBP"), "found an animation, expected one picture"),
    "a TIFF of numbers": (stored(Image.new("F", (16, 16)), "TIFF"), "PIL's mode F"),
}


both_decoders = pytest.mark.parametrize("decode", [pil_loader, torchvision.io.decode_image])


@pytest.mark.timeout(30)
@both_decoders
@pytest.mark.parametrize(("content", "message"), ODD.values(), ids=ODD)
def test_what_decoders_do_not_agree_on_is_refused_before_it_is_decoded(
    decode, content, message, folders
):
    (folders / "train/c0/x.JPEG").write_bytes(content)
    with pytest.raises(data.DataError, match=message) as refused:
        data.Images(folders, "train", 0, decode)[0, 0]
    assert str(refused.value).startswith(f"{folders}/train/c0/x.JPEG: ")


@both_decoders
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP", "PPM"])
@pytest.mark.filterwarnings("ignore")
def test_whatever_bytes_change_the_error_names_the_file(decode, kind, folders):
    draw, file = random.Random(kind), folders / "train/c0/x.JPEG"
    whole = stored(Image.new("RGB", (16, 16)), kind)
    dataset = data.Images(folders, "train", 0, decode)
    for _ in range(60):
        file.write_bytes(made.spoilt(whole, draw, 12, 200))
        with suppress(data.DataError):
            dataset[0, 0]


@both_decoders
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize(("most", "fits"), [(None, True), (128, True), (127, False)])
@pytest.mark.filterwarnings("ignore:Image size")
def test_pils_limit_of_pixels_holds_for_all_decoders(
    decode, kind, most, fits, folders, monkeypatch
):
    Image.new("RGB", (16, 16)).save(folders / "train/c0/x.JPEG", kind)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", most)
    refused = pytest.raises(data.DataError, match=r"c0/x\.JPEG: ")
    with nullcontext() if fits else refused:
        data.Images(folders, "train", 0, decode)[0, 0]


@both_decoders
@pytest.mark.parametrize("content", [b"", b"no image", b"\xff\xd8\xff\xe0 cut"])
def test_a_file_that_is_no_image_is_named(folders, decode, content):
    (folders / "train/c0/a'; echo foo.JPEG").write_bytes(content)
    with pytest.raises(data.DataError, match=r"c0/a'; echo foo\.JPEG: not decoded: "):
        data.Images(folders, "train", 0, decode)[0, 0]
