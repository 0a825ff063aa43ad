"""Chapter 10's experiments count what they say, find wrong results, and time cold operands."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from programs import REPOSITORY, experiment_file, load, run_main

from dlojz.chapters import n10_kernels as n10
from dlojz.chapters import session
from dlojz.chapters.n10_kernels import in_pytorch, timing
from dlojz.course import UserError
from dlojz.runs import log

CPU = torch.device("cpu")
# A job in a process that no other test has had Triton in: without a GPU it must be interpreted.
JOB = """
import sys
from programs import load_file
from dlojz.chapters import session
session.COPY_BYTES = session.MATRIX = {"cpu": 1 << 8, "cuda": 1 << 8}
sys.argv = sys.argv[1:]
load_file(sys.argv[0]).main()
"""


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


def in_a_process(name, folder, *flags) -> log.Run:
    """Run an experiment in a process of its own; return its log."""
    folder.mkdir()
    paths = os.pathsep.join([str(REPOSITORY / "tests"), str(REPOSITORY)])
    subprocess.run(
        [sys.executable, "-c", JOB, experiment_file(f"{name}.py"), *map(str, flags)],
        env=os.environ | {"DLOJZ_RUN": str(folder), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        cwd=REPOSITORY,
        check=True,
    )
    return log.read(folder)


# Timing ------------------------------------------------------------------------------------------


def test_operands_are_copied_until_no_cache_holds_them():
    made = timing.copies(lambda: (torch.randn(1 << 10), torch.randn(1 << 10)), CPU)
    assert len(made) == (1 << 16) // (8 << 10)
    assert len({x.data_ptr() for each in made for x in each}) == 2 * len(made)


def test_small_operands_are_not_copied_without_end():
    assert len(timing.copies(lambda: (torch.randn(1),), CPU)) == timing.MOST


def test_results_of_a_cycle_lie_in_different_places():
    cycle = timing.Cycle(torch.neg, [(torch.randn(9),) for _ in range(4)])
    assert len({out.data_ptr() for out in cycle()}) == len(cycle) == 4


def test_a_time_is_that_of_one_call(monkeypatch):
    monkeypatch.setattr(session, "in_turn", lambda calls, *_, **__: {key: [8.0] for key in calls})
    cycle = timing.Cycle(torch.neg, [(torch.randn(9),) for _ in range(4)])
    assert timing.by_call({"neg": cycle}, CPU, 1) == {"neg": [2.0]}


# Intensities -------------------------------------------------------------------------------------


def test_intensities_are_those_of_the_paper_and_pencil():
    """In 16 bits, as NVIDIA's guide has them; operands on no device have shapes only."""
    intensity, found = load("intensity"), {}
    for each in intensity.operations(256, 256):
        given = each.make("meta", torch.float16)
        moved = sum(map(session.size, (*given, each.call(*given))))
        found[each.name] = each.flops / moved
    assert found["linear, batch 512"] == pytest.approx(315, abs=1)
    assert found["linear, batch 1"] == pytest.approx(1, abs=0.01)
    assert found["max pool 3 x 3"] == 2.25
    assert found["ReLU"] == 0.25
    assert found["layer norm"] < 10
    assert found["dense convolution 3 x 3"] > 100 * found["depthwise convolution 3 x 3"]


def test_operations_are_logged_for_their_figure(tmp_path):
    file = experiment_file("intensity.py")
    run = run_main(file, tmp_path, *"-b 1 --channels 8 --rounds 2".split())
    cases = log.read(run).cases
    assert {case["kind"] for case in cases.values()} == set(n10.KINDS)
    assert all(len(case["ms"]) == 2 and min(case["ms"]) > 0 for case in cases.values())
    assert len(n10.intensities(run)) == len(cases) == 7


# Softmax -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def softmaxes(tmp_path_factory):
    flags = "--elements 1000 --columns 5000 --rounds 2".split()
    return in_a_process("softmax", tmp_path_factory.mktemp("softmax") / "run", *flags)


