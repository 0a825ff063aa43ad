"""The operations of an image against papers and torchvision, and the share of a GPU's peak."""

from pathlib import Path

import matplotlib as mpl
import pytest

mpl.use("Agg")
import torchvision
from test_compiling import experiment
from test_sharding import EXPERIMENTS

from dlojz import runs
from dlojz.course import UserError
from dlojz.figures import utilization as figures
from dlojz.runs import log
from dlojz.runs.stats import Summary
from dlojz.runs.utilization import Utilization, utilization
from dlojz.training import estimate, models, operations
from dlojz.training.worth import imported
from dlojz.widgets.quiz import QUIZZES

REPOSITORY = Path(__file__).parent.parent
PREDICTED = "cpu/11-predicted"
COMPILED, BLOCKS = "vit_2b, 64 images, compiled", "vit_2b, 32 images, checkpointing"
BEST, PRODUCT = "vit_2b, 96 images, compiled", "h200/00-ceilings"


@pytest.fixture(scope="module")
def trainer():
    return imported(REPOSITORY / "solutions/dlojz_11_fsdp.py")


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
        (made("NVIDIA H200", size=4), 4 * 989.5),
        (made("AMD Instinct MI250X"), 383 / 2),  # torch sees one of its two dies
        (made("NVIDIA H300"), None),
    ],
)
def test_the_peak_is_that_of_the_format_and_of_all_gpus(run, peak):
    found = utilization(run, OPERATIONS)
    assert found.peak_tflops == peak
    assert found.mfu == (300 / peak if peak else None)


def test_a_run_without_a_speed_used_nothing():
    assert utilization(runs.recorded("h200/11-vit_2b-b0256-off"), OPERATIONS) is None


# Figures -----------------------------------------------------------------------------------------


def test_the_table_has_each_run_that_has_a_speed_with_its_share():
    table = figures.shares(runs.recorded(PREDICTED), runs.recorded(PRODUCT))
    rows = {row[0]: row[1:] for row in table.rows}
    assert len(rows) == 5, "not the one that was out of memory"
    assert rows[COMPILED] == ("159", "3.17", "506", "51.1%", "51.1%", "64.1%", "77.4 GB")
    assert rows[BEST] == ("164", "3.17", "519", "52.4%", "52.4%", "65.8%", "102 GB")
    assert rows[BLOCKS] == ("99", "3.17", "314", "31.7%", "38.9%", "39.8%", "31.5 GB")
    assert table.head[4:7] == (
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
    assert [bar.get_width() > 0 for bar in again] == [True, False, False, False, False]
    sold, product = (line.get_xdata()[0] for line in ax.lines)
    assert (sold, product) == (989.5, pytest.approx(788.8, abs=0.1))
    assert {"51%  ", "52%  "} <= {text.get_text() for text in ax.texts}


def test_the_memory_is_drawn_with_a_mark_where_it_was_measured():
    ax = figures.plot_peaks(runs.recorded(PREDICTED))
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert (names[0], names[-3:]) == (BLOCKS, [COMPILED, BEST, "vit_2b, 256 images"])
    marks = [line.get_xdata()[0] for line in ax.lines if line.get_marker() == "D"]
    pairs = figures.cases(runs.recorded(PREDICTED))
    assert marks == [s.peak_memory_bytes / 1e9 for s, _ in pairs if s.completed]
    said = [text.get_text().split("\n") for text in ax.texts if "predicted" in text.get_text()]
    assert [[line.strip() for line in lines] for lines in said[-3:]] == [
        ["77.5 GB predicted, not compiled", "77.4 GB recorded"],
        ["102 GB predicted, not compiled", "102 GB recorded"],
        ["225 GB predicted", "out of memory"],
    ]


def test_a_gpu_that_is_in_no_table_has_a_speed_and_no_share(monkeypatch):
    monkeypatch.setattr("dlojz.machine.hardware.sold", list)
    table = figures.shares(runs.recorded(PREDICTED))
    assert table.head[3:] == ("TFLOP/s", "memory")
    assert table.rows[-1] == (BEST, "164", "3.17", "519", "102 GB")
    assert len(figures.plot_shares(runs.recorded(PREDICTED)).lines) == 0


def test_another_experiment_and_products_in_another_format_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"expected a run of predicted\.py"):
        figures.shares(runs.recorded("cpu/11-fits"))
    product = experiment(tmp_path / "events.jsonl", {"a": {}}, precision="fp32")
    with pytest.raises(UserError, match="expected products in bf16, not none"):
        figures.shares(runs.recorded(PREDICTED), product)


