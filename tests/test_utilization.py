"""The operations of an image against papers and torchvision, and the share of a GPU's peak."""

from collections import Counter
from pathlib import Path

import matplotlib as mpl
import numpy as np
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
from dlojz.runs import derived, log
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
    assert len(rows) == 14, "not the one that was out of memory"
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
    assert ax.get_title("left").endswith("2026-11-23 to 2026-11-25"), "all recordings"
    sold, product = (line.get_xdata()[0] for line in ax.lines)
    assert (sold, product) == (989.5, pytest.approx(788.8, abs=0.1))
    assert {"51%  ", "52%  "} <= {text.get_text() for text in ax.texts}


def test_the_memory_is_drawn_with_a_mark_where_it_was_measured():
    ax = figures.plot_peaks(runs.recorded(PREDICTED))
    names = [label.get_text() for label in ax.get_yticklabels()]
    shards = "vit_2b, 32 images, FSDP on 2 GPUs, checkpointing"
    assert (names[0], names[-4], names[-1]) == (shards, BEST, "vit_2b, 256 images")
    marks = [line.get_xdata()[0] for line in ax.lines if line.get_marker() == "D"]
    pairs = figures.cases(runs.recorded(PREDICTED))
    assert marks == [s.peak_memory_bytes / 1e9 for s, _ in pairs if s.completed]
    said = [text.get_text().split("\n") for text in ax.texts if "predicted" in text.get_text()]
    assert [[line.strip() for line in lines] for lines in said[-4:]] == [
        ["128 GB predicted, not compiled", "118 GB recorded"],
        ["128 GB predicted", "128 GB recorded"],
        ["135 GB predicted, not compiled", "131 GB recorded"],
        ["225 GB predicted", "out of memory"],
    ]


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


@claims("11_fsdp")
def test_what_notebook_11_says_of_predictions_is_so():
    pairs = figures.cases(runs.recorded(PREDICTED))
    [(lost, case)] = [pair for pair in pairs if not pair[0].completed]
    assert lost.state == "OUT_OF_MEMORY"
    needs, has = figures.plans.highest(case)[1].bytes / 1e9, lost.memory_limit_bytes
    yield f"predicted to need {needs:.0f} GB, and this GPU has {has / 1e9:.0f}: the"
    assert has < 141 * 2**30 < 1.01 * has, "vendors count in GiB"
    away = {
        figures.run_name(s): figures.plans.highest(case)[1].bytes / s.peak_memory_bytes - 1
        for s, case in pairs
        if s.completed
    }
    compiled = sorted(away.pop(name) for name in [*away] if "compiled" in name)
    assert (len(pairs), len(away), len(compiled)) == (15, 10, 4)
    yield "Here are fifteen runs"
    yield "Eleven of these runs are eager"
    yield "Four runs were compiled"
    assert max(map(abs, compiled[:2])) < 0.0005
    more = [100 * (1 - 1 / (1 + a)) for a in reversed(compiled[2:])]
    yield "Two needed what was predicted, two {1:.0f} % and {0:.0f} % less".format(*more)
    twice = "vit_2b, 32 images, DDP on 2 GPUs"
    predicted, s = next((c, s) for s, c in pairs if figures.run_name(s) == twice)
    peak = figures.plans.highest(predicted)[1]
    first, second = (r.memory["device_peak_bytes"] for r in log.read_ranks(runs.recorded(DDP)))
    yield f"{peak.bytes / 1e9:.1f} GB predicted, and {second / 1e9:.1f} measured"
    yield f"Its other GPU measured {first / 1e9:.1f}"
    yield f"8 GB more, about as much as all gradients: {peak.parts['gradients'] / 1e9:.2f}"
    assert second - peak.bytes == pytest.approx(peak.parts["gradients"], rel=0.02)
    assert s.peak_memory_bytes == second
    del away[twice]
    yield "Nine others were predicted to within 0.7 %, those with FSDP2 to within 0.3 %"
    assert max(map(abs, away.values())) < 0.007
    assert max(abs(a) for name, a in away.items() if "FSDP" in name) < 0.003


DDP, ROOT = "h200/11-vit_2b-b0032-off-ddp-x2", "FSDP2, root only"


@claims("11_fsdp")
def test_what_notebook_11_says_of_two_gpus_is_so():
    found = by_name()
    two = "vit_2b, 32 images, FSDP on 2 GPUs"
    (off, _), (again, _), (shards, _), (both, _) = (
        found[name]
        for name in (BLOCKS.partition(", check")[0], BLOCKS, two, f"{two}, checkpointing")
    )
    sizes = [s.peak_memory_bytes / 1e9 for s in (off, again, shards, both)]
    one, several = "took {:.1f} GB, and with checkpointing {:.1f}.", "took {:.1f} GB of each, and"
    yield one.format(*sizes)
    yield several.format(sizes[2])
    yield f"in shards with checkpointing {sizes[3]:.1f}. What"
    yield f"{sizes[1]:.1f} GB instead of {sizes[0]:.1f}."
    yield f"took {off.step_ms:.0f} ms without it and {again.step_ms:.0f} ms with it"
    yield f"with it: {again.step_ms / off.step_ms:.2f} times"

    def speed(name):
        return found[name][0].images_per_s

    large, small = (f"{m} images, FSDP on 2 GPUs" for m in ("vit_2b, 32", "vit_600m, 64"))
    kept = [speed(n) / speed(n.replace("FSDP", "DDP")) for n in (small, large)]
    kept.append(speed(f"{large}, checkpointing") / speed(large.replace("FSDP", "DDP")))
    shares = [f"{100 * share:.0f} %" for share in kept]
    yield "`vit_600m` kept {} of DDP's images per second, `vit_2b` {}, and {}".format(*shares)
    more = [
        found[n][0].step_ms - found[n.replace("FSDP", "DDP")][0].step_ms for n in (small, large)
    ]
    yield "added {:.0f} ms to a step of `vit_600m` and {:.0f} ms to one of `vit_2b`".format(*more)


