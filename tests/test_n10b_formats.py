"""Chapter 10b: fewer bits keep what they say, and its figures say what their logs say."""

import statistics

import matplotlib as mpl
import numpy as np
import pytest
import torch
from claims import claims
from logs import experiment, measure
from programs import experiment_file, load, run_main

mpl.use("Agg")

from dlojz import runs
from dlojz.chapters import n10b_formats as n10b
from dlojz.chapters import session
from dlojz.chapters.n10_kernels import timing
from dlojz.chapters.n10b_formats import bits, figures
from dlojz.runs import log

CPU = torch.device("cpu")
TINY = "--image-size 16 --classes 2 --images-per-class 8 --val-per-class 4 --epochs 2 "
TINY += "--batch-size 8 --layers 1 --width 32"


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small ceilings and operands, in one thread."""
    monkeypatch.setattr(session, "COPY_BYTES", {"cpu": 1 << 16})
    monkeypatch.setattr(session, "MATRIX", {"cpu": 64})
    monkeypatch.setattr(timing, "COLD_BYTES", {"cpu": 1 << 16})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def title(ax):
    return np.ravel(ax)[0].figure.get_suptitle().replace("\n", " ")


# Whole numbers -----------------------------------------------------------------------------------


def test_a_number_is_off_by_at_most_half_a_step_of_its_scale():
    weight = torch.randn(6, 32) * torch.logspace(-3, 3, 6)[:, None]
    for count, per in ((8, "row"), (4, 8), (3, "tensor")):
        values, scale = bits.quantized(weight, count, per)
        off = (bits.restored(weight, count, per) - weight).reshape(values.shape).abs()
        assert (off <= 0.5001 * scale).all()
        assert values.abs().max() == 2 ** (count - 1) - 1


def test_a_row_of_zeros_stays_zero():
    assert bits.restored(torch.zeros(2, 4)).eq(0).all()


def test_a_scale_for_each_row_saves_the_rows_of_small_numbers():
    weight = torch.randn(2, 64) * torch.tensor([[1.0], [1000.0]])
    away = {
        per: session.away([bits.restored(weight, 8, per)[:1]], [weight[:1]])
        for per in ("row", "tensor")
    }
    assert away["row"] < 0.02 < 0.5 < away["tensor"]


def test_packing_is_exact_for_each_pair():
    values = torch.cartesian_prod(*2 * [torch.arange(-8, 8, dtype=torch.int8)])
    pairs = bits.packed(values)
    assert pairs.nbytes * 2 == values.nbytes
    assert torch.equal(bits.unpacked(pairs), values)


def test_products_are_those_of_the_restored_weights():
    x, weight = torch.randn(1, 32), torch.randn(8, 32)
    for count, linear in ((8, bits.linear8), (4, bits.linear4)):
        values, scale = bits.quantized(weight, count)
        values = bits.packed(values) if count == 4 else values
        expected = x @ bits.restored(weight, count).T
        assert torch.allclose(linear(x, values, scale.flatten()), expected, atol=1e-4)


def test_int8_weights_pass_gradients_on_and_have_none():
    layer = bits.Linear8(torch.nn.Linear(8, 4))
    x = torch.randn(3, 8, requires_grad=True)
    layer(x).sum().backward()
    assert torch.allclose(x.grad[0], (layer.weight * layer.scale[:, None]).sum(0))
    assert [name for name, _ in layer.named_parameters()] == ["bias"]
    with pytest.raises(RuntimeError, match="floating point"):
        layer.weight.requires_grad_()


def test_only_linear_layers_change():
    block = torch.nn.TransformerEncoderLayer(16, 2, 32)
    assert [*bits.linears(block)] == ["linear1", "linear2"]
    assert isinstance(bits.replace(block).linear1, bits.Linear8)


# Floats ------------------------------------------------------------------------------------------


def test_formats_are_those_of_the_table():
    assert {name.max for name in map(torch.finfo, (bits.E4M3, bits.E5M2))} == {448, 57344}
    for dtype, least in ((bits.E4M3, 2.0**-9), (bits.E5M2, 2.0**-16)):
        assert torch.tensor(least).to(dtype).float() == least
        assert torch.tensor(least / 4).to(dtype).float() == 0


def test_a_number_beyond_the_range_is_clipped_not_infinite():
    found = bits.cast(torch.tensor([1e6, -1e6]), torch.tensor(1.0), bits.E4M3)
    assert found.float().tolist() == [448, -448]


def test_the_shares_of_a_cast_are_counted():
    scales = load("scales")
    x = torch.tensor([0.0, 1e-9, 1.0, 1000.0])
    away, zeros, clipped = scales.kept(x, torch.tensor(1.0), bits.E4M3).tolist()
    assert (zeros, clipped) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert away == pytest.approx(552 / 1000, rel=1e-3)


def test_a_delayed_scale_does_not_know_its_own_step():
    scales = load("scales")
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    watch = scales.Watch(model, every=1)
    for magnitude in (1.0, 16.0):
        watch()
        model(magnitude * torch.ones(3, 4, requires_grad=True)).sum().backward()
    cases = {(c["tensor"], c["format"], c["scale"]): c for c in watch.cases()}
    assert cases["inputs", "E4M3", "delayed"]["clipped"] == [0, 1]
    assert cases["inputs", "E4M3", "tensor"]["clipped"] == [0, 0]
    assert cases["inputs", "E4M3", "delayed"]["away"][1] == pytest.approx(15 / 16)
    assert cases["gradients", "E5M2", "row"]["steps"] == [0, 1]


def test_the_break_even_does_not_depend_on_the_inputs():
    """M N / (M + N) > 5 P / B, if the product in 8 bits is twice as fast."""
    even = load("break_even")
    speeds = {"memory": 1e3, "wide": 1e6, "8 bits": 2e6}  # 5 P / B is 5,000
    for k in (2048, 65536):
        for n, faster in ((4096, False), (16384, True)):
            shape = (1 << 20, n, k)
            gain = even.predicted("wide", shape, speeds, 2) / even.predicted(
                "current", shape, speeds, 2
            )
            assert (gain > 1) == faster


# The programs ------------------------------------------------------------------------------------


def test_weights_are_timed_and_their_errors_logged(tmp_path):
    run = run_main(
        experiment_file("int8.py"),
        tmp_path,
        *"--widths 32 --batches 4 --width 32 --rounds 2 --eager".split(),
    )
    cases = log.read(run).cases
    assert {case["way"] for case in cases.values()} == {"fp32", "int8", "int4"}
    away = {c["way"]: c["away"] for c in cases.values() if c["batch"] == 1}
    assert away["fp32"] < 1e-6 < away["int8"] < 0.02 < away["int4"] < 0.3
    assert len(n10b.weights(run)) == 3
    n10b.plot_weights(run), n10b.plot_batches(run)
    assert n10b.gain(run) is None


def test_a_trained_model_is_evaluated_by_the_trainer(tmp_path):
    run = run_main(experiment_file("quantized.py"), tmp_path, *f"{TINY} --rounds 2".split())
    cases = log.read(run).cases
    assert cases["int8, accuracy"]["accuracy"] == cases["8 bits, row, seed 0"]["accuracy"]
    away = [cases[f"{n} bits, row, seed 0"]["away"] for n in (8, 6, 5, 4, 3, 2)]
    assert away == sorted(away)
    assert n10b.evaluations(run).rows[-1][0] == "share of the weights in those layers"
    assert "within a point of" in title(n10b.plot_bits(run))


def test_the_tensors_of_a_training_are_cast(tmp_path):
    run = run_main(experiment_file("scales.py"), tmp_path, *f"{TINY} --every 1".split())
    assert len(log.read(run).cases) == 3 * 2 * 5
    table = n10b.formats(run)
    assert [row[0] for row in table.rows] == [
        t for t in ("inputs", "weights", "gradients") for _ in range(6)
    ]
    assert "power of two of room" in title(n10b.plot_delayed(run))


def test_layers_in_fp8_are_timed_beside_their_prediction(tmp_path):
    flags = "--models 16 --images 1 --elements 4096 --rounds 2".split()
    run = run_main(experiment_file("break_even.py"), tmp_path, *flags)
    found = log.read(run)
    layer = found.cases["MLP, first, M 197, N 64, K 16"]
    assert set(layer["ms"]) | set(layer["errors"]) == {"wide", "current", "delayed", "row"}
    assert set(layer["predicted"]) == {"wide", "current", "delayed", "row"}
    assert (len(n10b.casts(run)), len(n10b.sizes(run))) == (4, 3)
    n10b.plot_break_even(run)


def test_products_in_fp8_are_those_of_the_casts():
    even = load("break_even")
    x, weight, *largest = even.operands(16, 32, 48, CPU)
    calls = even.layers(lambda function: function)
    exact = calls["wide"](x, weight)
    for way in ("current", "delayed"):
        assert 0.01 < session.away([calls[way](x, weight, *largest)], [exact]) < 0.06


# The figures -------------------------------------------------------------------------------------


def logged(path, cases, **speeds):
    """The log of cases by name, and of the speeds of a machine."""
    events = [measure(name.replace("_", " "), value, "") for name, value in speeds.items()]
    return experiment(path, *events, *({"event": "case", "case": n, **c} for n, c in cases.items()))


def timed(way, kind, ms, batch=1):
    about = {"way": way, "kind": kind, "width": 1000, "batch": batch, "away": 0.01}
    return {f"{way} {batch}": about | {"ms": [ms, ms]}}


def test_the_title_compares_weights_at_the_largest_width(tmp_path):
    cases = timed("bf16", "bf16", 0.004) | timed("int8, compiled", "int8", 0.002)
    run = logged(tmp_path / "a.jsonl", cases, memory=500.0, matrix_product=1.0)
    assert "relative to bf16: int8, compiled x 2" in title(n10b.plot_weights(run))
    assert n10b.gain(run) == 2
    assert n10b.weights(run).rows[1][-1] == "500"


def test_a_layer_is_faster_in_fp8_or_not(tmp_path):
    case = {"part": "MLP, first", "shape": [64, 64, 64], "errors": {}}
    case |= {"ms": {"wide": [2.0, 2.0], "current": [1.0, 1.0]}}
    case |= {"predicted": {"wide": 3.0, "current": 2.0, "delayed": 1.0, "row": 2.0}}
    assert figures.gains(case, "current") == (1.5, 2)
    speeds = dict.fromkeys(("memory", "matrix_product", "product_in_8_bits"), 1.0)
    ax = n10b.plot_break_even(logged(tmp_path / "a.jsonl", {"a": case}, **speeds))
    assert "predicted to be faster for 1 of 1 layers, faster for 1" in title(ax)


# The recordings ----------------------------------------------------------------------------------


def medians(name, field="way", **wanted):
    """The median milliseconds of a recording's cases, by way."""
    cases = log.read(runs.recorded(f"h100/10b-{name}")).cases.values()
    mine = [c for c in cases if "ms" in c and wanted.items() <= c.items()]
    return {c[field]: statistics.median(c["ms"]) for c in mine}


