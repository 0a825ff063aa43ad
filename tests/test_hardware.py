"""Hardware as it is sold: its table, what is computed from it, and what was measured beside it."""

import dataclasses
import re
import shutil
from pathlib import Path

import matplotlib as mpl
import nbformat
import pytest
from claims import claims
from logs import experiment, measure
from programs import load

mpl.use("Agg")
import matplotlib.pyplot as plt
import torch

from dlojz import runs
from dlojz.chapters.n00b_machine import figures
from dlojz.course import UserError
from dlojz.figures import peaks
from dlojz.machine import hardware
from dlojz.runs import log
from dlojz.widgets.answer import ANSWERS
from dlojz.widgets.quiz import QUIZZES

REPOSITORY = Path(__file__).parent.parent
SOLD = {row.name: row for row in hardware.sold()}
V100, A100, MI250X, H100, H200, XEON, EPYC = SOLD.values()


# ---------------------------------------------------------------- the table


def test_each_row_has_its_documents_and_the_day_when_they_were_read():
    for row in [*SOLD.values(), *hardware.tiers()]:
        assert row.sources, row.name
        assert all(re.fullmatch(r"https://[\w.-]+\.\w+/\S+", a) for a in row.sources + row.seen)
        assert row.read.year >= 2026


def test_what_is_not_known_is_absent_and_never_zero():
    for row in [*SOLD.values(), *hardware.tiers()]:
        fields = dataclasses.asdict(row)
        speeds = fields.pop("tflops", {}) | fields.pop("per_cycle", {})
        assert speeds.keys() <= set(figures.FORMATS), row.name
        found = [*fields.values(), *speeds.values()]
        assert all(n > 0 for n in found if isinstance(n, int | float)), row.name
    for row in SOLD.values():
        assert row.kind in ("gpu", "cpu")
        assert not row.derived or (row.units and row.clock_mhz), row.name


def test_a_later_kind_of_memory_is_faster():
    rows = sorted(SOLD.values(), key=lambda row: row.memory_gb_per_s)
    kinds = [row.memory for row in rows]
    assert kinds == ["DDR5", "DDR5", "HBM2", "HBM2e", "HBM2e", "HBM3", "HBM3e"]
    assert figures.rest(rows).rows[-1][2] == "HBM3e"


def test_a_format_of_half_the_bits_is_at_least_as_fast():
    for row in SOLD.values():
        speeds = [row.speed(f) for f in ("fp64", "fp32", "tf32", "fp16", "fp8") if row.speed(f)]
        assert speeds == sorted(speeds), row.name
        assert row.speed("bf16") in (None, row.speed("fp16")) or row.derived
        assert row.speed("int8") in (None, row.speed("fp8")) or not row.speed("fp8")


def test_tensor_cores_are_dense_as_cores_and_clock_say():
    """With sparsity these would be twice what the units can do (operations per cycle and unit)."""
    per_cycle = {"tf32": 2048, "fp16": 4096, "bf16": 4096, "fp8": 8192, "int8": 8192}
    for name, operations in per_cycle.items():
        peak = H100.units * operations * H100.clock_mhz / 1e6
        assert H100.speed(name) == pytest.approx(peak, rel=0.01), name


def test_a_processor_gets_its_peak_from_cores_and_clock():
    assert XEON.speed("fp32") == pytest.approx(48 * 64 * 2.1 / 1000)
    assert EPYC.speed("fp32") == pytest.approx(96 * 32 * 2.4 / 1000)
    assert EPYC.speed("fp8") is None
    assert H100.speed("fp16") == 989.5


def test_the_ridge_is_where_arithmetic_and_memory_take_equally_long():
    assert A100.ridge("fp16") == pytest.approx(312e12 / 2039e9)
    assert V100.ridge("bf16") is None


