import io
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from programs import load
from torchvision.transforms.functional import pil_to_tensor

from dlojz.chapters import session


@pytest.fixture(scope="module")
def decoders():
    return load("decoders")


@pytest.fixture(scope="module")
def jpeg():
    """A photo without sharp edges: decoders differ in how they spread colours."""
    x = torch.linspace(0, 255, 300).round().to(torch.uint8)
    pixels = torch.stack([x.expand(200, 300), x.flip(0).expand(200, 300), x.expand(200, 300)], -1)
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, "JPEG", quality=95)
    return bytearray(file.getvalue())


def test_all_decoders_see_the_same_image(decoders, jpeg):
    expected = pil_to_tensor(decoders.pil(jpeg))
    for name, decode in decoders.DECODERS.items():
        if name != "PIL":
            away = (decode(jpeg).int() - expected.int()).abs().max()
            assert away <= 3, name


def test_every_road_ends_at_a_crop_in_its_dtype(decoders, jpeg):
    for name, road in decoders.roads(64).items():
        image = road(jpeg)
        assert tuple(image.shape) == (3, 64, 64), name
        assert str(image.dtype).removeprefix("torch.") == name.split(", ")[-1]


def test_a_crop_that_is_copied_first_gives_the_same_image(decoders, jpeg):
    image = decoders.torchvision(jpeg)
    for seed in range(8):
        found = []
        for crop in (decoders.v2.RandomResizedCrop, decoders.RandomResizedCrop):
            torch.manual_seed(seed)
            found.append(crop(64, antialias=True)(image))
        assert torch.equal(*found)


def test_all_roads_are_timed_in_turn_after_a_warm_up(decoders, jpeg):
    order = []
    ways = {name: lambda jpeg, name=name: order.append(name) for name in "ab"}
    found = decoders.images_per_s(ways, [jpeg], rounds=2)
    assert order == ["a", "b"] * 3
    assert [len(speeds) for speeds in found.values()] == [2, 2]


def test_images_are_found_whatever_their_suffix_is_like(tmp_path):
    names = ("a.JPEG", "b.jpg", "c.jpeg", "d.txt")
    for name in names:
        (tmp_path / "train" / "n01").mkdir(parents=True, exist_ok=True)
        (tmp_path / "train" / "n01" / name).touch()
    found = session.jpegs(SimpleNamespace(data=tmp_path, images=9))
    assert [path.name for path in found] == ["a.JPEG", "b.jpg", "c.jpeg"]
    with pytest.raises(SystemExit, match="dlojz data"):
        session.jpegs(SimpleNamespace(data=tmp_path / "nowhere", images=9))
