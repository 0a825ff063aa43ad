"""The cost of the tools themselves: `python tools/bench.py`, or `python tools/bench.py profiler`.

Each benchmark prints its figure, its own resolution, and the bound that it must meet. If the
resolution is too coarse for the bound, the answer is "cannot tell".
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import torch
import torchvision
from tqdm import tqdm

from dlojz import course, launch
from dlojz.launch import Request, series
from dlojz.machine import cpus
from dlojz.runs import log, stats
from dlojz.runs.log import WARMUP_STEPS
from dlojz.training.chronometer import Chronometer
from dlojz.watch import evidence, replay, stopwatch

MARKS_PER_STEP = 5


class Sink:
    """A log that keeps only the last record of a Chronometer."""

    def step(self, *fields):
        self.last = fields

    def window_opens(self):
        pass

    def window(self, **fields):
        self.last_window = fields

    validation = window


class Nothing:
    """In place of a Chronometer or a log: each call does nothing."""

    def __getattr__(self, name):
        return lambda *_, **__: None


def judged(low: float, high: float, bound: float) -> str:
    """Return whether an interval of ratios is at or above the bound, in words."""
    return "holds" if low >= bound else "FAILS" if high < bound else "cannot tell"


def _in_pairs(what, without, with_it, other, pairs, bound):
    """Time a loop with and without something in pairs A B B A ..., print it, and judge it.

    other: one more loop without it, for the resolution.
    """
    found = [[], []]
    for i in range(pairs):
        for ratios, pair in zip(found, ((without, with_it), (without, other)), strict=True):
            seconds = {loop: loop() for loop in pair[:: 1 if i % 2 else -1]}
            ratios.append(seconds[pair[0]] / seconds[pair[1]])
    (ratio, low, high), (null, null_low, null_high) = map(stats.interval, found)
    verdict = judged(low, high, bound)
    print(
        f"{what}, {torch.cuda.get_device_name()}: speed with / without {ratio:.4f} ({low:.4f} to "
        f"{high:.4f}; resnet50, TF32, batch 64, {pairs} pairs); A/A {null:.4f} ({null_low:.4f} to "
        f"{null_high:.4f}); bound {bound}: {verdict}"
    )
    return verdict != "FAILS"


def chronometer_on_a_cpu():
    """Time a mark on a CPU, as a share of a step of the smallest model that the course trains."""
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
    """Time the loop with and without marks on a GPU."""
    loop = _training_loop("cuda", "resnet50", 64, 224)
    loop(Nothing(), 20)
    without, other = (partial(loop, Nothing(), steps) for _ in range(2))

    def marked():
        return loop(Chronometer("cuda", Sink()), steps)

    return _in_pairs("chronometer", without, marked, other, pairs, bound=0.995)


def evidence_on_a_cpu(calls=20_000):
    """Time the permanent hooks on a CPU, as a share of a small model's step."""
    model, images, labels = torch.nn.Linear(4, 4), torch.zeros(2, 4), torch.zeros(2).long()
    witness = _watch(model, torch.optim.SGD(model.parameters()), torch.nn.CrossEntropyLoss())
    loss, per_step = torch.zeros(()), []
    for _ in range(6):
        begin = time.perf_counter()
        for _ in range(calls):
            witness._on_input(model, (images,))
            witness._on_loss(None, (images, labels), loss)
            witness._on_gradient(None)
            witness._counts["optimizer_steps"] += 1
        per_step.append((time.perf_counter() - begin) / calls)
    step = _step_seconds("cpu", "resnet18", 32, 64)
    share, spread = statistics.median(per_step) / step, (max(per_step) - min(per_step)) / 2 / step
    verdict = "holds" if share + spread < 0.002 else "FAILS"
    print(
        f"evidence, CPU: {1e6 * statistics.median(per_step):.1f} us a step of {1e3 * step:.0f} ms "
        f"(resnet18, 64 px, batch 32): {share:.4%} +- {spread:.4%}; bound 0.2 %: {verdict}"
    )
    return verdict == "holds"


def evidence_on_a_gpu(pairs=20, steps=40):
    """Time the loop with and without the permanent hooks on a GPU."""
    loops = [_training_loop("cuda", "resnet50", 64, 224, watched=w) for w in (False, True, False)]
    for loop in loops:
        loop(Nothing(), 20)
    timed = [partial(loop, Nothing(), steps) for loop in loops]
    return _in_pairs("evidence", *timed, pairs, bound=0.998)


