"""The work of a step: how it is counted, and that less of it never passes."""

import random
from collections import Counter

import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from dlojz.check import work as judged
from dlojz.check.exercise import State
from dlojz.runs import log, records
from dlojz.training import models, sharding
from dlojz.watch import profile, workload


def look(call):
    return workload.counted(profile.profiled(call))


def step(model, images):
    """A step of a model, as a call."""
    return lambda: model(images).float().square().mean().backward()


def flop(found, *when):
    return sum(e["flop"] * e["count"] for e in found if e["when"] in (when or judged.COMPUTED))


def random_tensors(*shapes):
    torch.manual_seed(0)
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize(
    "form",
    [
        lambda a, b, bias: a @ b,
        lambda a, b, bias: torch.addmm(bias, a, b),
        lambda a, b, bias: (b.T @ a.T).T,
        lambda a, b, bias: functional.linear(a, b.T, bias),
        lambda a, b, bias: functional.linear(a.view(2, 3, 4), b.T, bias),
        lambda a, b, bias: torch.bmm(a[None], b[None]),
        lambda a, b, bias: torch.einsum("mk,kn->nm", a, b),
    ],
)
def test_a_product_is_the_same_in_all_its_forms(form):
    operands = random_tensors((6, 4), (4, 5), 5)
    found = look(lambda: form(*operands).sum().backward())
    assert {(e["kind"], e["of"], e["flop"]) for e in found} == {("product", "6x5x4", 240)}
    counts = Counter()
    for entry in found:
        counts[entry["when"]] += entry["count"]
    assert counts == {"forward": 1, "backward": 2}


def test_a_batch_of_products_is_as_much_as_all_of_them():
    a, b, c = random_tensors((3, 6, 4), (3, 4, 5), (3, 6, 5))
    for call in (lambda: torch.bmm(a, b), lambda: torch.baddbmm(c, a, b)):
        ((entry),) = look(call)
        assert (entry["of"], entry["flop"], entry["count"]) == ("3 of 6x5x4", 720, 1)


