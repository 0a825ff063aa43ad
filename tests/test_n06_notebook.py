"""What notebook 06, its quiz and its answers say of recordings is in the recordings."""

from functools import cache

import numpy as np
import pytest
from claims import claims

from dlojz import runs
from dlojz.chapters.n06_ddp import figures
from dlojz.runs import log
from dlojz.runs.stats import summary
from dlojz.widgets.answer import ANSWERS
from dlojz.widgets.quiz import QUIZZES

GRADIENTS, STEP_MS = 102.2e6, 55.6  # bytes and milliseconds, of the notebook's cell


@cache
def variants(gpus):
    """Return the cases of the experiment with DDP, by name."""
    return dict(figures._cases(runs.recorded(f"h200/06-ddp-x{gpus}")))


def added(gpus, name, to="DDP"):
    """Return the milliseconds that a variant adds to another one, round by round."""
    one, other = (variants(gpus)[which]["step_ms"] for which in (to, name))
    return np.subtract(other, one)


def step_ms(gpus):
    """Return the time of a step of each recorded training."""
    found = [summary(path) for path in runs.recordings(f"h200/06-resnet50-bf16-x{gpus}-*")]
    assert len(found) == 3
    return [256_000 * gpus / run.images_per_s for run in found]


def paid(gpus):
    """Return the milliseconds that a step takes longer than on one GPU."""
    return np.mean(step_ms(gpus)) - np.mean(step_ms(1))


@claims("06_ddp")
def test_the_link_is_the_one_that_the_notebook_computes_with():
    assert np.mean(step_ms(1)) == pytest.approx(STEP_MS, abs=0.05)
    yield f"one process alone needed {STEP_MS} ms"
    runs_of_link = [runs.recorded(f"h200/06-all-reduce-x{n}") for n in (2, 4)]
    small, large = [], []
    for run in runs_of_link:
        link, (_, sizes, ms) = figures.link(run), figures._all_reduces(run)
        assert STEP_MS / (STEP_MS + link.milliseconds(GRADIENTS)) > 0.985, "99 % of linear"
        apart = 100 * np.abs(ms / link.milliseconds(sizes) - 1)
        small.append(apart[sizes < 16e6].max())
        large.append(apart[sizes >= 16e6].max())
    yield f"up to {max(small):.0f} % off for small messages, and at most {max(large):.0f} % from"
    two = figures.link(runs_of_link[0])
    yield f"much longer than the {two.milliseconds(GRADIENTS):.2f} ms in which"
    yield f"The link needs {two.milliseconds(GRADIENTS):.2f} ms"
    yield f"the recorded NVLink carried {two.bandwidth / 1e9:.0f}"


@claims("06_ddp")
def test_gpus_reach_what_is_remembered():
    linear = {n: 100 * np.mean(step_ms(1)) / np.mean(step_ms(n)) for n in (2, 4)}
    yield f"two H200 reached {linear[2]:.1f} % of twice the speed"
    link = figures.link(runs.recorded("h200/06-all-reduce-x2"))
    assert linear[2] < 100 * STEP_MS / (STEP_MS + link.milliseconds(GRADIENTS))
    assert linear[4] > 97.5, "nearly four times"
    yield f"still pays {paid(2):.1f} ms a step on two GPUs, {paid(4):.1f} ms on four"


@claims("06_ddp")
def test_the_last_bucket_sticks_out_and_process_0_waits():
    first, second = (
        run.last for run in log.read_ranks(runs.recorded("h200/06-resnet50-bf16-x2-1"))
    )
    assert first.communication_ms > 3 * second.communication_ms
    assert 0 < first.exposed_ms < first.communication_ms
    yield "they wait for process 1"


@claims("06_ddp")
def test_buckets_and_options_cost_what_the_notebook_says():
    for name in ("buckets of 5 MB", "buckets of 50 MB", "static graph", "stream of high priority"):
        rounds = added(2, name)
        assert rounds.min() < 0 < rounds.max(), name
    assert added(2, "one bucket").min() > 0
    assert np.median(added(2, "gradients travel as bf16")) > 2
    yield f"DDP adds {np.median(added(2, 'DDP', to='no communication')):.1f} ms"
    options = ("gradients live in the buckets", "buffers not sent")
    both, parts = np.median(added(2, "both")), sum(np.median(added(2, name)) for name in options)
    assert both == pytest.approx(parts, abs=0.1), "the gains add up"
    what_if = ANSWERS["06 what if"]
    assert f"a step takes {-both:.1f} ms longer" in what_if
    spread = max(np.ptp(step_ms(n)) for n in (1, 2))
    assert f"differed by {spread:.1f} ms" in what_if


@claims("06_ddp")
def test_a_wait_in_each_step_costs_more_with_more_processes():
    waits = ("loss read in each step", "metrics summed in each step")
    sentences = {2: "in each step cost {:.0f} ms", 4: "both cost {:.0f} ms instead of 3"}
    for gpus, words in sentences.items():
        costs = {f"{np.median(added(gpus, name)):.0f}" for name in waits}
        assert len(costs) == 1
        yield words.format(float(costs.pop()))
    sent = {name: variants(2)[name]["collectives"] for name in ("DDP", *waits)}
    more = [len(sent[name]) - len(sent["DDP"]) for name in waits]
    assert more == [0, 1]
    assert sent["metrics summed in each step"][-1]["bytes"] == 16
    yield "One of them sends 16 bytes"
    yield f"On four GPUs it adds {np.median(added(4, 'SyncBatchNorm')):.0f} ms"
    two = f"{np.median(added(2, 'SyncBatchNorm')):.0f}"
    assert f"these {two} ms hardly depend" in ANSWERS["06 from the figures"]
    (why,) = [answer.why for answer in QUIZZES["ddp-sync"].answers if answer.right]
    assert why.endswith(f"SyncBatchNorm adds {two}.")
