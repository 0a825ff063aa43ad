import json
import math
import re
import statistics
from collections import Counter

import pytest
from claims import claims
from logs import with_cases, write_log
from programs import load
from traces import CONV, LOADER, NCCL, PAGEABLE, RELU, Made, busy, steps, with_a_wait

from dlojz import cli, course, runs
from dlojz.chapters import n04b_roofline as n04b
from dlojz.chapters.n04_profiler import figures
from dlojz.figures import peaks, timeline
from dlojz.figures.look import KINDS, PALETTE
from dlojz.runs import log, stats
from dlojz.runs.columns import PHASES
from dlojz.runs.folder import trace_file
from dlojz.traces import breakdown, host, kinds, trace


@pytest.fixture
def file(tmp_path):
    return with_a_wait("aten::item").write(trace_file(tmp_path))


def labels(ax):
    return ax.get_legend_handles_labels()[1]


def bars(ax, row, name):
    """[(begin, width)] of what is drawn under this name in a row."""
    found = [c for c in ax.collections if c.get_label() == name]
    boxes = [path.get_extents() for c in found for path in c.get_paths()]
    return [(b.x0, b.width) for b in boxes if b.y0 < row < b.y1]


def test_a_step_is_drawn_from_its_begin_with_the_host_above_the_device(file):
    ax = timeline.plot_step(file, 0)
    assert [t.get_text() for t in ax.get_yticklabels()] == ["host", "GPU 0 stream 7"]
    assert bars(ax, 1, kinds.MATRIX) == [(pytest.approx(0.3), pytest.approx(5.7))]
    assert bars(ax, 0, "the host waits") == [(pytest.approx(1.1), pytest.approx(5))]
    assert ax.figure.get_suptitle().startswith("synchronisation bound: a step of")
    assert "NVIDIA H100" in ax.figure.get_supxlabel()


def test_what_a_step_asked_for_is_its_own_whenever_it_is_done(tmp_path):
    made = Made()
    made.step(0, 0, 5)
    made.launch(4, 7, 9)
    made.step(1, 5, 10)
    made.launch(6, 9, 12)
    path = made.write(tmp_path / "t.json")
    assert bars(timeline.plot_step(path, 0), 1, kinds.MATRIX) == [(7, 2)]
    assert bars(timeline.plot_step(path, 1), 1, kinds.MATRIX) == [(4, 3)]


def test_a_step_that_is_not_there_is_an_error(file):
    with pytest.raises(ValueError, match="no step 2: the trace has 2, from 0"):
        timeline.plot_step(file, 2)


def test_holes_are_drawn_as_holes(tmp_path):
    made = Made()
    made.step(0, 0, 25)
    for i in range(1000):
        made.launch(0.025 * i, 0.025 * i, 0.025 * i + 0.005, (CONV, RELU)[i % 2])
    ax = timeline.plot_step(made.write(tmp_path / "t.json"))
    for kind in (kinds.MATRIX, kinds.REST):
        assert sum(width for _, width in bars(ax, 1, kind)) == pytest.approx(2.5)


def test_each_kind_has_a_colour_of_its_own():
    colours = [*KINDS.values(), *(PALETTE[phase] for phase in PHASES)]
    assert len(set(colours)) == len(colours)
    assert set(KINDS) == set(kinds.KINDS)
    assert set(breakdown.WORDS) <= set(timeline.LOST)


def test_the_shares_of_a_step_make_one(tmp_path, file):
    made = steps((CONV, 2, 6), (NCCL, 4, 10), host=[(LOADER, 0, 2)])
    path = made.write(tmp_path / "t.json")
    for each in (file, path):
        found = breakdown.analyse(trace.read(each))
        shares = [*timeline._computed(found).values(), *found.lost.values()]
        assert sum(shares) == pytest.approx(1)
    assert found.lost == {kinds.COMMUNICATION: pytest.approx(0.4), host.DATA: pytest.approx(0.2)}
    ax = timeline.plot_shares({"a": file, "b": path})
    read = "waits: results that the host reads"
    assert {read, "waits: data", "waits: communication"} <= set(labels(ax))
    assert "communication bound" in {t.get_text() for t in ax.texts}


def test_a_copy_that_is_waited_for_is_lost_and_not_drawn_as_work_too(tmp_path):
    made = steps((PAGEABLE, 0, 5), (CONV, 5, 10))
    found = breakdown.analyse(trace.read(made.write(tmp_path / "t.json")))
    assert timeline._computed(found) == {kinds.MATRIX: pytest.approx(0.5), "copies": 0}


def test_the_tables_tell_what_the_trace_shows(tmp_path, file):
    text = str(timeline.times(file))
    assert "matrix products and convolutions" in text
    assert "100% of it on tensor cores" in text
    assert re.search(
        r"\.item\(\) +trainer.py, train_step \(from line 151\)", str(timeline.waits(file))
    )
    made = busy()
    made.launch(5, 20, 22, PAGEABLE)
    text = str(timeline.times(made.write(tmp_path / "t.json")))
    assert "from memory that is not pinned" in text
    assert "the host waits nowhere" in str(timeline.waits(tmp_path / "t.json"))