@pytest.mark.parametrize(
    "options",
    [{}, {"stride": 2}, {"padding": 1, "dilation": 2}, {"groups": 2}, {"stride": (2, 1)}],
)
def test_the_operations_of_a_convolution_are_those_that_torch_counts(options):
    images, weight = random_tensors((2, 4, 9, 8), (6, 4 // options.get("groups", 1), 3, 3))
    with FlopCounterMode(display=False) as counter:
        result = functional.conv2d(images, weight, **options)
    found = look(lambda: functional.conv2d(images, weight, **options).sum().backward())
    assert flop(found, "forward") == counter.get_total_flops()
    assert flop(found, "backward") == 2 * counter.get_total_flops(), "of images and of weights"
    assert result.shape[0] == 2


def test_a_transposed_convolution_is_counted_too():
    images, weight = random_tensors((2, 4, 9, 8), (4, 6, 3, 3))
    with FlopCounterMode(display=False) as counter:
        functional.conv_transpose2d(images, weight, stride=2)
    found = look(lambda: functional.conv_transpose2d(images, weight, stride=2).sum().backward())
    assert flop(found, "forward") == counter.get_total_flops()
    assert flop(found, "backward") == 2 * counter.get_total_flops()


def test_the_work_of_a_model_is_what_torch_counts():
    torch.manual_seed(0)
    model, images = models.build("squeezenet1_1", 5, 32), torch.randn(2, 3, 32, 32)
    with FlopCounterMode(display=False) as counter:
        step(model, images)()
    assert flop(look(step(model, images))) == counter.get_total_flops()


def test_only_asked_gradients_of_a_convolution_count():
    images, weight = random_tensors((2, 4, 9, 8), (6, 4, 3, 3))
    images.requires_grad_(False)
    found = look(lambda: functional.conv2d(images, weight).sum().backward())
    assert flop(found, "backward") == flop(found, "forward")
    assert [e["of"] for e in found if e["when"] == "backward"] == [
        "2x4x9x8 by 6x4x3x3 for the weights"
    ]


def test_layers_that_are_computed_again_are_told_from_the_backward_pass():
    torch.manual_seed(0)
    model, images = models.build("vit_tiny", 5, 32), torch.randn(2, 3, 32, 32)
    del model.encoder.layers[2:]
    usual = look(step(model, images))
    sharding.checkpoint_blocks(model)
    again = look(step(model, images))
    assert flop(usual, "again") == 0 < flop(again, "again") < flop(again, "forward")
    assert not judged.less(again, usual)
    assert not judged.less(usual, again)


def test_attention_is_its_products():
    query, key, value = random_tensors(*[(2, 3, 5, 4)] * 3)
    fused = look(
        lambda: functional.scaled_dot_product_attention(query, key, value).sum().backward()
    )
    by_hand = look(
        lambda: ((query @ key.transpose(-1, -2) / 2).softmax(-1) @ value).sum().backward()
    )
    for when in ("forward", "backward"):
        assert flop(fused, when) == flop(by_hand, when) > 0
    assert not judged.less(fused, by_hand)
    assert not judged.less(by_hand, fused)


def entry(when="forward", kind="convolution", of="a", flop=100, count=1, dtype="float32"):
    return {"when": when, "kind": kind, "of": of, "dtype": dtype, "flop": flop, "count": count}


def some_work(draw):
    """Work of random sizes, as a step's is logged."""
    return [
        entry(draw.choice(judged.COMPUTED), draw.choice(["convolution", "product"]), str(i),
              draw.randrange(1, 10**draw.randrange(1, 10)), draw.randrange(1, 5))
        for i in range(draw.randrange(1, 30))
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_less_work_never_passes_and_more_always_does(seed):
    draw = random.Random(seed)
    usual = some_work(draw)
    assert not judged.less(usual, usual)
    assert not judged.less([*usual, *some_work(draw)], usual)
    for i, one in enumerate(usual):
        others = usual[:i] + usual[i + 1 :]
        fewer = [one | {"count": one["count"] - 1}] if one["count"] > 1 else []
        smaller = [one | {"of": "smaller", "flop": one["flop"] - 1}]
        narrower = [one | {"dtype": draw.choice(["float16", "Float8_e4m3fn"])}]
        for instead in (fewer, smaller, narrower):
            assert judged.less([*others, *instead], usual), (one, instead)


def test_the_same_work_in_another_form_passes_but_not_of_another_kind_or_pass():
    usual = [entry(of="whole", flop=100), entry("backward", of="whole", flop=200)]
    halves = [entry(of="half", flop=50, count=2), usual[1]]
    assert not judged.less(halves, usual)
    assert judged.less([entry("backward", of="whole", flop=300)], usual)
    assert judged.less([entry(kind="product", flop=100), usual[1]], usual)
    assert judged.less([entry("again", flop=100), usual[1]], usual)


def test_what_is_missing_is_named():
    usual = [entry(of="256x64x56x56 by 64x64x3x3", count=5)]
    mine = [usual[0] | {"count": 2}, entry(of="128x64x56x56 by 64x64x3x3", flop=50, count=3)]
    assert judged.less(mine, usual) == (
        "3 fewer convolutions 256x64x56x56 by 64x64x3x3, 3 more 128x64x56x56 by 64x64x3x3, forward"
    )
    assert "some in bfloat16" in judged.less([usual[0] | {"dtype": "bfloat16"}], usual)


def test_a_compiled_trainer_beside_a_solution_that_is_not_has_no_tolerance():
    usual, nearly = run(WHOLE), [WHOLE[0], WHOLE[1] | {"count": 7}, entry("backward", flop=99)]
    assert not judged.finding([(run(WHOLE, regions=2, first=WHOLE), usual)]).fails
    assert judged.finding([(run(WHOLE, regions=2, first=HALF), usual)]).fails
    assert judged.finding([(run(nearly, regions=2, first=WHOLE), usual)]).fails
    assert not judged.finding([(run(nearly, regions=2), run(WHOLE, regions=2))]).fails


def run(*works, regions=None, first=(), compiled="off", again=0):
    """A log of one process for each of these works of the last step."""
    found = []
    for work_of_a_rank in works:
        one = log.Run("run", start={"arguments": {"compile": compiled}})
        if work_of_a_rank is not None:
            one.last = records.LastStep(work=work_of_a_rank, calls={"item": 1})
            if regions:
                one.last = records.LastStep(work=work_of_a_rank, compiled_regions=regions)
        one.probe, one.share = records.Probe(work=list(first)), records.Share(again=again)
        found.append(one)
    found[0].ranks = found
    return found[0]


WHOLE, HALF = [entry(count=4), entry("backward", count=8)], [entry(count=4), entry("backward")]


def test_every_process_does_its_work():
    assert judged.finding([(run(WHOLE, WHOLE), run(WHOLE, WHOLE))]).state == State.PASSED
    found = judged.finding([(run(WHOLE, HALF), run(WHOLE, WHOLE))])
    assert (found.state, found.hint) == (State.FAILED, "work")
    assert "7 fewer convolutions a, backward" in found.yours


def test_each_run_is_looked_at():
    pairs = [(run(WHOLE), run(WHOLE)), (run(HALF), run(WHOLE))]
    assert judged.finding(pairs).fails


def test_a_step_that_was_not_seen_does_not_pass():
    assert judged.finding([(run(None), run(WHOLE))]).state == State.UNMEASURED
    assert judged.finding([(run(None), run(None))]).state == State.NOT_ASKED


def test_compiled_work_is_counted_before_it_is_compiled():
    one = {"regions": 2, "compiled": "max-autotune"}
    usual = run([], first=WHOLE, **one)
    usual.last = records.LastStep(work=HALF[:1], compiled_regions=2)
    assert not judged.finding([(run(HALF[:1], first=WHOLE, **one), usual)]).fails
    assert judged.finding([(run(HALF[:1], first=HALF, **one), usual)]).fails


def test_compiled_code_may_pad_a_product_or_make_one_of_a_convolution_and_no_more():
    one = {"regions": 2, "compiled": "default", "first": WHOLE}
    usual = run(WHOLE, **one)
    product = [entry(kind="product", of="b", flop=99, count=4), WHOLE[1]]
    assert not judged.finding([(run(product, **one), usual)]).fails
    assert judged.finding([(run(HALF, **one), usual)]).fails


def test_what_a_graph_replays_is_counted_before_it_is_recorded():
    mine = run([], regions=2, first=WHOLE)
    mine.last = records.LastStep(work=HALF[:1], compiled_regions=2)
    assert judged.finding([(mine, run(WHOLE))]).fails
    mine.compilation = records.Compilation(seen=[{"why": "cudagraph_recording", "mode": "train"}])
    assert not judged.finding([(mine, run(WHOLE))]).fails
