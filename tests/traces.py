"""Traces by hand, in the profiler's own format."""

import gzip
import json

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


def steps(*work, host=(), count=2):
    """Steps of 10 ms, each with this work (name, begin, end) and these events of the host."""
    made = Made()
    for begin in range(0, 10 * count, 10):
        made.step(begin, begin, begin + 10)
        for name, a, b in work:
            made.launch(begin + a, begin + a, begin + b, name, 20 if name == NCCL else 7)
        for name, a, b in host:
            made.host("user_annotation", name, begin + a, begin + b)
    return made