def profiler_outside_its_window(pairs=11):
    """Time the steps outside a profiler's window against runs without a profiler, in pairs."""
    size = "--model shufflenet_v2_x0_5 --image-size 64 -b 32"
    if torch.cuda.is_available():
        size = "--model resnet50 --image-size 224 -b 256 --precision bf16"
    flags = f"--test --data synthetic --test-nsteps 45 {size}".split()
    entries = []
    for i in range(pairs):
        for name in ("off", "on") if i % 2 else ("on", "off"):
            more = ["--profile"] if name == "on" else []
            entries.append(
                series.Entry(f"{name}-{i}", course.solution("04_profiler"), [*flags, *more])
            )
    job = series.submit(entries, Request(name="bench-profiler", time_max_s=3600))
    runs = dict(tqdm(series.as_they_end(job), total=len(entries), unit="run"))
    found = stats.compare(*([runs[f"{n}-{i}"] for i in range(pairs)] for n in ("off", "on")))
    verdict = judged(found.low, found.high, 0.998)
    print(
        f"profiler, {stats.summary(runs['on-0']).device_name}: speed outside its window / without "
        f"it {found.ratio:.4f} ({found.low:.4f} to {found.high:.4f}; {size}, {pairs} pairs); "
        f"bound 0.998: {verdict}"
    )
    return verdict != "FAILS"


def stopwatch_on_a_cpu(pairs=16, steps=12):
    """Time the loop of 03 with and without a check's stopwatch on a CPU, in turn."""
    size = "--model resnet18 --image-size 64 -b 32 --precision fp32"
    return _stopwatch(size, pairs, steps, bound=0.99)


def stopwatch_on_a_gpu(pairs=6, steps=40):
    """Time the loop of 03 with and without a check's stopwatch on a GPU, in one process, in turn.

    Between processes the speed varies by more than the bound.
    """
    sizes = "--model resnet50 --image-size 224 -b 256 --precision"
    return all([_stopwatch(f"{sizes} {p}", pairs, steps, bound=0.998) for p in ("bf16", "fp16")])


def _stopwatch(size, pairs, steps, bound):
    """Print the effect of a check's stopwatch on the speed; return whether it holds."""
    flags = f"--test --data synthetic --test-nsteps {steps} {size}".split()
    loop = _solution_loop(course.solution("03_channels_last"), flags, steps)
    loop(False)
    speeds = {False: [], True: []}
    for i in tqdm(range(pairs), unit="pair"):
        for watched in (False, True)[:: 1 if i % 2 else -1]:
            speeds[watched].append(loop(watched))
    ratios = [a / b for a, b in zip(speeds[True], speeds[False], strict=True)]
    ratio, low, high = stats.interval(ratios)
    verdict = judged(low, high, bound)
    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else cpus.name()
    print(
        f"stopwatch, {hardware}: speed with / without {ratio:.4f} ({low:.4f} to {high:.4f}; "
        f"{size}, {len(ratios)} pairs); bound {bound}: {verdict}"
    )
    return verdict != "FAILS"


