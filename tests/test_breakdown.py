import pytest
from traces import CONV, LOADER, NCCL, PAGEABLE, PINNED, RELU, Made, busy, steps, with_a_wait

from dlojz.traces import breakdown, host, kinds, trace


def reading(made, path):
    return breakdown.analyse(trace.read(made.write(path / "trace.json")))


def with_a_pinned_copy():
    made = busy()
    made.launch(0, 0, 4, PINNED, stream=8)
    return made


@pytest.mark.parametrize(
    ("made", "verdict", "figures"),
    [
        (busy(), "GPU bound", {"step_ms": 10, "tensor_cores": 1, "launches": 5}),
        (
            steps((PAGEABLE, 0, 5), (CONV, 5, 10)),
            "held up by copies to the device",
            {"pageable_ms": 5},
        ),
        (with_a_pinned_copy(), "GPU bound", {"pageable_ms": 0}),
        (steps((CONV, 0, 5), (NCCL, 3, 10)), "communication bound", {"exposed_ms": 5}),
        (
            steps((CONV, 0, 1), (CONV, 9, 10), host=[("Python GC", 1, 9)]),
            "held up by Python's garbage collector",
            {},
        ),
    ],
    ids=["computes", "pageable", "pinned", "communicates", "garbage"],
)
def test_a_step_is_bound_by_what_the_device_waits_for(tmp_path, made, verdict, figures):
    found = reading(made, tmp_path)
    assert found.verdict == verdict
    assert {name: getattr(found, name) for name in figures} == pytest.approx(figures)


def test_gaps_while_the_host_launches_are_launch_bound(tmp_path):
    made = steps(*[(RELU, i + 0.1, i + 0.3) for i in range(10)])
    found = reading(made, tmp_path)
    assert found.verdict == "launch bound"
    assert found.idle[breakdown.LAUNCHES] == pytest.approx(7.9, abs=0.2)
    assert found.tensor_cores is None, "no matrix products"
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
    assert [w.why for w in reading(made, tmp_path).waits] == [".item()"] * seen


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_device_without_images_is_data_bound(tmp_path, count):
    found = reading(steps((CONV, 6, 10), host=[(LOADER, 0, 6)], count=count), tmp_path)
    assert found.verdict == "data bound"
    assert found.step_ms == pytest.approx(10)
    assert found.idle == {host.DATA: pytest.approx(6)}, "in each step, also in the first"


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


# On a processor ------------------------------------------------------------------------------


def processor(*ops, host=()):
    """A step of 10 ms on a processor, with these operations and ranges."""
    made = Made()
    made.step(0, 0, 10)
    for name, begin, end in ops:
        made.host("cpu_op", f"aten::{name}", begin, end)
    for name, begin, end in host:
        made.host("user_annotation", name, begin, end)
    return made


def test_a_processor_has_operations_and_no_kernels(tmp_path):
    ops = [("conv2d", 0, 6), ("copy_", 1, 2), ("batch_norm", 7, 10)]
    found = reading(processor(*ops, host=[("forward", 0, 5)]), tmp_path)
    times = {kinds.MATRIX: 5, kinds.NORMALIZATION: 3, kinds.LAYOUT: 1}
    assert found.kinds == pytest.approx(times)
    assert found.idle[breakdown.PYTHON] == pytest.approx(1)
    assert found.verdict == "processor bound"


def test_kernels_are_counted_by_name(tmp_path):
    made = trace.read(steps((CONV, 0, 5), (RELU, 5, 6), (RELU, 7, 9)).write(tmp_path / "t.json"))
    assert breakdown.named(made) == {CONV: (1, pytest.approx(5)), RELU: (2, pytest.approx(3))}


def test_an_operation_has_the_time_that_those_inside_of_it_leave(tmp_path):
    made = processor(("conv2d", 0, 6), ("copy_", 1, 2), ("copy_", 3, 5), ("batch_norm", 7, 10))
    found = breakdown.named(trace.read(made.write(tmp_path / "trace.json")))
    own = {name.removeprefix("aten::"): spent for name, spent in found.items()}
    assert own == {"conv2d": (1, 3), "batch_norm": (1, 3), "copy_": (2, 3)}


def test_on_a_processor_gloo_is_communication_and_not_python(tmp_path):
    made = processor(("conv2d", 0, 6), host=[("gloo:all_reduce", 5, 9)])
    made.events[-1]["tid"] = 7  # a thread of its own
    found = reading(made, tmp_path)
    assert found.exposed_ms == pytest.approx(3)
    assert found.idle[breakdown.PYTHON] == pytest.approx(1)
    assert found.verdict == "communication bound"


def test_images_that_the_training_thread_loads_are_no_computation(tmp_path):
    found = reading(processor(("copy_", 1, 5), ("conv2d", 6, 10), host=[(LOADER, 0, 6)]), tmp_path)
    assert found.verdict == "data bound"
    assert found.kinds == {kinds.MATRIX: pytest.approx(4)}