def test_on_a_processor_the_operations_are_below_the_host(tmp_path):
    made = Made()
    made.step(0, 0, 10)
    made.host("cpu_op", "aten::conv2d", 0, 6)
    ax = timeline.plot_step(made.write(tmp_path / "t.json"))
    assert [t.get_text() for t in ax.get_yticklabels()] == ["host", "operations"]
    assert bars(ax, 1, kinds.MATRIX) == [(0, pytest.approx(6))]


def test_a_roofline_has_each_layer_at_its_intensity(tmp_path):
    layer = {"kind": "Conv2d", "input": [1, 3, 8, 8], "count": 2}
    layers = [
        layer | {"flops": 2e9, "bytes": 1e7, "ms": 4.0},
        layer | {"kind": "ReLU", "flops": 1e6, "bytes": 8e6, "ms": 2.0},
    ]
    events = [
        {"event": "measure", "what": "memory", "value": 10.0, "unit": "GB/s"},
        {"event": "measure", "what": "matrix product", "value": 0.05, "unit": "TFLOP/s"},
        {"event": "case", "case": "layers", "layers": layers},
    ]
    file = write_log(tmp_path / "events.jsonl", steps=0, window=None)
    with open(file, "a") as out:
        out.writelines(json.dumps(e) + "\n" for e in events)
    ax = n04b.plot_roofline(file)
    convolution, relu = ax.collections
    assert convolution.get_offsets().tolist() == [[200, 500]], "FLOP for a byte, GFLOP/s"
    assert relu.get_offsets().tolist() == [[0.125, 0.5]]
    assert labels(ax)[1:] == ["Conv2d: 67%", "ReLU: 33%"], "what takes most is first"
    roof = ax.lines[0]
    assert roof.get_ydata().max() == pytest.approx(50)
    assert roof.get_ydata()[0] == pytest.approx(10 * roof.get_xdata()[0])


def test_a_roofline_of_many_kinds_leaves_none_out():
    layers = [{"kind": f"L{i}", "count": 1, "ms": 10.0 - i} for i in range(9)]
    kinds = n04b.figures._by_kind(layers)
    assert list(kinds) == ["L0", "L1", "L2", "L3", "L4", "others"]
    assert sum(map(len, kinds.values())) == 9


def test_a_run_without_a_trace_says_how_to_get_one(tmp_path):
    program = tmp_path / "program"
    program.mkdir()
    (program / "trainer.py").write_text("print('a program of ones own')")
    with pytest.raises(trace.TraceError, match="`dlojz watch` writes one of any program"):
        trace.open_trace(program)
    with pytest.raises(trace.TraceError, match="submitted with --profile"):
        trace.open_trace(tmp_path)


