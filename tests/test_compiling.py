"""Experiments and figures of notebook 09: fusion, graphs and their faults, break-even."""

import math
import os
import shutil

import matplotlib as mpl
import pytest
import torch
from logs import experiment, measure, with_cases
from programs import experiment_file, load, run_main

from dlojz import runs
from dlojz.chapters.n09_compile import figures
from dlojz.course import UserError
from dlojz.runs import log


def chain(eager_ms, compiled_ms, elements=1024, **more):
    """A case of experiments/pointwise.py, measured twice."""
    case = {"function": "2 sin", "elements": elements, "compile_s": 1.5}
    case |= {"launches": {"eager": 2, "compiled": 1}, "bytes": {"eager": 4e9, "compiled": 2e9}}
    case |= {"eager_ms": [eager_ms] * 2, "compiled_ms": [compiled_ms] * 2, "source": ""}
    return case | more


def way(step_ms, first_s=None):
    """A case of experiments/compile_time.py, which took these seconds to compile cold."""
    seen = first_s and {"first_s": [first_s, 0, 0, 0], "graphs": 1, "kernels": 7}
    warm = seen and seen | {"first_s": [first_s / 10, 0, 0, 0]}
    return {"step_ms": [step_ms] * 9, "cold": seen, "warm": warm}


# The experiments, for real -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    """The cases of experiments/graphs.py, run once."""
    folder = run_main(experiment_file("graphs.py"), tmp_path_factory.mktemp("graphs"))
    torch.compiler.reset()
    return folder


def test_each_fault_leaves_its_traces_and_its_repair_none(graphs):
    cases = log.read(graphs).cases
    names = [name for name, case in cases.items() if "calls" in case]
    count = {n: (cases[n]["graphs"], len(cases[n]["recompiles"])) for n in names}
    assert count.pop("branch on data")[0] > 1
    assert count.pop("print")[0] > 1
    assert count.pop("Python counter") == (8, 7)
    assert count.pop("four batch sizes") == (2, 1)
    assert count.pop("train and eval") == (2, 1)
    assert len(count) == 5
    assert set(count.values()) == {(1, 0)}, "the clean model, and each repair"


def test_a_break_is_found_on_its_line(graphs):
    (branch,) = log.read(graphs).cases["branch on data"]["breaks"]
    assert branch["text"] == "if x.mean() > 0.1:"
    source = (experiment_file("graphs.py")).read_text().splitlines()
    assert source[branch["line"] - 1].strip() == branch["text"]
    assert log.read(graphs).cases["Python counter"]["breaks"] == []


def test_past_the_limit_nothing_is_compiled_and_only_the_log_says_so(graphs):
    counter = log.read(graphs).cases["Python counter"]
    assert counter["graphs_run"] == [1] * 8 + [0] * 4
    assert any("recompile_limit" in warning for warning in counter["warnings"])
    assert counter["fullgraph"]["call"] == 8, "fullgraph=True accepts eight graphs, too"


def test_a_repaired_counter_has_the_gradients_of_the_counter():
    """Changed in place it would not: in torch 2.11 the backward pass then counts once more."""
    module, gradients = load("graphs"), []
    for make in (module.Counter, module.CounterRepaired):
        torch.manual_seed(0)
        model = make()
        run = torch.compile(model, backend="aot_eager") if make is not module.Counter else model
        run(torch.randn(4, module.WIDTH)).sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients)


def test_a_module_of_torch_nn_is_compiled_by_one_way_only_before_torch_2_14(graphs):
    """If this fails, PyTorch has changed: rewrite that part of notebook 09."""
    cases = log.read(graphs).cases
    for name in ("Sequential", "TransformerEncoderLayer"):
        assert cases[f"{name}, .compile()"]["graphs"] == (torch.__version__ >= (2, 14))
        assert cases[f"{name}, torch.compile()"]["graphs"] == 1
    assert cases["our own module, .compile()"]["graphs"] == 1


def test_a_recording_has_no_paths_of_its_machine(graphs):
    assert str(experiment_file("graphs.py").parent) not in (graphs / "events.jsonl").read_text()


@pytest.mark.skipif(
    not (shutil.which("g++") or os.environ.get("CI")), reason="needs g++: tools/system.sh"
)
def test_a_chain_becomes_one_kernel_that_reads_and_writes_once(train, tmp_path):
    train(
        experiment_file("pointwise.py"), tmp_path, *"--elements 4096 --sines 4 --rounds 2".split()
    )
    cases = log.read(tmp_path).cases
    sines, gelu = cases["4 sin, 4096 elements"], cases["GELU, 4096 elements"]
    assert sines["launches"] == {"eager": 4, "compiled": 1}
    assert sines["bytes"] == {"eager": 4 * 2 * 4 * 4096, "compiled": 2 * 4 * 4096}
    assert gelu["launches"] == {"eager": 8, "compiled": 1}
    source = figures.kernel(tmp_path, "4 sin")
    assert source.count("sin()") == 4
    assert "async_compile" not in source, "only the kernel, without what surrounds it"


