"""The oracle of `dlojz estimate` for tensor plans and pipelines: counted messages, equal shares."""

import dataclasses
from collections import Counter

import pytest
import torch
from programs import REPOSITORY
from torch import nn

from dlojz import cli
from dlojz.course import UserError
from dlojz.estimate import divided, estimate, storages
from dlojz.figures import plans as figures
from dlojz.runs import memory
from dlojz.training import imports, models
from dlojz.training.replaced import replaced

TINY = models.ViT(patch=8, layers=8, heads=4, width=64, mlp=256)
TOKENS = 17  # of an image of 32 pixels: not a multiple of 2
USUAL = {"model": "vit_tiny", "gpus": 1, "sharding": "ddp", "batch": 8, "image_size": 32}
USUAL |= {"checkpointing": "off", "precision": "bf16"}


@pytest.fixture(scope="module")
def trainer():
    return imports.trainer(REPOSITORY / "solutions/dlojz_11_fsdp.py")


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setitem(models.LARGER, "vit_tiny", TINY)


def plan(**more):
    return estimate.Plan(**USUAL | more)


def most(peaks, part):
    return max(peak.parts.get(part, 0) for peak in peaks.values())


# By hand -----------------------------------------------------------------------------------------


def test_attention_with_all_heads_is_torchs():
    whole = nn.MultiheadAttention(64, 4, batch_first=True)
    mine = divided.Attention(whole, 1, lambda x: x, lambda x: x).to_empty(device="cpu")
    mine.columns.load_state_dict({"weight": whole.in_proj_weight, "bias": whole.in_proj_bias})
    mine.rows.load_state_dict(whole.out_proj.state_dict())
    x = torch.randn(2, 5, 64)
    expected, _ = whole(x, x, x, need_weights=False)
    torch.testing.assert_close(mine(x, x, x, need_weights=False)[0], expected)


def test_attention_with_all_heads_takes_the_memory_of_torchs(trainer):
    own = trainer.build_model

    def build_model(*args):
        model = own(*args)
        for block in model.encoder.layers:
            block.self_attention = divided.Attention(block.self_attention, 1, *[lambda x: x] * 2)
        return model

    usual = estimate.measured(trainer, plan())
    with replaced(trainer, build_model=build_model):
        mine = estimate.measured(trainer, plan())
    assert most(mine, "activations") == pytest.approx(most(usual, "activations"), rel=0.01)


@pytest.mark.parametrize("tensor", [2, 4])
def test_a_tensors_processes_share_its_blocks_and_activations(tensor, trainer):
    whole, share = (estimate.measured(trainer, plan(gpus=n, tensor=n)) for n in (1, tensor))
    width, classes = TINY.width, estimate.CLASSES
    small = TINY.layers * 6 * width + 2 * width + classes * (width + 1)  # each has them
    small += (3 * TINY.patch**2 + 1) * width + (TOKENS + 1) * width
    blocks = TINY.parameters(classes, 32) - small
    assert most(share, "parameters") == pytest.approx(4 * (small + blocks / tensor), rel=0.03)
    # Between products each has some of the tokens; the inputs of the columns are whole.
    kept = most(share, "activations") / most(whole, "activations")
    assert 1 / tensor < kept < 1 / tensor + 0.25


def test_a_stage_holds_the_activations_of_the_parts_from_it_to_the_last(trainer):
    def activations(stage, parts):
        sizes = {"batch": 8 * parts, "parts": parts, "image_size": 64}
        asked = plan(gpus=4, stages=4, stage=stage, **sizes)
        return most(estimate.measured(trainer, asked), "activations")

    one, two, three = (activations(1, parts) for parts in (1, 2, 3))
    assert three - two == pytest.approx(two - one, rel=0.02)
    assert activations(1, 8) == pytest.approx(three, rel=0.01), "of 4 stages, 3 are left"
    assert activations(2, 8) == pytest.approx(two, rel=0.01)


def test_a_pipeline_divides_the_model_and_fsdp_each_stage(trainer):
    found = estimate.result(trainer, plan(gpus=8, tensor=2, stages=2, parts=4, sharding="fsdp"))
    count = TINY.parameters(estimate.CLASSES, 32)
    assert found["parameters"] == count
    held = [stage["peaks"]["update"]["parameters"] for stage in found["stages"]]
    assert sum(held) == pytest.approx(4 * count / 4, rel=0.25), "embedding and classifier are whole"
    most_bytes = [max(sum(p.values()) for p in each["peaks"].values()) for each in found["stages"]]
    assert found["plan"]["stage"] == most_bytes.index(max(most_bytes))
    assert found["stages"][0]["peaks"]["forward ends"]["unreduced"] > 0


def test_the_blocks_are_dealt_out_in_order():
    ends = [divided.held(10, plan(stages=4, stage=stage)) for stage in range(4)]
    assert ends == [(0, 3), (3, 6), (6, 8), (8, 10)]


def test_short_versions_predict_a_long_stage(trainer, monkeypatch):
    monkeypatch.setitem(models.LARGER, "vit_tiny", TINY._replace(layers=32))
    asked = plan(gpus=4, tensor=2, stages=2, parts=4)
    whole, added = (run(trainer, asked) for run in (estimate.measured, estimate.added_up))
    for phase, peak in whole.items():
        assert added[phase].bytes == pytest.approx(peak.bytes, rel=0.02)


# Messages ----------------------------------------------------------------------------------------


