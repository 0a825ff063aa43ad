"""What a data set makes of a file, whoever wrote it."""

import functools
import gc
import multiprocessing
import os

import pytest
import torch
import torchvision.transforms.v2
from torch.utils.data import DataLoader, get_worker_info

from dlojz import course
from dlojz.chapters.n05_dataloader import exercise
from dlojz.training import data
from dlojz.watch import samples

V1, V2 = torchvision.transforms, torchvision.transforms.v2
CROP = [V2.RandomResizedCrop(64), V2.RandomHorizontalFlip()]


def tensor(path):
    return torchvision.io.decode_image(path, mode="RGB")


def look(images, decode=tensor, transform=CROP):
    return samples.look(data.Images(images, "train", 0, decode, V1.Compose(transform)))


@pytest.fixture(scope="module")
def usual(images):
    return look(images)


def test_two_decoders_show_the_same(images, usual):
    crop = [V1.RandomResizedCrop(64), V1.RandomHorizontalFlip()]
    to_tensor = [V1.ToTensor(), V1.Normalize(data.MEAN, data.STD)]
    found = look(images, torchvision.datasets.folder.pil_loader, crop + to_tensor)
    assert found["pil"] > samples.DRAWS
    assert usual["pil"] == 0
    assert found["dtype"] == "float32"
    assert usual["dtype"] == "uint8"
    assert torch.tensor(found["boxes"]) == pytest.approx(torch.tensor(usual["boxes"]), abs=0.01)
    assert found["detail"] == pytest.approx(usual["detail"], rel=0.01)


def test_a_flip_and_a_cut_are_read_from_the_pixels(images):
    (box, *_) = look(images, transform=[V2.RandomHorizontalFlip(p=1), V2.Resize([60, 80])])["boxes"]
    assert box == pytest.approx((1, 0, 0, 1), abs=0.02)
    (box, *_) = look(images, transform=[V2.CenterCrop([150, 200])])["boxes"]
    assert box == pytest.approx((0.3, 0.7, 0.3, 0.7), abs=0.02)


def test_detail_is_lost_where_a_file_is_made_smaller(images, usual):
    found = look(images, lambda path: V2.functional.resize(tensor(path), [75, 100]))
    assert found["detail"] < 0.9 * usual["detail"]
    assert found["shape"] == usual["shape"] == [3, 64, 64]


def test_who_keeps_decoded_images_does_not_see_the_new_file(images, usual):
    kept = {}
    found = look(images, lambda path: kept.setdefault(path, tensor(path)))
    assert found["fresh"] == 0
    assert usual["fresh"] == samples.DRAWS // 2


def test_images_that_are_kept_in_files_are_seen(images, usual, tmp_path):
    """By path, size, time and inode: what a cache between runs would ask for."""

    def decode(path):
        facts = os.stat(path)
        name = f"{path}{facts.st_size}{facts.st_mtime_ns}{facts.st_ino}".replace("/", "-")
        if not (tmp_path / name).exists():
            torch.save(tensor(path), tmp_path / name)
        return torch.load(tmp_path / name)

    found = look(images, decode)
    assert found["fresh"] == 0
    assert found["others"] == 2, "the probe's file, and the grey one"
    assert usual["others"] == 0


def test_an_image_that_is_no_tensor_is_told(images):
    found = look(images, torchvision.datasets.folder.pil_loader, [])
    seen = {"set": "Images", "pil": 1, "others": 0}
    assert found == {**seen, "label": samples.LABEL, "dtype": "Image"}


def test_colours_in_another_order_show(images, usual):
    swapped = look(images, lambda path: torchvision.io.decode_image(path, mode="RGB").flip(0))
    assert (usual["red"], swapped["red"]) == (0, 2)


def test_a_grey_file_needs_a_mode(images, usual):
    assert usual["grey"] == 3
    assert look(images, torchvision.io.decode_image)["grey"] == 1


def test_what_is_kept_of_each_image_is_counted(images, usual):
    kept = []

    def leak(path):
        kept.append(tensor(path))
        return kept[-1]

    leaked = samples.DRAWS // 2  # other threads of the tests may let go of a few meanwhile
    assert look(images, leak)["kept_objects"] > 0.75 * leaked > exercise.KEPT_OBJECTS
    assert usual["kept_objects"] < samples.DRAWS // 4


def test_a_set_that_is_made_of_no_files_is_not_asked(images):
    assert samples.look([1, 2]) == {"set": "list"}


class Around(torch.utils.data.Dataset):
    """A data set around the course's, which hands on its other attributes."""

    def __init__(self, inner):
        self.inner = inner

    def __getitem__(self, key):
        return self.inner[key]

    def __getattr__(self, name):
        return getattr(self.inner, name)


def test_a_set_around_the_courses_shows_the_same(images, usual):
    inner = data.Images(images, "train", 0, tensor, V1.Compose(CROP))
    found = samples.look(Around(inner))
    assert found["boxes"] == usual["boxes"]
    assert (found["set"], found["fresh"], found["label"]) == ("Images", 16, samples.LABEL)


def test_a_set_that_does_not_read_through_the_courses_is_not_asked(images):
    class Listed(Around):
        def __getitem__(self, key):
            return self.items[key[1]]

    sets = [Listed(data.Images(images, "train", 0, tensor, V1.Compose(CROP))) for _ in "ab"]
    sets[0].items = []
    sets[1].items = [sets[1].inner[0, i] for i in range(2)] * samples.DRAWS
    assert [samples.look(one) for one in sets] == [{"set": "Listed"}] * 2


def test_the_draws_leave_the_generator_as_it_was(images):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    look(images)
    assert torch.equal(torch.get_rng_state(), state)


def test_no_loader_outlives_its_training(images, tmp_path, train):
    def loaders():
        gc.collect()
        return sum(type(o) is torch.utils.data.DataLoader for o in gc.get_objects())

    before = loaders()
    flags = "--test --test-nsteps 2 --model resnet18 --image-size 32 -b 4 --num-workers 1".split()
    train(course.solution("05"), tmp_path, *flags, "--data", images)
    assert loaders() == before, "at the end of Python each worker is waited for"


def test_what_is_dropped_once_hides_no_growth():
    assert samples._kept([10, 14, 18, 5, 9]) == 16
    assert samples._kept([10, 10, 10, 30, 30]) == 0


def within(images, init=None, workers=1, **more):
    dataset = data.Images(images, "train", 0, more.pop("decode", tensor), V1.Compose(CROP))
    loader = DataLoader(dataset, batch_size=2, num_workers=workers, worker_init_fn=init, **more)
    return samples.look_within(loader)


def keeps(_):
    dataset = get_worker_info().dataset
    dataset.decode = functools.cache(dataset.decode)


@functools.cache
def _kept(path):
    return tensor(path)


def keeps_in_workers(path):
    return _kept(path) if get_worker_info() else tensor(path)


@pytest.mark.parametrize(
    ("decode", "init", "workers", "fresh"),
    [
        (tensor, None, 0, 16),
        (tensor, None, 1, 16),
        (tensor, keeps, 1, 0),
        (keeps_in_workers, None, 1, 0),
        (keeps_in_workers, None, 0, 16),  # it has no worker to keep anything in
    ],
)
def test_what_a_worker_does_is_seen_there(images, decode, init, workers, fresh):
    before = torch.get_rng_state()
    assert within(images, init, workers, decode=decode)["fresh"] == fresh
    assert torch.equal(torch.get_rng_state(), before), "the training draws what it would have"
    assert not multiprocessing.active_children()
