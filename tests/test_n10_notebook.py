"""What notebook 10 and its answers say of recordings is in the recordings."""

import statistics
import tomllib
from functools import cache

import pytest
import torch
from claims import claims

from dlojz import course, runs
from dlojz.chapters.n10_kernels import amdahl, figures
from dlojz.chapters.n10_kernels import shapes_and_strings as shapes
from dlojz.runs.stats import summary
from dlojz.traces import breakdown
from dlojz.traces.trace import open_trace


def recorded(what):
    return runs.recorded(f"h100/10-{what}")


@cache
def operations():
    cases = figures.intensities_of(recorded("intensity")).cases.values()
    return {case["operation"]: case for case in cases}


@cache
def speeds(columns):
    """The median GB/s of each softmax, for rows of this length."""
    cases = figures._softmaxes(recorded("softmax"), columns)
    return {way: figures._speed(case) for way, case in cases.items()}


@cache
def triton(columns):
    return figures._softmaxes(recorded("softmax"), columns)["Triton"]


def copying(what):
    """The GB/s of a large copy, in the job of a recording."""
    return figures._measured(recorded(what))["memory"]


def of_the_roof(name):
    best, case = figures._measured(recorded("intensity")), operations()[name]
    roof = figures.attainable(case["flops"] / case["bytes"], best["memory"], best["matrix product"])
    return figures.rate(case, "flops")[1] / roof


@claims("10_kernels")
def test_the_first_figure_has_two_operations_at_the_roof():
    shares = {name: of_the_roof(name) for name in operations()}
    top = {name for name, share in shares.items() if share > 0.97}
    assert top == {"ReLU", "dense convolution 3 x 3"}
    ms = {name: statistics.median(case["ms"]) for name, case in operations().items()}
    one, many = (1000 * ms[f"linear, batch {n}"] for n in (1, 512))
    yield f"end after {one:.0f} and {many:.0f} µs"
    assert min(shares, key=shares.get) == "max pool 3 x 3"
    x = torch.randn(1, 1, 4, 4, dtype=torch.bfloat16)
    out, places = torch.ops.aten.max_pool2d_with_indices(x, [3, 3], [1, 1], [1, 1])
    counted = x.element_size() + out.element_size()
    yield f"in {places.element_size()} bytes, and so moves"
    yield f"moves {(counted + places.element_size()) / counted:.0f} times as much"


@claims("10_kernels")
def test_the_intensity_on_paper_is_that_of_the_job():
    case = operations()["linear, batch 512"]
    yield f"{case['flops'] / 1e9:.1f} GFLOP and {case['bytes'] / 1e6:.1f} MB"
    yield f"{case['flops'] / case['bytes']:.0f} operations per byte"


@claims("10_kernels")
def test_one_kernel_gains_by_the_bytes():
    cases = figures._softmaxes(recorded("softmax"), 4096)
    moved = cases["PyTorch"]["moved"] / cases["Triton"]["moved"]
    assert moved == pytest.approx(4, abs=0.01)
    assert cases["PyTorch"]["kernels"] == 5
    yield "they move four times the bytes"
    gain = speeds(4096)["Triton"] / speeds(4096)["PyTorch"]
    yield f"a softmax became {gain:.1f} times as fast"
    own = 100 * speeds(4096)["Triton"] / speeds(4096)["compiled"] - 100
    yield f"one kernel is {own:.0f} % faster than the compiler's"
    assert speeds(4096)["PyTorch"] * moved > 0.8 * copying("softmax"), "not far from the roof"


@claims("10_kernels")
def test_a_row_that_is_too_long_is_spilled():
    lengths = figures._lengths(recorded("softmax"))
    first = next(n for n in lengths if triton(n)["spills"])
    yield f"From {first:,} numbers on, a whole row is too long"
    slower = next(n for n in lengths if speeds(n)["Triton"] < speeds(n)["PyTorch"])
    assert slower == 131072
    online = [speeds(n)["online"] for n in lengths if n >= 256]
    assert 0.6 < online[-1] / max(online) < 2 / 3
    yield "with long rows it loses more than a third of its speed"
    assert figures._softmaxes(recorded("softmax"), slower)["online"]["spills"] == 0


