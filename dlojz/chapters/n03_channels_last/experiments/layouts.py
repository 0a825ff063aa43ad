"""Hidden changes of layout: the parts of a training step's time, in five cases.

Submitted by a notebook:

    dlojz/chapters/n03_channels_last/experiments/layouts.py
    --model resnet18 -b 32


Whole steps are timed first, the cases in turn, so that a disturbance affects all. Then one step of
each is profiled: kernels on a GPU, operations on a CPU.
"""

import argparse
import os
import statistics
from collections import Counter
from functools import partial

import torch
import torchvision

from dlojz.chapters import session
from dlojz.watch import readings

CASES = {  # weights in channels_last, images in channels_last, .contiguous() before each stage
    "neither": (False, False, False),
    "images only": (False, True, False),
    "weights only": (True, False, False),
    "both": (True, True, False),
    "both, and .contiguous()": (True, True, True),
}
TRACED = 60  # first kernels of the step, kept with their times
SHORT_US = 20  # a kernel or operation too short to be visible in a trace
NAME = 160  # letters kept of a kernel's name


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    session.add_sizes(parser, 64)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each case")
    args = parser.parse_args()
    with session.begin(args) as (run, device):
        session.set_float32(args.precision)
        torch.backends.cudnn.benchmark = True  # as in the solution of this step

        steps = {case: training(args, device, *choice) for case, choice in CASES.items()}
        for case, ms in session.in_turn(steps, device, args.steps, warm_up=2).items():
            run.measure(case, statistics.median(ms), "ms per step")
            run.case(case, step_ms=ms, **profile(steps[case], device))


def training(args, device, weights_last, images_last, interrupted):
    """Return step(), a training step of a model of its own."""
    torch.manual_seed(0)
    model = torchvision.models.get_model(args.model, weights=None).to(device)
    images, labels = session.batch(args, device)
    if weights_last:
        model = model.to(memory_format=torch.channels_last)
    if images_last:
        images = images.to(memory_format=torch.channels_last)
    if interrupted:
        for stage in model.children():
            if any(True for _ in stage.children()):
                stage.register_forward_pre_hook(lambda _, inputs: (inputs[0].contiguous(),))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    dtype = session.DTYPES.get(args.precision)
    return partial(session.one_step, model, optimizer, images, labels, dtype)


def profile(step, device):
    """Return the time of one step by name, its first kernels, and the layouts."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # else it warns on stderr without a GPU
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    layouts = Counter()
    model = step.args[0]
    hooks = [
        m.register_forward_hook(lambda _, __, out: layouts.update([readings.layout(out)]))
        for m in model.modules()
        if isinstance(m, torch.nn.Conv2d)
    ]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        step()
        session.wait(device)
    [hook.remove() for hook in hooks]
    times, trace = Counter(), []
    events = sorted(profiler.events(), key=lambda e: e.time_range.start)
    for event in events:
        on_gpu = event.device_type == torch.autograd.DeviceType.CUDA
        if event.is_user_annotation or on_gpu != (device.type == "cuda"):
            continue
        # A CPU operation contains those that it calls, so only its own time counts.
        span = event.time_range.elapsed_us()
        own = span if on_gpu else event.self_cpu_time_total
        times[event.name[:NAME]] += own / 1000
        if SHORT_US < own >= span / 2 and len(trace) < TRACED:
            start = (event.time_range.start - events[0].time_range.start) / 1000
            trace.append([event.name[:NAME], round(start, 4), round(span / 1000, 4)])
    return {
        "times_ms": {name: round(ms, 4) for name, ms in times.most_common()},
        "trace_ms": trace,
        "convolutions": dict(layouts),
    }


if __name__ == "__main__":
    main()
