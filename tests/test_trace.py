import gzip
import json
import subprocess
import sys
import textwrap

import pytest

from dlojz.runs import kinds, trace

CONV = "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64"
RELU = "void at::native::vectorized_elementwise_kernel<8, at::native::launch_clamp_scalar>"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
PAGEABLE, PINNED = "Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pinned -> Device)"
LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"


class Made:
    """A trace by hand, in the profiler's own format; times in milliseconds."""

    def __init__(self):
        self.events, self.number = [], 0

    def host(self, category, name, begin, end, **args):
        """Something that the training thread did."""
        self.number += 1
        times = {"ts": 1e6 + 1000 * begin, "dur": 1000 * (end - begin)}
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, **times, "args": args}
        )

    def step(self, number, begin, end):
        self.host("user_annotation", f"ProfilerStep#{number}", begin, end)

    def launch(self, at, begin, end, name=CONV, stream=7):
        """A kernel or copy, and the call that asked for it `at` that time."""
        call = "cudaMemcpyAsync" if name.startswith("Mem") else "cudaLaunchKernel"
        self.host("cuda_runtime", call, at, at + 0.005, correlation=self.number + 1)
        category = "gpu_memcpy" if name.startswith("Mem") else "kernel"
        facts = {"External id": 90000 + self.number, "queued": 0, "device": 0, "context": 1}
        facts |= {"stream": stream, "correlation": self.number, "registers per thread": 168}
        facts |= {"shared memory": 180224, "blocks per SM": 7.757576, "warps per SM": 62.060608}
        facts |= {"grid": [1024, 1, 1], "block": [256, 1, 1], "est. achieved occupancy %": 97}
        times = {"ts": 1e6 + 1000 * begin, "dur": 1000 * (end - begin)}
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": stream, **times}
            | {"args": facts}
        )

    def write(self, path):
        head = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H100"}]}
        text = json.dumps(head | {"traceEvents": self.events, "traceName": "x"})
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(text.encode()))
        else:
            path.write_text(text)
        return path


def reading(made, path):
    return trace.analyse(trace.read(made.write(path / "trace.json")))


def busy(gpu_idle=0.0):
    """Two steps of 10 ms: the host is ahead, the device busy but for `gpu_idle` ms in each."""
    made = Made()
    for step in (0, 1):
        made.step(step + 5, 10 * step, 10 * step + 5)
        for i in range(5):
            begin = 10 * step + 2 * i
            made.launch(10 * step + 0.5 * i, begin, begin + 2 - gpu_idle / 5)
    return made


# Reading -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_is_read_zipped_or_not(tmp_path, name):
    found = trace.read(busy().write(tmp_path / name))
    assert found.device == "NVIDIA H100"
    assert [e.name for e in found.steps] == ["ProfilerStep#5", "ProfilerStep#6"]
    begin = found.steps[0].begin
    assert found.work[1].begin - begin == pytest.approx(2), "milliseconds"
    assert len(found.work) == len(found.calls) == 10


def test_an_event_across_two_chunks_is_read_once(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "CHUNK", 50)
    assert len(trace.read(busy().write(tmp_path / "t.json")).work) == 10


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", 'no "traceEvents"'),
        ('{"a": 1}', 'no "traceEvents"'),
        ('{"traceEvents": [{"ph": "X", "na', "cut short"),
        ('{"traceEvents": [', "cut short"),
        ('{"traceEvents": []}', "no step in it; call prof.step()"),
    ],
)
def test_what_is_no_trace_says_so(tmp_path, text, said):
    file = tmp_path / "a'; echo foo.json"
    file.write_text(text)
    with pytest.raises(trace.TraceError, match=said) as error:
        trace.read(file)
    assert str(file) in str(error.value)


def test_a_file_that_is_not_there_or_cut_in_its_zip_says_so(tmp_path):
    with pytest.raises(trace.TraceError, match="can't be read"):
        trace.read(tmp_path / "none.json")
    file = busy().write(tmp_path / "t.json.gz")
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(trace.TraceError, match="can't be read"):
        trace.read(file)


def test_100_mb_are_read_in_10_s_and_1_gb(tmp_path):
    made = busy()
    one = ",".join(json.dumps(e) for e in made.events[1:11])
    file = tmp_path / "large.json"
    with open(file, "w") as out:
        out.write('{"traceEvents": [' + json.dumps(made.events[0]))
        while out.tell() < 100e6:
            out.write("," + ",".join([one] * 1000))
        out.write("]}")
    # Not ru_maxrss: a process inherits that from the one that started it.
    script = """
        import re, sys, time
        from pathlib import Path
        from dlojz.runs import kinds, trace
        begin = time.process_time()
        trace.analyse(trace.read(sys.argv[1]))
        spent = time.process_time() - begin
        peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]
        print(spent, int(peak) / 1e6)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), file], capture_output=True, text=True
    )
    seconds, gigabytes = map(float, done.stdout.split())
    assert seconds < 10
    assert gigabytes < 1


# Verdicts ------------------------------------------------------------------------------------


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
    assert found.idle[trace.LAUNCHES] == pytest.approx(7.6, abs=0.5)
    assert found.tensor_cores is None, "no matrix products"


def test_launches_that_are_slowed_by_the_recording_of_functions_say_so(tmp_path):
    made = Made()
    for i in range(20):
        made.launch(i, i + 0.1, i + 0.3, RELU)
    made.step(1, 0, 20)
    made.host("python_function", "trainer.py(3): main", 0, 20)
    words = "launch bound, while Python's functions are recorded"
    assert reading(made, tmp_path).verdict == words


def with_a_wait(op, call="cudaStreamSynchronize"):
    """In each step of 8 ms the host waits for the device, then launches from nothing."""
    made = Made()
    for step in (0, 1):
        begin = 8 * step
        made.step(step, begin, begin + 8)
        made.launch(begin + 0.2, begin + 0.3, begin + 6)
        made.host("python_function", "/r/0001/trainer.py(151): train_step", begin + 1, begin + 7)
        made.host("cpu_op", op, begin + 1, begin + 6.2)
        made.host("cuda_runtime", call, begin + 1.1, begin + 6.1)
    return made


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
    assert found.idle == {trace.DATA: pytest.approx(6)}, "in each step, also in the first"


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
