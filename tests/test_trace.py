import gzip
import json
import subprocess
import sys
import textwrap

import pytest

from dlojz.runs import trace

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


def busy(gpu_idle=0.0):
    """Two steps of 10 ms: the host is ahead, the device busy but for `gpu_idle` ms in each."""
    made = Made()
    for step in (0, 1):
        made.step(step + 5, 10 * step, 10 * step + 5)
        for i in range(5):
            begin = 10 * step + 2 * i
            made.launch(10 * step + 0.5 * i, begin, begin + 2 - gpu_idle / 5)
    return made


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
        ('{"traceEvents": []}', "no operation, call or kernel in it"),
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
        from dlojz.runs import breakdown, trace
        begin = time.process_time()
        breakdown.analyse(trace.read(sys.argv[1]))
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
