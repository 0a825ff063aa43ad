"""The experiment that takes a trainer's batches as fast as they come."""

import pytest
import torch
from programs import load

from dlojz import course


@pytest.fixture(scope="module")
def experiment():
    return load("loader")


def test_the_loader_is_the_trainers_own(experiment, images, monkeypatch):
    monkeypatch.setattr("sys.argv", ["test"])
    trainer = experiment.module(course.solution(0))
    flags = ["--data", str(images), "--model", "resnet18", "--image-size", "32", "-b", "8"]
    loader, args = experiment.loader(trainer, flags, 0)
    assert (loader.num_workers, args.batch_size) == (0, 8)
    assert next(iter(loader))[0].shape == (8, 3, 32, 32)


def test_the_clock_starts_after_the_warm_up(experiment, monkeypatch):
    ticks = iter((0, 5, 6, 8, 10))  # begin, and four batches
    monkeypatch.setattr(experiment.time, "perf_counter", lambda: next(ticks))
    batches = [(torch.zeros(4), None)] * 9
    assert experiment.images_per_s(batches, warmup=2, count=2) == (5, 8 / 4)


def test_an_epoch_of_warm_up_only_says_so(experiment):
    with pytest.raises(SystemExit, match="an epoch has 2 batches, and 2 are to warm up"):
        experiment.images_per_s([(torch.zeros(4), None)] * 2, warmup=2, count=5)
