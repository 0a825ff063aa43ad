"""The measurements behind `dlojz worth compile`: one eager step, and one block compiled.

    python -m dlojz.chapters.n09b_modes.measuring --into worth.json \\
        dlojz/dlojz.py --model resnet18 -b 8

It takes the reader's own trainer, with its `build_model` and `train_step`, and trains on one
synthetic batch that stays on the device. `worth` of this folder predicts from these measurements;
with --measure the whole model is compiled as well, to compare.
"""

import argparse
import copy
import json
import math
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict
from datetime import date
from pathlib import Path

import torch

from dlojz import idr_torch
from dlojz.chapters.n09b_modes import worth
from dlojz.chapters.session import seconds, tell_the_older_switch, wait
from dlojz.course import UserError
from dlojz.machine import cpus
from dlojz.runs import source
from dlojz.traces import trace
from dlojz.training import any_model, imports, mixing, private
from dlojz.training.chronometer import NoMarks
from dlojz.training.imports import first_line
from dlojz.watch import compilation

FIRST = 4  # steps that choose algorithms, allocate memory, or compile
WINDOWS, WINDOW_S = 8, 0.1  # each window takes at least one step and this time
UPDATES = 100_000  # of the learning rate's schedule: more than needed here
LEAST = 8  # operations of a block that is large enough to measure
NO_ROOM = "No space left on device"
NO_COMPILER = ("InvalidCxxCompiler", "No working C++ compiler", "Failed to find C compiler")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--into", type=Path, required=True, help="a file for the result, as JSON")
    add("--mode", choices=worth.MODES, default="default", help="mode of torch.compile")
    add("--measure", action="store_true", help="compile the whole model, too")
    add("trainer", help="such as dlojz/dlojz.py")
    add("flags", nargs=argparse.REMAINDER, help="the trainer's")
    args = parser.parse_args()
    try:
        args.into.write_text(json.dumps(result(args)), encoding="utf-8")
    except (UserError, OSError) as error:
        if is_of_disk(error):
            sys.exit(f"dlojz: {no_room()} ({first_line(error)})")
        if not isinstance(error, UserError):
            raise
        sys.exit(f"dlojz: {error}")
    except (RuntimeError, MemoryError) as error:  # torch's errors of memory are RuntimeErrors
        if not is_of_memory(error):
            raise
        sys.exit(f"dlojz: out of memory: give a smaller -b or --image-size ({first_line(error)})")


def result(args) -> dict:
    """Return the profile of a trainer with its flags, and the hardware."""
    if idr_torch.size > 1:
        raise UserError(f"{idr_torch.size} processes: run it in one, on one device")
    tell(f"building the training of {args.trainer}")
    training = Training(args.trainer, args.flags)
    on_gpu = training.device.type == "cuda"
    name = args.trainer if source.names_model(args.trainer) else Path(args.trainer).name
    found = {
        "command": " ".join([name, *args.flags]),
        "mode": args.mode,
        "device": torch.cuda.get_device_name() if on_gpu else cpus.name(),
        "threads": None if on_gpu else torch.get_num_threads(),
        "torch": torch.__version__.partition("+")[0],  # without its build
        "date": date.today().isoformat(),
        "profile": asdict(profile(training, options(args.mode))),
    }
    if args.measure:
        tell("compiling the whole model, to compare")
        found["measured"] = measured(training, args)
    return found


def tell(what):
    """Print the progress to stderr."""
    print(f"  {what} ...", file=sys.stderr, flush=True)


def options(mode):
    """Return the arguments of torch.compile."""
    return {} if mode == "default" else {"mode": mode}


# The reader's training ---------------------------------------------------------------------------


