"""The operations of an image against papers and torchvision, and the share of a GPU's peak."""

from pathlib import Path

import matplotlib as mpl
import pytest
from claims import claims
from logs import with_cases
from programs import experiment_file

mpl.use("Agg")
import torchvision

from dlojz import runs
from dlojz.chapters.n11_fsdp import operations
from dlojz.chapters.n11b_hybrid import figures
from dlojz.chapters.n11b_hybrid.flops import Utilization, utilization
from dlojz.course import UserError
from dlojz.estimate import estimate
from dlojz.figures import peaks
from dlojz.runs import log
from dlojz.runs.stats import Summary
from dlojz.training import imports, models
from dlojz.widgets.quiz import QUIZZES

REPOSITORY = Path(__file__).parent.parent
PREDICTED = "cpu/11-predicted"
COMPILED, BLOCKS = "vit_2b, 64 images, compiled", "vit_2b, 32 images, checkpointing"
LARGER, PRODUCT = "vit_2b, 96 images, compiled", "h200/00-ceilings"
BEST = "vit_6b, 64 images, FSDP on 2 GPUs, compiled"
SAVED = "vit_6b, 32 images, FSDP on 2 GPUs, checkpointing"


@pytest.fixture(scope="module")
def trainer():
    return imports.trainer(REPOSITORY / "solutions/dlojz_11_fsdp.py")


def counted(trainer, model, checkpointing="off", **more):
    sizes = {"model": model, "gpus": 1, "sharding": "ddp", "batch": 8, "image_size": 224}
    asked = sizes | {"checkpointing": checkpointing, "precision": "fp32"} | more
    return operations.of_an_image(trainer, estimate.Plan(**asked))


# Operations --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet50", "vit_b_16"])
def test_the_forward_pass_has_the_operations_that_torchvision_names(name, trainer):
    named = torchvision.models.get_model_weights(name).IMAGENET1K_V1.meta["_ops"]
    found = counted(trainer, name)
    assert found["forward"] == pytest.approx(2e9 * named, rel=0.001), "a multiplication and a sum"
    assert found["backward"] == pytest.approx(2 * found["forward"], rel=0.04), (
        "no gradient of images"
    )
    assert found["again"] == 0