def counted(trainer, asked, monkeypatch):
    """Return the bytes that collectives sent in a step, as rings, by kind."""
    found, see = Counter(), storages.Storages._see

    def seen(self, function, args, kwargs, out):
        if function.namespace == "c10d" and "_base_" in str(function):
            kind = "gathered" if "allgather" in str(function) else "reduced"
            found[kind] += abs(args[0].nbytes - args[1].nbytes)  # all but this process's own
        see(self, function, args, kwargs, out)

    monkeypatch.setattr(storages.Storages, "_see", seen)
    estimate.counted(trainer, asked)
    return {kind: size / estimate.STEPS for kind, size in found.items()}


@pytest.mark.parametrize("checkpointing", ["off", "blocks"])
@pytest.mark.parametrize("how", [{"tensor": 2}, {"sharding": "fsdp"}])
def test_the_messages_are_those_that_the_step_sends(how, checkpointing, trainer, monkeypatch):
    asked = plan(gpus=2, checkpointing=checkpointing, **how)
    model = estimate.on_meta(trainer.build_model, asked, estimate.parsed(trainer, asked))
    told, found = divided.sent(model, asked, torch.bfloat16), counted(trainer, asked, monkeypatch)
    names = {"gathered": "tokens, gathered", "reduced": "tokens, reduced"}
    if "sharding" in how:
        names = {"gathered": "weights", "reduced": "gradients"}
    for kind, name in names.items():
        # Shards are padded, and torch gathers what it can't cut evenly.
        assert found[kind] == pytest.approx(told[name], rel=0.001 if "tensor" in how else 0.02)


def test_ddp_sends_each_gradient_twice_but_for_its_own_share(trainer):
    count = TINY.parameters(estimate.CLASSES, 32)
    found = estimate.result(trainer, plan(gpus=4))["sent"]
    assert found == {"gradients": pytest.approx(2 * 3 / 4 * 4 * count)}
    assert estimate.result(trainer, plan())["sent"] == {}


def test_a_stage_sends_its_tokens_on_and_their_gradients_back(trainer):
    found = estimate.result(trainer, plan(gpus=4, stages=4, parts=4))["stages"]
    one = 8 * TOKENS * TINY.width * 4  # autocast leaves float32 between blocks
    assert [stage["sent"]["to other stages"] for stage in found] == [one, 2 * one, 2 * one, one]


# A plan that can't be ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"tensor": 3, "gpus": 3}, "vit_tiny has 4 heads, .* expected one of 1, 2, 4"),
        ({"stages": 8, "gpus": 8}, "has 8 blocks; expected at most 4 stages"),
        ({"tensor": 2}, "--gpus 1: expected a multiple of .* such as --gpus 2"),
        ({"stages": 2, "gpus": 2, "parts": 3}, "don't divide --batch 8; .* such as --batch 9"),
        ({"parts": 2}, "--parts 2: of a pipeline, so expected --stages of at least 2"),
        ({"model": "resnet18", "tensor": 2, "gpus": 2}, "resnet18 is not a vision transformer"),
        ({"model": "vgg11", "stages": 2, "gpus": 2}, "vgg11 is not a vision transformer"),
        ({"tensor": 0}, "--tensor 0: expected a whole number of at least 1"),
    ],
)
def test_a_division_that_cannot_be_is_one_clear_line(how, message, trainer):
    with pytest.raises(UserError, match=message) as raised:
        estimate.result(trainer, plan(**how))
    assert len(str(raised.value).splitlines()) == 1


# The command -------------------------------------------------------------------------------------


def test_the_prediction_tells_of_stages_messages_and_what_is_not_torchs(trainer):
    row = estimate.result(trainer, plan(gpus=8, tensor=2, stages=2, parts=4))
    text = figures.about(row)
    assert "tensors over 2 GPUs, 2 stages, 4 parts, DDP on 2 GPUs, 8 images" in text
    assert "of 32 px on each 4 GPUs" in text
    assert "At most 70.6 MB on each GPU of stage 1, " in text
    assert "tokens, gathered" in text
    assert figures.HEADS in text
    assert set(row["sent"]) <= set(memory.SENT)
    usual = figures.about(estimate.result(trainer, plan()))
    assert "stage" not in usual
    assert "sent" not in usual


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tensor 4", "--gpus 1: expected a multiple of --tensor 4 times --stages 1"),
        ("--stages 2 --gpus 2 --parts 5", "--parts 5 don't divide --batch 32"),
    ],
)
def test_what_needs_no_torch_is_refused_at_once(words, message, course_folder, capfd):
    assert cli.main(["estimate", "--model", "vit_2b", *words.split()]) == 2
    err = capfd.readouterr().err
    assert message in err
    assert "importing torch" not in err


def test_the_largest_batch_of_a_pipeline_has_equal_parts(trainer):
    asked = plan(gpus=4, stages=2, parts=4)
    limit = 1.5 * max(estimate.needed(trainer, asked, 8).values())
    first = next(estimate.fitting(trainer, asked, limit))
    assert first["plan"]["batch"] % 4 == 0
    assert first["plan"]["batch"] > 32
    assert estimate.ways(trainer, asked)[-1].sharding == "fsdp"


def test_the_help_says_how_attention_is_divided(capsys):
    with pytest.raises(SystemExit):
        cli.main(["estimate", "--help"])
    assert "as if its heads were divided" in " ".join(capsys.readouterr().out.split())


def test_a_plan_without_these_fields_is_one_of_a_whole_model():
    old = dataclasses.asdict(plan(gpus=2))
    for name in ("tensor", "stages", "parts", "stage"):
        del old[name]
    assert memory.means(old) == "bf16, DDP on 2 GPUs"
    assert estimate.Plan(**old) == plan(gpus=2)