class Training:
    """The reader's training, on one batch on the device, and not compiled."""

    def __init__(self, file, flags):
        foreign = source.names_model(str(file))
        self.trainer = any_model if foreign else imports.trainer(file)
        sys.argv = [str(file), *[f"--model={file}"] * foreign, *flags]
        self.args = self.trainer.parse_args()
        self.args.data, self.args.accumulate = "synthetic", 1
        if "compile" in self.args:
            self.args.compile = "off"
        self.trainer.set_numerics(self.args)
        tell_the_older_switch()
        self.device = self.trainer.set_device()
        if foreign:
            self.parts = any_model.build_training(self.args, self.device)
            self.batch = any_model.batch(self.model, self.args, self.args.batch, self.device)
        else:
            loader, _ = self.trainer.build_loaders(self.args)
            self.batch = [part.to(self.device) for part in next(iter(loader))]
            whole = self.args, self.device, len(loader.dataset.classes), UPDATES
            self.parts = self.trainer.build_training(*whole)
        if getattr(self.args, "mix", "off") != "off":  # an epoch draws it for each batch
            size = len(self.batch[0]), self.args.image_size
            self.parts.draws = mixing.draws_of(self.args.seed, 0, 0, *size).to(self.device)
        if compilation.is_compiled(self.model):
            remedy = "return the model as it is" if foreign else "give flags such as --compile off"
            raise UserError(f"{file} compiles its model already: {remedy}")
        self.model.train()

    @property
    def model(self):
        return self.parts.model

    def step(self, marks=None):
        """Train on the batch once."""
        self.trainer.train_step(0, self.parts, *self.batch, self.args, marks or NoMarks())


def is_of_memory(error) -> bool:
    """Return whether the memory of a GPU or of the machine was exhausted."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "allocate memory" in str(error)
    )


def is_of_disk(error) -> bool:
    """Return whether a temporary file could not be written, as by the profiler."""
    return isinstance(error, trace.TraceError) or NO_ROOM in str(error)


def no_room() -> str:
    """Return the remedy if temporary files can't be written."""
    return f"no room for files in {tempfile.gettempdir()}: set TMPDIR to a folder with space"


class HostMarks(NoMarks):
    """The host's own time: each part begins with an idle device."""

    def __init__(self, device):
        self.device, self.began = device, time.perf_counter()

    def update(self):
        self.model_ms = 1000 * (time.perf_counter() - self.began)
        wait(self.device)
        self.began = time.perf_counter()

    def ends(self):
        """Return the milliseconds of the model, and of the update."""
        return self.model_ms, 1000 * (time.perf_counter() - self.began)


class TraceMarks(NoMarks):
    """The range of the update in a trace. Earlier work has ended before it."""

    def __init__(self, device):
        self.device, self.range = device, None

    def update(self):
        wait(self.device)
        self.range = torch.profiler.record_function(worth.UPDATE)
        self.range.__enter__()

    def ends(self):
        wait(self.device)
        if self.range is None:
            raise UserError("train_step does not call chrono.update() before the update: add it")
        self.range.__exit__(None, None, None)


# The eager step ----------------------------------------------------------------------------------


def profile(training: Training, compiling: dict) -> worth.Profile:
    """Return the parts of an eager step's time, and the cost of compiling a block."""
    tell(f"timing eager steps on {training.device}")
    for _ in range(FIRST):
        training.step()
    wait(training.device)
    ms = windows([training])[0]
    tell("recording one step with the profiler")
    found = worth.split(traced(training))
    if found["on_gpu"]:
        found |= host_times(training)
    calls, spans = counted(training)
    name = block_of(training.model, spans)
    tell(f"compiling one block with an empty cache: {name or 'the whole model'}")
    start_s, block = compiled_block(training, name, calls[slice(*spans[name])], compiling)
    return worth.Profile(
        **found,
        step_ms=statistics.median(ms),
        varied=(max(ms) - min(ms)) / statistics.median(ms),
        operations=len(calls),
        different=len(set(calls)),
        start_s=start_s,
        block=block,
        nchw=found["on_gpu"] and has_nchw(training.model),
    )


