"""What the idle time of a device is charged to, held against a simulated host and device."""

import pytest
from simulated import LARGE, MIDDLE, TINY, Machine

from dlojz.traces import breakdown, host, trace, whatif


def nothing(machine):
    pass


def synchronizes(machine):
    """Before many short kernels, for which the host then has no lead."""
    machine.synchronize()
    machine.train(TINY)


def training(model, plant, functions=False, steps=5):
    """Return the machine after a training that does `plant` at the end of each step."""
    machine = Machine(functions, warm_up=steps - 2)
    for _ in machine.steps():
        machine.load(0.1)
        machine.train(model)
        plant(machine)
    return machine


def reading(machine, folder):
    return breakdown.analyse(trace.read(machine.write(folder / "trace.json")))


COSTS = {
    "a sleep": (lambda machine: machine.sleep(30), nothing, host.AWAY),
    "a short sleep": (lambda machine: machine.sleep(8), nothing, host.AWAY),
    "garbage": (lambda machine: machine.collect(10), nothing, host.COLLECTOR),
    "a wait": (synchronizes, lambda machine: machine.train(TINY), host.SYNC),
    "an emptied cache": (lambda machine: machine.empty_cache(50), nothing, host.ALLOCATOR),
    "a small cache": (lambda machine: machine.empty_cache(12), nothing, host.ALLOCATOR),
    "pinning": (lambda machine: machine.pin(8), nothing, host.COPIES),
    "loading": (lambda machine: machine.load(20), lambda machine: machine.load(0), host.DATA),
}
MODELS = pytest.mark.parametrize("model", [LARGE, MIDDLE, TINY], ids=["large", "middle", "tiny"])


@MODELS
@pytest.mark.parametrize(("plant", "without", "cause"), COSTS.values(), ids=COSTS)
def test_a_cause_costs_what_the_training_is_slower_with_it(tmp_path, model, plant, without, cause):
    """Also if it costs nothing, since the device has enough to do meanwhile."""
    slower = training(model, plant, True, 12).step_ms - training(model, without, True, 12).step_ms
    found = reading(training(model, plant, functions=True), tmp_path)
    assert found.idle.get(cause, 0) == pytest.approx(slower, abs=0.25)


@MODELS
@pytest.mark.parametrize("fault", ["a sleep", "a wait", "an emptied cache"])
def test_work_and_idle_time_make_the_step(tmp_path, model, fault):
    plant = COSTS[fault][0]
    machine = training(model, plant)
    found = reading(machine, tmp_path)
    assert found.step_ms == pytest.approx(training(model, plant, steps=12).step_ms, rel=0.01)
    assert sum(found.kinds.values()) + sum(found.idle.values()) == pytest.approx(found.step_ms)


def test_a_host_that_is_never_ahead_leaves_the_first_cause_its_own_time_and_no_more(tmp_path):
    """All that follows the short wait for a batch was launch bound without it."""
    found = reading(training(TINY, nothing), tmp_path)
    assert found.idle[host.DATA] == pytest.approx(0.1, abs=0.05)
    assert found.idle[breakdown.LAUNCHES] > 0.5 * found.step_ms
    assert found.verdict == "launch bound"


def test_a_device_that_always_has_work_is_not_launch_bound(tmp_path):
    found = reading(training(LARGE, nothing), tmp_path)
    assert found.idle == {breakdown.PAUSES: pytest.approx(0.25, abs=0.05)}
    assert found.verdict == "GPU bound"


def test_while_the_host_catches_up_what_held_it_up_is_still_to_blame(tmp_path):
    """After a wait the device is idle now and then, until the host is ahead again."""
    found = reading(training(LARGE, synchronizes), tmp_path)
    gaps = found.idle[host.SYNC]
    assert gaps > 2, "and not 0.02 ms, as long as the gap right after the wait is"
    assert breakdown.LAUNCHES not in found.idle
    (wait,) = found.waits
    assert wait.call == "cudaDeviceSynchronize"
    assert wait.idle_ms == pytest.approx(found.steps * gaps)


@pytest.mark.parametrize(
    ("plant", "why", "cause"),
    [
        (Machine.item, ".item()", host.READS),
        (Machine.is_nonzero, "if tensor", host.READS),
        (Machine.nonzero, "aten::nonzero", host.READS),
        (Machine.cpu, ".cpu()", host.READS),
        (Machine.synchronize, "", host.SYNC),
        (lambda machine: machine.pageable(2), "a copy", host.COPIES),
    ],
    ids=["item", "if", "nonzero", "cpu", "synchronize", "pageable"],
)
def test_a_wait_has_the_heading_of_what_asked_for_it(tmp_path, plant, why, cause):
    def before_short_kernels(machine):
        plant(machine)
        machine.train(TINY)

    found = reading(training(LARGE, before_short_kernels), tmp_path)
    assert {wait.why for wait in found.waits} == {why}
    assert found.idle[cause] > 1
    assert not {host.READS, host.SYNC, host.COPIES} - {cause} & set(found.idle)


def test_a_wait_counts_for_the_place_that_waited_longest(tmp_path):
    """Without the first of two waits the host would wait at the second: they cost it together."""

    def both(machine):
        machine.synchronize()
        machine.item()
        machine.train(TINY)

    found = reading(training(LARGE, both), tmp_path)
    assert found.waits[0].call == "cudaDeviceSynchronize"
    assert found.idle[host.SYNC] > 20 * found.idle[host.READS]


def test_the_replay_of_what_was_recorded_begins_all_work_when_it_began():
    calls = [(0.0, 0.1, 0.5, 1.0), (0.2, 0.3, 1.1, 2.0), (4.0, 4.1, 4.5, 5.0)]
    tasks = whatif.tasks(calls, 0.0)
    assert [t.pause for t in tasks] == pytest.approx([0, 0.1, 0]), "the second was asked for before"
    found = whatif.replay(tasks, 0.0, (0.0, 5.0), [])
    assert found.pauses == pytest.approx(0.1)
    assert found.waits == pytest.approx(0.5 + 2.5)
    sooner = whatif.replay(tasks, 0.0, (0.0, 5.0), [(1.0, 3.0)])
    assert sooner.waits == pytest.approx(0.5 + 0.5)


def test_time_with_two_causes_counts_for_the_first():
    tasks = whatif.tasks([(3.0, 3.1, 3.0, 4.0)], 0.0)
    told, rest = whatif.costs(tasks, 0.0, (0.0, 4.0), {"a": [(0, 2)], "b": [(1, 3)]})
    assert told == {"a": pytest.approx(2), "b": pytest.approx(1)}
    assert rest.waits == pytest.approx(0)