def test_a_device_is_found_by_torchs_name_and_no_other_is_taken_for_it():
    rows = {
        "NVIDIA H100 80GB HBM3": H100,
        "NVIDIA H100 PCIe": None,
        "NVIDIA H200": H200,
        "NVIDIA H200 NVL": None,
        "NVIDIA A100-SXM4-80GB": A100,
        "NVIDIA A100-SXM4-40GB": None,
        "Tesla V100-SXM2-32GB": V100,
        "Tesla V100-SXM2-16GB": None,
        "AMD Instinct MI250X": MI250X,
        "Intel(R) Xeon(R) Platinum 8468": XEON,
        "Intel(R) Xeon(R) Platinum 8468H": None,
        "AMD EPYC 9654 96-Core Processor": EPYC,
        "AMD EPYC 9654P 96-Core Processor": None,
    }
    assert {device: hardware.same_as(device, list(SOLD.values())) for device in rows} == rows


# ---------------------------------------------------------------- tables and readings


def cells(table, name):
    [row] = [row for row in table.rows if row[0] == name]
    return dict(zip(table.head, row, strict=True))


def test_what_is_not_sold_is_an_empty_cell_and_what_is_derived_is_marked():
    table = figures.speeds(list(SOLD.values()))
    assert cells(table, V100.name)["bf16"] == ""
    assert cells(table, H100.name)["fp8"] == "1,979"
    assert cells(table, XEON.name)["bf16"] == "≈ 103"
    assert cells(table, A100.name)["ridge, operations per byte"] == "153"
    assert cells(figures.rest(list(SOLD.values())), XEON.name)["links GB/s"] == ""
    units = cells(figures.rest([H100]), H100.name)["units, of all"]
    assert units == "132 of 144"


def test_sources_are_links_and_names_are_escaped():
    row = hardware.Tier("a <b>", H100.read, ["https://github.com/me/it/x.md"], ["https://b.org/c"])
    text = figures.Sources([row])._repr_html_()
    assert '<b>a &lt;b&gt;</b>: <a href="https://github.com/me/it/x.md"' in text
    assert ">github.com/me/it</a>; as quoted on 2026-11-23 in <a" in text
    assert "    https://b.org/c" not in repr(figures.Sources([row]))
    assert "as quoted on 2026-11-23 in https://b.org/c" in repr(figures.Sources([row]))


def test_the_readings_follow_from_the_table():
    ridges, halves, growth, links = figures.readings(list(SOLD.values()))
    found = [row.ridge("fp16") for row in (V100, A100, H100, H200)]
    assert found[:3] == sorted(found[:3]), "the ridge moves right"
    assert found[3] < found[2], "and the H200 brings it back"
    assert re.findall(r"\b\d{3}\b(?! \d)", ridges)[0] == f"{found[0]:.0f}"
    assert f"back to {found[3]:.0f}" in ridges
    assert H100.speed("fp16") == H200.speed("fp16"), "the same chip"
    assert f"{494.5 / 67:.1f} times as fast as fp32" in halves
    assert "int8 is no faster than fp16" in halves
    ratios = [float(x) for x in re.findall(r"([\d.]+) times", growth)]
    assert ratios[:5] == sorted(ratios[:5], reverse=True), "what grew most is first"
    assert ratios[0] == round(989.5 / 125, 1)
    assert ratios[5] == round(989.5 / 125 * 300 / 700, 1)
    assert f"{900 / 150:.1f}, {2039 / 300:.1f}, {3350 / 450:.1f}, {4800 / 450:.1f}" in links


def test_the_readings_move_with_the_table():
    other = dataclasses.replace(H100, tflops=H100.tflops | {"fp16": 500})
    rows = [other if row is H100 else row for row in SOLD.values()]
    assert "139, 153, 149" in figures.readings(rows)[0]
    assert "16-bit arithmetic 4.0 times" in figures.readings(rows)[2]