def test_each_way_is_right_to_rounding_also_with_large_numbers(softmaxes):
    assert len(softmaxes.cases) == 5
    for name, case in softmaxes.cases.items():
        assert max(case["error"]) < 2e-6, name


def test_the_interpreter_counts_what_a_kernel_asks(softmaxes):
    columns, blocks = 5000, 2  # of the online kernel
    whole, online = (softmaxes.cases[f"{way}, {columns} columns"] for way in ("Triton", "online"))
    rows, numbers = whole["rows"], whole["rows"] * columns
    assert whole["kernels"] == online["kernels"] == 1
    assert whole["asked"]["loads"] == whole["asked"]["stores"] == rows
    assert whole["asked"]["read_bytes"] == 4 * numbers
    assert online["asked"]["read_bytes"] == 8 * numbers
    assert online["asked"]["loads"] == 2 * blocks * rows
    assert {case["asked"]["written_bytes"] for case in (whole, online)} == {4 * numbers}
    assert whole["asked"]["idle"] == 2 * rows * (8192 - columns)
    assert whole["asked"]["outside"] == online["asked"]["outside"] == 0
    assert "ms" not in whole, "the interpreter's time means nothing"


def test_five_operations_move_four_times_the_bytes_of_one(softmaxes):
    cases = softmaxes.cases
    naive, compiled = (cases[f"{way}, 5000 columns"] for way in ("PyTorch", "compiled"))
    assert (naive["kernels"], compiled["kernels"]) == (5, 1)
    assert naive["moved"] / compiled["moved"] == pytest.approx(4, rel=0.01)


def test_a_softmax_that_does_not_subtract_the_maximum_is_found():
    softmax = load("softmax")
    x = torch.randn(4, 50)

    def overflows(x):
        powers = torch.exp(x)
        return powers / powers.sum(dim=1, keepdim=True)

    good, bad = softmax.errors(in_pytorch.naive, x), softmax.errors(overflows, x)
    assert max(good) < 1e-6
    assert bad[0] < 1e-6
    assert bad[1] != bad[1], "not a number"


def test_the_figures_of_a_processor_leave_triton_out(softmaxes):
    legend = n10.plot_softmax(softmaxes).get_legend().get_texts()
    told = {text.get_text() for text in legend}
    assert told == {"PyTorch", "compiled", "torch.softmax", "a large copy"}
    assert [row[0] for row in n10.asked(softmaxes).rows] == ["Triton", "online"]


# The normalization -------------------------------------------------------------------------------


def test_a_normalization_is_off_by_half_a_unit_and_not_more():
    normalize = load("normalize")
    (images,) = normalize.drawn(2, 7, CPU)
    right = normalize.eager(images)
    assert normalize.off(right, images) <= 0.5
    assert torch.equal(normalize.loop(images), right)
    assert torch.equal(normalize.line(images, *normalize.data.line(CPU)), right)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda out: out.float(),
        lambda out: out.contiguous(),
        lambda out: out[:1],
        lambda out: out.flip(1).contiguous(memory_format=torch.channels_last),
        lambda out: out + 0.5,
    ],
    ids=["type", "order in memory", "shape", "channels", "values"],
)
def test_a_wrong_normalization_is_off_by_more(wrong):
    normalize = load("normalize")
    (images,) = normalize.drawn(2, 7, CPU)
    assert normalize.off(wrong(normalize.eager(images)), images) > 1