@claims("10b_formats")
def test_the_gain_of_int8_is_that_of_its_kernel():
    ms = medians("int8", width=8000)
    reads = {
        way: figures.BYTES[way.partition(",")[0]] * 64 / t
        for way, t in ms.items()
        if "torchao" not in way
    }
    gain = ms["bf16"] / ms["int8, compiled"]
    yield f"int8 is {gain:.2f} times as fast as bf16"
    yield "dlojz/chapters/n10b_formats/answers.toml", f"{gain:.2f} times as fast if it is compiled"
    yield f"for int8 reads {reads['int8, compiled']:,.0f} GB/s"
    yield f"and the library's for bf16 {reads['bf16']:,.0f}"
    tuned = [ms, *(medians(f"int8-tuned-{again}") for again in (1, 2, 3))]
    ours, theirs = (
        sorted(found["bf16"] / found[f"{way}, compiled"] for found in tuned)
        for way in ("int8", "torchao int8")
    )
    yield f"Four runs gave {ours[0]:.2f} to {ours[-1]:.2f} times"
    yield f"and {theirs[0]:.2f} to {theirs[-1]:.2f} with the int8 layer of"
    yield f"Eager int8 is {ms['int8'] / ms['bf16']:.1f} times *slower*"
    assert ms["int8"] / ms["bf16"] > 1.5 * 5 / 2, "which explains 2.5"
    yield f"reads only {reads['int4, compiled']:,.0f} GB/s"
    rows = n10b.weights(runs.recorded("h100/10b-int8")).rows
    away = {row[0]: float(row[2].rstrip("%")) for row in rows}
    yield f"{away['int8']} % of the output, of which bf16 itself has {away['bf16']} %"
    yield f"The error is {away['int4']:.0f} % with one scale"


