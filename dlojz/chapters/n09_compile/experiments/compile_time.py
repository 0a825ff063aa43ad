"""The cost and gain of compiling a model: cold, warm, and time per step.

Submitted by a notebook: submit("dlojz/chapters/n09_compile/experiments/compile_time.py").

The model is compiled with an empty cache, then by a second process with the first one's cache. Its
steps and those of the eager one are timed in turn, so that a disturbance affects both. By default
the model is a small one, made of ResNet's blocks, which a processor compiles in seconds.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
import torchvision
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import metrics
from torch._inductor.utils import fresh_cache
from torchvision.models.resnet import BasicBlock

from dlojz import idr_torch
from dlojz.chapters import session

EAGER, WHOLE = "eager", "whole model"
CACHE = "TORCHINDUCTOR_CACHE_DIR"
FIRST = 4  # steps that may compile: the first, and those that record CUDA graphs
WIDTH, DEPTH = 32, 3  # of the small model


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    session.add_sizes(parser, 8)
    parser.set_defaults(model="small", image_size=32)
    add = parser.add_argument
    add("--mode", default="default", help="mode of torch.compile, such as reduce-overhead")
    add("--backend", default="inductor", help="the compiler's backend; aot_eager makes no code")
    add("--steps", type=int, default=60, help="timed steps of each way")
    add("--warm", type=Path, help="only compile, with the caches as they are, and write to a file")
    args = parser.parse_args()
    session.set_float32(args.precision)
    if args.warm:
        args.warm.write_text(json.dumps(again(args, idr_torch.device())), "utf-8")
        return
    with session.begin(args) as (run, device):
        with tempfile.TemporaryDirectory() as folder:
            steps, cold = with_empty_caches(args, device, Path(folder))
            warm = in_a_second_process(Path(folder))
        step_ms = session.in_turn(steps, device, args.steps)
        run.measure("the compiler starts, cold", cold.pop("start_s"), "s")
        run.measure("the compiler starts, warm", warm.pop("start_s"), "s")
        for way, ms in step_ms.items():
            run.measure(way, statistics.median(ms), "ms per step")
            run.case(way, step_ms=ms, cold=cold.get(way), warm=warm.get(way))


def with_empty_caches(args, device, folder):
    """Return a training step of each way, and the cost of compiling; keep the cache."""
    steps, found = {EAGER: training(args, EAGER, device)}, {}
    [steps[EAGER]() for _ in range(FIRST)]
    with fresh_cache():
        found["start_s"] = start(args, device)
    with fresh_cache(dir=str(folder), delete=False):
        steps[WHOLE], found[WHOLE] = compiled(args, device)
        shutil.copytree(os.environ[CACHE], folder / "cache", dirs_exist_ok=True)
    return steps, found


def in_a_second_process(folder):
    """Return the cost of compiling in a second process, with that cache."""
    into = folder / "warm.json"
    command = [sys.executable, __file__, *sys.argv[1:], "--warm", str(into)]
    subprocess.run(command, check=True, env=os.environ | {CACHE: str(folder / "cache")})
    return json.loads(into.read_text("utf-8"))


def again(args, device):
    """Return the cost of compiling with the present cache."""
    return {"start_s": start(args, device), WHOLE: compiled(args, device)[1]}


def start(args, device):
    """Return the seconds of a first, tiny compilation, for imports and other one-time work."""
    tiny = torch.compile(torch.sin, backend=args.backend)
    return session.seconds(lambda: tiny(torch.ones(8, device=device)), device)


def compiled(args, device):
    """Return a compiled training step, and its cost."""
    torch.compiler.reset()
    counters.clear()
    metrics.reset()
    step = training(args, WHOLE, device)
    seconds = [session.seconds(step, device) for _ in range(FIRST)]
    return step, {
        "first_s": seconds,
        "graphs": counters["stats"]["unique_graphs"],
        "kernels": metrics.generated_kernel_count,
        "cached": {name: n for name, n in counters["aot_autograd"].items() if "cache" in name}
        | {name: n for name, n in counters["inductor"].items() if "cache" in name},
    }


def training(args, way, device):
    """Return step(), a training step of a model, compiled or not."""
    torch.manual_seed(0)
    model = build(args.model).to(device)
    images, labels = session.batch(args, device)
    if device.type == "cuda":
        model = model.to(memory_format=torch.channels_last)
        images = images.to(memory_format=torch.channels_last)
    fused = device.type == "cuda"
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, fused=fused)
    options = {"backend": args.backend}
    if args.mode != "default":
        options["mode"] = args.mode
    if way == WHOLE:
        model = torch.compile(model, **options)
    dtype = session.DTYPES.get(args.precision)
    return partial(session.one_step, model, optimizer, images, labels, dtype)


def build(name):
    """Return a classifier of torchvision, or the small one."""
    if name != "small":
        return torchvision.models.get_model(name, weights=None)
    first = nn.Conv2d(3, WIDTH, 3, padding=1)
    same = [BasicBlock(WIDTH, WIDTH) for _ in range(DEPTH)]
    return nn.Sequential(first, *same, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 10))


if __name__ == "__main__":
    main()
