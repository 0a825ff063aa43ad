"""The generated image set: same bytes always, weights as ImageNet's, folders never damaged."""

import errno
import io
import json
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from waiting import until

from dlojz.images import DataError, dataset, draw, generate, make_equal

SMALL = {"classes": 2, "images_per_class": 3, "val_images_per_class": 1, "progress": False}


def make(root, **changes):
    return generate(root, **(SMALL | {"workers": 1} | changes))


def content(root):
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(pathlib.Path(root).rglob("*.JPEG"))
    }


def everything(root):
    return sorted(str(path.relative_to(root)) for path in pathlib.Path(root).rglob("*"))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return make(tmp_path_factory.mktemp("data") / "small")


@pytest.fixture(scope="module")
def photos():
    """160 images of 10 classes as (bytes, class)."""
    return [(draw.jpeg(0, "train", i % 10, i // 10), i % 10) for i in range(160)]


def test_the_layout_is_that_of_imagenet(small):
    expected = ["dataset.json", "train", "val"]
    for label, name in enumerate(("n01440764", "n01462331"), 1):
        expected += [f"train/{name}", *(f"train/{name}/{name}_{i}.JPEG" for i in range(3))]
        expected += [f"val/{name}", f"val/{name}/ILSVRC2012_val_0000000{label}.JPEG"]
    assert everything(small) == sorted(expected)


def test_the_marker_says_what_the_folder_holds(small):
    expected = SMALL | {"seed": 0, "made_by": "dlojz.generate", "complete": True}
    expected |= {"format_version": dataset.FORMAT_VERSION}
    del expected["progress"]
    assert json.loads((small / "dataset.json").read_text()) == expected


def test_a_judge_draws_other_images_of_the_same_classes(small, tmp_path):
    judged, again, other = (make(tmp_path / str(i), judge=seed) for i, seed in enumerate((5, 5, 6)))
    usual, found = content(small), content(judged)
    assert content(again) == found
    assert usual.keys() == found.keys()
    for name, image in found.items():
        assert (image == usual[name]) == name.startswith("train/")
        assert (image == content(other)[name]) == name.startswith("train/")
    assert json.loads((judged / "dataset.json").read_text())["judge"] == 5


def test_a_judges_images_are_not_mixed_with_others(small, tmp_path):
    judged = make(tmp_path / "judged", judge=5, images_per_class=0)
    with pytest.raises(DataError, match="judge's seed 5, but the judge's seed none was"):
        make(judged)
    with pytest.raises(DataError, match="judge's seed none, but the judge's seed 5 "):
        make(small, judge=5)
    with pytest.raises(DataError, match="Give --judge 0"):
        make(tmp_path / "negative", judge=-1)


def test_names_of_all_classes_are_distinct_sorted_and_of_9_characters():
    names = [draw.wnid(label) for label in range(draw.MAX_CLASSES)]
    assert names == sorted(set(names))
    assert {len(name) for name in names} == {9}
    last = draw.image_name("val", draw.MAX_CLASSES - 1, dataset.MAX_VAL_IMAGES - 1)
    assert len(last) == len("ILSVRC2012_val_00000001.JPEG")


def test_a_thousand_classes_are_all_different():
    assert len({draw.identity(0, label) for label in range(1000)}) == 1000


def test_the_first_12_classes_share_neither_silhouette_nor_pattern():
    first = [draw.identity(3, label) for label in range(12)]
    assert len({silhouette for silhouette, *_ in first}) == 12
    assert len({pattern for _, pattern, *_ in first}) == 12


def test_two_workers_make_the_same_bytes_as_one(small, tmp_path):
    # Enough images for several tasks, so that both workers take part.
    assert content(make(tmp_path / "two", workers=2)) == content(small)


def test_more_classes_and_images_leave_the_others_unchanged(small, tmp_path):
    larger = content(make(tmp_path / "l", classes=3, images_per_class=4, val_images_per_class=2))
    assert larger | content(small) == larger


def test_seed_split_class_and_index_all_change_the_image():
    arguments = [(0, "train", 0, 0), (1, "train", 0, 0), (0, "val", 0, 0), (0, "train", 1, 0)]
    assert len({draw.jpeg(*each) for each in [*arguments, (0, "train", 0, 1)]}) == 5


def test_growing_a_set_keeps_its_files_and_adds_the_new_ones(tmp_path):
    root = make(tmp_path / "set")
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*.JPEG")}
    make(root, classes=3, images_per_class=4)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert len(content(root)) == 3 * (4 + 1)
    assert json.loads((root / "dataset.json").read_text())["classes"] == 3


def test_an_interrupted_run_goes_on(small, tmp_path, monkeypatch):
    root, true_jpeg, calls = tmp_path / "set", dataset.jpeg, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return true_jpeg(*arguments)

    monkeypatch.setattr(dataset, "jpeg", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make(root)
    assert json.loads((root / "dataset.json").read_text())["complete"] is False
    (root / "train" / "n01440764" / ".dlojz-1-abcd.tmp").write_bytes(b"cut")
    make(root)
    assert len(calls) == 4 + (8 - 3)  # three were finished
    assert content(root) == content(small)
    assert everything(root) == everything(small)


def test_files_that_were_deleted_are_made_again(small, tmp_path):
    root = make(tmp_path / "set")
    next(root.rglob("*_2.JPEG")).unlink()
    make(root)
    assert content(root) == content(small)


def test_a_killed_run_with_workers_leaves_no_process_and_goes_on(tmp_path):
    root = tmp_path / "set"
    code = f"from dlojz.images import generate; generate({str(root)!r}, workers=2)"
    run = subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    until(lambda: content(root))
    run.send_signal(signal.SIGKILL)
    # End of file comes when the last process that inherited the pipe, a worker, has ended.
    assert run.communicate(timeout=20) == (b"", None)
    there = content(root)
    assert there
    for image in there.values():
        Image.open(io.BytesIO(image)).load()  # whole


def test_ctrl_c_ends_the_workers_without_their_tracebacks(tmp_path):
    root = tmp_path / "set"
    code = (  # a shell starts what runs in the background with this signal ignored
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
        f"from dlojz.images import generate; generate({str(root)!r}, workers=2)"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    until(lambda: len(content(root)) >= 20)
    os.killpg(run.pid, signal.SIGINT)  # what a terminal does: every process gets it
    _, printed = run.communicate(timeout=20)
    assert printed.count("Traceback") == 1  # the parent's KeyboardInterrupt
    assert not list(root.rglob("*.tmp"))


def test_a_finished_set_returns_at_once(small, monkeypatch):
    monkeypatch.setattr(dataset, "jpeg", lambda *_: pytest.fail("an image was made again"))
    make(small)


def test_two_processes_in_one_folder_make_one_good_set(small, tmp_path):
    root = tmp_path / "set"
    code = (
        "from dlojz.images import generate;"
        f"generate({str(root)!r}, 2, 3, 1, workers=1, progress=False)"
    )
    runs = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [run.wait(timeout=60) for run in runs] == [0, 0]
    assert content(root) == content(small)
    assert everything(root) == everything(small)


def test_a_temporary_file_removed_by_another_process_is_written_again(tmp_path, monkeypatch):
    true_replace, removed = os.replace, []

    def replace(source, target):
        if not removed:
            removed.append(source)
            os.unlink(source)
        true_replace(source, target)

    monkeypatch.setattr(os, "replace", replace)
    dataset._write(tmp_path / "a", b"whole")
    assert (tmp_path / "a").read_bytes() == b"whole"
    assert everything(tmp_path) == ["a"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, r"holds images of seed 0, but seed 1 was asked for.* Type `dlojz data"),
        ({"classes": 1}, r"holds a set of classes=2, but classes=1.* Type dlojz data --classes 2"),
        ({"images_per_class": 2}, r"images_per_class=3, but images_per_class=2"),
        ({"val_images_per_class": 0}, r"val_images_per_class=1, but val_images_per_class=0"),
    ],
)
def test_another_set_is_refused(small, changes, message):
    before = everything(small)
    with pytest.raises(DataError, match=message):
        make(small, **changes)
    assert everything(small) == before


def test_another_format_version_is_refused(small, monkeypatch):
    monkeypatch.setattr(dataset, "FORMAT_VERSION", dataset.FORMAT_VERSION + 1)
    with pytest.raises(DataError, match=r"format version.* Type `dlojz data"):
        make(small)


def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path):
    (tmp_path / "train" / "n01440764").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("mine")
    before = everything(tmp_path)
    with pytest.raises(DataError, match=r"found notes.txt, train.*nothing was written.*--data"):
        make(tmp_path)
    assert everything(tmp_path) == before


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"made_by": "somebody"}', "\ufffd"])
def test_a_foreign_marker_is_refused(tmp_path, text):
    (tmp_path / "dataset.json").write_text(text)
    with pytest.raises(DataError, match=r"not a marker of `dlojz data`.*another folder"):
        make(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classes": 0}, r"classes is 0, expected 1 to 5000. Give --classes 1"),
        ({"classes": 5001}, "classes is 5001, expected 1 to 5000"),
        ({"images_per_class": -1}, "images_per_class is -1, expected 0 to"),
        ({"val_images_per_class": -1}, "val_images_per_class is -1, expected 0 to"),
        ({"seed": -1}, "seed is -1, expected 0 to"),
        ({"workers": 0}, r"workers is 0, expected 1 or more. Give --workers 1"),
    ],
)
def test_counts_out_of_range_are_refused(tmp_path, changes, message):
    with pytest.raises(DataError, match=message):
        make(tmp_path / "set", **changes)
    assert not (tmp_path / "set").exists()