@claims("10b_formats")
def test_the_break_even_is_where_it_was_predicted():
    run = runs.recorded("h100/10b-break-even")
    found = {tuple(c["shape"]): figures.gains(c, "current") for c in figures._layers(run)}
    guessed, true = ([gain[at] > 1 for gain in found.values()] for at in (0, 1))
    right = sum(a == b for a, b in zip(guessed, true, strict=True))
    yield f"predicted to pay for {sum(guessed)} of {len(found)} layers, and pays for {sum(true)}"
    yield f"the prediction is right for {right}"
    assert sum(a and not b for a, b in zip(guessed, true, strict=True)) == 2, "both others"
    rows = [figures.gains(c, "row")[1] for c in figures._layers(run)]
    more = sum(row > gain for row, (_, gain) in zip(rows, found.values(), strict=True))
    yield f"*Row* gains more than *current* in {more} of them"
    best = max(gain for _, gain in found.values())
    speeds = figures._speeds(run)
    yield f"With {speeds['matrix product']:.0f} TFLOP/s and {speeds['memory'] / 1000:.2f} TB/s"
    limit = 5 * 1e3 * speeds["matrix product"] / speeds["memory"]
    assert 1280 < limit < 1305, "about 1,300"
    assert all(gain < 1 for (m, n, _), (_, gain) in found.items() if n < limit or m == 197)
    product = speeds["product in 8 bits"] / speeds["matrix product"]
    yield f"{best:.2f} times the speed of a large layer in FP8"
    most = f"the best layer gains {best:.2f}, and {max(rows):.2f} with one for each row"
    yield f"{most}, where a product without casts gains {product:.2f}"
    late = [figures.gains(c, "delayed") for c in figures._layers(run)]
    pairs = [*zip(late, found.values(), strict=True)]
    assert all(a[0] > b[0] and a[1] < b[1] for a, b in pairs), "and is slower in all"
    yield f"and is slower in all {len(pairs)}"
    results = dict(n10b.sizes(run).rows)
    assert ["works" in result for result in results.values()] == [False, False, True]