@claims("11_fsdp")
def test_what_notebook_11_says_of_late_hosts_is_so():
    lead = {
        name: [derived.lead_ms(run) for run in log.read_ranks(runs.recorded(f"h200/11-{name}-x2"))]
        for name in ("vit_600m-b0064-off-ddp", "vit_600m-b0064-off-fsdp", "vit_6b-b0064-off-fsdp")
    }
    both, (_, late), large = lead.values()
    yield f"both hosts are {min(both):.0f} ms ahead of their GPUs"
    assert round(min(both)) == round(max(both))
    yield f"one of them is {late:.1f} ms ahead"
    yield f"In `vit_6b` both hosts are {min(large):.0f} ms or more ahead"


@claims("11_fsdp")
def test_what_notebook_11_says_of_the_largest_model_is_so():
    found = by_name()
    case = dict((figures.run_name(s), case) for s, case in figures.cases(runs.recorded(PREDICTED)))
    whole = BEST.removesuffix(", compiled")
    parts = figures.plans.highest(case[whole])[1].parts
    halves = sum(parts[part] for part in ("parameters", "gradients", "optimizer"))
    # One GPU has all of them, and autocast's copies of the weights in place of the gathered ones.
    alone = 2 * halves + parts["activations"] + 2 * case[whole]["parameters"]
    yield f"`vit_6b` with 64 images would need {alone / 1e9:.0f} GB of one H200"
    yield f"with 64 images it would need {alone / 1e9:.0f} GB. In shards"
    speeds = [found[name][0].images_per_s for name in (BEST, whole)]
    yield "compiled at {:.0f} images/s instead of {:.0f}".format(*speeds)
    (large, _), (again, _) = (found[name] for name in (whole, SAVED))
    yield f"and {again.peak_memory_bytes / 1e9:.1f} GB with 32 images and checkpointing"
    assert again.peak_memory_bytes < 80e9
    assert 3 * again.peak_memory_bytes < large.peak_memory_bytes
    yield f"less than a third of the memory, and train {again.images_per_s:.0f} images/s"


@claims("11_fsdp")
def test_what_notebook_11_says_of_the_same_training_on_two_gpus_is_so():
    fp32, bf16 = (
        log.read(runs.recorded(f"h200/11-sharding{kind}-x2")).cases for kind in ("-fp32", "")
    )
    ways = ("DDP", "FSDP2")
    times = [np.median(fp32[way]["step_ms"]) for way in ways]
    yield "a step in float32 took {:.0f} ms with DDP, and {:.0f} with FSDP2".format(*times)
    low, high = min(bf16["FSDP2"]["step_ms"]), max(bf16["FSDP2"]["step_ms"])
    ddp = np.median(bf16["DDP"]["step_ms"])
    yield f"it took {ddp:.0f} ms with DDP, and between {low:.0f} and {high:.0f} with FSDP2"
    yield f"overlaps nothing, and took {np.median(bf16[ROOT]['step_ms']):.0f} ms"
    sent = [sum(c["bytes"] for c in bf16[way]["collectives"]) for way in (ROOT, "FSDP2")]
    assert sent[0] == pytest.approx(0.75 * sent[1], rel=0.01), "three quarters"
    waited = sorted(
        run.cases["FSDP2"]["communication_ms"]
        for run in log.read_ranks(runs.recorded("h200/11-sharding-x2"))
    )
    yield "one process spent {:.0f} ms in its collectives, and the other {:.0f} ms".format(*waited)
    calls = Counter(c["op"] for c in bf16["FSDP2"]["collectives"])
    gathers = f"{calls['all_gather']} all-gathers"
    yield f"{len(bf16['DDP']['collectives'])} all-reduces with DDP, or {gathers}"
    yield f"{gathers} and {calls['reduce_scatter']} reduce-scatters"
    yield "less than 2 millionths apart in float32"
    yield "about one part in a hundred"
    assert 1e-6 < max(case["gradient_away"] for case in fp32.values()) < 2e-6
    assert max(case["gradient_away"] for case in bf16.values()) == pytest.approx(0.01, rel=0.2)


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
    yield f"used {100 * compiled.mfu:.0f} % of what"
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
    shares = [found[f"vit_2b, 32 images, {how} on 2 GPUs"][1].mfu for how in ("FSDP", "DDP")]
    shares = [100 * share for share in (*shares, of_off.mfu)]
    yield "{:.0f} % with FSDP2, {:.0f} % with DDP, {:.0f} % on a single".format(*shares)
    assert best.tflops == max(u.tflops for _, u in found.values())
    (highest, lowest), each = sharded.sm_clock_mhz, sharded.power_w / sharded.size
    yield f"took {each:.0f} W of the 700 that"
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
