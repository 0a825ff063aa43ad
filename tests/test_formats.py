"""Number formats are what torch says, and the figures show what was measured."""

import json
import subprocess
import sys

import matplotlib as mpl
import pytest
import torch
import torchvision
from claims import claims
from logs import experiment, measure, write_log
from programs import load

from dlojz import runs
from dlojz.chapters import n02b_formats as n02b
from dlojz.chapters.n02_amp import figures
from dlojz.chapters.n02_amp.figures import FORMATS
from dlojz.runs import log
from dlojz.runs.stats import summary
from dlojz.widgets.answer import ANSWERS

TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture
def measured(tmp_path):
    """measured({unit: {(what, x, variant): value}}) -> the log of an experiment with these."""

    def write(units):
        measures = [
            {"event": "measure", "unit": unit, "value": value}
            | dict(zip(("what", "x", "variant"), where, strict=False))
            for unit, values in units.items()
            for where, value in values.items()
        ]
        return experiment(tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl", *measures)

    return write


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


# Computed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TORCH)
def test_a_format_is_what_torch_says(name):
    f, info = FORMATS[name], torch.finfo(TORCH[name])
    assert (f.largest, f.spacing) == (info.max, info.eps)
    assert 2.0**f.normal == info.smallest_normal
    assert f.bytes * 8 == info.bits
    smallest = torch.tensor([2.0**f.subnormal], dtype=torch.float64).to(TORCH[name])
    assert smallest > 0
    assert (smallest / 2 == 0).all()


def test_tf32_has_the_range_of_bf16_and_the_steps_of_fp16():
    assert FORMATS["tf32"].largest_exponent == FORMATS["bf16"].largest_exponent
    assert FORMATS["tf32"].spacing == FORMATS["fp16"].spacing


@pytest.mark.parametrize("scale", [-8, 0, 16, 40])
def test_the_fate_of_numbers_is_what_rounding_does_to_them(scale):
    numbers = 2.0 ** torch.empty(20_000, dtype=torch.float64).uniform_(-40, 10)
    counts = load("underflow").by_exponent(numbers)
    assert sum(counts.values()) == len(numbers)
    rounded = (numbers * 2.0**scale).half()
    found = figures.fate(counts, FORMATS["fp16"], scale)
    few = (rounded.abs() < 2.0**-14) & (rounded != 0)
    # Numbers that are rounded up to the next power of two are 0.0005 of those near it.
    assert found.zero == pytest.approx((rounded == 0).double().mean().item(), abs=1e-3)
    assert found.subnormal == pytest.approx(few.double().mean().item(), abs=1e-3)
    assert found.infinite == pytest.approx(rounded.isinf().double().mean().item(), abs=1e-3)


def test_a_step_is_skipped_if_the_scale_falls_after_it():
    assert figures.skipped([8, 4, 4, 8, 4]) == [0, 3]
    assert figures.skipped([8]) == []


def test_an_unknown_unit_is_named_with_those_that_were_measured(measured):
    with pytest.raises(ValueError, match=r"no 'kg' among \['m'\]"):
        figures.points(measured({"m": {("a", 1): 2}}), "kg")


def test_a_run_without_a_first_step_has_no_dtypes_and_says_so(tmp_path):
    for run in (tmp_path, write_log(tmp_path / "r.jsonl")):
        assert repr(figures.dtypes(run)) == "nothing was seen: the run ended before its first step"


def test_the_dtypes_of_a_run_are_counted_by_layer(tmp_path):
    conv = {"layer": "Conv2d", "in": "bfloat16", "out": "bfloat16", "count": 3}
    seen = {
        "when": "probe",
        "layers": [conv | {"in_layout": "NCHW"}, conv | {"in_layout": "any", "count": 4}],
        "logits": {"dtype": "bfloat16"},
        "loss": {"dtype": "float32"},
        "parameters": {"dtypes": {"float32": 5}},
        "gradients": {"dtypes": {"float32": 5}},
        "optimizer_state": {"float32": 5},
    }
    text = repr(figures.dtypes(write_log(tmp_path / "r.jsonl", evidence=seen)))
    assert "7 x Conv2d                bfloat16  bfloat16" in text
    assert "the loss                  bfloat16  float32" in text


# Experiments ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "stops"), [("fp32", 4096), ("fp16", 2048), ("bf16", 256)])
def test_counting_by_ones_stops_where_the_next_number_is_two_away(name, stops):
    sums = dict(load("formats").sum_in(TORCH[name], torch.ones(1, 4096)))
    assert sums[4096] == stops


def test_a_small_update_is_lost_in_bf16_and_not_in_fp32():
    weights, gradients = [torch.ones(10)], [torch.ones(10)]
    unchanged = load("underflow").unchanged
    assert unchanged(weights, gradients, 0.001, torch.bfloat16) == 1
    assert unchanged(weights, gradients, 0.1, torch.bfloat16) == 0
    assert unchanged(weights, gradients, 0.001, torch.float32) == 0
    none = [torch.tensor([0.0, 1.0])]
    assert unchanged([torch.ones(2)], none, 0.1, torch.bfloat16) == 0, (
        "a zero gradient is no update"
    )


def test_a_parameter_takes_12_or_16_bytes_with_autocast_and_without(ran):
    run = ran("footprint", "--model", "squeezenet1_1", "--image-size", "64")
    parts = figures.points(run, "bytes per parameter")
    copies = dict(zip(*parts.pop("weights in 16 bits, during a step"), strict=True))
    totals = {}
    for names, values in parts.values():
        for name, value in zip(names, values, strict=True):
            totals[name] = totals.get(name, 0) + value
    assert [totals[f"{r}, SGD"] for r in ("fp32", "autocast", "pure bf16")] == [12, 12, 6]
    assert [totals[f"{r}, Adam"] for r in ("fp32", "autocast", "pure bf16")] == [16, 16, 8]
    assert copies["autocast, SGD"] == pytest.approx(2, abs=0.1)
    assert copies["fp32, SGD"] == pytest.approx(0, abs=0.1)
    images = {n: v[0] for n, (_, v) in figures.points(run, "activations (bytes per image)").items()}
    assert images["autocast"] == pytest.approx(images["fp32"] / 2, rel=0.2)


def test_a_transformer_has_a_footprint_without_its_initial_weights(ran):
    """Torch 2.15 looks at what it draws for them, and a fake tensor has no values."""
    _, weights = figures.points(ran("footprint", "--model", "vit_b_32"), "bytes per parameter")[
        "weights"
    ]
    assert set(weights) == {4, 2}


def test_sizes_are_measured_around_the_given_one(ran):
    (xs, values), *others = figures.points(ran("sizes", "--size", "64"), "TFLOP/s").values()
    assert xs[0] == 48
    assert 65 in xs
    assert min(values) > 0
    assert bool(others) == torch.cuda.is_available()


# Figures -------------------------------------------------------------------------------------


def test_the_formats_are_drawn_with_all_their_bits():
    ax = figures.plot_formats()
    widths = [p.get_width() for p in ax.patches]
    assert sum(widths) == 8 * (4 + 4 + 2 + 2)
    assert "65,504" in "".join(text.get_text() for text in ax.texts)


def test_the_underflow_is_told_before_and_after_scaling(measured):
    run = measured({"gradients": {("activations", -30): 30, ("activations", -10): 70}})
    axes = figures.plot_underflow(run)
    assert legend(axes[0]) == ["of activations: 30.00% become zero, 0% lose bits"]
    assert legend(axes[1]) == ["of activations: 0.00% become zero, 0% lose bits"]
    assert "of activations: 0.00% become zero, 0% lose bits, 70.0% are infinite" in legend(
        figures.plot_underflow(run, scale_exponent=30)[1]
    )


def test_skipped_steps_are_marked(measured):
    scales = {("scale", step): scale for step, scale in enumerate((8.0, 4.0, 4.0))}
    ax = figures.plot_scale(measured({"loss scale": scales}))
    assert list(ax.lines[1].get_xdata()) == [0, 1], "as many marks as steps"
    assert ax.figure.get_suptitle() == "1 of 2 steps skipped"
    assert [list(line.get_xdata()) for line in ax.lines][-1] == [0]


def test_sums_updates_and_reductions_are_lines_and_bars(measured):
    sums = {(n, x): x for n in TORCH for x in (1, 2)}
    shares = {(n, x): 0.5 for n in TORCH for x in (0.1, 1.0)}
    parts = {(n, x, w): 0.1 for n in ("fp16", "bf16") for w in ("allowed", "refused")
             for x in (1, 2)}  # fmt: skip
    run = measured(
        {
            "sum of ones": sums,
            "relative error of a dot product": sums,
            "weight, 0.001 less each step": sums,
            "share of weights that a step does not change": shares,
            "relative error of a matrix product": parts,
        }
    )
    assert [len(ax.lines) for ax in figures.plot_sums(run)] == [3, 3]
    lines, bars = figures.plot_updates(run, run)
    assert (len(lines.lines), len(bars.patches)) == (3, 6)
    assert len(figures.plot_reductions(run).lines) == 4
    sizes = measured({"TFLOP/s": {("fp16", 15): 1.0, ("fp16", 16): 2.0}})
    axes = figures.plot_sizes([sizes, sizes])
    assert list(axes[0].get_xticks()) == [16]


def test_multiples_of_8_are_coloured(tmp_path):
    events = [
        *(measure("channels", 1000.0 * c, "GFLOP/s", x=c) for c in (255, 256)),
        *(measure("batch", 10.0 * b, "images/s", x=b) for b in (7, 8, 9)),
    ]
    axes = n02b.plot_multiples(experiment(tmp_path / "m.jsonl", *events))
    assert [ax.get_ylabel() for ax in axes] == ["TFLOP/s", "images/s"]
    assert [p.get_height() for p in axes[0].patches] == [255, 256]
    colours = [p.get_facecolor() == mpl.colors.to_rgba(n02b.EIGHTS) for p in axes[1].patches]
    assert colours == [False, True, False]


def test_an_experiment_of_sizes_that_failed_says_where_to_look(tmp_path):
    with pytest.raises(ValueError, match=r"nothing was measured; see the job's stderr.txt"):
        n02b.plot_multiples(experiment(tmp_path / "m.jsonl"))


def test_the_footprint_is_stacked(measured):
    units = {
        "bytes per parameter": {
            **{(part, "fp32, SGD"): 4.0 for part in ("weights", "gradients", "optimizer")},
            ("weights in 16 bits, during a step", "fp32, SGD"): 2.0,
        },
        "activations (bytes per image)": {("fp32",): 5e6},
    }
    left, right = figures.plot_footprint(measured(units))
    assert left.texts[0].get_text().strip() == "14.0"
    assert right.patches[0].get_width() == 5


def test_memory_is_split_into_what_is_fixed_and_what_a_batch_adds(tmp_path):
    runs = [
        write_log(tmp_path / f"{b}.jsonl", batch=b, device=True,
                  memory={"device_peak_bytes": 10**9 + b * 10**7})
        for b in (64, 128)
    ]  # fmt: skip
    ax = figures.plot_memory({"fp32": runs})
    assert [p.get_width() for p in ax.patches] == pytest.approx([1.0, 2.56])
    assert "1.00 + 2.6 GB; 10.0 MB an image" in ax.texts[0].get_text()
    with pytest.raises(ValueError, match="fp16: expected completed runs of two batch sizes"):
        figures.plot_memory({"fp16": runs[:1]})


def test_each_precision_has_its_bar_and_what_did_not_fit_has_none(tmp_path):
    end = {"outcome": "out_of_memory", "time": "2026-01-02T03:05:05", "error": "CUDA out of memory"}
    fp32, fp16 = ({"device": True, "arguments": {"precision": p}} for p in ("fp32", "fp16"))
    runs = [
        write_log(tmp_path / "a.jsonl", steps=0, window=None, end=end, **fp32),
        write_log(tmp_path / "b.jsonl", **fp16),
    ]
    speed, energy = figures.plot_precisions(runs)
    assert [p.get_height() for p in speed.patches] == [summary(runs[1]).images_per_s]
    assert len(energy.patches) == 0
    assert legend(speed) == ["fp32", "fp16"]


def test_a_fused_update_is_one_call_and_reads_nothing(ran):
    cases = log.read(ran("updates", "--model", "squeezenet1_1", "--rounds", "2")).cases
    assert cases["fused, without a scaler"]["launches"] == 1
    weights = len(list(torchvision.models.squeezenet1_1().parameters()))
    for scaler, reads in (("without", 0), ("with", 1)):
        alone = cases[f"one by one, {scaler} a scaler"]
        assert alone["launches"] >= 2 * weights
        assert alone["reads"] == cases[f"in groups, {scaler} a scaler"]["reads"] == reads
        assert cases[f"fused, {scaler} a scaler"]["reads"] == 0
    assert all(len(case["host_ms"]) == 2 for case in cases.values())


@pytest.mark.parametrize("device", [True, False])
def test_the_ways_to_update_are_drawn_by_host_and_by_device(device, tmp_path):
    path = write_log(tmp_path / "r.jsonl", steps=0, window=None, device=device)
    slow = {"host_ms": [21, 22, 29], "whole_ms": [23, 23, 23], "work_ms": [20, 20, 20]}
    fast = {"host_ms": [1, 1, 1], "whole_ms": [22, 22, 22], "work_ms": [20, 20, 20]}
    cases = {"in groups": slow | {"launches": 1500, "reads": 1}}
    cases["fused"] = fast | {"launches": 1, "reads": 0}
    with path.open("a") as file:
        for name, case in cases.items():
            file.write(json.dumps({"event": "case", "case": name} | case) + "\n")
    ax = figures.plot_ways(path)
    widths = [bar.get_width() for bar in ax.patches]
    assert widths == ([22, 1, 3, 2] if device else [22, 1])
    told = [text.get_text().strip() for text in ax.texts]
    if device:
        assert told == ["1,500 kernels, the host waits", "1 kernel"]
    else:
        assert told == ["1,500 operations, a number is read", "1 operation"]


SWITCHES = """
import torch
matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
print(matmul.allow_tf32, cudnn.allow_tf32, matmul.fp32_precision, cudnn.conv.fp32_precision)
matmul.fp32_precision = "tf32"
try:
    print(matmul.allow_tf32)
except RuntimeError as error:
    print("mix of the legacy and new APIs" in str(error))
"""


def test_the_switches_of_tf32_are_as_notebook_02b_says():
    """In a fresh process: they are the defaults of torch."""
    out = subprocess.run(
        [sys.executable, "-c", SWITCHES], capture_output=True, text=True, check=True
    )
    assert out.stdout.split("\n")[:2] == ["False True none tf32", "True"]


def test_special_numbers_are_recognised_by_their_exponent():
    exponents = {row[0].split(",")[0]: row[2] for row in n02b.bits().rows}
    assert {name for name, bits in exponents.items() if bits == "00000"} == {"0", "2⁻²⁴"}
    assert {name for name, bits in exponents.items() if bits == "11111"} == {"infinity", "NaN"}
    assert n02b.bits().rows[4][1:] == ("0", "11110", "1" * 10)


@claims("02b_formats")
def test_sizes_of_a_network_cost_what_notebook_02b_says():
    found = log.read(runs.recorded("h100/03-multiples")).measures
    speed = {(m.what, m.x): m.value for m in found}
    assert speed["channels", 257] < 0.5 * speed["channels", 256]
    assert speed["channels", 264] < speed["channels", 256]
    yield "the speed is less than half. Even 264 does not reach 256"
    batches = {x: v for (what, x), v in speed.items() if what == "batch"}
    yield f"{100 - 100 * min(batches.values()) / max(batches.values()):.0f} % at most"
    assert batches[264] < batches[257]
    yield "not in favour of multiples of 8"
    assert 2.7 < speed["classes", 1000] / speed["classes", 1001] < 3
    yield "1,001 cost nearly three times as much as 1,000"
    gains = [speed["classes", 50304] / speed["classes", 50257]]
    gains += [speed["channels", size] / speed["channels", 257] for size in (264, 256)]
    for gain in gains:
        assert f"{gain:.1f} times" in ANSWERS["02b from the figures"]
