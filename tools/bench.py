"""What the tools themselves cost: `python tools/bench.py [chronometer] [log] [submit]`.

Each benchmark prints its figure, its own resolution, and the bound it is held to. Where the
resolution is wider than what the bound leaves, the answer is "cannot tell".
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torchvision

from dlojz import course, launch, log
from dlojz.chronometer import Chronometer

MARKS_PER_STEP = 5
STUDENT_T = {5: 2.571, 7: 2.365, 9: 2.262, 11: 2.201, 15: 2.131, 19: 2.093}  # 95 %, by freedom


def interval(ratios) -> tuple[float, float]:
    """The mean of paired ratios (geometric) and the half-width of its 95 % interval."""
    logs = [math.log(r) for r in ratios]
    t = STUDENT_T[len(logs) - 1]
    half = t * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(statistics.mean(logs)), math.expm1(half)


class Sink:
    """Takes what a Chronometer hands over and keeps the last."""

    def step(self, *fields):
        self.last = fields

    def window_opens(self):
        pass

    def window(self, **fields):
        self.last_window = fields

    validation = window


class Unmarked:
    """A Chronometer that does nothing."""

    def __getattr__(self, name):
        return lambda **_: None


def chronometer_on_a_cpu():
    """Microseconds for each mark, over the step of the smallest model that the course trains."""
    per_mark = [_seconds_per_mark(5_000) for _ in range(6)]
    step = _step_seconds("cpu", "resnet18", 32, 64)
    share = MARKS_PER_STEP * statistics.median(per_mark) / step
    resolution = MARKS_PER_STEP * (max(per_mark) - min(per_mark)) / 2 / step
    verdict = "cannot tell" if resolution > 0.005 else "holds" if share < 0.005 else "FAILS"
    print(
        f"chronometer, CPU: {1e6 * statistics.median(per_mark):.2f} us a mark, "
        f"{1e3 * step:.0f} ms a step (resnet18, 64 px, batch 32): {share:.4%} of the step; "
        f"resolution +- {resolution:.4%}; bound 0.5 %: {verdict}"
    )
    return verdict != "FAILS"


def _seconds_per_mark(steps):
    chrono = Chronometer("cpu", Sink())
    chrono.start()
    chrono.next_iter()
    begin = time.perf_counter()
    for _ in range(steps):
        for mark in (chrono.transfer, chrono.forward, chrono.backward, chrono.update):
            mark()
        chrono.next_iter(images=32)
    return (time.perf_counter() - begin) / steps / MARKS_PER_STEP


def chronometer_on_a_gpu(pairs=20, steps=25):
    """The paired ratio of the loop without marks to the loop with them, A B B A ..."""
    loop = _training_loop("cuda", "resnet50", 64, 224)
    loop(Unmarked(), 20)
    with_marks, same = [], []
    for i in range(pairs):
        a, b = Unmarked(), Chronometer("cuda", Sink())
        times = {}
        for which in ("ab", "ba")[i % 2]:
            times[which] = loop(a if which == "a" else b, steps)
        with_marks.append(times["a"] / times["b"])
        same.append(loop(Unmarked(), steps) / loop(Unmarked(), steps))
    ratio, half = interval(with_marks)
    _, resolution = interval(same)
    verdict = "cannot tell" if resolution > 0.005 else "holds" if ratio >= 0.995 else "FAILS"
    print(
        f"chronometer, {torch.cuda.get_device_name()}: speed with / without {ratio:.4f} "
        f"+- {half:.4f} (resnet50, TF32, batch 64, {pairs} pairs); resolution (A/A) "
        f"+- {resolution:.4f}; bound 0.995: {verdict}"
    )
    return verdict != "FAILS"


def _training_loop(device, model, batch, size):
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    network = torchvision.models.get_model(model, weights=None).to(device)
    optimizer = torch.optim.SGD(network.parameters(), 0.01)
    images = torch.randn(batch, 3, size, size, device=device)
    labels = torch.randint(1000, (batch,), device=device)

    def loop(chrono, steps):
        torch.accelerator.synchronize() if device == "cuda" else None
        begin = time.perf_counter()
        chrono.start()
        chrono.next_iter()
        for _ in range(steps):
            chrono.transfer()
            chrono.forward()
            loss = torch.nn.functional.cross_entropy(network(images), labels)
            chrono.backward()
            optimizer.zero_grad()
            loss.backward()
            chrono.update()
            optimizer.step()
            chrono.next_iter(images=batch, loss=loss)
        chrono.stop()
        torch.accelerator.synchronize() if device == "cuda" else None
        return (time.perf_counter() - begin) / steps

    return loop


def _step_seconds(device, model, batch, size):
    loop = _training_loop(device, model, batch, size)
    loop(Unmarked(), 2)
    return loop(Unmarked(), 5)


def reading_a_log(sizes=(100_000, 1_000_000)):
    """Seconds to read a log, for two lengths: it must grow with the length, not faster."""
    sample = next(s for s in log.__doc__.splitlines() if s.startswith('{"event": "step"'))
    event, seconds = json.loads(sample), []
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            file = Path(folder) / "events.jsonl"
            with file.open("w") as stream:
                for i in range(size):
                    event["step"] = i
                    stream.write(json.dumps(event) + "\n")
            tries = [_seconds_to_read(file, size) for _ in range(3)]
            seconds.append(min(tries))  # the least disturbed
            spread = (max(tries) - min(tries)) / 2
            print(f"log: {size:,} steps read in {seconds[-1]:.2f} s (+- {spread:.2f} in 3 tries)")
    growth = seconds[1] / seconds[0] / (sizes[1] / sizes[0])
    holds = seconds[1] < 20 and growth < 1.5
    verdict = "holds" if holds else "FAILS"
    print(f"log: grows {growth:.2f} times as fast as its length; bounds 20 s and 1.5: {verdict}")
    return holds


def _seconds_to_read(file, size):
    begin = time.perf_counter()
    steps = len(log.read(file).steps)
    assert steps == size
    return time.perf_counter() - begin


def submitting(pairs=6):
    """What the launcher adds to running the trainer by hand: wall time, in pairs."""
    import subprocess

    from dlojz.local import _environment

    flags = "--test --test-nsteps 2 --data synthetic --model resnet18 --image-size 32 -b 4"
    trainer, added = course.solution(0), []
    for _ in range(pairs):
        with tempfile.TemporaryDirectory() as run:
            begin = time.perf_counter()
            subprocess.run(
                [sys.executable, str(trainer), *flags.split()],
                env=_environment(
                    Path(run), {"cwd": str(course.course_root()), "n_gpu": 1}, ["cpu"]
                ),
                check=True,
                capture_output=True,
            )
            by_hand = time.perf_counter() - begin
        begin = time.perf_counter()
        launch.submit(f"{trainer} {flags}").wait()
        added.append(time.perf_counter() - begin - by_hand)
    mean, spread = statistics.mean(added), statistics.stdev(added)
    half = STUDENT_T[pairs - 1] * spread / math.sqrt(pairs)
    verdict = "holds" if mean + half <= 1 else "FAILS" if mean - half > 1 else "cannot tell"
    print(f"submit: adds {mean:.2f} +- {half:.2f} s ({pairs} pairs); bound 1 s: {verdict}")
    return verdict != "FAILS"


def main():
    benchmarks = {
        "chronometer": chronometer_on_a_gpu if torch.cuda.is_available() else chronometer_on_a_cpu,
        "log": reading_a_log,
        "submit": submitting,
    }
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("which", nargs="*", choices=[*benchmarks, []], help="default: all")
    chosen = parser.parse_args().which or list(benchmarks)
    sys.exit(not all([benchmarks[name]() for name in chosen]))


if __name__ == "__main__":
    main()
