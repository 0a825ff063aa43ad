"""Notebook 10's kernel, on Triton's interpreter, and the verdict on it."""

import math
import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest
import steps
import torch
import wrong
from programs import load_file

from dlojz import course
from dlojz.chapters.n10_kernels import exercise
from dlojz.check import ending, judge
from dlojz.check.exercise import State
from dlojz.course import UserError
from dlojz.runs import log, records
from dlojz.training import data, imports
from dlojz.watch import auditor, interpreted, normalizing, profile

STEP = "10_kernels"
SOLVED, PREPARED = course.solution(STEP).with_name("kernels.py"), course.prepared(STEP)
ARGS = Namespace(normalize="triton", precision="fp32", mix="off", channels_last=True)
ORDER = [*exercise.EXERCISE.hints]
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs here")


@pytest.fixture(scope="module")
def solved():
    return load_file(SOLVED)


def a_training():
    return SimpleNamespace(model=torch.nn.Linear(2, 2))


def looked_at(trainer, monkeypatch):
    """The record of the probe, for this trainer and the file beside it."""
    monkeypatch.setitem(sys.modules, "__main__", imports.from_file(trainer, "looked_at"))
    return records.Normalized(**normalizing.look(a_training(), ARGS))


def a_run(seen, **last):
    last = records.LastStep(**{"launches": 1, "graphs_alive": 0, "batches_alive": 0} | last)
    start = {"arguments": {"normalize": "triton"}}
    return log.Run("a run", start=start, normalized=seen, last=last)


def failing(mine, reference=None):
    """The hints of the findings on a run that fail, in their order."""
    pair = SimpleNamespace(mine=mine, reference=reference or a_run(records.Normalized()))
    found = [f for f in exercise.mechanism(pair) if f.state == State.FAILED]
    return sorted({f.hint for f in found}, key=ORDER.index)


# The file ----------------------------------------------------------------------------------------


def test_only_the_body_of_the_kernel_is_left_to_do():
    handed_out, solved_one = PREPARED.read_text(), SOLVED.read_text()
    assert steps.problems(handed_out, solved_one, "10") == []
    body = solved_one.partition("# 10a: ")[2].partition("\n\n")[0].splitlines()[1:]
    assert len(body) == 6, "the notebook promises six lines"
    assert handed_out.count("# TODO 10") == 1


def test_the_prepared_kernel_says_what_is_to_do():
    images = torch.zeros(1, 3, 2, 2, dtype=torch.uint8)
    with pytest.raises(Exception, match="TODO 10a: write the body of _normalize"):
        load_file(PREPARED).normalize(images, torch.float32)


@pytest.mark.parametrize("dtype", normalizing.DTYPES)
@pytest.mark.parametrize("shape", [(5, 3, 33, 31), (1, 3, 1, 1), (2, 3, 1, 7), (4, 3, 64, 64)])
def test_the_kernel_is_within_a_unit_of_torch(solved, shape, dtype):
    torch.manual_seed(0)
    images = torch.randint(0, 256, shape, dtype=torch.uint8)
    for each in (images, images.to(memory_format=torch.channels_last), images[..., ::2]):
        out = solved.normalize(each, dtype)
        assert out.dtype == dtype
        assert out.is_contiguous(memory_format=torch.channels_last)
        assert normalizing.units(out, data.normalize(each), dtype) <= 1


def test_all_levels_are_normalized_as_in_float64(solved):
    levels = torch.arange(256, dtype=torch.uint8).view(256, 1, 1, 1).expand(-1, 3, 2, 2)
    mean, std = (torch.tensor(v).double().view(1, 3, 1, 1) for v in (data.MEAN, data.STD))
    expected = (levels.double() / 255 - mean) / std
    assert float((solved.normalize(levels, torch.float32) - expected).abs().max()) < 1e-6


def test_images_that_are_no_bytes_are_refused(solved):
    with pytest.raises(UserError, match=r"are torch\.float32, .* torch\.uint8, .* notebook 05"):
        solved.normalize(torch.zeros(1, 3, 2, 2), torch.float16)