def test_the_price_of_compiling_is_measured_cold_and_warm(train, tmp_path, monkeypatch):
    """With a backend that generates no code, which takes seconds."""
    monkeypatch.setattr("sys.executable", os.environ["DLOJZ_PYTHON"])
    train(experiment_file("compile_time.py"), tmp_path, *"--backend aot_eager --steps 3".split())
    assert [*log.read(tmp_path).cases] == ["eager", "whole model"]
    case = log.read(tmp_path).cases["whole model"]
    for cache in ("cold", "warm"):
        assert case[cache]["graphs"] == 1
        assert case[cache]["first_s"][0] > case[cache]["first_s"][-1], "the first step compiles"


# Figures -----------------------------------------------------------------------------------------


def test_a_gain_is_written_above_its_bars_and_a_loss_is_red(tmp_path):
    cases = {"a": chain(4.0, 2.0), "b": chain(0.003, 0.006, 16), "c": chain(3.0, 1.0)}
    left, right = figures.plot_pointwise(with_cases(tmp_path / "p.jsonl", cases))
    assert [t.get_text() for t in left.texts] == ["4", "2", "x 2.0", "3", "1", "x 3.0"]
    assert [t.get_text() for t in right.texts] == ["3", "6", "x 0.50"]
    assert right.texts[-1].get_color() == figures.WORSE
    assert "(ms)" in left.get_ylabel()
    assert "(µs)" in right.get_ylabel()
    assert "2 → 1" in left.get_xticklabels()[0].get_text()
    assert "A100" in left.figure.get_supxlabel()
    assert left.figure.get_suptitle().startswith("Compiled, times as fast: 2 to 3 on")


def test_bandwidth_is_bytes_by_time(tmp_path):
    (eager, compiled) = figures.moved(with_cases(tmp_path / "p.jsonl", {"a": chain(4, 1)})).rows
    assert eager == ("2 sin", "eager", "2 kernels", "4 GB", "4 ms", "1,000 GB/s", "")
    assert compiled == ("", "compiled", "1 kernel", "2 GB", "1 ms", "2,000 GB/s", "1.5 s")


TRITON = """
triton_poi_fused_sin_0 = async_compile.triton('triton_poi_fused_sin_0', '''
@triton.jit
def triton_poi_fused_sin_0(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    tmp0 = tl.load(in_ptr0 + (x0), xmask)
    tmp1 = tl_math.sin(tmp0)
    tl.store(out_ptr0 + (x0), tmp1, xmask)
''', device_str='cuda')
"""


def test_a_kernel_is_shown_by_line_with_what_moves_data(tmp_path):
    run = with_cases(tmp_path / "p.jsonl", {"a": chain(4, 1, source=TRITON)})
    source = figures.kernel(run, "2 sin")
    assert repr(source).splitlines()[0] == "  1  @triton.jit"
    html = source._repr_html_()
    moves, computes = "213,94,0", "0,114,178"
    (line,) = [part for part in html.split("<div") if "tmp1 = " in part]
    assert computes in line
    assert moves not in line
    assert all(moves in part for part in html.split("<div") if "load" in part or "store" in part)
    with pytest.raises(UserError, match=r"no chain '9 sin'.*one of 2 sin"):
        figures.kernel(run, "9 sin")


def test_a_kernel_that_is_not_recognized_is_shown_whole(tmp_path):
    run = with_cases(tmp_path / "p.jsonl", {"a": chain(4, 1, source="all of it")})
    assert figures.kernel(run, "2 sin") == "all of it"


def test_the_cases_are_shown_with_what_ran_last():
    run = runs.recorded("cpu/09-graphs")
    rows = {row[0]: row[1:] for row in figures.graphs(run).rows}
    assert rows["clean"] == ("1", "0", "0", "compiled", "nothing")
    assert rows["Python counter"][:4] == ("8", "0", "7", "EAGER")
    assert rows["branch on data"][-1].startswith("call 1: ")
    why = figures.reasons(run).rows
    assert ("Python counter", "... and 5 more guards", "recompiled") in why
    lines = (experiment_file("graphs.py")).read_text().splitlines()
    at = 1 + next(i for i, line in enumerate(lines) if "if x.mean()" in line)
    branch = "Data-dependent branching"
    assert ("branch on data", f"line {at}: if x.mean() > 0.1:", branch) in why, "record it again"
    silent = figures.compiled_nothing(run).rows
    assert ("Sequential, .compile()", "0", "EAGER") in silent


def test_a_table_shows_what_a_cache_did_with_another_precision():
    rows = figures.stale(runs.recorded("cpu/09-stale")).rows
    assert [row[1:5] for row in rows] == [
        ("bf16", "", "compiled", "bfloat16"),
        ("fp16", "", "from the cache", "bfloat16"),
        ("fp16", "'fp16'", "compiled", "float16"),
    ]