def windows(trainings, count: int = WINDOWS) -> list[list[float]]:
    """Return the milliseconds per step in each window, the trainings in turn."""
    steps = [max(1, math.ceil(WINDOW_S / seconds(t.step, t.device))) for t in trainings]
    found = [[] for _ in trainings]
    for _ in range(count):
        for training, n, ms in zip(trainings, steps, found, strict=True):
            ms.append(1000 * seconds(training.step, training.device, n))
    return found


def host_times(training) -> dict:
    """Return the host's times to launch a step, if it never waits for the device."""
    spent = []
    for _ in range(WINDOWS):
        wait(training.device)
        marks = HostMarks(training.device)
        training.step(marks)
        spent.append(marks.ends())
    wait(training.device)
    model_ms, update_ms = map(statistics.median, zip(*spent, strict=True))
    return {"host_ms": model_ms, "update_host_ms": update_ms}


def traced(training) -> trace.Trace:
    """Return a trace of one step, after one to warm the profiler up."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        with torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(file)),
            acc_events=True,  # else it warns about events cleared by a second cycle
        ) as profiler:
            for _ in range(2):
                marks = TraceMarks(training.device)
                training.step(marks)
                marks.ends()
                profiler.step()
        return trace.read(file)


def has_nchw(model) -> bool:
    """Return whether a convolution has weights in NCHW."""
    return any(
        not module.weight.is_contiguous(memory_format=torch.channels_last)
        for module in model.modules()
        if isinstance(module, torch.nn.Conv2d)
    )


# The model's size, and one block -----------------------------------------------------------------


class Calls(private.dispatch_mode()):
    """The operations of a forward pass: operator, shapes and dtypes of each."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        leaves = filter(torch.is_tensor, private.tree_leaves((args, kwargs)))
        kinds = tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)
        self.seen.append((str(function), kinds))
        return function(*args, **(kwargs or {}))


def counted(training) -> tuple[list, dict]:
    """Return the operations of a forward pass, and the range of each submodule's, by name."""
    calls, spans, hooks = Calls(), {}, []
    for name, module in training.model.named_modules():

        def begins(module, inputs, name=name):
            spans[name] = (len(calls.seen), len(calls.seen))

        def ends(module, inputs, output, name=name):
            spans[name] = (spans[name][0], len(calls.seen))

        hooks += [module.register_forward_pre_hook(begins), module.register_forward_hook(ends)]
    hooks.append(training.model.register_forward_pre_hook(lambda *_: calls.__enter__() and None))
    hooks.append(training.model.register_forward_hook(lambda *_: calls.__exit__(None, None, None)))
    try:
        training.step()
    finally:
        for hook in hooks:
            hook.remove()
    return calls.seen, spans


def block_of(model, spans) -> str:
    """Return the submodule to compile as a sample: the smallest repeated top-level block.

    Without one it is the smallest with some operations; "" is the whole model.
    """
    parts, size = dict(model.named_modules()), {n: end - begin for n, (begin, end) in spans.items()}
    fits = [n for n in spans if n and LEAST <= size[n] <= size[""] / 2]
    count = Counter(type(part) for part in parts.values())
    own = [n for n in fits if not type(parts[n]).forward.__module__.startswith("torch.nn.")]
    repeated = [n for n in own if count[type(parts[n])] > 1]
    outermost = [n for n in repeated if not any(n.startswith(f"{o}.") for o in repeated)]
    return min(outermost or fits, key=size.get, default="")