def test_no_images_at_all_is_a_set_of_empty_folders(tmp_path):
    root = make(tmp_path / "set", classes=1, images_per_class=0, val_images_per_class=0)
    assert " ".join(everything(root)) == "dataset.json train train/n01440764 val val/n01440764"


@pytest.mark.parametrize("name", ["a'; echo foo", "$(touch x)", "un été", "-rf", "a\nb"])
def test_a_hostile_path_is_just_a_folder(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    make(name, images_per_class=1, val_images_per_class=0)
    assert os.listdir(tmp_path) == [name]
    assert len(content(tmp_path / name)) == 2


@pytest.mark.parametrize("workers", [1, 2])
def test_a_path_that_cannot_be_a_folder_is_named(tmp_path, workers):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write .*file/set: .*then type dlojz data "):
        make(tmp_path / "file" / "set", workers=workers)


def test_a_full_disk_names_the_file_and_says_how_to_go_on(tmp_path, monkeypatch):
    true_write = pathlib.Path.write_bytes

    def write(path, data):
        if len(data) > 1000:
            true_write(path, data[:1000])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return true_write(path, data)

    monkeypatch.setattr(pathlib.Path, "write_bytes", write)
    message = r"cannot write .*n01440764_0.JPEG: No space left.*Free some space.*dlojz data "
    with pytest.raises(DataError, match=message):
        make(tmp_path / "set")
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_file_in_the_place_of_a_class_folder_is_named(tmp_path):
    root = make(tmp_path / "set", images_per_class=0, val_images_per_class=0)
    place = root / "train" / "n01440764"
    place.rmdir()
    place.write_text("")
    with pytest.raises(DataError, match=r"cannot write .*n01440764"):
        make(root)


def test_a_dead_worker_is_explained(tmp_path, monkeypatch):
    def broken(*_):
        raise dataset.futures.BrokenExecutor
        yield

    monkeypatch.setattr(dataset, "_run", broken)
    with pytest.raises(DataError, match=r"a worker process died.* --workers 1"):
        make(tmp_path / "set")


def test_the_room_imports_no_torch():
    code = "import sys, dlojz.images; print('torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert printed.stdout.strip() == "False"


def test_weights_are_those_of_imagenet(photos):
    weights = np.array([len(image) for image, _ in photos]) / 1000
    assert 105 < weights.mean() < 115
    assert 25 < weights.std() < 80


def test_sizes_are_those_of_imagenet(photos):
    sizes = [Image.open(io.BytesIO(image)).size for image, _ in photos]
    usual = np.mean([sorted(size) == [375, 500] for size in sizes])
    assert 0.5 < usual < 0.8
    assert 0.05 < np.mean([width < height for width, height in sizes]) < 0.45
    assert min(map(min, sizes)) < 280
    assert 700 < max(map(max, sizes)) <= 1500


def test_files_are_baseline_420_jpegs_that_open_as_rgb(photos):
    for image, _ in photos[:40]:
        picture = Image.open(io.BytesIO(image))
        assert picture.format == "JPEG"
        assert "progressive" not in picture.info
        assert picture.convert("RGB").size == picture.size
        if picture.mode == "RGB":
            assert [layer[1:3] for layer in picture.layer] == [(2, 2), (1, 1), (1, 1)]


def test_a_few_images_are_grey(photos):
    modes = [Image.open(io.BytesIO(image)).mode for image, _ in photos]
    assert set(modes) == {"RGB", "L"}
    assert modes.count("L") < 0.05 * len(modes)


def test_the_mean_colour_does_not_tell_the_class(photos):
    """Least squares from the mean colour to the classes: fit on half, judged on the other."""
    colours, labels = [], np.array([label for _, label in photos])
    for image, _ in photos:
        picture = Image.open(io.BytesIO(image))
        picture.draft("RGB", (64, 64))
        colours.append(np.asarray(picture.convert("RGB")).mean(axis=(0, 1)))
    inputs = np.column_stack([colours, np.ones(len(photos))])
    half = len(photos) // 2
    fit, *_ = np.linalg.lstsq(inputs[:half], np.eye(10)[labels[:half]], rcond=None)
    accuracy = np.mean((inputs[half:] @ fit).argmax(axis=1) == labels[half:])
    assert accuracy < 0.25  # chance: 0.10


def test_files_of_one_size_hold_the_same_images(tmp_path):
    folder = make(tmp_path)
    files = sorted(folder.rglob("*.JPEG"))
    before = [Image.open(file).tobytes() for file in files]
    assert len({file.stat().st_size for file in files}) > 1
    for _ in range(2):  # the second time it changes nothing
        make_equal(folder)
        assert len({file.stat().st_size for file in files}) == 1
        assert [Image.open(file).tobytes() for file in files] == before