def notebook():
    cells = nbformat.read(REPOSITORY / "solutions/00b_machine.ipynb", as_version=4).cells
    return "\n".join(cell.source for cell in cells)


@claims("00b_machine")
def test_the_numbers_of_the_text_follow_from_the_table():
    memory = H100.memory_gb_per_s / V100.memory_gb_per_s
    arithmetic = H100.speed("fp16") / V100.speed("fp16")
    yield f"grew {arithmetic:.1f} times and the speed of memory {memory:.1f} times"
    whole = f"{H100.units_full} multiprocessors, and {H100.units} of them are sold"
    yield whole
    yield f"SXM, {H100.power_w} W"
    yield "an H100 989 TFLOP/s in fp16, and an H200, which is the same chip, 1,979"
    assert int(H100.speed("fp16")) == 989
    faster = f"{H200.memory_gb_per_s / H100.memory_gb_per_s:.2f} times"
    quiz = QUIZZES["machine-ridge"]
    assert faster in quiz.question
    closing = ANSWERS["00b from the figures"]
    speed = 2 * H100.memory_gb_per_s / 1000
    assert f"{speed:.1f} TFLOP/s, {speed / H100.speed('fp16'):.1%}".replace("%", " %") in closing
    assert faster in closing
    dense = [a for a in QUIZZES["machine-sparsity"].answers if a.right]
    assert dense[0].text == f"{H100.speed('fp8'):,.0f} TFLOP/s"
    assert f"{2 * H100.speed('fp8'):,.0f} TFLOP/s" in QUIZZES["machine-sparsity"].question
    registers, shared = H100.units * H100.registers_per_unit * 4, H100.shared_kb_per_unit * 1024
    assert registers > H100.units * shared, "registers hold more than all shared memory"


@claims("00b_machine")
def test_the_recorded_h200_reaches_what_the_text_says():
    found = peaks.measured(runs.recorded("h200/00-ceilings"))
    assert found.recorded
    row = hardware.same_as(found.device, list(SOLD.values()))
    assert row is H200
    shares = [100 * found.tflops[f] / row.speed(f) for f in found.tflops]
    copy = 100 * found.memory_gb_per_s / row.memory_gb_per_s
    between = f"{min(shares):.0f} to {max(shares):.0f} % of"
    yield f"reached {between} an H200's advertised peak"
    yield f"{between} the peak is a good result for a matmul, and {copy:.0f} % for"
    yield f"within its {row.power_w} W"
    table = [line[-1] for line in figures.shares(found, row).rows]
    assert table == ["76%", "82%", "77%", "80%", "88%"]


def test_the_peak_holds_at_the_clock_that_the_text_says():
    text, per_cycle = notebook(), 4096
    at = f"{H200.units} multiprocessors with {per_cycle:,} operations per cycle make"
    speed = H100.units * per_cycle * H100.clock_mhz / 1e6
    assert H100.speed("fp16") == H200.speed("bf16") == pytest.approx(speed, abs=0.1)
    assert f"{at} {int(speed)} TFLOP/s at {H100.clock_mhz:,} MHz" in text
    (window,) = log.read(runs.recorded("h200/03-resnet50-fp16-nhwc-b0256")).windows
    high, low = window["sm_clock_mhz"]
    assert f"a recorded training ran at {low:,} to {high:,} MHz" in text
    bf16 = peaks.measured(runs.recorded("h200/00-ceilings")).tflops["bf16"]
    shares = [100 * bf16 / H200.speed("bf16") * ratio for ratio in (1, H100.clock_mhz / high)]
    assert "at {:,} the {:.0f} % of bf16 would be {:.0f} %".format(high, *shares) in text
    best = log.read(runs.recorded("h200/11-vit_6b-b0064-off-fsdp-compiled-x2")).ranks
    lowest = min(w["sm_clock_mhz"][1] for run in best for w in run.windows)
    assert f"notebook 11b shows {lowest:,} MHz" in text


