"""The course's step against timm's, interleaved in one process: `make bench-gpu`, with a GPU.

Both train resnet50 at 224 px on the same synthetic images: same batch, same precision, same layout,
same fused optimizer and loss; each normalizes the images in its own way. Ours is `train_step` of
the solution, with its metrics, scheduler and Chronometer; timm's (its model and a plain loop as in
its train.py) has none of these. The result is the ratio of the speeds, ours over timm's, with its
95 % interval over pairs A B B A ...; a goal is reached if the whole interval is there.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from bench import Nothing
from torch._inductor import config as inductor

from dlojz import course
from dlojz.chapters.session import DTYPES
from dlojz.runs import stats
from dlojz.training import data, imports
from dlojz.training.chronometer import Chronometer
from dlojz.watch import evidence

PAIRS, STEPS, BATCH, SIZE = 12, 30, 256, 224


@dataclass(frozen=True)
class Setting:
    """A comparison: the solution's settings, timm's, and the goal."""

    step: str  # of the solution
    precision: str
    channels_last: bool = True
    mode: str = ""  # of torch.compile, in our solution; "": not compiled
    timms: str = ""  # the mode of timm's training
    timms_precision: str = "bf16"  # if it is compiled
    tuned: bool = False  # Inductor tries neighbouring tile sizes for each of our kernels
    goal: float = 1.00


GRAPHS = {"mode": "reduce-overhead", "timms": "default", "goal": 1.02}
SETTINGS = {
    "02 fp16": Setting("02", "fp16", channels_last=False),
    "02 bf16": Setting("02", "bf16", channels_last=False),
    "03 fp16": Setting("03", "fp16"),
    "03 bf16": Setting("03", "bf16"),
    "09 bf16": Setting("09", "bf16", mode="default", timms="default"),
    "09 graphs": Setting("09", "bf16", **GRAPHS),
    "09 graphs fp16": Setting("09", "fp16", **GRAPHS),
    "09 tuned": Setting("09", "bf16", **GRAPHS, tuned=True),
    "09 tuned fp16": Setting("09", "fp16", **GRAPHS, tuned=True),
    "09 autotune": Setting("09", "bf16", mode="max-autotune", timms="default", goal=1.02),
    "09 autotune fp16": Setting("09", "fp16", mode="max-autotune", timms="default", goal=1.02),
    "09 both graphs": Setting("09", "bf16", mode="reduce-overhead", timms="reduce-overhead"),
}


def flags(setting: Setting, batch: int) -> str:
    """Return the flags of our solution."""
    words = f"--test --data synthetic --model resnet50 -b {batch} --precision {setting.precision}"
    if setting.channels_last:
        words += " --channels-last"
    return f"{words} --compile {setting.mode}" if setting.mode else words


def _parsed(setting, batch):
    """Return our solution as a module, and its parsed flags."""
    trainer = imports.from_file(course.solution(setting.step), f"solution_{setting.step}")
    sys.argv = ["dlojz.py", *flags(setting, batch).split()]
    return trainer, trainer.parse_args()


def ours(setting, images, labels, batch):
    """Return a loop over the solution's own step, to be called with a number of steps."""
    trainer, args = _parsed(setting, batch)
    trainer.set_numerics(args)
    device = torch.device("cuda")
    loader, _ = trainer.build_loaders(args)
    training = trainer.build_training(args, device, 1000, 100_000)
    evidence.watch(Nothing(), training, loader, args)
    training.model.train()

    chrono = Chronometer(device, Nothing())
    chrono.start()
    chrono.next_iter()

    def loop(steps):
        for _ in range(steps):
            chrono.transfer()
            x, y = (t.to(device, non_blocking=True) for t in (images, labels))
            loss = trainer.train_step(0, training, x, y, args, chrono)
            chrono.next_iter(images=len(x), loss=loss)

    return loop


def timm_loop(setting, images, labels):
    """Return a loop over timm's resnet50, like that of its train.py."""
    import timm

    device = torch.device("cuda")
    model = timm.create_model("resnet50", num_classes=1000).to(device)
    layout = torch.channels_last if setting.channels_last else torch.contiguous_format
    model = model.to(memory_format=layout)
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), 0.004, 0.9, weight_decay=5e-4, fused=True)
    for weight in model.parameters():  # as in the solution: a skipped first update writes none
        optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    if setting.timms:
        model = torch.compile(model, mode=setting.timms)
    precision = setting.timms_precision if setting.timms else setting.precision
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")
    dtype = DTYPES[precision]
    mean, std = (
        torch.tensor(values, device=device).mul(255).view(1, 3, 1, 1)
        for values in (timm.data.IMAGENET_DEFAULT_MEAN, timm.data.IMAGENET_DEFAULT_STD)
    )
    model.train()

    def loop(steps):
        for _ in range(steps):
            x, y = (t.to(device, non_blocking=True) for t in (images, labels))
            # timm's loader normalizes on the GPU, too.
            x = x.contiguous(memory_format=layout).float().sub_(mean).div_(std)
            with torch.autocast("cuda", dtype):
                loss = criterion(model(x), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    return loop


def _seconds(loop, steps):
    torch.cuda.synchronize()
    begin = time.perf_counter()
    loop(steps)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def outcome(low: float, high: float, goal: float = 1.0) -> str:
    """Return the conclusion of an interval of ratios on a goal: none, if it includes the goal."""
    return "reached" if low >= goal else "MISSED" if high < goal else "cannot tell"


def compare(name, args) -> bool:
    """Time one setting, print the ratio, and return whether the goal is certainly reached."""
    setting = SETTINGS[name]
    synthetic = SimpleNamespace(seed=0, batch_size=args.batch, image_size=SIZE, pin_memory=True)
    images, labels = data.Synthetic("train", synthetic).__getitems__([(0, 0)] * args.batch)
    mine = ours(setting, images, labels, args.batch)
    theirs = timm_loop(setting, images, labels)
    # The solution's switches apply to both: cuDNN's autotuner, TF32.
    with inductor.patch(coordinate_descent_tuning=setting.tuned):
        mine(15)
    theirs(15)
    ratios, speeds = [], {"a": [], "b": []}
    for i in range(args.pairs):
        seconds = {}
        for which in ("ab", "ba")[i % 2]:
            seconds[which] = _seconds(mine if which == "a" else theirs, STEPS)
            speeds[which].append(args.batch * STEPS / seconds[which])
        ratios.append(seconds["b"] / seconds["a"])
    mean, low, high = stats.interval(ratios)
    a, b = (sum(s) / len(s) for s in speeds.values())
    word = outcome(low, high, setting.goal)
    layout = "channels_last" if setting.channels_last else "NCHW"
    print(
        f"{name} {layout}: ours {a:,.0f}, timm {b:,.0f} images/s; ours / timm {mean:.4f} "
        f"({low:.4f} to {high:.4f}, {args.pairs} pairs of {STEPS} steps, batch {args.batch}); "
        f"goal {setting.goal:.2f}: {word}",
        flush=True,
    )
    torch.cuda.empty_cache()
    return word == "reached"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("which", nargs="*", help=f"some of {', '.join(SETTINGS)} (default: all)")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--batch", type=int, default=BATCH)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU here: this benchmark needs one")
    import timm
    from torch._functorch import config

    config.enable_autograd_cache = False  # it would reuse bf16's code for fp16: notebook 09b
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, timm {timm.__version__}")
    wanted = args.which or list(SETTINGS)
    sys.exit(not all([compare(name, args) for name in wanted]))


if __name__ == "__main__":
    main()
