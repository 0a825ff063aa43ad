"""The figures of chapter 10 say what their logs say."""

import kernel_logs
import matplotlib as mpl
import numpy as np
import pytest
from logs import experiment, measure, with_cases, write_log

mpl.use("Agg")

from dlojz import runs
from dlojz.chapters import n10_kernels as n10
from dlojz.chapters.n10_kernels import figures
from dlojz.course import UserError


def title(ax):
    return np.ravel(ax)[0].figure.get_suptitle()


def arrows(ax):
    return [text for text in ax.texts if text.arrow_patch]


def labels(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_an_operation_is_limited_by_the_lower_of_two_roofs():
    assert figures.attainable(2, 100, 0.3) == pytest.approx(200)
    assert figures.attainable(5, 100, 0.3) == pytest.approx(300)


def test_operations_are_drawn_under_their_roof(tmp_path):
    run = kernel_logs.intensity(tmp_path / "intensity.jsonl")
    ax = n10.plot_intensity(run)
    assert "Below 200 operations per byte memory is the limit: of 1 of these 2" in title(ax)
    assert labels(ax) == ["what is possible", "elementwise", "matrix product"]
    table = n10.intensities(run)
    assert [row[2] for row in table.rows] == ["0.25", "316"]
    assert [row[-1] for row in table.rows] == ["90%", "90%"]
    assert table.rows[0][3].startswith("675 (")


def test_a_roof_is_that_of_reading_where_that_is_faster_than_a_copy(tmp_path):
    events = [measure("memory", 10.0, "GB/s"), measure("reading", 14.0, "GB/s")]
    run = experiment(tmp_path / "a.jsonl", *events)
    assert figures._measured(run)["memory"] == 14
    assert figures._measured(kernel_logs.softmax(tmp_path / "b.jsonl"))["memory"] == 3000


def test_the_parts_of_a_card_are_those_that_were_read(tmp_path):
    table = n10.parts(kernel_logs.intensity(tmp_path / "intensity.jsonl"))
    assert ("multiprocessors", "132") in table.rows
    assert table.rows[-1] == ("programs of a multiprocessor, at most", "32")
    assert len(table) == len(kernel_logs.CARD) + 1


def test_softmaxes_are_compared_by_the_bytes_that_must_move(tmp_path):
    run = kernel_logs.softmax(tmp_path / "softmax.jsonl")
    ax = n10.plot_softmax(run)
    assert "Rows of 4,096: Triton is 4.5 times as fast as five operations, at 90%" in title(ax)
    assert set(labels(ax)) == {*figures.SOFTMAXES, "a large copy"}
    table = n10.softmaxes(run, 256)
    assert table.rows[0][:3] == ("PyTorch", "5", "2.15 GB")
    assert table.rows[0][-2:] == ("2.0", "1.0")
    with pytest.raises(UserError, match=r"no rows of 7 in this run: expected one of \[256, 4096\]"):
        n10.softmaxes(run, 7)


def test_a_result_that_is_no_number_is_told(tmp_path):
    case = {"way": "naive", "columns": 8, "kernels": 1, "error": [0.0, float("nan")], "rows": 2}
    table = n10.softmaxes(with_cases(tmp_path / "a.jsonl", {"a": case}))
    assert table.rows[0][-1] == "NaN"


def test_the_path_on_the_roofline_has_an_arrow_to_each_next_way(tmp_path):
    (ax,) = n10.plot_path(kernel_logs.softmax(tmp_path / "softmax.jsonl"))
    assert len(arrows(ax)) == 2, "not from Triton to online, whose points coincide"
    assert "arrows: PyTorch, then compiled, then Triton" in ax.figure.get_supxlabel()
    assert "need 4.0 times fewer bytes" in title(ax)
    assert {"PyTorch: 80%", "Triton: 90%"} < {text.get_text() for text in ax.texts}
    (alone,) = n10.plot_path(kernel_logs.softmax(tmp_path / "cpu.jsonl", on_gpu=False))
    assert len(arrows(alone)) == 1


def test_the_path_of_the_longest_rows_is_beside_that_of_the_middle_ones():
    axes = n10.plot_path(runs.recorded("h100/10-softmax"))
    assert [ax.get_title("left") for ax in axes] == [
        "16,384 rows of 4,096 numbers",
        "256 rows of 262,144 numbers",
    ]
    assert [len(arrows(ax)) for ax in axes] == [1, 3]


def test_what_a_kernel_asks_of_memory_is_told_for_each_number(tmp_path):
    run = kernel_logs.softmax(tmp_path / "cpu.jsonl", on_gpu=False)
    assert n10.asked(run).rows == [
        ("Triton", "16", "16", "16", "4", "4"),
        ("online", "16", "32", "16", "8", "4"),
    ]
    assert "had a GPU" in repr(n10.asked(kernel_logs.softmax(tmp_path / "gpu.jsonl")))


@pytest.mark.parametrize(
    ("warps", "registers", "shared", "expected"),
    [
        (16, 24, 64, (4, "threads")),
        (32, 53, 128, (1, "registers")),  # 56 of them, for each of 1,024 threads
        (1, 18, 0, (32, "programs")),
        (4, 32, 100_000, (2, "shared memory")),
    ],
)
def test_programs_share_a_multiprocessor_until_something_runs_out(
    warps, registers, shared, expected
):
    case = {"warps": warps, "registers": registers, "shared_bytes": shared}
    assert figures.resident(case, kernel_logs.CARD) == expected


def test_occupancy_is_a_share_of_the_threads(tmp_path):
    run = kernel_logs.softmax(tmp_path / "softmax.jsonl")
    table = n10.occupancy(run, kernel_logs.intensity(tmp_path / "intensity.jsonl"))
    assert table.rows[0] == ("Triton, 256", "16", "24", "0", "4", "100%", "threads")
    card = kernel_logs.intensity(tmp_path / "again.jsonl")
    assert [row[0] for row in n10.occupancy(run, card, [4096]).rows] == [
        "Triton, 4,096",
        "online, 4,096",
    ]


def test_a_kernel_gains_more_than_its_step(tmp_path):
    run = kernel_logs.normalize(tmp_path / "normalize.jsonl")
    assert n10.kernel_gain(run) == pytest.approx(4)
    ms = 256 * 3 * 224 * 224 * 3 / kernel_logs.MEMORY / 1e6  # of the floor
    step = write_log(tmp_path / "step" / "events.jsonl", device=True)  # 100 ms
    assert n10.step_gain(run, step.parent) == pytest.approx(100 / (100 - 3 * ms), rel=1e-6)
    alone = kernel_logs.normalize(tmp_path / "cpu.jsonl", on_gpu=False)
    assert n10.kernel_gain(alone) is None
    assert n10.step_gain(alone, step.parent) is None


def test_normalizations_are_drawn_by_batch(tmp_path):
    ax = n10.plot_normalize(kernel_logs.normalize(tmp_path / "normalize.jsonl"))
    assert title(ax) == (
        "The kernels alone, 256 images: compiled x 3.6, your kernel x 4, relative to PyTorch's two"
    )
    assert {"loop: x 0.1", "PyTorch", "Triton: x 4", "dotted: kernels alone"} < {*labels(ax)}
    dotted = [line for line in ax.lines if line.get_linestyle() == ":" and len(line.get_xdata())]
    assert len(dotted) == 4
    alone = n10.plot_normalize(kernel_logs.normalize(tmp_path / "cpu.jsonl", on_gpu=False))
    assert title(alone).startswith("256 images: compiled x 3.")
    assert "your kernel" not in title(alone)
    assert not [line for line in alone.lines if line.get_linestyle() == ":"]


def test_points_that_hide_each_other_have_one_text(tmp_path):
    cases = {
        name: {"operation": name, "kind": "reduction", "flops": flops, "bytes": 8, "ms": [1, 1, 1]}
        for name, flops in (("max pool", 8.5), ("layer norm", 8.0), ("ReLU", 1.0))
    }
    ax = n10.plot_intensity(kernel_logs.written(tmp_path / "a.jsonl", cases))
    assert {text.get_text() for text in ax.texts} == {"ReLU", "layer norm, max pool"}


def test_a_large_number_has_no_exponent():
    assert [figures._digits(n) for n in (445_437.2, 0.25, 1977.6)] == ["445,400", "0.25", "1,978"]


def test_an_interpreted_kernel_has_no_time(tmp_path):
    table = n10.normalizations(kernel_logs.normalize(tmp_path / "cpu.jsonl", on_gpu=False))
    assert table.rows[-1] == ("Triton", "4", "1", "interpreted", "-", "1.00")
    table = n10.softmaxes(kernel_logs.softmax(tmp_path / "softmax.jsonl", on_gpu=False))
    assert table.rows[-1][:5] == ("online", "1", "-", "interpreted", "-")


def test_fewer_operations_take_less_time_but_not_as_much_less(tmp_path):
    axes = n10.plot_shapes(kernel_logs.shapes(tmp_path / "shapes.jsonl"))
    first, second = title(axes).splitlines()
    assert first == (
        "1,024 channels: depthwise has 1,024 times fewer operations, and takes 1/4 of the time"
    )
    assert second.startswith("16 narrow layers take 3 times as long")
    assert len(axes[1].patches) == 3


def test_the_dispatcher_has_no_code_for_some_operands(tmp_path):
    cases = {
        "a": {"asked": "x * 2", "of": "float32", "keys": ["CPU", "ADInplaceOrView"]},
        "b": {"asked": "x * 2", "of": "float8", "keys": ["CPU"]},
    }
    cases["a"] |= {"operations": ["aten::mul"], "result": "float32", "answered": True}
    cases["b"] |= {"operations": [], "result": "not implemented", "answered": False}
    table = n10.dispatched(with_cases(tmp_path / "a.jsonl", cases))
    assert table.rows == [
        ("x * 2", "float32", "CPU", "1", "float32"),
        ("x * 2", "float8", "CPU", "none", "not implemented"),
    ]


def test_a_build_is_told_with_its_speed_and_with_what_broke(tmp_path):
    cases = {
        "build": {"what": "build", "language": "C++", "first_s": 8.4},
        "ours": {"what": "time", "least": 3e9, "ms": [1000.0, 1500.0, 3000.0]},
        "transposed": {"what": "input", "result": "right"},
        "again": {"what": "again", "again_s": 0.008},
    }
    assert n10.inlined(with_cases(tmp_path / "a.jsonl", cases)).rows == [
        ("first build, C++", "8.4 s"),
        ("speed: ours", "2 GB/s (1 to 3)"),
        ("input: transposed", "right"),
        ("the same in another process", "0.008 s"),
    ]


@pytest.mark.parametrize(
    "call", [n10.plot_intensity, n10.plot_softmax, n10.plot_normalize, n10.inlined, n10.dispatched]
)
def test_the_log_of_another_experiment_is_refused(call, tmp_path):
    run = with_cases(tmp_path / "a.jsonl", {"a": {"losses": [1.0]}})
    with pytest.raises(UserError, match=r"expected a run of experiments/\w+\.py"):
        call(run)


def test_the_source_of_a_function_is_shown_with_its_decorator():
    kernel = n10.source("_online")
    assert kernel.startswith("@triton.jit\ndef _online(")
    assert kernel.endswith("mask=places < columns)")
    assert n10.source("naive").startswith("def naive(x):")
    assert "__global__" in n10.source("IN_CUDA")
    with pytest.raises(UserError, match="no function 'nothing' in this chapter"):
        n10.source("nothing")


def test_bytes_that_a_gpu_counted_are_drawn_as_passes_over_all_numbers(tmp_path):
    passes = {"PyTorch": (5, 2.9), "Triton": (5.2, 4.6), "online": (2, 0.9)}
    cases = {
        way: {"way": way, "columns": 4096, "once": 100, "read": 100 * read, "written": 100 * write}
        for way, (read, write) in passes.items()
    }
    (ax,) = n10.plot_counters(with_cases(tmp_path / "a.jsonl", cases))
    assert "kernel moves 4.9 times the bytes that must, the online one 1.4 times" in title(ax)
    assert [bar.get_width() for bar in ax.patches] == pytest.approx([5, 2.9, 5.2, 4.6, 2, 0.9])