def test_a_kernel_is_checked_and_counted_in_the_interpreter(tmp_path):
    flags = "--image-size 9 --batches 2 --rounds 2".split()
    cases = in_a_process("normalize", tmp_path / "run", *flags).cases
    assert {case["way"] for case in cases.values()} == {"loop", "PyTorch", "compiled", "Triton"}
    kernel = cases["Triton, interpreted"]
    assert kernel["units_off"] <= 1, "the interpreter cuts bf16 off"
    assert kernel["kernels"] == 1
    assert kernel["asked"]["written_bytes"] == 2 * 4 * 3 * 9 * 9
    assert kernel["asked"]["read_bytes"] >= 4 * 3 * 9 * 9
    kernels = {way: cases[f"{way}, 2 images"]["kernels"] for way in ("PyTorch", "compiled", "loop")}
    assert (kernels["PyTorch"], kernels["compiled"]) == (2, 1)
    assert kernels["loop"] >= 12, "an operation and a copy, for each channel of each image"


# Counters ----------------------------------------------------------------------------------------

RANGE = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
OF_NCU = "\n".join(
    (
        "==PROF== Connected",
        f'"ID","{RANGE}","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum"',
        '"","","","byte","byte"',
        '"0","1 ""<default domain>:PyTorch:none:none"" ","reduce","1,000","0"',
        '"1","1 ""<default domain>:PyTorch:none:none"" ","exp","1,000","900"',
        '"2","1 ""<default domain>:online:none:none"" ","_online","2,000","900"',
    )
)


def counts_of(said, monkeypatch, tmp_path, status=0):
    """The counters of a program `ncu` that prints this."""
    ncu = tmp_path / "ncu"
    ncu.write_text(f"#!/bin/sh\ncat <<'E'\n{said}\nE\nexit {status}\n")
    ncu.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return load("counters").counted(4096)


def test_counters_of_several_kernels_are_added(monkeypatch, tmp_path):
    assert counts_of(OF_NCU, monkeypatch, tmp_path) == {
        "PyTorch": {"read": 2000, "written": 900, "kernels": 2},
        "online": {"read": 2000, "written": 900, "kernels": 1},
    }


def test_without_counters_the_reason_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="no ncu on this machine: install NVIDIA Nsight Compute"):
        load("counters").counted(4096)
    refused = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission"
    monkeypatch.setenv("PATH", "/bin")
    for status in (0, 1):
        with pytest.raises(UserError, match="ncu counted nothing: ==ERROR== ERR_NVGPUCTRPERM"):
            counts_of(refused, monkeypatch, tmp_path, status)


# Inline ------------------------------------------------------------------------------------------


def linear(x):
    """Return ReLU as code does that walks over memory, for numbers of float32 only."""
    if x.dtype != torch.float32:
        raise RuntimeError("expected scalar type Float but found Double")
    out = torch.empty_like(x)
    values = torch.as_strided(x.detach(), (x.numel(),), (1,))
    into = torch.as_strided(out, (out.numel(),), (1,))
    into.copy_(torch.where(values > 0, values, torch.zeros(())))
    return out


def test_inputs_that_a_function_was_not_written_for_are_told():
    inline = load("inline")
    told = {name: inline.given(linear, x) for name, x in inline.inputs(CPU).items()}
    assert told["as it was written for"] == told["transposed"] == told["no numbers"] == "right"
    assert told["every other column"].startswith("wrong, without an error")
    assert told["one number is NaN"] == "wrong, without an error: 1 of 3,072 numbers"
    assert told["weights to train"] == "wrong, without an error: no gradient"
    assert told["float64"] == "expected scalar type Float but found Double"


def test_torchs_own_relu_is_right_for_all_inputs():
    inline = load("inline")
    assert {inline.given(torch.relu, x) for x in inline.inputs(CPU).values()} == {"right"}


def test_a_build_that_waits_for_a_lock_is_given_up(tmp_path, monkeypatch):
    inline = load("inline")
    monkeypatch.setattr(inline, "WAIT_S", 0.05)
    ended = threading.Event()

    def build(folder, _):
        while Path(folder, "lock").exists():
            ended.wait(0.01)
        ended.set()

    monkeypatch.setattr(inline, "build", build)
    with pytest.raises(TimeoutError, match="until lock is removed"):
        inline.stale_lock(tmp_path / "own", "C++")
    assert ended.is_set(), "no thread is left behind"