def test_each_call_has_the_colour_of_what_happened():
    ax = figures.plot_calls(runs.recorded("cpu/09-graphs"))
    colours = [mpl.colors.to_hex(p.get_facecolor()).upper() for p in ax.patches]
    assert colours[:12] == [figures.COMPILING] * 8 + [figures.EAGER.upper()] * 4
    assert colours[12:] == [figures.COMPILING] + [figures.COMPILED.upper()] * 11


# Break-even --------------------------------------------------------------------------------------


def test_the_break_even_is_what_was_paid_by_what_is_saved(tmp_path):
    """40 s for 20 ms less in each step; the first four steps of the cold run also trained."""
    cases = {"eager": way(100.0), "whole model": way(80.0, 40.32)}
    _, whole = figures.ways(with_cases(tmp_path / "c.jsonl", cases))
    assert whole.gain == pytest.approx(1.25)
    assert whole.cold_s == pytest.approx(40)
    assert whole.break_even(whole.cold_s).steps == pytest.approx(2000)
    assert str(whole.break_even(whole.cold_s)) == "2,000 steps (2,000 to 2,000)"


def test_a_process_also_pays_for_the_start_of_the_compiler(tmp_path):
    cases = {"eager": way(100.0), "whole model": way(80.0, 40.32)}
    events = [{"event": "case", "case": name, **case} for name, case in cases.items()]
    starts = [measure(f"the compiler starts, {cache}", 20.0, "s") for cache in ("cold", "warm")]
    _, whole = figures.ways(experiment(tmp_path / "c.jsonl", *starts, *events))
    assert whole.cold_s == pytest.approx(60)
    assert whole.warm_s == pytest.approx(20 + 4.032 - 0.32)


def test_a_break_even_has_the_ends_that_the_interval_of_its_gain_gives():
    way = figures.Way("whole model", 80, 1.25, 1.1, 2.0, 40, 4, 1, 7)
    assert str(way.break_even(way.cold_s)) == "2,000 steps (800 to 4,400)"


@pytest.mark.parametrize(
    ("step_ms", "text", "title"),
    [
        ([120.0] * 9, "never", "Compiling never pays: a step is slower"),
        ([90.0] * 5 + [110.0] * 4, "none seen", "No gain is seen"),
    ],
)
def test_without_a_gain_there_is_no_break_even(tmp_path, step_ms, text, title):
    cases = {"eager": way(100.0), "whole model": way(1, 10) | {"step_ms": step_ms}}
    run = with_cases(tmp_path / "c.jsonl", cases)
    _, whole = figures.ways(run)
    assert math.isinf(whole.break_even(whole.cold_s).steps)
    assert figures.costs(run).rows[1][-2:] == (text, text)
    ax = figures.plot_break_even(run)
    assert ax.figure.get_suptitle() == title
    assert len(ax.lines) == 3, "no crossing is marked"


def test_a_line_begins_below_zero_by_what_was_paid_and_crosses_inside_the_axes(tmp_path):
    cases = {"eager": way(100.0), "whole model": way(80.0, 40.32)}
    run = with_cases(tmp_path / "c.jsonl", cases, model="small", image_size=32, batch_size=8)
    ax = figures.plot_break_even(run)
    _, cold, *_ = (line.get_xydata() for line in ax.lines)
    assert cold[0] == pytest.approx([0, -40])
    assert cold[1] == pytest.approx([3000, 20])
    assert ax.lines[2].get_xydata().ravel() == pytest.approx([2000, 0])
    assert ax.figure.get_suptitle() == "Compiling pays after 2,000 steps (2,000 to 2,000)"


def test_one_disturbed_step_does_not_move_a_gain(tmp_path):
    quiet = {"eager": way(100.0), "whole model": way(80.0, 40.0)}
    noisy = {**quiet, "whole model": quiet["whole model"] | {"step_ms": [80.0] * 8 + [2000.0]}}
    (_, a), (_, b) = (
        figures.ways(with_cases(tmp_path / f"{i}.jsonl", cases))
        for i, cases in enumerate((quiet, noisy))
    )
    assert (a.gain, a.low, a.high) == (b.gain, b.low, b.high)


@pytest.mark.parametrize(
    ("values", "ends"), [(range(30), (9, 20)), (range(6), (0, 5)), (range(5), (0, math.inf))]
)
def test_the_interval_of_a_median_counts_values_on_either_side(values, ends):
    assert figures.median_interval(values) == ends


def test_an_experiment_that_failed_says_where_to_look(tmp_path):
    with pytest.raises(UserError, match=r"nothing was measured; see the job's stderr.txt"):
        figures.costs(with_cases(tmp_path / "c.jsonl", {}))
