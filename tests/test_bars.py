"""The bars: how much faster, on which hardware, and by which source."""

import builtins
import json
from itertools import pairwise
from unittest.mock import MagicMock

import pytest
from made import EPYC, H100, RESNET

from dlojz import course
from dlojz.check import bars, exercise
from dlojz.course import presets
from dlojz.runs import stats


@pytest.mark.parametrize(
    ("step", "hardware", "changes", "at_least"),
    [
        ("01_gpu", H100, {}, 8.0),
        ("01_gpu", EPYC, {}, None),
        ("02_amp", H100, {"precision": "fp16"}, 1.5),
        ("02_amp", H100, {"precision": "fp16", "batch_size": 8}, None),
        ("02_amp", "cuda: Some Card", {"precision": "fp16"}, None),
        ("02_amp", EPYC, {"precision": "bf16"}, None),
        ("03_channels_last", H100, {"precision": "fp16"}, 1.15),
        ("03_channels_last", H100, {"precision": "fp16", "batch_size": 128}, None),
        ("03_channels_last", H100, {"precision": "fp16", "model": "vgg19", "batch_size": 64}, 1.15),
        ("03_channels_last", H100, {"precision": "fp32"}, None),
        ("03_channels_last", EPYC, {"precision": "fp32"}, 1.0),
        ("03_channels_last", EPYC, {"precision": "fp32", "image_size": 64}, None),
        ("06_ddp", H100, {"precision": "bf16"}, 0.9),
        ("06_ddp", H100, {"precision": "bf16", "batch_size": 128}, None),
        ("06_ddp", EPYC, {}, None),
    ],
)
def test_each_hardware_has_its_bar(step, hardware, changes, at_least):
    assert bars.bar(exercise.find(step), hardware, RESNET | changes).at_least == at_least


def test_every_bar_has_a_source():
    assert all(bar.source for step in exercise.STEPS for bar in exercise.find(step).bars)


def recorded_gains(step):
    """Runs recorded on an H100, and how many times as fast as the step before each was."""
    for file in sorted((course.course_root() / "reference" / "h100").glob("03-*16-nhwc-b*.jsonl")):
        precision = file.name.split("-")[2]
        before = file.name.replace("nhwc", "nchw")
        if step == "02_amp":
            file = file.with_name(before)
            before = before.replace(precision, "fp32")
        slow = stats.summary(file.with_name(before)) if file.with_name(before).exists() else None
        fast = stats.summary(file)
        if slow and slow.images_per_s and fast.images_per_s:
            yield fast, fast.images_per_s / slow.images_per_s


@pytest.mark.parametrize("step", ["02_amp", "03_channels_last"])
def test_what_was_recorded_clears_each_bar_by_far(step):
    asked = 0
    for recorded, gain in recorded_gains(step):
        at_least = bars.bar(
            exercise.find(step), f"cuda: {recorded.device_name}", recorded.arguments
        ).at_least
        if at_least is not None:
            asked += 1
            assert gain > 1.1 * at_least, f"{recorded.name}: {gain:.2f} times"
    assert asked > 8


def test_of_a_gpu_that_nobody_recorded_no_gain_is_asked_and_that_is_said():
    bar = bars.bar(exercise.find("02_amp"), "cuda: NVIDIA X1", RESNET | {"precision": "fp16"})
    assert bar.at_least is None
    assert bar.source == "no bar is known for NVIDIA X1"
    assert (
        "sizes"
        in bars.bar(
            exercise.find("02_amp"), H100, RESNET | {"precision": "fp16", "batch_size": 8}
        ).source
    )


class Names(dict):
    """The names of a notebook; whatever is not there is a stand-in."""

    def __missing__(self, name):
        if hasattr(builtins, name):
            raise KeyError(name)
        return MagicMock()


def submitted_on_a_gpu(notebook):
    """Return the arguments of the job that this notebook checks, on a machine with GPUs."""
    cells = json.loads((course.course_root() / f"solutions/{notebook}.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]

    def job(command, **more):
        return MagicMock(command=command)

    names = Names(preset=presets.PRESETS["gpu"], n=2, submit=job)
    for source in sources:
        if "flags" in source:
            exec(source, {}, names)
        if "after" in names:
            break
    words = names["after"].command.split()
    found = dict(pairwise(words))  # a flag that comes twice: the last counts
    sizes = {"image_size": int(found["--image-size"]), "batch_size": int(found["-b"])}
    return sizes | {"model": found["--model"], "precision": found.get("--precision", "")}


@pytest.mark.parametrize(
    "notebook", ["01_gpu", "02_amp", "03_channels_last", "06_ddp", "09_compile"]
)
@pytest.mark.parametrize("card", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"])
def test_on_a_gpu_a_notebook_checks_a_job_of_which_a_gain_is_asked(notebook, card):
    bar = bars.bar(exercise.find(notebook), f"cuda: {card}", submitted_on_a_gpu(notebook))
    assert bar.at_least, bar.source