def _solution_loop(solution, flags, steps):
    """Return a function that trains, watched or not, and returns the solution's steps a second."""
    trainer = replay.imported(solution)
    sys.argv = [str(solution), *flags]
    args = trainer.parse_args()
    trainer.set_numerics(args)
    device = trainer.set_device()
    training = trainer.build_training(args, device, 1000, 10_000)
    shape = args.batch_size, 3, args.image_size, args.image_size
    images = torch.randint(256, shape, dtype=torch.uint8, device=device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(1000, (args.batch_size,), device=device)

    def train(count):
        for step in range(count):
            trainer.train_step(step, training, images, labels, args, Nothing())
        if device.type != "cpu":
            torch.accelerator.synchronize()

    def loop(watched):
        training.model.train()
        if watched:
            witness = SimpleNamespace(last=None, settled=True)
            watch = stopwatch.Stopwatch(Nothing(), training.model, args, witness, 10**6)
        train(WARMUP_STEPS)
        begin = time.perf_counter()
        train(steps)
        speed = steps / (time.perf_counter() - begin)
        if watched:
            watch.finish()
        return speed

    return loop


def _watch(model, optimizer, criterion):
    training = SimpleNamespace(model=model, optimizer=optimizer, criterion=criterion)
    loader = torch.utils.data.DataLoader([0] * 8)
    args = SimpleNamespace(test=False, test_nsteps=1, epochs=1)
    return evidence.watch(Nothing(), training, loader, args)


def _training_loop(device, model, batch, size, watched=False):
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    network = torchvision.models.get_model(model, weights=None).to(device)
    optimizer = torch.optim.SGD(network.parameters(), 0.01)
    criterion = torch.nn.CrossEntropyLoss()
    if watched:
        _watch(network, optimizer, criterion)
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
            loss = criterion(network(images), labels)
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
    loop(Nothing(), 2)
    return loop(Nothing(), 5)


def reading_a_log(sizes=(100_000, 1_000_000)):
    """Time reading logs of two lengths: the time may not grow faster than the length."""
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


IMPORTS = """
import resource
def spent():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
print("python", spent())
import torch; print("torch", spent())
import torchvision.transforms.v2; print("torchvision", spent())
import dlojz.dlojz; print("dlojz", spent())
"""


def importing(times=5, bound_s=2.5):
    """Time the imports of a job before it can begin, in seconds of a core, by package."""
    seen = []
    for _ in range(times):
        done = subprocess.run(
            [sys.executable, "-P", "-c", IMPORTS], capture_output=True, text=True, check=True
        )
        names, ends = zip(*(line.split() for line in done.stdout.splitlines()), strict=True)
        ends = [0.0, *map(float, ends)]
        seen.append([b - a for a, b in itertools.pairwise(ends)])
    best = min(seen, key=sum)  # on a core that others use too, the same work takes longer
    parts = ", ".join(f"{name} {s:.2f}" for name, s in zip(names, best, strict=True))
    holds = sum(best) <= bound_s
    text = f"bound {bound_s} s: {'holds' if holds else 'FAILS'}"
    print(f"imports: {sum(best):.2f} s of a core ({parts}), best of {times}; {text}")
    return holds


def submitting(pairs=12, bound_s=0.3):
    """Time the launcher beside the same program run by hand, in pairs of wall times.

    The program does nothing: a trainer's work takes as long either way, and varies by more.
    """
    added = []
    with tempfile.TemporaryDirectory() as folder:
        nothing = Path(folder, "nothing.py")
        nothing.touch()
        for _ in range(pairs):
            begin = time.perf_counter()
            subprocess.run([sys.executable, str(nothing)], check=True)
            by_hand = time.perf_counter() - begin
            begin = time.perf_counter()
            launch.submit((str(nothing),)).wait()
            added.append(time.perf_counter() - begin - by_hand)
    mean, half = statistics.mean(added), stats.half_width(added)
    holds, fails = mean + half <= bound_s, mean - half > bound_s
    verdict = "holds" if holds else "FAILS" if fails else "cannot tell"
    print(f"submit: adds {mean:.2f} +- {half:.2f} s ({pairs} pairs); bound {bound_s} s: {verdict}")
    return verdict != "FAILS"


def waiting(counts=(50, 100, 200), sweep=500, seconds=35, bound=0.01):
    """Measure the share of a core that waiting jobs take: single ones, and one sweep."""
    holds = True
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"DLOJZ_ROOT": folder, "DLOJZ_QUEUE": f"{folder}/queue"}
        asleep = Path(folder, "asleep.py")
        asleep.write_text("import time\ntime.sleep(3600)\n")
        jobs = [launch.submit((str(asleep),))]
        for count in counts:
            jobs += [launch.submit((str(asleep),)) for _ in range(count + 1 - len(jobs))]
            holds &= _asleep(jobs[1:], f"{count} jobs", seconds, bound)
        for job in jobs[1:]:
            job.cancel()
        jobs += launch.submit([(str(asleep),)] * sweep)
        holds &= _asleep(jobs[-sweep:], f"a sweep of {sweep}", seconds, bound)
        for job in reversed(jobs):
            job.cancel()
            job.wait()
    return holds


def _asleep(jobs, what, seconds, bound):
    time.sleep(5)  # until the last one has begun
    waiters = {json.loads((job.directory / "keeper.json").read_text())["pid"] for job in jobs}
    before = sum(map(_seconds_of_a_core, waiters))
    time.sleep(seconds)  # longer than between two signs of life
    cores = (sum(map(_seconds_of_a_core, waiters)) - before) / seconds
    memory = sum(psutil.Process(pid).memory_full_info().pss for pid in waiters) / 1e6
    verdict = "holds" if cores <= bound else "FAILS"
    text = f"{100 * cores:.2f} % of a core, {memory:.0f} MB in {len(waiters)} processes"
    print(f"waiting: {what}: {text}; bound {100 * bound:.0f} %: {verdict}")
    return cores <= bound


def _seconds_of_a_core(pid):
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def main():
    benchmarks = {
        "chronometer": chronometer_on_a_gpu if torch.cuda.is_available() else chronometer_on_a_cpu,
        "evidence": evidence_on_a_gpu if torch.cuda.is_available() else evidence_on_a_cpu,
        "profiler": profiler_outside_its_window,
        "stopwatch": stopwatch_on_a_gpu if torch.cuda.is_available() else stopwatch_on_a_cpu,
        "log": reading_a_log,
        "imports": importing,
        "submit": submitting,
        "waiting": waiting,
    }
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("which", nargs="*", choices=[*benchmarks, []], help="default: all")
    chosen = parser.parse_args().which or list(benchmarks)
    sys.exit(not all([benchmarks[name]() for name in chosen]))


if __name__ == "__main__":
    main()
