import pytest
from traces import LOADER, NCCL, PAGEABLE, PINNED, RELU, Made, busy, with_a_wait

from dlojz.traces import breakdown, host, kinds, trace


def reading(made, path):
    return breakdown.analyse(trace.read(made.write(path / "trace.json")))


def test_a_device_that_always_computes_is_gpu_bound(tmp_path):
    found = reading(busy(), tmp_path)
    assert found.verdict == "GPU bound"
    assert found.step_ms == pytest.approx(10)
    assert found.kinds[kinds.MATRIX] == pytest.approx(10)
    assert found.tensor_cores == 1
    assert found.launches == 5


def test_gaps_while_the_host_launches_are_launch_bound(tmp_path):
    made = Made()
    for step in (0, 1):
        made.step(step, 10 * step, 10 * step + 10)
        for i in range(10):
            at = 10 * step + i
            made.launch(at, at + 0.1, at + 0.3, RELU)
    found = reading(made, tmp_path)
    assert found.verdict == "launch bound"
    assert found.idle[breakdown.LAUNCHES] == pytest.approx(7.6, abs=0.5)
    assert found.tensor_cores is None, "no matrix products"


def test_launches_that_are_slowed_by_the_recording_of_functions_say_so(tmp_path):
    made = Made()
    for i in range(20):
        made.launch(i, i + 0.1, i + 0.3, RELU)
    made.step(1, 0, 20)
    made.host("python_function", "trainer.py(3): main", 0, 20)
    words = "launch bound, while Python's functions are recorded"
    assert reading(made, tmp_path).verdict == words


@pytest.mark.parametrize(
    ("op", "why"), [("aten::item", ".item()"), ("aten::to", "a copy"), ("aten::nonzero", None)]
)
def test_a_wait_is_named_with_what_asked_for_it_and_where(tmp_path, op, why):
    found = reading(with_a_wait(op), tmp_path)
    blocked = "synchronisation bound" if why != "a copy" else "held up by copies to the device"
    assert found.verdict == blocked
    (wait,) = found.waits
    assert wait.call == "cudaStreamSynchronize"
    assert wait.why == (why or op)
    assert wait.line == "trainer.py, train_step (from line 151)"
    assert wait.count == 2
    assert wait.idle_ms == pytest.approx(2 * 2.3), "after both steps"


def test_a_tensor_that_is_printed_is_read(tmp_path):
    made = with_a_wait("aten::item")
    made.host("python_function", "torch/_tensor_str.py(702): _str", 1.05, 6.3)
    made.host("python_function", "torch/nn/modules/module.py(9): _call_impl", 1.06, 6.2)
    (printed, read) = sorted(reading(made, tmp_path).waits, key=lambda w: w.why, reverse=True)
    assert (printed.why, read.why) == ("print", ".item()"), "in the first step, in the second"
    assert printed.line == read.line == "trainer.py, train_step (from line 151)"


@pytest.mark.parametrize(("launches", "seen"), [(False, 0), (True, 1)])
def test_a_wait_counts_in_the_threads_that_launch(tmp_path, launches, seen):
    """On a GPU the backward pass has a thread of its own; a loader's thread does not train."""
    made = with_a_wait("aten::item")
    for event in made.events:
        if event["name"] in ("cudaStreamSynchronize", "aten::item"):
            event["tid"] = 2
        if launches and event["name"] == "cudaLaunchKernel":
            event["tid"] = 2
    found = reading(made, tmp_path)
    assert len(found.waits) == seen
    assert [w.why for w in found.waits] == [".item()"] * seen


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_device_without_images_is_data_bound(tmp_path, steps):
    made = Made()
    for step in range(steps):
        begin = 10 * step
        made.step(step, begin, begin + 10)
        made.host("user_annotation", LOADER, begin, begin + 6)
        made.launch(begin + 6, begin + 6, begin + 10)
    found = reading(made, tmp_path)
    assert found.verdict == "data bound"
    assert found.step_ms == pytest.approx(10)
    assert found.idle == {host.DATA: pytest.approx(6)}, "in each step, also in the first"


def test_pageable_copies_count_as_lost(tmp_path):
    made = Made()
    for step in (0, 1):
        begin = 10 * step
        made.step(step, begin, begin + 10)
        made.launch(begin, begin, begin + 5, PAGEABLE)
        made.launch(begin + 1, begin + 5, begin + 10)
    found = reading(made, tmp_path)
    assert found.pageable_ms == pytest.approx(5)
    assert found.verdict == "held up by copies to the device"
    assert found.kinds["copies"] == pytest.approx(5)


def test_pinned_copies_do_not(tmp_path):
    made = busy()
    made.launch(0, 0, 4, PINNED, stream=8)
    found = reading(made, tmp_path)
    assert found.pageable_ms == 0
    assert found.verdict == "GPU bound"


def test_communication_that_nothing_hides(tmp_path):
    made = Made()
    for step in (0, 1):
        begin = 10 * step
        made.step(step, begin, begin + 10)
        made.launch(begin, begin, begin + 5)
        made.launch(begin, begin + 3, begin + 10, NCCL, stream=20)
    found = reading(made, tmp_path)
    assert found.exposed_ms == pytest.approx(5)
    assert found.verdict == "communication bound"


def test_the_garbage_collector_is_caught(tmp_path):
    made = Made()
    for step in (0, 1):
        begin = 10 * step
        made.step(step, begin, begin + 10)
        made.host("python_function", "Python GC", begin + 1, begin + 9)
        made.launch(begin, begin, begin + 1)
        made.launch(begin + 9.1, begin + 9.1, begin + 10)
    found = reading(made, tmp_path)
    assert found.verdict == "held up by Python's garbage collector"


def test_what_was_asked_before_the_trace_began_is_not_of_its_steps(tmp_path):
    """The device is behind when the trace begins: kernels without the calls that asked for them."""
    made = Made()
    made.step(1, 0, 6)
    made.launch(1, 3, 9)
    made.events.append(made.events[-1] | {"ts": 1e6, "dur": 3000, "args": {"correlation": 10**6}})
    found = reading(made, tmp_path)
    assert found.step_ms == pytest.approx(6)
    assert found.launches == 1
    assert found.verdict == "GPU bound"


def test_a_trace_without_numbers_of_calls_counts_all_work(tmp_path):
    made = busy()
    for event in made.events:
        event["args"].pop("correlation", None)
    assert reading(made, tmp_path).launches == 5


def test_steps_that_ask_for_nothing_are_no_trace_of_a_training(tmp_path):
    made = Made()
    made.launch(-5, -1, 3)
    made.step(1, 0, 10)
    with pytest.raises(trace.TraceError, match="no step in it asked the GPU"):
        reading(made, tmp_path)