def by_hand(vit, size=224, classes=1000):
    """Return the operations of an image in each part of a transformer's forward pass."""
    patches, w = (size // vit.patch) ** 2, vit.width
    tokens = patches + 1
    return {
        "patches": 2 * patches * 3 * vit.patch**2 * w,
        "projections": vit.layers * 2 * tokens * 4 * w * w,
        "attention": vit.layers * 2 * 2 * tokens**2 * w,
        "mlp in": vit.layers * 2 * tokens * w * vit.mlp,
        "mlp out": vit.layers * 2 * tokens * w * vit.mlp,
        "head": 2 * w * classes,
    }


def test_a_transformer_has_the_operations_that_are_counted_by_hand(trainer):
    parts = by_hand(models.LARGER["vit_tiny"])
    found = counted(trainer, "vit_tiny", "blocks")
    assert found["forward"] == sum(parts.values())
    assert found["backward"] == 2 * found["forward"] - parts["patches"], "none for the images"
    # The last product of a block is not needed again, so it is not computed again.
    assert found["again"] == sum(parts[p] for p in ("projections", "attention", "mlp in"))


def test_a_batch_on_many_gpus_in_16_bits_changes_nothing_of_an_image(trainer):
    usual, other = (
        counted(trainer, "vit_tiny", **more)
        for more in ({}, {"batch": 3, "gpus": 8, "sharding": "fsdp", "precision": "bf16"})
    )
    assert usual == other


@pytest.mark.parametrize("name", ["vit_600m", "vit_2b"])
def test_six_operations_for_each_parameter_and_token_are_nearly_all(name):
    """As PaLM's appendix B has it, with attention: 6 N + 12 L H Q T for each token."""
    case = next(
        c for c in log.read(runs.recorded(PREDICTED)).cases.values() if c["plan"]["model"] == name
    )
    vit, tokens = models.LARGER[name], 257
    palm = (6 * case["parameters"] + 12 * vit.layers * vit.width * tokens) * tokens
    found = case["operations"]
    assert found["forward"] + found["backward"] == pytest.approx(palm, rel=0.005)
    assert found["forward"] == sum(by_hand(vit).values()), "the recording is what is counted"


# The share of the peak ---------------------------------------------------------------------------

OPERATIONS = {"forward": 1e12, "backward": 2e12, "again": 1e12}


def made(device_name, images_per_s=100.0, precision="bf16", size=1):
    arguments = {"precision": precision}
    return Summary(
        "a",
        "COMPLETED",
        device_name=device_name,
        images_per_s=images_per_s,
        size=size,
        arguments=arguments,
    )


def test_what_is_computed_again_counts_for_the_hardware_alone():
    found = utilization(made("NVIDIA H200"), OPERATIONS)
    assert found == Utilization(tflops=300, again_tflops=100, peak_tflops=989.5)
    assert (found.mfu, found.hfu) == (300 / 989.5, 400 / 989.5)


@pytest.mark.parametrize(
    ("run", "peak"),
    [
        (made("NVIDIA H200", precision="tf32"), 494.5),
        (made("NVIDIA H200", precision="fp32"), 67),
        (made("NVIDIA H200", 400.0, size=4), 989.5),
        (made("AMD Instinct MI250X"), 383 / 2),  # torch sees one of its two dies
        (made("NVIDIA H300"), None),
    ],
)
def test_the_peak_is_that_of_the_format_and_of_each_gpu(run, peak):
    found = utilization(run, OPERATIONS)
    assert found.peak_tflops == peak
    assert found.mfu == (300 / peak if peak else None)


def test_a_run_without_a_speed_used_nothing():
    assert utilization(runs.recorded("h200/11-vit_2b-b0256-off"), OPERATIONS) is None


# Figures -----------------------------------------------------------------------------------------


def test_the_table_has_each_run_that_has_a_speed_with_its_share():
    table = figures.shares(runs.recorded(PREDICTED), runs.recorded(PRODUCT))
    rows = {row[0]: row[1:] for row in table.rows}
    assert len(rows) == 16, "not the one that was out of memory"
    assert rows[COMPILED] == ("159", "3.17", "506", "51.1%", "51.1%", "64.1%", "77.4 GB")
    assert rows[LARGER] == ("164", "3.17", "519", "52.4%", "52.4%", "65.8%", "102 GB")
    assert rows[BEST] == ("113", "9.22", "520", "52.5%", "52.5%", "65.9%", "118 GB")
    assert rows[BLOCKS] == ("99", "3.17", "314", "31.7%", "38.9%", "39.8%", "31.5 GB")
    assert table.head[3:7] == (
        "TFLOP/s of each GPU",
        "MFU: of 989.5 TFLOP/s",
        "HFU",
        "of 789, a product on NVIDIA H200",
    )
    assert "a product" not in str(figures.shares(runs.recorded(PREDICTED)))


def test_the_bars_of_the_speed_end_where_the_hardware_was():
    ax = figures.plot_shares(runs.recorded(PREDICTED), runs.recorded(PRODUCT))
    own, again = ax.containers
    used = figures.used(runs.recorded(PREDICTED))
    assert [bar.get_width() for bar in own] == [u.tflops for _, u in used]
    assert sum(bar.get_width() > 0 for bar in again) == 3, "with checkpointing"
    assert ax.figure.get_supxlabel().endswith("2026-11-23 to 2026-11-28"), "all recordings"
    sold, product = (line.get_xdata()[0] for line in ax.lines)
    assert (sold, product) == (989.5, pytest.approx(788.8, abs=0.1))
    assert {"51%  ", "52%  "} <= {text.get_text() for text in ax.texts}


def test_a_gpu_that_is_in_no_table_has_a_speed_and_no_share(monkeypatch):
    monkeypatch.setattr("dlojz.machine.hardware.sold", list)
    table = figures.shares(runs.recorded(PREDICTED))
    assert table.head[3:] == ("TFLOP/s of each GPU", "memory")
    assert table.rows[-1] == (BEST, "113", "9.22", "520", "118 GB")
    assert len(figures.plot_shares(runs.recorded(PREDICTED)).lines) == 0


def test_another_experiment_and_products_in_another_format_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"expected a run of predicted\.py"):
        figures.shares(runs.recorded("cpu/11-fits"))
    product = with_cases(tmp_path / "events.jsonl", {"a": {}}, precision="fp32")
    with pytest.raises(UserError, match="expected products in bf16, not none"):
        figures.shares(runs.recorded(PREDICTED), product)


def test_the_experiment_predicts_a_recording_and_counts_its_image(train, tmp_path):
    train(experiment_file("predicted.py"), tmp_path, "--recordings", "h100/01-resnet50-fp32-b0008*")
    [(name, case)] = log.read(tmp_path).cases.items()
    assert name == "h100/01-resnet50-fp32-b0008"
    [(s, _)] = figures.cases(tmp_path)
    peak = max(sum(parts.values()) for parts in case["peaks"].values())
    assert peak == pytest.approx(s.peak_memory_bytes, rel=0.01)
    found = utilization(s, case["operations"])
    assert found.tflops == pytest.approx(s.images_per_s * 6 * 4.09e9 / 1e12, rel=0.02)
    assert found.peak_tflops == 67, "true fp32"


