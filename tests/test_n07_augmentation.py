"""Chapter 07 measures what it names, and its figures say what was measured."""

from functools import partial
from types import SimpleNamespace

import matplotlib as mpl
import pytest
import torch
from programs import experiment_file, load

mpl.use("Agg")

from dlojz.figures import paired
from dlojz.launch import Request, State, series
from dlojz.runs import log
from dlojz.training import mixing

CPU = torch.device("cpu")
ACCURACY = experiment_file("accuracy.py")


# Mixing ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program():
    return load("mixing")


def batch(images=6, height=20, width=30):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (images, 3, height, width), generator=generator).to(torch.uint8)
    return pixels, torch.arange(images) % 4, mixing.draws_of(0, 0, 0, images, (height, width))


@pytest.mark.parametrize("how", ["mixup", "cutmix"])
def test_the_loop_and_the_masks_give_the_same(program, how):
    images, labels, draws = batch()
    by_masks = program.ways(how)["masks"].func
    found = program.looped(images, labels, draws, how, 4)
    program.same(found, by_masks(images, labels, draws, how, 4), how)
    assert (found[0] != images).any()
    assert found[1].sum(1) == pytest.approx(torch.ones(6))
    assert len(found[1].amax(1).unique()) > 1, "a share for each image"


def test_other_images_or_targets_are_an_error(program):
    images, labels, draws = batch()
    found = program.looped(images, labels, draws, "cutmix", 4)
    with pytest.raises(AssertionError, match="here: an image differs"):
        program.same((images, found[1]), found, "here")
    with pytest.raises(AssertionError):
        program.same((found[0], found[1].flip(0)), found, "here")


def test_v2_draws_one_share_for_all_images(program):
    images, labels, draws = batch()
    for how in program.HOW:
        _, targets = program.ways(how)["v2"](images, labels, draws)
        assert len({round(share, 4) for share in targets.amax(1).tolist()}) <= 1 + (how == "cutmix")


def test_only_the_loop_takes_more_operations_for_more_images(program):
    counted = {}
    for size in (8, 16):
        images, labels, draws = batch(size)
        for name, way in program.ways("cutmix").items():
            if name != "compiled":
                call = partial(way, images, labels, draws)
                counted[name, size] = program.launched(call, name, CPU)["launches"]
    assert counted["masks", 8] == counted["masks", 16]
    assert counted["v2", 8] == counted["v2", 16]
    assert counted["loop", 16] > 1.8 * counted["loop", 8]


# Accuracy ----------------------------------------------------------------------------------------

TINY = "--model shufflenet_v2_x0_5 --image-size 24 -b 8 -e 1 --classes 3"
TINY += " --images-per-class 8 --val-per-class 3"


def test_trainings_are_dealt_out_and_come_together_in_order():
    flags = f"--seeds 2 {TINY} --variants mixup cutmix"
    job = series.submit(
        [series.Entry("dealt", ACCURACY, flags.split())], Request(name="accuracy", n_gpu=2)
    )
    assert job.wait() == State.COMPLETED, job.explain()
    (folder,) = series.folders(job).values()
    assert [len(rank.cases) for rank in log.read_ranks(folder)] == [3, 3]
    found = [(c["variant"], c["seed"]) for c in paired.trainings(folder)]
    names = ("fp32", "mixup", "cutmix")
    assert found == [(name, seed) for seed in (0, 1) for name in names]
    clean, *others = paired.rows(folder)
    assert [row.title for row in others] == ["mixup, alpha 1", "CutMix, alpha 1"]
    assert [*clean.accuracies] == [0, 1]


@pytest.fixture(scope="module")
def accuracy():
    return load("accuracy")


def resident(accuracy, randaugment=None, epoch=0):
    images = torch.full((16, 3, 30, 30), 90, dtype=torch.uint8)
    images[:, :, 10:20] = torch.arange(16, dtype=torch.uint8)[:, None, None, None] * 15
    loader = accuracy.Resident(images, torch.arange(16), 24, 8, seed=1, randaugment=randaugment)
    loader.epoch = epoch
    shown, labels = zip(*loader, strict=True)
    return torch.cat(shown), torch.cat(labels)


def test_randaugment_changes_each_image_by_seed_epoch_and_index(accuracy):
    plain, order = resident(accuracy)
    found, same = resident(accuracy, (2, 9))
    assert (same == order).all()
    assert found.dtype == torch.uint8
    assert found.shape == plain.shape
    changed = (found != plain).flatten(1).any(1)
    assert changed.float().mean() > 0.5
    assert (found == resident(accuracy, (2, 9))[0]).all()
    assert (found != resident(accuracy, (2, 9), epoch=1)[0]).any()


@pytest.mark.parametrize("how", ["mixup", "cutmix"])
def test_only_a_training_is_mixed_and_each_update_draws_again(accuracy, how):
    seen = []
    trainer = SimpleNamespace(forward=lambda training, images, labels, args: seen.append(labels))
    accuracy.mixes(how, 1.0)(trainer)
    images, labels, _ = batch(8, 24, 24)
    scheduler = SimpleNamespace(last_epoch=0)
    training = SimpleNamespace(model=SimpleNamespace(training=True), scheduler=scheduler, classes=4)
    args = SimpleNamespace(seed=3)
    trainer.forward(training, images, labels, args)
    scheduler.last_epoch = 1
    trainer.forward(training, images, labels, args)
    training.model.training = False
    trainer.forward(training, images, labels, args)
    assert seen[0].shape == seen[1].shape == (8, 4)
    assert (seen[0] != seen[1]).any()
    assert seen[2] is labels