@claims("10b_formats")
def test_int8_gains_where_the_product_converts():
    run = runs.recorded("h100/10b-batches")
    cases = log.read(run).cases.values()
    at = {(c["way"], c["batch"]): statistics.median(c["ms"]) for c in cases if "ms" in c}
    assert at["int8, compiled", 1] < at["bf16", 1]
    assert all(at["int8, compiled", n] > at["bf16", n] for _, n in at if n > 1)
    assert "with one row only" in title(n10b.plot_batches(run))
    yield f"takes {at['int8, compiled', 4] / at['bf16', 4]:.1f} times as long as bf16 with four"
    moved = 3 * 4096**2  # one byte is read, two are written
    convert = moved / figures._speeds(run)["memory"] / 1e6
    told = f"{moved / 1e6:.0f} MB take {convert:.3f} ms, and bf16's product {at['bf16', 4]:.3f}"
    yield f"{told}. Both together took {at['int8, compiled', 4]:.3f}"
    assert 0.85 < (convert + at["bf16", 4]) / at["int8, compiled", 4] < 1.15


@claims("10b_formats")
def test_the_bits_of_a_trained_model_are_those_of_the_recording():
    run = runs.recorded("h100/10b-quantized")
    cases = [case for case in log.read(run).cases.values() if "seed" in case]
    found, away = {}, {}
    for case in cases:
        found.setdefault((case["per"], case["bits"]), []).append(case["accuracy"])
        away.setdefault((case["per"], case["bits"]), []).append(case["away"])
    mean = {key: 100 * statistics.mean(values) for key, values in found.items()}
    before, seeds = mean[None, None], found[None, None]
    eight = zip(seeds, found["row", 8], strict=True)
    assert all(abs(a - b) < 0.001 for a, b in eight), "less than a tenth of a point"
    assert all(abs(mean[per, 4] - before) < 0.2 for per in figures.SHARED)
    yield f"within 0.2 points of {before:.1f} % of 2,400 images"
    assert len(seeds) == 3
    three = [before - mean[per, 3] for per in ("tensor", "row")]
    yield f"a scale for the tensor costs {three[0]:.1f} points, and one for each row {three[1]:.1f}"
    two = [mean[per, 2] for per in ("tensor", "row")]
    yield f"{two[0]:.0f} % of the images are still right with the first, and {two[1]:.0f} %"
    yield f"for each 32 numbers of a row {mean['32 numbers', 2]:.0f} % are"
    for bits_ in (8, 6, 5, 4, 3, 2):
        errors = [statistics.mean(away[per, bits_]) for per in ("tensor", "row", "32 numbers")]
        assert errors == sorted(errors, reverse=True)
    speeds = {c["way"]: sorted(c["ms"]) for c in log.read(run).cases.values() if "ms" in c}
    slower = 1 - statistics.median(speeds["bf16"]) / statistics.median(speeds["int8"])
    yield f"Evaluating is {slower:.0%} slower".replace("%", " %")
    wide, narrow = speeds["bf16, compiled"], speeds["int8, compiled"]
    assert narrow[0] < wide[0] < narrow[-1] < wide[-1], "the ranges overlap"
    yield f"hold {n10b.evaluations(run).rows[-1][1].replace('%', ' %')} of this model's weights"