@claims("00b_machine")
def test_the_recorded_distances_are_what_the_text_says():
    rows = figures.distances(runs.recorded("h200/00-latency")).rows
    far = {where: (after, speed) for where, after, speed, _ in rows}
    tiny, large = far["the GPU, from pinned memory"]
    yield f"from anywhere in 256 MiB took {far['anywhere in 256 MiB'][0]}. A tiny copy from its "
    yield f"A tiny copy from its pinned memory to the GPU took {tiny}, and a large one went at"
    yield f"and a large one went at {float(large):.0f} GB/s"


# ---------------------------------------------------------------- what was measured


def test_the_measured_row_comes_from_the_log(tmp_path):
    path = experiment(
        tmp_path / "events.jsonl",
        measure("memory", 1600.0, "GB/s"),
        measure("matrix product", 250.0, "TFLOP/s", variant="bf16"),
        measure("matrix product", 120.0, "TFLOP/s", variant="tf32"),
    )
    found = peaks.measured(path)
    assert found.tflops == {"bf16": 250, "tf32": 120}
    assert found.memory_gb_per_s == 1600
    assert found.label == "NVIDIA A100-SXM4-80GB, measured here"
    table = figures.shares(found, hardware.same_as(found.device, list(SOLD.values())))
    assert [row[2:] for row in table.rows] == [
        ("120", "156", "77%"),
        ("250", "312", "80%"),
        ("1,600", "2,039", "78%"),
    ]
    row = cells(figures.speeds([], [found]), found.label)
    assert (row["bf16"], row["memory GB/s"]) == ("250", "1,600")


def test_torch_sees_one_of_two_dies(tmp_path):
    path = experiment(
        tmp_path / "e.jsonl", measure("matrix product", 150, "TFLOP/s", variant="fp16")
    )
    [row] = figures.shares(peaks.measured(path), MI250X).rows
    assert row[2:] == ("150", "191.5", "78%")


def test_an_unknown_device_is_measured_and_has_no_share(tmp_path):
    path = experiment(tmp_path / "e.jsonl", measure("memory", 20, "GB/s"), device="Some CPU")
    found = peaks.measured(path)
    assert hardware.same_as(found.device, list(SOLD.values())) is None
    assert figures.shares(found, None).rows == [("copy in memory", "GB/s", "20", "", "")]


def test_a_run_that_measured_nothing_is_an_error(tmp_path):
    with pytest.raises(UserError, match="nothing was measured"):
        peaks.measured(experiment(tmp_path / "e.jsonl"))


def test_each_device_is_drawn_at_its_memory_and_its_speeds(tmp_path):
    path = experiment(tmp_path / "e.jsonl", measure("memory", 1600, "GB/s"),
                 measure("matrix product", 250, "TFLOP/s", variant="bf16"))  # fmt: skip
    ax = figures.plot_ridges([A100, H100], [peaks.measured(path)])
    bends = [line.get_xydata()[0] for line in ax.lines if line.get_marker() == "o"]
    assert [tflops for _, tflops in bends] == [312, 250, 989.5]
    assert [x for x, _ in bends] == pytest.approx([153.02, 156.25, 295.37], abs=0.01)
    names = [t.get_text() for t in ax.texts]
    assert names == ["A100: 153", "NVIDIA A100-SXM4-80GB, measured here: 156", "H100: 295"]
    roof = ax.lines[0].get_xydata()
    slope, level = roof[roof[:, 1] < 312], roof[roof[:, 0] > 154]
    assert slope[:, 1] == pytest.approx(2.039 * slope[:, 0])
    assert set(level[:, 1]) == {312}
    assert (
        ax.figure.get_suptitle().replace("\n", " ")
        == "The ridge is at 153 (A100) to 295 operations per byte (H100)"
    )


# ---------------------------------------------------------------- how far data is


@pytest.fixture(scope="module")
def latency():
    return load("latency")