@claims("10_kernels")
def test_half_of_the_occupancy_is_enough_or_too_much():
    card = figures._measured(recorded("intensity"))
    programs = {n: figures.resident(triton(n), card)[0] for n in (256, 512, 131072)}
    held = card["threads of a multiprocessor, at most"]
    share = {n: programs[n] * 32 * triton(n)["warps"] / held for n in programs}
    assert (share[256], share[512], share[131072]) == (0.5, 1, 1)
    yield f"rows of 256 with {share[256]:.0%} are as fast".replace("%", " %")
    assert speeds(256)["Triton"] == pytest.approx(speeds(512)["Triton"], rel=0.01)
    yield f"each thread {triton(131072)['registers']} registers"
    assert programs[131072] == 2
    assert speeds(131072)["Triton"] < min(speeds(n)["Triton"] for n in (32768, 65536))


@claims("10_kernels")
def test_the_gpu_counts_what_is_spilled_and_read_again():
    cases = figures.counters_of(recorded("counters")).cases
    read = {name: case["read"] / case["once"] for name, case in cases.items()}
    assert read["online, 131072 columns"] == pytest.approx(2, abs=0.1)
    assert read["online, 4096 columns"] == pytest.approx(1, abs=0.05), "a cache has the row"
    assert speeds(8192)["online"] < 0.92 * speeds(4096)["online"] < speeds(4096)["Triton"]
    assert read["torch.softmax, 131072 columns"] > 2.5
    spilled = cases["Triton, 131072 columns"]
    assert spilled["read"] + spilled["written"] > 4 * 2 * spilled["once"]
    yield "and spills the rest"


@claims("10_kernels")
def test_the_prediction_has_the_numbers_of_the_recordings():
    yield f"a copy moves {copying('normalize') / 1000:.0f} TB/s"
    step = summary(runs.recorded("h100/03-resnet50-bf16-nhwc-b0256"))
    yield f"takes about {step.step_ms:.0f} ms"
    assert step.arguments["precision"] == "bf16"
    saved = 256 * 3 * 224 * 224 * (11 - 3) / copying("normalize") / 1e6
    gain = 100 * saved / (step.step_ms - saved)
    yield f'predict(\\"10 step\\", gain_percent={gain:.1f})'
    yield f'predict(\\"10 kernel\\", ratio={11 / 3:.1f})'


@claims("10_kernels")
def test_a_kernel_of_ones_own_could_gain_what_the_trace_tells():
    trace = open_trace(runs.recorded("h100/04-trace-fault-none"))
    step = breakdown.analyse(trace).step_ms
    spent = {amdahl.short(name): ms for name, (_, ms) in breakdown.named(trace).items()}
    assert float(amdahl.gains(trace).rows[-1][3]) / step == pytest.approx(2 / 3, abs=0.01)
    rest = {n: ms for n, ms in spent.items() if n in {row[0] for row in amdahl.gains(trace).rows}}
    assert max(rest.values()) / step < 0.14
    yield "no single one is more than 14 %"
    order = [row[0] for row in amdahl.gains(trace).rows]
    assert all(name.startswith("batch_norm") for name in order[:3])
    relu = ("CUDAFunctor_add", "launch_clamp_scalar", "threshold_kernel_impl")
    for name in relu:
        yield f"`{name}`"
    yield f"take {sum(spent[name] for name in relu) / step:.0%}.".replace("%", " %")