def test_the_experiment_predicts_a_recording_and_counts_its_image(train, tmp_path):
    train(EXPERIMENTS / "predicted.py", tmp_path, "--recordings", "h100/01-resnet50-fp32-b0008*")
    [(name, case)] = log.read(tmp_path).cases.items()
    assert name == "h100/01-resnet50-fp32-b0008"
    [(s, _)] = figures.cases(tmp_path)
    peak = max(sum(parts.values()) for parts in case["peaks"].values())
    assert peak == pytest.approx(s.peak_memory_bytes, rel=0.01)
    found = utilization(s, case["operations"])
    assert found.tflops == pytest.approx(s.images_per_s * 6 * 4.09e9 / 1e12, rel=0.02)
    assert found.peak_tflops == 67, "true fp32"


def test_what_the_notebooks_say_of_these_runs_is_so():
    found = {figures.run_name(s): (s, u) for s, u in figures.used(runs.recorded(PREDICTED))}
    (off, of_off), (again, of_again), (smaller, compiled), (larger, best) = (
        found[name] for name in (BLOCKS.partition(", check")[0], BLOCKS, COMPILED, BEST)
    )
    peaks = [s.peak_memory_bytes / 1e9 for s in (again, off)]
    memory, times = "{:.1f} GB and {:.1f}".format(*peaks), again.step_ms / off.step_ms
    eleven = [f"{memory}. What", f"{memory.replace('and', 'instead of')}."]
    eleven.append(f"took {off.step_ms:.0f} ms without it and {again.step_ms:.0f} ms with it")
    eleven.append(f"with it: {times:.2f} times")
    pairs = figures.cases(runs.recorded(PREDICTED))
    [(lost, case)] = [pair for pair in pairs if not pair[0].completed]
    assert lost.state == "OUT_OF_MEMORY"
    needs, has = figures.memory.highest(case)[1].bytes / 1e9, lost.memory_limit_bytes
    eleven.append(f"predicted to need {needs:.0f} GB, and this GPU has {has / 1e9:.0f}: the")
    eleven += ["Here are six runs", "Three of the runs were predicted to within 0.3 %"]
    eleven.append("So were the two compiled ones")
    assert (len(pairs), sum(figures._compiled(s) for s, _ in pairs)) == (6, 2)
    assert has < 141 * 2**30 < 1.01 * has, "vendors count in GiB"
    case = dict((figures.run_name(s), case) for s, case in pairs)[BLOCKS]
    image = sum(case["operations"][part] for part in ("forward", "backward")) / 1e12
    product = figures.machines.measured(runs.recorded(PRODUCT)).tflops["bf16"]
    rule, part = 6 * case["parameters"] * 257 / 1e12, best.tflops / product
    hybrid = [f"{image:.2f} TFLOP", f"{rule:.2f} TFLOP", f"used {100 * compiled.mfu:.0f} % of what"]
    hybrid.append(f"with 64 images, and {100 * best.mfu:.0f} % with 96")
    faster = larger.images_per_s / smaller.images_per_s - 1
    more = (larger.peak_memory_bytes - smaller.peak_memory_bytes) / 1e9
    hybrid.append(f"{100 * faster:.0f} % more speed for {more:.0f} GB more memory")
    hybrid.append(f"got {product:.0f} TFLOP/s from an H200")
    hybrid.append(f"(HFU): {100 * of_again.hfu:.1f} %, nearly the {100 * of_off.mfu:.1f} %")
    hybrid.append(f"{best.tflops:.0f} are {100 * part:.0f} %")
    hybrid.append(f"and {100 * best.mfu:.0f} % are {50 * best.mfu:.0f} %")
    for name, said in (("11_fsdp", eleven), ("11b_hybrid", hybrid)):
        text = (EXPERIMENTS.parent / f"{name}.ipynb").read_text()
        assert [words for words in said if words not in text] == []


def test_what_the_quiz_says_of_these_runs_is_so():
    found = {figures.run_name(s): (s, u) for s, u in figures.used(runs.recorded(PREDICTED))}
    (off, of_off), (again, of_again) = (found[n] for n in (BLOCKS.partition(", check")[0], BLOCKS))
    more = 1 + of_again.again_tflops / of_again.tflops
    asked = QUIZZES["fsdp-utilization"]
    quiz = [f"{off.images_per_s:.0f} images/s, with an MFU of {100 * of_off.mfu:.0f} %"]
    quiz += [f"{again.images_per_s:.0f} images/s", f"{more:.2f} times"]
    assert [words for words in quiz if words not in asked.question] == []
    [right] = [a.text for a in asked.answers if a.right]
    assert right == f"{100 * of_again.mfu:.0f} %"
