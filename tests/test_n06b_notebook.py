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
    two = linear(STRONG, 2)
    lost, answer = bound(128) - two, ANSWERS["06b from the figures"]
    assert f"reached {two:.0f} % of linear, which is {two / 50:.1f} times" in answer
    assert f"Four can reach {bound(64):.0f} % at most" in answer
    assert f"two GPUs lost {np.floor(lost):.0f} points more" in answer
    assert bound(64) < 80
    yield "With 64 images for each, less than 80 % are left"
    times = [256_000 * n / means(WEAK, n, "images_per_s") for n in (1, 2)]
    yield f"Messages explain little of it: {times[1] - times[0]:.1f} ms (notebook 06)"


@claims("06b_scaling")
def test_neither_messages_nor_hosts_explain_the_loss():
    alone = [summary(path).ahead_ms for path in runs.recordings(f"{STRONG}-x1-*")]
    steps, leads, backward = [], [], []
    for path in runs.recordings(f"{STRONG}-x2-*"):
        run = log.read(path)
        measured, times = derived.measured(run), derived.step_times(run)[1]
        steps.append(np.median(sum(times.values())[measured]))
        leads.append([derived.lead_ms(rank) for rank in run.ranks])
        backward.append(np.median(times["backward"][measured]))
    assert 30 < min(steps) < 31
    yield "of a step of 30 ms"
    yield f"shrinks from {np.median(alone):.0f} ms to {np.max(leads):.0f} or less"
    ahead = int(np.argmax(np.min(leads, axis=1)))
    assert min(leads[ahead]) > 10, "both hosts are well ahead"
    assert steps[ahead] > 1.1 * min(steps), "and it is slow"
    yield f"{min(backward):.1f} to {max(backward):.1f} ms in the median"


@claims("06b_scaling")
def test_an_image_takes_as_much_more_energy_as_the_notebook_says():
    more = [
        100 * means(name, 2, "energy_per_image_j") / means(name, 1, "energy_per_image_j") - 100
        for name in (STRONG, WEAK)
    ]
    yield "took {:.0f} % more than on one GPU, and {:.0f} % more with weak scaling".format(*more)


@claims("06b_scaling")
def test_only_a_forgotten_ddp_loses_accuracy_with_32_images_each():
    _, *rows = paired.rows(runs.recorded("h200/06-accuracy-x2"))
    several, synchronised, forgotten = (row.difference.word for row in rows)
    assert several == synchronised == "no difference shown" != forgotten
    yield "**Several processes: no difference shown.**"