@claims("10_kernels")
def test_fewer_operations_take_less_time_but_not_as_much_less():
    run = recorded("shapes")
    dense, depthwise, chains = (
        shapes._shapes(run, kind) for kind in ("dense", "depthwise", "as many operations")
    )
    ms = {n: shapes._span(case)[1] for n, case in dense.items()}
    fewer = dense[1024]["flops"] / depthwise[1024]["flops"]
    saved = ms[1024] / shapes._span(depthwise[1024])[1]
    assert fewer > 50 * saved
    assert depthwise[1024]["bytes"] > 0.9 * dense[1024]["bytes"]
    assert figures._speed({"least": depthwise[1024]["bytes"], **depthwise[1024]}) > 2000
    assert ms[32] <= ms[16]
    assert ms[64] > 1.5 * ms[32]
    wide, deep = chains[1024], chains[256]
    yield f"{deep['layers']} narrow layers move {deep['bytes'] / wide['bytes']:.1f} times the bytes"


@claims("10_kernels")
def test_a_build_takes_seconds_and_three_results_are_wrong():
    cases = shapes.inlined_of(recorded("inline")).cases
    yield f"the first build took {cases['build']['first_s']:.1f} s"
    yield f"another process {1000 * cases['again']['again_s']:.0f} ms"
    own, torchs = (figures.rate(cases[name])[1] for name in ("ours", "torch.relu"))
    yield f"The kernel reached {own / torchs:.0%} of the speed of torch's ReLU".replace("%", " %")
    results = [case["result"] for case in cases.values() if case["what"] == "input"]
    assert sum(text.startswith("wrong, without an error") for text in results) == 3
    yield "Three wrong results came without one"
    assert "until lock is removed" in cases["the lock of a killed job"]["result"]


@claims("10_kernels")
def test_the_mean_of_segments_has_code_for_floats_only():
    cases = shapes.answers_of(recorded("dispatch")).cases
    means = {c["of"]: c["answered"] for c in cases.values() if c["asked"] == "segment mean"}
    assert means == {"float32": True, "int8": False}
    assert not cases["x * 2, float8"]["answered"]
    yield "`segment_reduce`, for floats only"


def test_the_online_kernel_is_close_to_a_roof_of_three_passes():
    path = course.course_root() / "dlojz/chapters/n10_kernels/answers.toml"
    answer = tomllib.loads(path.read_text())["10 from the figures"]
    online = speeds(262144)["online"]
    share = f"{1.5 * online / copying('softmax'):.0%}".replace("%", " %")
    assert answer.startswith(f"{online:,.0f} GB/s count two passes")
    assert f"{round(1.5 * online, -2):,.0f} GB/s: {share} of a copy's" in answer.replace("\n", " ")
    assert speeds(4096)["online"] == pytest.approx(speeds(4096)["Triton"], rel=0.02)


@claims("10_kernels")
def test_the_kernel_gains_by_its_bytes_and_by_their_speed():
    run = recorded("normalize")
    cases = {c["way"]: c for c in figures._timed(run) if c["batch"] == 256}
    own, eager = (figures._speed(cases[way], "kernel_ms") for way in ("Triton", "PyTorch"))
    yield f"The kernel gains more than the {11 / 3:.1f} that its bytes predict"
    assert figures.kernel_gain(run) > 11 / 3
    own, eager = own / copying("normalize"), eager * 11 / 3 / copying("normalize")
    yield f"at {own:.0%} of a copy's speed, PyTorch's two kernels at {eager:.0%}".replace("%", " %")
    assert (cases["PyTorch"]["kernels"], cases["compiled"]["kernels"]) == (2, 1)
    ms = {way: statistics.median(case["kernel_ms"]) for way, case in cases.items()}
    slower = ms["compiled"] / ms["Triton"] - 1
    yield f"only {slower:.0%} slower than yours".replace("%", " %")
    launched = {way: statistics.median(c["ms"]) - ms[way] for way, c in cases.items()}
    assert launched["compiled"] > 1.5 * launched["Triton"], "guards"
    step = runs.recorded("h100/03-resnet50-bf16-nhwc-b0256")
    assert 1 < figures.step_gain(run, step) < 1.005
    few = next(c for c in figures._timed(run) if (c["way"], c["batch"]) == ("Triton", 4))
    assert statistics.median(few["ms"]) > 10 * statistics.median(few["kernel_ms"])
