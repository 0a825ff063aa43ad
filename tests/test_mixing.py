"""The draws of a batch that is mixed."""

import pytest
import torch

from dlojz.training import mixing

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
