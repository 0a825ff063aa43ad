"""A step under torch's profiler: its work, its waits, its copies and its communication."""

import math
import time
from collections import Counter

import torch

from dlojz.traces import kinds, spans
from dlojz.watch import compilation, workload

ITEM_BYTES = {
    **{"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4},
    "uint8": 1,
}


CPU = torch.autograd.DeviceType.CPU


CONVOLUTION = "aten::convolution"
RANGE_S = 0.1  # gloo's threads complete a collective, and end its range in the trace a moment later


def start_profiler(activities=()):
    """Return a profiler that has started; `stop_profiler` stops it.

    activities: by default the host's work, and a GPU's if there is one.
    """
    kinds_of = torch.profiler.ProfilerActivity
    on_gpu = [kinds_of.CUDA] if torch.cuda.is_available() else []
    activities = list(activities) or [kinds_of.CPU, *on_gpu]
    profiler = torch.profiler.profile(activities=activities, record_shapes=True, acc_events=True)
    profiler.start()
    # True only avoids a warning. At the end it would spend seconds on Python objects that nothing
    # reads.
    profiler.profiler.acc_events = False
    return profiler


def stop_profiler(profiler) -> list:
    """Stop the profiler, which waits for the device; return its events."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        time.sleep(RANGE_S)
    profiler.stop()
    return profiler.profiler.kineto_results.events()


def profiled(call) -> list:
    """Return the profiler's events of `call()`, and of the kernels that it launches."""
    profiler = start_profiler()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return stop_profiler(profiler)


def counts(events) -> dict[str, int]:
    """Return the numbers of operations, kernels, and reads of a value, which make the host wait."""
    names = [e.name() for e in events if e.device_type() == CPU]
    return {
        "operations": sum(name.startswith("aten::") for name in names),
        "kernels": sum(_ran_on_gpu(e) for e in events),
        "reads": sum(name in kinds.READS for name in names),
    }


def on_device(events) -> list[tuple[str, float]]:
    """Return a GPU's kernels and copies, in their order, each with its seconds."""
    ran = sorted(filter(_ran_on_gpu, events), key=lambda e: e.start_ns())
    return [(e.name(), e.duration_ns() / 1e9) for e in ran]


def before_convolution(events) -> list[str] | None:
    """Return a GPU's kernels from the last copy of a batch to the first convolution; None on a CPU.

    Casts of the first convolution's weights are among them.
    """
    ran = sorted(filter(_ran_on_gpu, events), key=lambda e: e.start_ns())
    hosts = [e for e in events if e.device_type() == CPU]
    first = min((e for e in hosts if e.name() == CONVOLUTION), key=_start, default=None)
    if not ran or first is None:
        return None
    # Operations only, as in `_backward`.
    inside = {e.correlation_id() for e in hosts if _within(e, first) and e.name()[:2] != "cu"}
    ends = [e.start_ns() for e in ran if e.linked_correlation_id() in inside]
    before = [e for e in ran if e.start_ns() < min(ends, default=0)]
    copies = [e.start_ns() for e in before if e.name().startswith("Memcpy HtoD")]
    return [e.name()[:120] for e in before if e.start_ns() > max(copies, default=0)]


def _start(event) -> int:
    return event.start_ns()


def summary(events) -> dict:
    """Return the fields of a profiled step\'s record."""
    matrix, calls, copies, kernels = Counter(), Counter(), Counter(), Counter()
    fused = 0
    hosts = [e for e in events if e.device_type() == CPU]  # ranges are repeated on the GPU
    own = [e for e in hosts if kinds.OWN_READS.match(e.name())]
    aside = [e for e in hosts if e.name() == kinds.ASIDE]
    waits_of_ddp, forward = kinds.OWN_WAITS
    ddp = [e for e in hosts if e.name() == forward]
    for event in events:
        name = event.name()
        if kind := kinds.MATRIX_OPS.get(name):
            matrix[kind, workload.dtype(next((d for d in event.dtypes() if d), "?"))] += 1
        elif kinds.FUSED.match(name):
            fused += 1
        elif name == "aten::_local_scalar_dense":
            calls["item"] += not any(_within(event, other) for other in own + aside)
        elif kinds.WAITS.match(name):
            others = aside + ddp * bool(waits_of_ddp.match(name))
            calls[name] += not any(_during(event, other) for other in others)
        elif name.startswith("Memcpy"):
            copies[name] += 1
        elif _ran_on_gpu(event):
            kernels[name[:120]] += event.duration_ns()
    return {
        **communication(events),
        **compilation.coverage(events),
        "work": workload.counted(events),
        "matrix_ops": [{"op": op, "dtype": d, "count": n} for (op, d), n in matrix.items()],
        "fused_updates": fused,
        "calls": dict(calls),
        "copies": dict(copies),
        "non_blocking": sum(map(_asks_not_to_wait, events)),
        "before_convolution": before_convolution(events),
        "kernels_us": {name: ns / 1000 for name, ns in kernels.most_common(12)},
    }


def _within(event, other) -> bool:
    return event.start_thread_id() == other.start_thread_id() and _during(event, other)


def _during(event, other) -> bool:
    return 0 <= event.start_ns() - other.start_ns() < other.duration_ns()


def _asks_not_to_wait(event) -> bool:
    # Tensor.to(dtype, layout, device, pin_memory, non_blocking, copy, memory_format), after self
    inputs = event.concrete_inputs() if event.name() == "aten::to" else ()
    return len(inputs) == 8 and inputs[5] is True


def _ran_on_gpu(event) -> bool:
    # The profiler repeats the host's annotations on the GPU, around their kernels.
    return event.device_type() != CPU and not event.is_user_annotation()


def communication(events):
    """Return the communication between the processes in a step; {} if there was none.

    Each collective has the size of its operand, its duration and its begin, counted from the step's
    first record; the span of the backward pass is beside it. On a GPU with a kernel for each
    collective, these are the kernels' times. The kernels' total time, and its part that did not
    overlap with other work, are added.
    """
    begin = min((e.start_ns() for e in events), default=0)
    collectives, kernels, others = [], [], []
    for event in events:
        if _ran_on_gpu(event):
            (kernels if kinds.NCCL_KERNEL.match(event.name()) else others).append(event)
        elif kinds.COLLECTIVE.fullmatch(event.name()) and event.device_type() == CPU:
            collectives.append(event)
    if not collectives:
        return {}
    collectives.sort(key=lambda e: e.start_ns())
    kernels.sort(key=lambda e: e.start_ns())
    one_each = len(kernels) == len(collectives)  # then both are in the same order
    times = [_span(event, begin) for event in (kernels if one_each else collectives)]
    found = {
        "collectives": [_collective(e, s) for e, s in zip(collectives, times, strict=True)],
        "timed_on": "gpu" if one_each else "host",
    }
    if backward := _backward(events, others if one_each else []):
        ends = [_span(event, begin) for event in backward]
        found["backward_ms"] = [round(f, 3) for f in (min(ends)[0], max(e for _, e in ends))]
    if kernels:
        ours, rest = (spans.union(_span(e, begin) for e in part) for part in (kernels, others))
        found["communication_ms"] = round(spans.length(ours), 3)
        found["exposed_ms"] = round(spans.length(spans.without(ours, rest)), 3)
    return found


def _span(event, begin):
    """Return an event's begin and end, in milliseconds since `begin`."""
    start = (event.start_ns() - begin) / 1e6
    return start, start + event.duration_ns() / 1e6


def _collective(event, span):
    backend, op = kinds.COLLECTIVE.fullmatch(event.name()).groups()
    dtype = workload.dtype(next(iter(event.dtypes()), "?"))
    return {
        "backend": backend,
        "op": op,
        "bytes": math.prod(next(iter(event.shapes()), [])) * ITEM_BYTES.get(dtype, 4),
        "dtype": dtype,
        "begin_ms": round(span[0], 3),
        "ms": round(span[1] - span[0], 3),
    }


def _backward(events, on_device):
    """Return the records of the backward pass: its kernels on the GPU, or its own."""
    host = [e for e in events if e.name().startswith("autograd::engine::evaluate_function")]
    if not host or not on_device:
        return host
    begin = min(e.start_ns() for e in host)
    end = max(e.start_ns() + e.duration_ns() for e in host)
    # Operations only: CUDA calls have numbers of their own, which may coincide.
    launched = {
        e.correlation_id()
        for e in events
        if e.device_type() == CPU and not e.name().startswith("cu") and begin <= e.start_ns() < end
    }
    return [e for e in on_device if e.linked_correlation_id() in launched] or host
