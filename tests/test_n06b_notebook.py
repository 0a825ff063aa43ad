"""What notebook 06b and its answers say of recordings is in the recordings."""

import numpy as np
from claims import claims

from dlojz import runs
from dlojz.figures import paired
from dlojz.runs import derived, log
from dlojz.runs.stats import summary
from dlojz.widgets.answer import ANSWERS

STRONG, WEAK = "h200/06-strong-resnet50-bf16", "h200/06-resnet50-bf16"


def means(name, processes, value):
    """Return the mean of a value over the runs with this number of processes."""
    found = runs.recordings(f"{name}-x{processes}-*")
    assert len(found) == 3
    return np.mean([getattr(summary(path), value) for path in found])


def linear(name, processes):
    """Return the speed of n processes, in percent of n times that of one."""
    one, several = (means(name, n, "images_per_s") for n in (1, processes))
    return 100 * several / (processes * one)


def bound(batch):
    """Return the speed of one GPU with this batch, in percent of its speed with 256 images."""
    names = [f"h200/03-resnet50-bf16-nhwc-b{b:04d}" for b in (batch, 256)]
    share, whole = (summary(runs.recorded(name)).images_per_s for name in names)
    return 100 * share / whole


@claims("06b_scaling")
def test_gpus_scale_as_the_notebook_says():
    yield f"With weak scaling two H200 reached {linear(WEAK, 2):.1f} % of linear"
    two, four = linear(STRONG, 2), linear(STRONG, 4)
    assert two < bound(128)
    assert 1 < 4 * four / (2 * two) < 1.05, "hardly faster"
    answer = ANSWERS["06b from the figures"]
    assert f"reached {two:.0f} % of linear, which is {two / 50:.1f} times" in answer
    assert f"Four were {four / 25:.1f} times as fast, too" in answer
    joules = [means(STRONG, n, "energy_per_image_j") for n in (2, 4)]
    assert f"took {100 * joules[1] / joules[0] - 100:.0f} % more energy than two" in answer
    assert bound(64) < 80
    yield "With 64 images a GPU keeps less than 80 % of its speed even alone"
    times = [256_000 * n / means(WEAK, n, "images_per_s") for n in (1, 2)]
    yield f"Messages explain little of it: {times[1] - times[0]:.1f} ms (notebook 06)"


@claims("06b_scaling")
def test_neither_messages_nor_hosts_explain_the_loss():
    passes = {"forward": {}, "backward": {}}
    steps, by_ms = [], {}
    for processes in (1, 2, 4):
        for path in runs.recordings(f"{STRONG}-x{processes}-*"):
            run = log.read(path)
            measured, times = derived.measured(run), derived.step_times(run)[1]
            for name, found in passes.items():
                found.setdefault(processes, []).append(np.median(times[name][measured]))
            if processes == 2:
                steps.append(np.median(sum(times.values())[measured]))
            by_ms[np.median(times["backward"][measured])] = run
    yield f"of a step of {np.median(steps):.0f} ms"
    forward = [np.median(passes["forward"][n]) for n in (1, 2, 4)]
    yield "from {:.1f} to {:.1f} and {:.1f} ms".format(*forward)
    alone, two, four = (passes["backward"][n] for n in (1, 2, 4))
    yield f"{np.median(alone):.1f} ms on one GPU, {np.median(two):.1f} on two,"
    yield f"but {min(four):.1f} to {max(four):.1f} on four"
    assert min(derived.lead_ms(rank) for rank in by_ms[max(four)].ranks) > 15
    yield "In the slowest run all hosts were well ahead"


@claims("06b_scaling")
def test_an_image_takes_as_much_more_energy_as_the_notebook_says():
    def more(name, processes):
        one, several = (means(name, n, "energy_per_image_j") for n in (1, processes))
        return f"{100 * several / one - 100:.0f} %"

    yield f"took {more(STRONG, 2)} more on two GPUs than on one, and {more(STRONG, 4)} more on four"
    yield f"With weak scaling it was {more(WEAK, 2)} on two"


@claims("06b_scaling")
def test_only_a_forgotten_ddp_loses_accuracy_with_32_images_each():
    _, *rows = paired.rows(runs.recorded("h200/06-accuracy-x2"))
    several, synchronised, forgotten = (row.difference.word for row in rows)
    assert several == synchronised == "no difference shown" != forgotten
    yield "**Several processes: no difference shown.**"