def test_a_chain_visits_every_line_once_and_comes_back(latency):
    torch.manual_seed(0)
    block = latency.chain(64 << 10)
    base, at, seen = block.data_ptr(), block.data_ptr(), set()
    for _ in range(1024):
        seen.add(at)
        at = block[(at - base) // 8].item()
    assert at == base
    assert seen == {base + 64 * i for i in range(1024)}


def test_blocks_grow_twice_in_each_doubling(latency):
    assert [size >> 10 for size in latency.sizes(70 << 10)] == [16, 24, 32, 48, 64]


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
def test_the_loops_follow_the_chain_and_add_up(latency, tmp_path):
    found = latency.loops(tmp_path)
    block = latency.chain(16 << 10)
    base = block.data_ptr()
    assert found.chase(base, 1) == block[0].item()
    assert found.chase(base, 256) == base, "once round"
    assert found.total(torch.arange(10).data_ptr(), 10, 3) == 3 * 45


def test_without_a_compiler_that_works_there_are_no_loops(latency, tmp_path, monkeypatch):
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    assert latency.loops(tmp_path) is None
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert latency.loops(tmp_path) is None


CACHES = [
    {"level": 1, "bytes": 48 << 10, "many": 2, "threads": 1},
    {"level": 2, "bytes": 2 << 20, "many": 2, "threads": 1},
]


def far(path, compiled=True, **storage):
    loads = {16 << 10: 1.0, 64 << 10: 4.0, 96 << 10: 5.0, 1 << 20: 6.0, 8 << 20: 90.0}
    both = [measure("load", ns, "ns", x=x) for x, ns in loads.items()]
    both += [measure("read in order", 100 / ns, "GB/s", x=x) for x, ns in loads.items()]
    processor = {"event": "case", "case": "processor", "caches": CACHES, "compiled": compiled}
    stored = {"event": "case", "case": "storage", **storage}
    return experiment(path, *(both if compiled else []), processor, stored)


def test_a_caches_row_is_from_blocks_that_fit_it_and_not_the_one_before(tmp_path):
    stored = {"type": "ext4", "operations_per_s": 50_000, "read_bytes_per_s": 2e9, "direct": True}
    rows = figures.distances(far(tmp_path / "e.jsonl", **stored), hardware.tiers()[:1]).rows
    assert [row[:3] for row in rows] == [
        ("L1, 48 KiB", "1 ns", "100"),
        ("L2, 2 MiB", "5 ns", "20"),  # 64 KiB is not twice the L1
        ("anywhere in 8 MiB", "90 ns", "1.11"),
        ("a small file on ext4, cached", "20 µs", ""),
        ("a large file on ext4", "", "2"),
        ("first cache of a processor", "0.5 ns", ""),
    ]
    assert rows[4][3] == "measured here, past the page cache"


def test_the_figure_marks_the_caches_and_says_what_it_lacks(tmp_path):
    left, right = figures.plot_latency(far(tmp_path / "e.jsonl"))
    assert [t.get_text() for t in left.texts] == [" L1", " L2"]
    assert left.lines[0].get_ydata().tolist() == [1, 4, 5, 6, 90]
    assert right.lines[0].get_ydata().tolist() == [100, 25, 20, pytest.approx(16.7, 0.01),
                                                   pytest.approx(1.11, 0.01)]  # fmt: skip
    left, _ = figures.plot_latency(far(tmp_path / "e.jsonl", compiled=False))
    assert "no C++ compiler" in left.figure.get_supxlabel()
    plt.close("all")


def test_the_experiment_is_what_the_figure_reads(ran):
    table = figures.distances(ran("latency", "--largest", "1", "--rounds", "1"))
    assert table.rows[-1][0].startswith("a large file on ")
    if shutil.which("g++"):
        assert any(row[0].startswith("anywhere in 1 MiB") for row in table.rows)


# ---------------------------------------------------------------- anatomy


def facts(**changes):
    cpu = {"model": "Xeon", "cores": 4, "threads": 8, "instructions": ["AVX2", "AVX-512", "AMX"]}
    base = {"cpu": cpu | {"caches": CACHES}, "memory": {"total_bytes": 10**10}, "torch": {}}
    return base | {"gpu": {"cards": []}} | changes


def test_a_processors_parts_are_beside_those_of_an_h100():
    table = figures.anatomy(facts(), H100)
    here = {part: text for part, text, _ in table.rows}
    assert here["units"] == "4 cores, each with 16 fp32 numbers in an instruction"
    assert here["at once"] == "8 threads, 2 on a core"
    assert here["last cache"] == "L2 2 MiB"
    assert here["matrix units"] == "AMX"
    assert here["power"] == ""
    sold = {part: text for part, _, text in table.rows}
    assert sold["at once"].endswith(f": {132 * 2048:,} threads")
    assert sold["registers"] == "33 MiB in all, 256 KiB on each"


def test_a_gpus_parts_come_from_torch_and_nvml():
    device = {"name": "X1", "units": 10, "warp": 32, "threads_per_unit": 2048, "clock_khz": 1e6}
    device |= {"registers_per_unit": 65536, "shared_bytes_per_unit": 228 << 10}
    device |= {"cache_bytes": 50 << 20, "memory_bytes": 80 * 10**9}
    card = {"name": "X1", "clock_mhz": 1980, "power_limit_w": 650.0}
    found = facts(torch={"devices": [device]}, gpu={"cards": [card]})
    here = {part: text for part, text, _ in figures.anatomy(found, H100).rows}
    assert here["at once"] == "64 warps of 32 threads on each: 20,480 threads"
    assert here["registers"] == "2.5 MiB in all, 256 KiB on each"
    assert (here["clock"], here["power"]) == ("1,980 MHz", "650 W, the limit set")
    assert here["memory"] == "80 GB"
    assert "matrix units" not in {part for part, text in here.items() if text}
    own = {part: text for part, text, _ in figures.anatomy(found, H100, H100).rows}
    assert own["units"] == "10 multiprocessors, of 144 on the whole die"
    assert own["matrix units"] == "40 tensor cores, 4 on each"
    assert own["memory"] == "80 GB, sold with 3,350 GB/s"
    die = {part: text for part, text, _ in figures.anatomy(found, H100, MI250X).rows}
    assert die["memory"] == "80 GB, sold with 1,638 GB/s", "half of the package's"


def test_what_a_gpu_does_not_say_is_an_empty_cell():
    device = dict.fromkeys(("threads_per_unit", "registers_per_unit", "shared_bytes_per_unit"))
    device |= {"name": "Instinct", "units": 110, "warp": 64, "clock_khz": None}
    device |= {"cache_bytes": 8 << 20, "memory_bytes": 64 * 10**9}
    here = {p: t for p, t, _ in figures.anatomy(facts(torch={"devices": [device]}), H100).rows}
    assert here["registers"] == here["clock"] == here["power"] == ""
    assert here["units"] == "110 multiprocessors"


# ---------------------------------------------------------------- the ceilings


def test_the_ceilings_are_measured_in_the_formats_of_this_device(monkeypatch):
    roofline = load("roofline")
    cpu = torch.device("cpu")
    for names, expected in ((["AVX2"], ("fp32",)), (["AVX2", "AMX"], ("fp32", "bf16"))):
        monkeypatch.setattr(roofline.facts, "cpu", lambda names=names: {"instructions": names})
        assert roofline.formats(cpu) == expected
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    assert roofline.formats(torch.device("cuda")) == ("fp32", "fp16")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert roofline.formats(torch.device("cuda")) == ("fp32", "tf32", "fp16", "bf16")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert roofline.formats(torch.device("cuda")) == ("fp32", "fp16", "bf16")