def test_without_triton_the_file_says_what_to_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(UserError, match=r"no Triton beside torch .*pip install -c constr"):
        load_file(SOLVED)


def test_without_a_gpu_kernels_are_interpreted(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not interpreted.is_used()
    load_file(SOLVED)
    assert interpreted.is_used()


# What the interpreter does -----------------------------------------------------------------------


def test_launches_loads_and_stores_are_counted(solved):
    images = torch.zeros(2, 3, 64, 64, dtype=torch.uint8)  # 1.5 blocks
    with interpreted.counted() as count:
        solved.normalize(images, torch.float16)
    values, places = images.numel(), 2 * 16384  # those of shift and scale have no mask
    expected = {"read_bytes": values + 2 * 4 * places, "written_bytes": 2 * values}
    expected["idle"] = 2 * (places - values)  # of a load and a store
    assert count == interpreted.Count(launches=1, loads=6, stores=2, **expected)
    solved.normalize(images, torch.float16)
    assert count.launches == 1, "the context has ended"


KERNEL = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import triton, triton.language as tl

@triton.jit
def double(x, out, count, block: tl.constexpr):
    places = tl.arange(0, block)
    tl.store(out + places, 2 * tl.load(x + places), mask=places < count)
"""


def test_values_that_are_read_outside_of_the_tensors_are_counted(tmp_path):
    (tmp_path / "double.py").write_text(KERNEL)
    around, out = torch.ones(100), torch.zeros(30)
    with interpreted.counted() as count:
        load_file(tmp_path / "double.py").double[(1,)](around[10:40], out, 30, 64)
    assert (count.outside, count.outside_floats, count.loads, count.stores) == (34, 34, 1, 1)
    assert out.tolist() == [2.0] * 30


# The probe ---------------------------------------------------------------------------------------


def test_the_solution_is_right_in_every_case(monkeypatch):
    seen = looked_at(course.solution(STEP), monkeypatch)
    assert seen.error is None
    assert [case["images"] for case in seen.cases][2:] == [
        *("channels_last", "NCHW", "a view", "every second image"),
        *("fewer than a program has", "whole programs"),
    ]
    assert {case["launches"] for case in seen.cases} == {1}
    assert (seen.again, seen.stream, seen.timed) == (False, None, {})
    assert failing(a_run(seen)) == []


RIGHT = [a for a in wrong.right() if a.step == STEP]


@pytest.mark.parametrize("answer", RIGHT, ids=lambda answer: answer.name)
def test_a_kernel_of_another_make_is_right(answer, tmp_path, monkeypatch):
    assert failing(a_run(looked_at(wrong.put(answer, tmp_path), monkeypatch))) == []


def test_there_are_several_right_answers():
    assert len(RIGHT) >= 4


BESIDE = [  # changes of the solution's kernels.py, and the first hint
    ("tl.load(images + places, mask=inside)", "tl.load(images + places)", "load-mask"),
    ("places % 3", "(places + 1) % 3", "values"),
    ("values = tl.load(shift", "values = 1.01 * tl.load(shift", "rounded"),
    ("mask=inside)  #", "mask=inside & (places > 5))  #", "unwritten"),
    ("    return out\n", "    return out.contiguous()\n", "form"),
    ("    return out\n", "    return None\n", "form"),
    ("out.numel(), BLOCK)\n    return", "out.numel(), BLOCK, 1)\n    return", "error"),
    ("block + tl.arange", "block + tl.zeros([block], tl.int32) + tl.arange", "interpreter"),
]


@pytest.mark.parametrize(("old", "new", "hint"), BESIDE)
def test_a_mistake_in_the_kernel_is_named(old, new, hint, tmp_path, monkeypatch):
    text = SOLVED.read_text()
    assert old in text
    (tmp_path / "kernels.py").write_text(text.replace(old, new))
    (tmp_path / "dlojz.py").write_text(course.solution(STEP).read_text())
    assert failing(a_run(looked_at(tmp_path / "dlojz.py", monkeypatch)))[0] == hint


class Log(list):
    evidence = list.append


def test_a_run_whose_kernel_writes_outside_does_not_begin(tmp_path, monkeypatch):
    answer = next(a for a in wrong.every(STEP) if a.name == "no-mask")
    trainer = wrong.put(answer, tmp_path)
    monkeypatch.setitem(sys.modules, "__main__", imports.from_file(trainer, "looked_at"))
    run = Log()
    with pytest.raises(UserError, match=r"wrote \d+ values outside .* give the store a mask"):
        normalizing.watch(run, a_training(), ARGS)
    assert failing(a_run(run[0]))[0] == "mask"


@pytest.mark.parametrize(
    ("args", "wish"), [(Namespace(), ""), (Namespace(normalize="torch"), ""), (ARGS, "timed")]
)
def test_a_run_by_torch_and_one_that_is_timed_are_left_alone(args, wish, monkeypatch):
    if wish:
        monkeypatch.setenv(auditor.VARIABLE, f'{{"{wish}": true}}')
    run = Log()
    normalizing.watch(run, a_training(), args)
    assert run == []


def test_the_draws_of_the_run_stay_as_they_are(monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", imports.from_file(course.solution(STEP), "it"))
    training, before = a_training(), torch.get_rng_state()
    assert normalizing.look(training, ARGS)["cases"]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_kernel_that_ends_its_process_is_told(tmp_path):
    end = ending.Ending(ending.How.FAILED, "ended by SIGSEGV")
    assert judge._ended(exercise.EXERCISE, tmp_path, end, "job", "job").hint == "crashed"


def test_a_trainer_without_the_file_is_not_seen(tmp_path, monkeypatch):
    (tmp_path / "dlojz.py").write_text(course.solution("09").read_text())
    seen = looked_at(tmp_path / "dlojz.py", monkeypatch)
    assert not seen
    assert failing(a_run(seen, launches=0)) == ["not-called"]
    assert failing(a_run(seen, launches=2)) == ["twice"]


@pytest.mark.parametrize(
    ("off", "dtype", "found"),
    [
        (0.0, torch.float16, 0),
        (2.0**-11, torch.float16, 0.5),
        (2.0**-7, torch.bfloat16, 1),
        (3.0, torch.bfloat16, 384),
    ],
)
def test_units_are_those_of_the_place_of_the_expected_value(off, dtype, found):
    """Between 1 and 2 the last place of fp16 is 2^-10, and that of bf16 2^-7."""
    expected = torch.full((2, 3), 1.0)
    off = expected.double() + off + (normalizing.ROUNDING if off else 0)
    assert normalizing.units(off, expected, dtype) == pytest.approx(found)


def test_a_value_that_is_no_number_is_infinitely_far():
    assert math.isinf(normalizing.units(torch.tensor([math.nan]), torch.ones(1), torch.float16))


# The verdict on what only a GPU shows ------------------------------------------------------------

TIMED = {
    **{"bytes": 3e8, "calls": 2, "worst": 0.5, "kernels": ["_normalize"] * 2},
    **{"fewer": ["_normalize"], "kernel": [1e-4, 1.1e-4], "torch": [4e-4] * 2, "copy": [9e-5] * 2},
}


@pytest.mark.parametrize(
    ("changed", "hints"),
    [
        ({}, []),
        ({"worst": 2.0}, ["timed"]),
        ({"worst": math.inf}, ["timed"]),
        ({"kernels": ["_normalize", "at::native::cast"] * 2}, ["torch"]),
        ({"kernels": ["_normalize"] * 4}, ["launches"]),
        ({"fewer": ["_normalize"] * 9}, ["tuned"]),
        ({"kernel": [6e-5] * 2}, ["too-fast"]),
        ({"kernel": [5e-4] * 2}, ["slow"]),
    ],
)
def test_the_timed_calls_are_judged(changed, hints):
    assert failing(a_run(records.Normalized(timed=TIMED | changed))) == hints


def test_the_outputs_of_the_timed_calls_are_looked_at(solved, monkeypatch):
    monkeypatch.setattr(normalizing, "LARGE", (4, 3, 8, 8))
    found = normalizing._rounds(solved.normalize, torch.device("cpu"))
    assert found["worst"] <= 1
    assert found["bytes"] == 4 * 3 * 8 * 8 * 3
    assert [len(found[way]) for way in ("kernel", "torch", "copy")] == [normalizing.ROUNDS] * 3
    late = iter([False] * normalizing.ROUNDS * normalizing.CALLS)

    def wrong_in_the_last_round(images, dtype):
        return solved.normalize(images, dtype) + next(late, True)

    assert normalizing._rounds(wrong_in_the_last_round, torch.device("cpu"))["worst"] > 100


def test_an_output_of_former_images_is_recognized(solved, monkeypatch):
    monkeypatch.setattr(normalizing, "SIZE", 4)
    monkeypatch.setattr(normalizing, "PRODUCTS", 1)
    device, former = torch.device("cpu"), []

    def too_early(images, dtype):
        return solved.normalize(former[0], dtype)

    usual = normalizing._images

    def images(*args):
        former.append(usual(*args).clone())
        return former[-1].clone()

    monkeypatch.setattr(normalizing, "_images", images)
    assert normalizing._on_its_stream(solved.normalize, device) is False
    former.clear()
    assert normalizing._on_its_stream(too_early, device) is True
    former.clear()
    assert normalizing._again(too_early, device) is True
    assert normalizing._again(solved.normalize, device) is False


def test_a_stream_that_does_not_wait_is_named():
    assert failing(a_run(records.Normalized(stream=True))) == ["stream"]
    assert failing(a_run(records.Normalized(stream=False))) == []


@pytest.mark.parametrize(
    ("kernels", "hints"),
    [
        (["layout", "_normalize", "weights"], []),
        (["_normalize"], []),
        (["layout", "_normalize", "cast", "weights"], ["between"]),
        (["layout", "addcmul", "cast"], ["not-called"]),
    ],
)
def test_the_kernels_before_the_first_convolution_are_judged(kernels, hints):
    seen, usual = records.Normalized(timed=TIMED), ["layout", "_normalize", "weights"]
    runs = (a_run(seen, launches=0, before_convolution=names) for names in (kernels, usual))
    assert failing(*runs) == hints


class Event:
    """One of the profiler's, on the host or on the GPU."""

    def __init__(self, name, start, end, number=0, linked=0, gpu=False):
        self._name, self._start, self._end, self._gpu = name, start, end, gpu
        self._number, self._linked = number, linked

    def name(self):
        return self._name

    def start_ns(self):
        return self._start

    def duration_ns(self):
        return self._end - self._start

    def start_thread_id(self):
        return 1

    def device_type(self):
        kinds = torch.autograd.DeviceType
        return kinds.CUDA if self._gpu else kinds.CPU

    def is_user_annotation(self):
        return False

    def correlation_id(self):
        return self._number

    def linked_correlation_id(self):
        return self._linked


HOST = [
    Event("aten::copy_", 0, 5, 1),
    Event("aten::convolution", 20, 40, 2),
    Event("aten::cudnn_convolution", 22, 38, 3),
    Event("cudaLaunchKernel", 24, 25, 9),
    Event("aten::convolution", 50, 60, 4),
]
GPU = [
    Event("Memcpy HtoD", 3, 8, 11, 1, gpu=True),
    Event("before", 1, 2, 10, gpu=True),
    Event("_normalize", 9, 15, 12, 9, gpu=True),
    Event("weights", 16, 18, 13, 1, gpu=True),
    Event("conv", 30, 50, 14, 3, gpu=True),
    Event("conv", 51, 60, 15, 4, gpu=True),
]


def test_kernels_are_counted_from_the_copy_to_the_first_convolution():
    assert profile.before_convolution([*HOST, *GPU]) == ["_normalize", "weights"]
    assert profile.before_convolution(HOST) is None
    assert profile.before_convolution(GPU) is None
    names = ["before", "Memcpy HtoD", "_normalize", "weights", "conv", "conv"]
    assert [name for name, _ in profile.on_device([*HOST, *GPU])] == names
    assert profile.on_device(GPU)[-1] == ("conv", 9e-9)
