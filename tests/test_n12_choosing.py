"""The map of plans: its rates are those of recordings, and its cells those of `dlojz estimate`."""

from dataclasses import replace

import matplotlib.pyplot as plt
import pytest
import torch

from dlojz import runs
from dlojz.chapters.n06_ddp import figures as n06
from dlojz.chapters.n11_fsdp import operations
from dlojz.chapters.n11b_hybrid import figures as n11b
from dlojz.chapters.n12_model_parallel import choosing, giants
from dlojz.chapters.n12_model_parallel import choosing_figures as figures
from dlojz.estimate import estimate
from dlojz.training import models
from dlojz.training.replaced import replaced

RECORDED = "cpu/12-map"
FAST, SLOW = (giants.rates(speed) for speed in giants.NETWORKS.values())


def plan(**more):
    found = {"model": "vit_2b", "gpus": 8, "sharding": "fsdp", "batch": 16, "image_size": 224}
    found |= {"checkpointing": "off", "precision": "bf16", "flags": ("--optimizer", "adamw")}
    return estimate.Plan(**found | more)


# What is assumed ---------------------------------------------------------------------------------


def test_the_speed_of_products_is_that_of_a_recorded_training():
    used = n11b.used(runs.recorded("cpu/11-predicted"))
    trained = {(s.model, s.size, s.arguments["compile"]): u.mfu for s, u in used}
    assert trained["vit_2b", 2, "default"] == pytest.approx(giants.MFU, abs=0.005)


def test_the_links_are_those_of_a_recorded_all_reduce():
    link = n06.link(runs.recorded("h200/06-all-reduce-x4"))
    assert link.bandwidth == pytest.approx(FAST.inside, rel=0.01)
    assert link.latency_s == pytest.approx(FAST.latency_s, rel=0.02)
    assert FAST.between / SLOW.between == giants.NODE


