"""A batch that is mixed: its draws, the solution's arithmetic, and the probe of a check."""

import shutil
import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from programs import load_file

from dlojz import course
from dlojz.chapters.n07_augmentation import exercise
from dlojz.check.exercise import State
from dlojz.runs import log, records
from dlojz.training import checkpoint, mixing
from dlojz.watch import mixtures

WAYS = {"seed": 1, "epoch": 1, "step": 1, "rank": 1}
ONE = {"seed": 0, "epoch": 0, "step": 0, "images": 64, "size": 32, "rank": 0, "processes": 2}


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))


def test_draws_are_the_same_again_and_leave_the_generator_alone():
    before = torch.get_rng_state()
    draws = mixing.draws_of(**ONE)
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(3)
    assert same(draws, mixing.draws_of(**ONE))


@pytest.mark.parametrize("name", WAYS)
def test_each_seed_epoch_step_and_rank_has_draws_of_its_own(name):
    draws, other = mixing.draws_of(**ONE), mixing.draws_of(**ONE | {name: WAYS[name]})
    assert not any(
        torch.equal(x, y) for x, y in zip(vars(draws).values(), vars(other).values(), strict=True)
    )


def test_one_process_that_accumulates_draws_what_two_processes_draw():
    for step in range(4):
        several = mixing.draws_of(**ONE | {"step": step // 2, "rank": step % 2})
        assert same(several, mixing.draws_of(0, 0, step, 64, 32))


@pytest.mark.parametrize("images", [2, 3, 64])
def test_no_image_is_its_own_partner(images):
    for step in range(20):
        partner = mixing.draws_of(0, 0, step, images, 32).partner
        assert bool((partner != torch.arange(images)).all())
        assert set(partner.tolist()) <= set(range(images))


def test_the_only_image_of_a_batch_is_its_own_partner():
    assert mixing.draws_of(0, 0, 0, 1, 32).partner.tolist() == [0]


def test_shares_are_even_with_alpha_1_and_near_the_ends_with_a_smaller_one():
    even, ends = (mixing.draws_of(0, 0, 0, 20_000, 32, alpha=a).share for a in (1.0, 0.2))
    for share in (even, ends):
        assert bool(((share >= 0) & (share <= 1)).all())
        assert float(share.mean()) == pytest.approx(0.5, abs=0.02)
    near = [float(((share - 0.5).abs() > 0.4).float().mean()) for share in (even, ends)]
    assert near[0] == pytest.approx(0.2, abs=0.02)
    assert near[1] > 0.5


def test_a_box_has_the_rest_of_the_share_and_may_lie_partly_outside():
    draws = mixing.draws_of(0, 0, 0, 2000, (400, 200))
    top, left, bottom, right = draws.box.T
    area = (bottom - top) * (right - left) / (400 * 200)
    assert bool(((area - (1 - draws.share)).abs() < 0.02).all())
    for centre, size in (((top + bottom) / 2, 400), ((left + right) / 2, 200)):
        assert bool(((centre >= 0) & (centre < size)).all())
    outside = (top < 0) | (left < 0) | (bottom > 400) | (right > 200)
    assert 0.2 < float(outside.float().mean()) < 0.95


def test_draws_have_the_types_that_an_index_and_a_share_need():
    draws = mixing.draws_of(0, 3, 5, 8, 32).to("cpu")
    assert [t.dtype for t in vars(draws).values()] == [torch.int64, torch.float32, torch.int64]
    assert [tuple(t.shape) for t in vars(draws).values()] == [(8,), (8,), (8, 4)]


@pytest.fixture(scope="module")
def solution():
    return load_file(course.solution("07"))


@pytest.fixture
def batch():
    """Images that are higher than wide, labels, and draws."""
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(256, (9, 3, 20, 12), dtype=torch.uint8, generator=draw)
    return images, torch.arange(9) % 4, mixing.draws_of(0, 0, 0, 9, (20, 12))


def test_mixup_is_a_weighted_mean_of_each_image_and_its_partner(solution, batch):
    images, labels, draws = batch
    found, targets = solution.mixed(*batch, "mixup", 4)
    assert found.dtype == torch.uint8
    for i, (j, share) in enumerate(zip(draws.partner, draws.share, strict=True)):
        expected = share * images[i].float() + (1 - share) * images[j].float()
        assert float((found[i] - expected).abs().max()) <= 0.501
        row = torch.zeros(4)
        row[labels[i]] += share
        row[labels[j]] += 1 - share
        assert torch.allclose(targets[i], row)


def test_cutmix_pastes_a_box_and_counts_the_pixels_that_arrive(solution, batch):
    images, labels, draws = batch
    found, targets = solution.mixed(*batch, "cutmix", 4)
    for i, j in enumerate(draws.partner):
        top, left, bottom, right = draws.box[i].clamp(min=0).tolist()
        expected, mask = images[i].clone(), torch.zeros(20, 12)
        expected[:, top:bottom, left:right] = images[j, :, top:bottom, left:right]
        mask[top:bottom, left:right] = 1
        assert torch.equal(found[i], expected)
        row = torch.zeros(4)
        row[labels[i]] += 1 - mask.mean()
        row[labels[j]] += mask.mean()
        assert torch.allclose(targets[i], row)


def test_the_draws_are_no_part_of_a_checkpoint(batch):
    model = torch.nn.Linear(1, 1)
    training = SimpleNamespace(model=model, draws=batch[-1], classes=10, criterion=len, scaler=None)
    assert checkpoint.parts(training) == {"model": model}


ARGS = Namespace(mix="cutmix", channels_last=True, precision="fp32")


def probed(forward, monkeypatch, args=ARGS):
    """The record of the probe for a trainer with this `forward`."""
    monkeypatch.setattr(sys.modules["__main__"], "forward", forward, raising=False)
    training = SimpleNamespace(model=torch.nn.Linear(1, 1), classes=5)
    loader = SimpleNamespace(dataset=SimpleNamespace(classes=range(5)))
    return records.Mixtures(**mixtures.look(training, args, loader))


def failing(seen):
    return {f.key: f.hint for f in exercise._probed(seen) if f.fails}


def test_the_probe_finds_nothing_wrong_with_the_solution(solution, monkeypatch):
    torch.manual_seed(0)
    seen = probed(solution.forward, monkeypatch)
    after = torch.rand(3)
    assert seen.error is None
    assert failing(seen) == {}
    torch.manual_seed(0)
    torch.nn.Linear(1, 1)  # which `probed` makes
    assert torch.equal(after, torch.rand(3))


def test_a_run_that_is_timed_or_mixes_nothing_is_not_probed(solution, monkeypatch):
    assert not probed(solution.forward, monkeypatch, Namespace(mix="off"))
    assert not probed(solution.forward, monkeypatch, Namespace())
    monkeypatch.setenv("DLOJZ_AUDIT", '{"timed": true}')
    assert not probed(solution.forward, monkeypatch)


@pytest.mark.parametrize(
    ("old", "new", "key", "hint"),
    [
        ("share = 1 - rows", "_ = 1 - rows", "share-cutmix", "clipped"),
        (
            "top, left, bottom, right = draws",
            "left, top, right, bottom = draws",
            "box-cutmix",
            "turned",
        ),
        ("images[draws.partner]", "images.clone()", "pixels-mixup", "partner"),
        (
            "draws.share\n",
            "draws.share.mean().expand(len(labels))\n",
            "distinct-mixup",
            "one-share",
        ),
        (" and training.model.training", "", "unmixed", "validation-mixed"),
        ('args.mix != "off" and ', "", "unasked", "not-asked"),
        (
            "classes), share[:, None]",
            "classes).half(), share[:, None].half()",
            "targets-mixup",
            "targets",
        ),
        (
            "[draws.partner], draws",
            "[[int(i) for i in draws.partner]], draws",
            "loop-mixup",
            "loop",
        ),
    ],
)
def test_the_probe_names_a_mistake(old, new, key, hint, tmp_path, monkeypatch):
    text = course.solution("07").read_text()
    assert old in text
    file = tmp_path / "trainer.py"
    file.write_text(text.replace(old, new, 1))
    assert failing(probed(load_file(file).forward, monkeypatch))[key] == hint


def test_of_a_trainer_that_mixes_elsewhere_the_probe_says_nothing(monkeypatch):
    def forward(training, images, labels, args):
        logits = training.model(images)
        return logits, training.criterion(logits, labels)

    found = exercise._probed(probed(forward, monkeypatch))
    assert [f.state for f in found] == [State.NOT_ASKED]


def test_an_error_in_the_probe_is_the_trainers_and_no_end(monkeypatch):
    def forward(training, images, labels, args):
        raise KeyError("mine")

    assert probed(forward, monkeypatch).error == "KeyError: 'mine'"


def test_a_run_that_mixes_trains_validates_and_says_what_accuracy_is(train, tmp_path, capsys):
    flags = (
        "--test --data synthetic --model shufflenet_v2_x0_5 --image-size 32 -b 8 --test-nsteps 2"
    )
    train(course.solution("07"), tmp_path, *flags.split(), "--mix", "cutmix", "--precision", "fp32")
    assert "each image's own label only" in capsys.readouterr().out
    run = log.read(tmp_path)
    assert run.start["arguments"]["mix"] == "cutmix"
    assert [i["mode"] for i in run.whole.inputs] == ["train", "val"]


def test_a_resumed_run_mixes_and_augments_as_the_whole_one(train, tmp_path, images, monkeypatch):
    def save(training, states, args, epoch, step, real=checkpoint.save):
        real(training, states, args, epoch, step)
        if (epoch, step) == (0, 3):
            shutil.copy(args.checkpoint, tmp_path / "half.pt")

    monkeypatch.setattr(checkpoint, "save", save)
    flags = f"--data {images} --num-workers 0 --model shufflenet_v2_x0_5 --image-size 32 -b 8"
    flags += " --precision fp32 --mix cutmix --randaugment 2 9"
    more = [*flags.split(), "--checkpoint-every", "3"]
    train(course.solution("07"), tmp_path / "whole", *more)
    train(course.solution("07"), tmp_path / "half", *more, "--resume", tmp_path / "half.pt")
    whole, half = (list(log.read(tmp_path / name).steps.loss) for name in ("whole", "half"))
    assert len(whole) > 3
    assert half[-len(whole[3:]) :] == whole[3:]