@claims("10b_formats")
def test_formats_and_scales_are_those_of_the_recordings():
    rows = {row[:3]: row[3:] for row in n10b.formats(runs.recorded("h100/10b-scales")).rows}
    scaled = [key for key in rows if key[2] != "none"]
    for name in ("E4M3", "E5M2"):
        off = [float(rows[key][0].rstrip("%")) for key in scaled if key[1] == name]
        yield f"{name}{' is off' * (name == 'E4M3')} by {min(off):.1f} to {max(off):.1f} %"
    _, zeros = rows["gradients", "E4M3", "of the tensor"]
    yield f"{float(zeros.rstrip('%')):.1f} % of them became zero, and none"
    assert rows["gradients", "E4M3", "of each row"][1] == "0.00%"
    assert rows["gradients", "E4M3", "none"][1] == "100.00%"
    yield f"and {float(rows['gradients', 'E5M2', 'none'][1].rstrip('%')):.0f} % in E5M2"
    for place in ("cpu/10b-cpu-scales", "h100/10b-scales"):
        cases = log.read(runs.recorded(place)).cases
        worst = [cases[f"gradients, E5M2, {s}"]["worst"] for s in ("delayed", "tensor")]
        late, now = (100 * max(values) for values in worst)
        on_gpu = f"the worst step had {late:.1f} % instead of {now:.1f}"
        on_cpu = f"an error of {late:.0f} %; with a current scale none had more than {now:.0f}"
        yield on_gpu if place.startswith("h100") else on_cpu
    last = log.read(runs.recorded("h100/10b-scales")).cases["gradients, E5M2, tensor"]["steps"][-1]
    assert 830 <= last <= 840
    ms = medians("break-even", part="cast")
    yield f"{ms['delayed']:.3f} and {ms['current']:.3f} ms"
    yield f"At {3 * 2**26 / ms['delayed'] / 1e6:,.0f} GB/s"
    yield f"would make it {5 * 2**26 / ms['delayed'] / 1e6:,.0f}"
    saved = 1 - ms["delayed, row by row"] / ms["current"]
    assert ms["row"] < ms["delayed, row by row"], "*row* is faster still"
    yield f"it takes {ms['delayed, row by row']:.3f} ms: that is the saving, {100 * saved:.0f} %"
    yield f"{5 * 2**26 / ms['row'] / 1e6:,.0f} GB/s are more than the memory has"


@claims("10b_formats")
def test_the_bend_is_that_of_notebook_10():
    speeds = figures._speeds(runs.recorded("h100/10-intensity"))
    yield f"{speeds['matrix product']:.0f} TFLOP/s and {speeds['memory'] / 1000:.2f} TB/s"
    yield f"At {1000 * speeds['matrix product'] / speeds['memory']:.0f} rows bf16 reaches the bend"