def compiled_block(training, name, calls, compiling) -> tuple[float, worth.Block]:
    """Return the seconds of the compiler's start, and the cost of compiling a block."""
    module, inputs, named, autocast = seen_by(training, name)
    block = copy.deepcopy(module)

    def run(part):
        with torch.autocast(training.device.type, **autocast):
            # Cloned, since a submodule may change its inputs in place.
            positional, by_name = private.tree_map(cloned, (inputs, named))
            out = private.tree_leaves(part(*positional, **by_name))
            total = sum(leaf.float().sum() for leaf in out if torch.is_tensor(leaf))
        total.backward()

    run(block)
    torch.compiler.reset()
    device, kind = training.device, type(module).__name__
    try:
        with empty_cache():
            start_s = started(device, compiling)
            fast = torch.compile(block, **compiling)
            compile_s = seconds(lambda: run(fast), device)
            ms = [[seconds(lambda p=p: run(p), device) for p in (block, fast)] for _ in range(20)]
    except Exception as error:  # a compiler's errors have many classes
        if is_of_memory(error):
            raise
        raise UserError(refusal(kind, error)) from error
    eager, compiled = (statistics.median(each) for each in zip(*ms, strict=True))
    label = f"{name} ({kind})" if name else kind
    return start_s, worth.Block(label, len(calls), len(set(calls)), compile_s, eager / compiled)


@contextmanager
def empty_cache():
    """Compile into an empty folder, which is removed in the end."""
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with folder as path, private.empty_compile_cache(path):
        yield


def started(device, compiling) -> float:
    """Return the seconds of a first, tiny compilation, for imports and other one-time work."""
    tiny = torch.compile(torch.sin, **compiling)
    return seconds(lambda: tiny(torch.ones(8, device=device)), device)


def refusal(kind: str, error: Exception) -> str:
    """Return the reason why a block can't be compiled, with the remedy."""
    text = f"{type(error).__name__}: {error}"
    if any(sign in text for sign in NO_COMPILER):
        return (
            "no working C++ compiler, which torch.compile needs: install g++, load its module, or "
            "set $CXX. Nothing can be predicted without it"
        )
    if NO_ROOM in text:
        return no_room()
    if "TritonMissing" in text:
        return "no triton, with which torch.compile writes kernels for a GPU: install it with torch"
    return (
        f"{kind} can't be compiled: {type(error).__name__}: {first_line(error)}. Leave it eager, "
        "or see TORCH_LOGS=+dynamo"
    )


def seen_by(training, name):
    """Return a submodule, its inputs in a step, and its autocast."""
    part, kind, found = training.model.get_submodule(name), training.device.type, {}

    def look(module, inputs, named):
        if not found:
            found["inputs"], found["named"] = private.tree_map(detached, (inputs, named))
            dtype = torch.get_autocast_dtype(kind)
            found["autocast"] = {"dtype": dtype, "enabled": torch.is_autocast_enabled(kind)}

    hook = part.register_forward_pre_hook(look, with_kwargs=True)
    training.step()
    hook.remove()
    return part, found["inputs"], found["named"], found["autocast"]


def cloned(leaf):
    """Return a copy of a tensor that gradients flow through; anything else unchanged."""
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def detached(leaf):
    """Return a detached copy of a tensor with the same layout, which may have a gradient."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


# The whole model, compiled for real --------------------------------------------------------------


def measured(eager, args) -> dict:
    """Return gain and compile time of the whole model, in turn with eager steps.

    The compiler's start is in the profile.
    """
    torch.compiler.reset()
    compiled = Training(args.trainer, args.flags)
    # Not in place, which would compile nothing of a model of a class of torch.nn.
    compiled.parts.model = torch.compile(compiled.model, **options(args.mode))
    try:
        with empty_cache():
            started(eager.device, options(args.mode))
            first_s = FIRST * seconds(compiled.step, eager.device, FIRST)
            eager_ms, compiled_ms = windows([eager, compiled], 2 * WINDOWS)
    except Exception as error:
        if is_of_memory(error):
            raise
        raise UserError(refusal(type(eager.model).__name__, error)) from error
    return {
        "gain": statistics.median(a / b for a, b in zip(eager_ms, compiled_ms, strict=True)),
        "compile_s": first_s - FIRST * statistics.median(compiled_ms) / 1000,
        "eager_ms": eager_ms,
        "compiled_ms": compiled_ms,
    }


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