@pytest.mark.parametrize("name", giants.GIANTS)
def test_a_giants_stand_in_has_its_parameters_and_nearly_its_tokens(name):
    giant, pixels = giants.giants()[name], giants.image_size(name)
    vit = choosing.known()[name]
    assert vit.parameters(1000, pixels) == pytest.approx(giant.parameters, rel=0.01)
    tokens = (pixels // giants.PATCH) ** 2 + 1
    assert tokens == pytest.approx(giant.sequence, rel=0.02)


def test_a_giant_has_its_paper():
    for giant in giants.giants().values():
        assert giant.source.startswith("https://arxiv.org/abs/")
    llama = giants.giants()["llama_405b"]
    assert 6 * llama.parameters * llama.trained_tokens == pytest.approx(3.8e25, rel=0.01)
    chinchilla = giants.giants()["chinchilla"]
    assert chinchilla.trained_tokens / chinchilla.parameters == 20


def test_the_table_of_giants_has_120_operations_for_each_squared_parameter():
    rows = {row[0]: row for row in figures.sizes().rows}
    assert rows["Chinchilla (2022)"][2:5] == ("1.4", "20", "5.9e+23")
    assert rows["Chinchilla (2022)"][5] == rows["Chinchilla (2022)"][8]
    assert rows["BLOOM 176B (2022)"][3] == "2"


# The time of a step ------------------------------------------------------------------------------


def test_the_operations_are_those_that_torch_counts():
    asked = plan(gpus=1, sharding="ddp", batch=2)
    counted = sum(operations.of_an_image(choosing.trainer(), asked).values())
    assert choosing.operations(asked) == pytest.approx(counted, rel=0.01)


def test_a_bubble_is_one_part_for_each_stage_but_the_last():
    asked = plan(stages=4, parts=16, batch=64)
    found = choosing.seconds(asked, FAST)
    assert found["bubble"] == pytest.approx(3 / 16 * found["computing"])
    assert found["tensor"] == 0


def test_messages_hide_behind_passes_until_they_are_longer():
    few, many = (choosing.seconds(plan(batch=n, gpus=64), SLOW) for n in (1, 1024))
    assert few["data"] > few["computing"]
    assert many["data"] == 0
    inside = choosing.seconds(plan(batch=1), SLOW)["data"]
    assert 10 * inside < few["data"]


def test_messages_grow_with_images_as_dlojz_estimates():
    asked = plan(tensor=2, stages=2, parts=8, batch=64)
    found = estimate.divided.sent(_share(asked), asked, torch.bfloat16)
    for name in ("tokens, gathered", "tokens, reduced", "to other stages", "gradients"):
        assert choosing.messages(asked)[name] == pytest.approx(found[name])


def _share(asked):
    trainer = choosing.trainer()
    return estimate.on_meta(trainer.build_model, asked, estimate.parsed(trainer, asked))


# The choice --------------------------------------------------------------------------------------


def test_no_plan_has_too_many_images_or_divides_a_head():
    found = [*choosing.plans("vit_6b", 1024)]
    assert {each.tensor for each in found} == {1}, "it has 25 heads"
    assert max(each.batch * each.replicas for each in found) == giants.largest("vit_6b")
    assert not [each for each in choosing.plans("llama_70b", 1024) if each.replicas == 1024]


@pytest.mark.parametrize("more", [{}, {"checkpointing": "blocks"}, {"stages": 4, "parts": 8}])
def test_the_bound_is_below_what_dlojz_estimates(more):
    asked = plan(**more)
    assert choosing.least(asked) < choosing.needed(asked)


def test_memory_depends_neither_on_more_parts_nor_on_more_copies():
    vit = models.LARGER["vit_tiny"]._replace(layers=8)
    with replaced(choosing, known=lambda: {"vit_tiny": vit}):
        asked = plan(model="vit_tiny", sharding="ddp", stages=2, parts=16, batch=64, gpus=16)
        usual = choosing.alike(asked, 4)
        assert (usual.gpus, usual.parts, usual.batch) == (4, 4, 16)
        assert choosing.needed(usual) == pytest.approx(choosing.needed(asked), rel=0.01)


def cell(**more):
    found = {"plan": vars(plan(gpus=1024, tensor=2)), "alone": 0.8, "undivided": 3}
    return found | {"seconds": {"computing": 1, "data": 1}} | more


def test_each_choice_has_its_reason():
    assert figures.reason(cell()) == "DDP or FSDP alone has 80% of its speed"
    assert figures.reason(cell(alone=None)) == "DDP or FSDP alone does not fit"
    few = figures.reason(cell(undivided=0, alone=None))
    assert few == "fewer images or sequences than GPUs: 4,096"
    whole = cell(plan=vars(plan()))
    assert figures.reason(whole) == "50% of a step waits for messages"
    assert figures.reason(whole | {"seconds": {"computing": 1, "data": 0}}) == "nothing waits"
    assert figures.kind(whole) == "FSDP"
    assert figures.kind(cell()) == "tensors"
    assert figures.kind({"plan": None}) == figures.NOTHING
    divided = [cell(), cell(alone=None), cell(alone=0.99), whole, {"plan": None}]
    assert [figures.pays(each) for each in divided] == [True, True, False, False, False]
    assert figures.words(cell()["plan"]) == ["TP 2", "FSDP 512"]


# The recording -----------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", [4, 8])
def test_a_recorded_cell_is_what_would_be_chosen_now(gpus):
    for network, r in zip(giants.NETWORKS, (FAST, SLOW), strict=True):
        kept = figures.cells(runs.recorded(RECORDED))[network]["vit_2b", gpus]
        found = choosing.choose("vit_2b", gpus, r)
        assert found["plan"] | {"flags": None} == kept["plan"] | {"flags": None}
        assert found["bytes"] == pytest.approx(kept["bytes"], rel=0.01)
        assert found["mfu"] == pytest.approx(kept["mfu"], rel=0.01)


def test_each_chosen_plan_fits_and_is_as_fast_as_one_without_division():
    for of in figures.cells(runs.recorded(RECORDED)).values():
        for found in of.values():
            if found["plan"]:
                assert found["bytes"] <= FAST.memory
                assert found["mfu"] <= giants.MFU + 1e-9
                assert (found["alone"] or 0) <= 1 + 1e-5


def test_the_map_shows_each_cell_with_its_finding():
    axes = figures.plot_map(runs.recorded(RECORDED))
    found = figures.cells(runs.recorded(RECORDED))
    assert len(axes) == len(found)
    for ax, of in zip(axes, found.values(), strict=True):
        assert len(ax.patches) == len(of)
    title = axes[0].figure.get_suptitle()
    assert title.startswith("It pays to divide the model in ")
    assert len(figures.chosen(runs.recorded(RECORDED))) == sum(
        bool(each["plan"]) for of in found.values() for each in of.values()
    )
    plt.close(axes[0].figure)


def test_a_plan_of_the_map_is_one_of_dlojz_estimate():
    for of in figures.cells(runs.recorded(RECORDED)).values():
        for found in of.values():
            if found["plan"]:
                asked = estimate.Plan(**found["plan"] | {"flags": tuple(found["plan"]["flags"])})
                assert asked.replicas * asked.tensor * asked.stages == asked.gpus
                assert replace(asked, batch=1).model in choosing.known()