def test_a_program_is_hidden_and_found_again(monkeypatch, tmp_path):
    inline = load("inline")
    (tmp_path / "ninja").touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{tmp_path.parent}")
    with inline.without("ninja"):
        assert shutil.which("ninja") is None
    assert shutil.which("ninja") == str(tmp_path / "ninja")


def test_an_error_is_told_by_the_line_of_the_compiler():
    said = load("inline").said
    text = "Error building extension\nmain.cpp:3:1: fatal error: a.h: No such file\ncompilation"
    assert said(RuntimeError(text)) == "a.h: No such file"
    assert said(RuntimeError("Ninja is required\nmore")) == "Ninja is required"


def test_a_string_is_compiled_and_broken(tmp_path):
    run = in_a_process("inline", tmp_path / "run", "--rounds", 2)
    cases = run.cases
    assert cases["as it was written for"]["result"] == "right"
    assert cases["every other column"]["result"].startswith("wrong, without an error")
    assert "No such file" in cases["a header that is not there"]["result"]
    assert "Ninja is required" in cases["no ninja"]["result"]
    assert "waits until lock is removed" in cases["the lock of a killed job"]["result"]
    assert cases["again"]["again_s"] < cases["build"]["first_s"] / 2
    assert len(n10.inlined(run)) == len(cases)


def test_a_machine_without_a_compiler_is_told(tmp_path, monkeypatch):
    inline = load("inline")

    def refused(*_):
        raise RuntimeError("Ninja is required to load C++ extensions")

    monkeypatch.setattr(inline, "build", refused)
    monkeypatch.setenv("DLOJZ_RUN", str(tmp_path))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with session.begin(SimpleNamespace(), CPU) as (run, _):
        inline.measured(run, CPU, 2)
    assert log.read(tmp_path).cases["no build"]["result"].startswith("Ninja is required")


# Shapes and the dispatcher -----------------------------------------------------------------------


def test_wide_and_deep_chains_have_as_many_operations(tmp_path):
    flags = "-b 1 --widest 64 --rounds 2".split()
    run = run_main(experiment_file("shapes.py"), tmp_path, *flags)
    cases = log.read(run).cases
    chains = [c for c in cases.values() if c["shape"] == "as many operations"]
    assert [(c["channels"], c["layers"]) for c in chains] == [(64, 1), (32, 4), (16, 16)]
    assert len({case["flops"] for case in chains}) == 1
    assert chains[2]["bytes"] > 3 * chains[0]["bytes"]
    dense, depthwise = (cases[f"{kind}, 1 of 64"]["flops"] for kind in ("dense", "depthwise"))
    assert dense == 64 * depthwise == 2 * 9 * 64**2 * 28**2
    n10.plot_shapes(run)


def test_a_long_chain_keeps_its_numbers_near_1():
    shapes = load("shapes")
    torch.manual_seed(0)
    out = shapes.chain(*shapes.operands(1, 16, 16, False, CPU, torch.float32))
    assert 0.2 < out.std() < 2


def test_the_dispatcher_sees_device_layout_and_gradients(tmp_path):
    run = run_main(experiment_file("dispatch.py"), tmp_path)
    cases = log.read(run).cases
    assert "CPU" in cases["x * 2, float32"]["keys"]
    assert "SparseCPU" in cases["x * 2, sparse"]["keys"]
    assert "Meta" in cases["x * 2, without values"]["keys"]
    assert cases["x * 2, float32"]["operations"][0] == "aten::mul"
    for name in ("x * 2, float8", "segment mean, int8"):
        assert not cases[name]["answered"]
        assert "not implemented for" in cases[name]["result"]
    assert cases["segment mean, float32"]["answered"]
    assert len(n10.dispatched(run)) == len(cases)