def test_the_stages_of_a_model_add_up_to_all_of_its_operations(train, tmp_path):
    """The first stage of a ResNet has the name of a layer in each of its blocks."""
    train(experiment_file("model.py"), tmp_path, "--model", "resnet50")
    found = {m.what: m.value for m in log.read(tmp_path).measures}
    assert found["conv1"] == pytest.approx(2 * 112**2 * 64 * 3 * 7**2 / 1e6)
    assert sum(found.values()) == pytest.approx(2 * 4089, rel=0.001)


def by_name():
    return {figures.run_name(s): (s, u) for s, u in figures.used(runs.recorded(PREDICTED))}


@claims("11b_hybrid")
def test_what_notebook_11b_says_of_the_share_is_so():
    found = by_name()
    (smaller, compiled), (larger, of_larger), (sharded, best) = (
        found[name] for name in (COMPILED, LARGER, BEST)
    )
    (_, of_off), (_, of_again) = (found[n] for n in (BLOCKS.partition(", check")[0], BLOCKS))
    pairs = figures.cases(runs.recorded(PREDICTED))
    case = dict((figures.run_name(s), case) for s, case in pairs)[BLOCKS]
    image = sum(case["operations"][part] for part in ("forward", "backward")) / 1e12
    product = peaks.measured(runs.recorded(PRODUCT)).tflops["bf16"]
    rule, part = 6 * case["parameters"] * 257 / 1e12, best.tflops / product
    yield f"{image:.2f} TFLOP"
    yield f"{rule:.2f} TFLOP"
    yield f"used {100 * compiled.mfu:.0f} % of the peak"
    yield f"with 64 images, and {100 * of_larger.mfu:.0f} % with 96"
    faster = larger.images_per_s / smaller.images_per_s - 1
    more = (larger.peak_memory_bytes - smaller.peak_memory_bytes) / 1e9
    yield f"{100 * faster:.0f} % more speed for {more:.0f} GB more memory"
    yield f"got {product:.0f} TFLOP/s from an H200"
    yield f"has {100 * of_again.hfu:.1f} %, nearly the {100 * of_off.mfu:.1f} %"
    yield f"{best.tflops:.0f} are {100 * part:.0f} %"
    yield f"and {100 * best.mfu:.1f} % are {50 * best.mfu:.0f} %"
    eager = found[BEST.removesuffix(", compiled")][1]
    shards = found["vit_2b, 160 images, FSDP on 2 GPUs, compiled"][1]
    yield f"160 images used {100 * shards.mfu:.1f} %, and `vit_6b` with 64 used"
    yield f"64 used {100 * best.mfu:.1f} %, or {100 * eager.mfu:.1f} % eager"
    four = found["vit_6b, 32 images, FSDP on 4 GPUs, compiled"][1]
    yield f"On four, with 32 images each, `vit_6b` used {100 * four.mfu:.1f} %"
    shares = [found[f"vit_2b, 32 images, {how} on 2 GPUs"][1].mfu for how in ("FSDP", "DDP")]
    shares = [100 * share for share in (*shares, of_off.mfu)]
    yield "{:.0f} % with FSDP2, {:.0f} % with DDP, {:.0f} % on a single".format(*shares)
    assert best.tflops == max(u.tflops for _, u in found.values())
    (highest, lowest), each = sharded.sm_clock_mhz, sharded.power_w / sharded.size
    yield f"took {each:.0f} W of its limit of 700"
    yield f"one of them from {highest:,} MHz to {lowest:,} within eleven steps"
    assert sharded.throttled == ("power cap",)
    [window] = log.read_ranks(runs.recorded("h200/11-vit_6b-b0064-off-fsdp-compiled-x2"))[1].windows
    assert (window["sm_clock_mhz"], window["steps"]) == ([highest, lowest], 11)


def test_what_the_quiz_says_of_these_runs_is_so():
    found = by_name()
    (off, of_off), (again, of_again) = (found[n] for n in (BLOCKS.partition(", check")[0], BLOCKS))
    more = 1 + of_again.again_tflops / of_again.tflops
    asked = QUIZZES["fsdp-utilization"]
    quiz = [f"{off.images_per_s:.0f} images/s, with an MFU of {100 * of_off.mfu:.0f} %"]
    quiz += [f"{again.images_per_s:.0f} images/s", f"{more:.2f} times"]
    assert [words for words in quiz if words not in asked.question] == []
    [right] = [a.text for a in asked.answers if a.right]
    assert right == f"{100 * of_again.mfu:.0f} %"