def test_the_command_tells_and_draws(file, tmp_path, capsys):
    assert cli.main(["trace", str(file), "--png", str(tmp_path / "t.png")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("synchronisation bound")
    assert ".item()" in out
    assert "the host waits for the device (certain): in each step" in out
    assert (tmp_path / "t.png").stat().st_size > 5000
    assert cli.main(["trace", str(tmp_path / "t.png")]) == 2
    assert 'no "traceEvents" in it' in capsys.readouterr().err


@pytest.mark.filterwarnings("error")  # matplotlib warns if decorations leave the axes no room
def test_many_causes_leave_the_bars_their_room():
    names = ("cpu/04-cpu-trace-sleep", "cpu/04-cpu-trace-garbage", "h100/04-trace-fault-one-worker")
    folders = [course.course_root() / "reference" / name for name in names]
    ax = timeline.plot_shares({folder.name: next(folder.glob("trace*")) for folder in folders})
    ax.figure.canvas.draw()
    assert ax.get_position().width > 0.6


def test_the_operations_that_wait_are_those_that_need_a_value_or_a_copy(ran):
    needs = dict(figures.host_waits(ran("host_waits")).rows)
    assert needs["x.sum().item()"] == needs["if x.sum() > 0:"] == "a number"
    assert needs["x[mask]"] == needs["x.unique()"] == needs["torch.where(mask)"] == "a size"
    assert needs["torch.where(mask, x, 0.0)"] == needs["x.masked_fill(mask, 0.0)"] == "nothing"
    assert needs["x.cpu()"] == "a copy"


@pytest.mark.parametrize(
    ("error", "waited"), [("called a synchronizing CUDA operation", True), ("", False)]
)
def test_on_a_gpu_torch_says_where_the_host_waits(monkeypatch, error, waited):
    """As far as a machine without one can tell: the switch is replaced, and what it raises."""
    modes, module = [], load("host_waits")
    monkeypatch.setattr(module.torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(module.torch.cuda, "synchronize", lambda: None)

    def operation(x, mask, host):
        assert modes == ["error"]
        if error:
            raise RuntimeError(error)

    assert module.waits(operation, "cpu") == waited
    assert modes == ["error", "default"]


def test_what_a_gpu_said_of_each_operation_is_a_column(tmp_path):
    cases = {"a": {"needs": "a number", "waits": True}, "b": {"needs": "nothing", "waits": False}}
    rows = figures.host_waits(with_cases(tmp_path / "waits.jsonl", cases)).rows
    assert rows == [("a", "a number", "waits"), ("b", "nothing", "goes on")]


@claims("04_profiler")
def test_on_an_h200_exactly_the_lines_waited_that_need_something():
    cases = log.read(runs.recorded("h200/04-host-waits")).cases.values()
    assert [case["waits"] for case in cases] == [case["needs"] != "nothing" for case in cases]
    assert [case["waits"] for case in cases][-6:] == [True] + 5 * [False]
    yield "The last five lines"
    yield "On an H200 exactly the lines above them waited."


@claims("04b_roofline")
def test_what_notebook_04b_says_of_the_recorded_averages_is_so():
    recorded = runs.recorded("h200/04-averages")
    assert log.read(recorded).start["arguments"]["batch_size"] == 128
    rows = log.read(recorded).cases["by name and shapes"]["rows"]
    whole = sum(row["ms"] for row in rows)
    normal = sum(row["ms"] for row in rows if "batch_norm" in row["op"])
    sides = Counter()
    for row in rows:
        if "convolution" in row["op"] and row["ms"]:
            backward = row["op"] == "aten::convolution_backward"  # its first input is a gradient
            sides[row["shapes"][1 if backward else 0][2]] += row["ms"]
    ms = sum(sides.values())
    yield f"The convolutions take {ms:.1f} of {whole:.1f} ms"
    yield f"{sides[224]:.1f} ms at 224 px, {sides[56]:.1f} at 56, {sides[28]:.1f} at 28, "
    yield f"{sides[14]:.1f} at 14 and {sides[7]:.1f} at 7"
    yield f"with 3 channels in, takes {100 * sides[224] / ms:.0f} %"
    yield f"batch normalization: {normal:.1f} ms, {normal / ms:.1f} times as much as all"
    forward = [row for row in rows if row["op"] == "aten::native_batch_norm"]
    gb = sum(2 * math.prod(row["shapes"][0]) * row["calls"] for row in forward) / 1e9
    tb = peaks.measured(runs.recorded("h200/00-ceilings")).memory_gb_per_s / 1000
    yield f"{gb:.2f} GB, read and written eight times"
    yield f"copies {tb:.1f} TB/s"
    yield f"that would be {8 * gb / tb:.1f} ms"
    step = stats.summary(runs.recorded("h200/03-resnet50-bf16-nhwc-b0128")).step_ms
    yield f"a *whole* step with as many images takes {step:.1f} ms"
    first, last = sides[224] + sides[56], sides[14] + sides[7]
    assert first == pytest.approx(last, rel=0.1), "neither guess is right"
    shown = n04b.averages(recorded, by_shape=True, only="convolution").rows
    assert all("convolution" in name for name, *_ in shown)
    assert len(shown) == 8


@claims("04b_roofline")
def test_what_notebook_04b_says_of_the_recorded_segments_is_so():
    cases = log.read(runs.recorded("h200/04-segments")).cases
    ms = {name: statistics.median(case["ms"]) for name, case in cases.items()}
    two, best = ms.pop("two scatter_add_"), min(ms.values())
    ceilings = peaks.measured(runs.recorded("h200/00-ceilings"))
    times = two / 1000 * 1e9 * ceilings.memory_gb_per_s / (20_000 * 32 * 4)
    spent = cases["two scatter_add_"]["ms"]
    yield f"two `scatter_add_` took {two:.2f} ms, "
    yield f"the best of the other ways {100 * (1 - best / two):.0f} % less"
    yield f"the slowest took {max(spent) / min(spent):.1f} times as long as the fastest"
    yield f"In {two:.2f} ms that GPU's memory could bring the rows {round(times, -2):.0f} times"
    loop = ms["loop of sums"] / best
    yield f"the loop took {loop:.0f} times as long there as the fastest way"
    yield "on an H200 the loop over segments took more than a hundred times as long"
    assert loop > 100


def test_operations_are_summed_up_by_name_and_by_shapes(ran):
    run = ran("averages", *"--model resnet18 --image-size 32 -b 2".split())
    by_name = {row[0]: row[1:] for row in n04b.averages(run, most=200).rows}
    assert by_name["native_batch_norm"][0] == "20", "of a ResNet-18, in a step"
    by_shape = n04b.averages(run, by_shape=True, most=200).rows
    forward = [row for row in by_shape if row[0] == "native_batch_norm"]
    assert sum(float(calls) for _, _, calls, *_ in forward) == 20
    assert "2x64x16x16 64" in [inputs for _, inputs, *_ in forward], "the first one"
    times = [float(ms) for *_, ms, _ in by_shape]
    assert times == sorted(times, reverse=True)
