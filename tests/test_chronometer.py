"""The Chronometer, with clocks that the tests turn by hand."""

from types import SimpleNamespace

import pytest
import torch

from dlojz.runs.columns import PHASES
from dlojz.runs.log import WARMUP_STEPS
from dlojz.training import clocks
from dlojz.training.chronometer import Chronometer


class Clock:
    """A host clock that stands still until told."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Event:
    def __init__(self, device):
        self.device, self.at = device, None

    def query(self):
        return self.at <= self.device.reached

    def elapsed_time(self, later):
        if not (self.query() and later.query()):
            raise RuntimeError("elapsed_time of an event that has not finished")
        return 1000 * (later.at - self.at)


class Device:
    """A fake GPU: work is queued, and done later than the host asks for it."""

    def __init__(self, clock):
        self.clock, self.busy_until, self.reached, self.synchronized = clock, 0.0, 0.0, 0

    def event(self):
        return Event(self)

    def record(self, event):
        # it takes up its work when the host asks, or when it is done with what came before
        event.at = max(self.busy_until, self.clock.now)

    def launch(self, seconds):
        self.busy_until = max(self.busy_until, self.clock.now) + seconds

    def advance_to(self, seconds):
        self.reached = seconds

    def synchronize(self):
        self.synchronized += 1
        self.clock.now = max(self.clock.now, self.busy_until)
        self.reached = max(self.reached, self.clock.now)

    def fetch(self, tensor):
        return tensor


class Sink:
    def __init__(self):
        self.steps, self.windows, self.validations = [], [], []

    def step(self, values, host_ms, device_ms, ahead_ms):
        self.steps.append((values, host_ms, device_ms, ahead_ms))

    def window_opens(self):
        pass

    def window(self, **fields):
        self.windows.append(fields)

    def validation(self, seconds):
        self.validations.append(seconds)


class Run:
    """A Chronometer that has started, with its clock, its sink, and perhaps a fake GPU."""

    def __init__(self, on_device=False, witness=None):
        self.clock, self.sink = Clock(), Sink()
        self.device = Device(self.clock) if on_device else None
        kind = "cuda" if on_device else "cpu"
        self.chrono = Chronometer(kind, self.sink, self.clock, self.device, witness)
        self.chrono.start()

    def steps(self, count, durations=(0.04, 0.001, 0.02, 0.03, 0.005), slower=10):
        """Train. slower: the time of the device, as a multiple of the host's."""
        self.chrono.next_iter()
        for i in range(count):
            self.clock.now += durations[0]
            self.chrono.transfer()
            for phase, seconds in zip(PHASES[2:], durations[1:4], strict=True):
                self.clock.now += seconds
                if self.device:
                    self.device.launch(slower * seconds)
                getattr(self.chrono, phase)()
            self.clock.now += durations[4]
            self.chrono.next_iter(images=32, step=i)
            if self.chrono.profiler:
                self.chrono.profiler.step()

    def marks(self, forward_s=0.0, **values):
        """Mark a step whose forward pass keeps the device busy for so long."""
        self.chrono.transfer()
        self.chrono.forward()
        self.device.launch(forward_s)
        self.chrono.backward()
        self.chrono.update()
        self.chrono.next_iter(**values)

    @property
    def measured_s(self):
        return sum(window["wall_s"] for window in self.sink.windows)


class Profiler:
    """Like torch's: looks at the steps that its schedule names, and takes its time for it."""

    def __init__(self, clock, actions, seconds=5.0):
        self._clock, self._actions, self._seconds = clock, actions, seconds
        self._step, self.stopped = 0, False

    def schedule(self, step):
        name = self._actions[step] if step < len(self._actions) else "NONE"
        return SimpleNamespace(name=name)

    @property
    def current_action(self):
        return self.schedule(self._step)

    def step(self):
        before = self.current_action.name
        self._step += 1
        if self.current_action.name != before:
            self._clock.now += self._seconds

    def stop(self):
        self.stopped = True


class Witness:
    settled = True

    def __init__(self, last):
        self.last, self.told = last, []

    def begins(self, step):
        self.told.append("begins")

    def ends(self):
        self.told.append("ends")

    def profiled(self, actions):
        self.told.append(actions)


def test_phases_sum_to_the_step_and_a_cpu_has_no_device_clock():
    run = Run()
    begin = run.clock.now
    run.steps(5)
    run.chrono.stop()
    assert len(run.sink.steps) == 5
    total = sum(sum(host.values()) for _, host, _, _ in run.sink.steps)
    assert total == pytest.approx(1000 * (run.clock.now - begin))
    _, host, device, ahead = run.sink.steps[0]
    assert host == pytest.approx(dict(zip(PHASES, (40, 1, 20, 30, 5), strict=True)), rel=1e-6)
    assert (device, ahead) == (None, None)


@pytest.mark.parametrize("value", [[0.1], (0.1,), {"lr": 0.1}, "0.1"])
def test_what_is_no_number_is_refused_where_it_is_given(value):
    chrono = Chronometer()
    chrono.start()
    with pytest.raises(TypeError, match=r"next_iter\(lr=\.\.\.\): expected a number, found"):
        chrono.next_iter(lr=value)


STEP = ("start", "next_iter", "transfer", "forward", "backward")


@pytest.mark.parametrize(
    ("marks", "wrong", "message"),
    [
        ((), "next_iter", r"next_iter\(\) came before chrono.start\(\)"),
        (STEP[:1], "forward", r"forward\(\) came during the phase 'idle'"),
        (STEP[:2], "forward", r"expected chrono.transfer\(\) or chrono.validation"),
        (STEP[:2], "next_iter", r"next_iter\(\) came during the phase 'data'"),
        (STEP[:3], "backward", r"phase 'transfer': expected chrono.forward"),
        (STEP[:4], "next_iter", r"phase 'forward'"),
        (STEP, "next_iter", r"'backward': expected chrono.forward\(\) or chrono.update\(\)"),
        (("start", "stop"), "next_iter", "expected nothing more"),
    ],
)
def test_a_forgotten_mark_raises_with_the_phase(marks, wrong, message):
    chrono = Chronometer()
    for mark in marks:
        getattr(chrono, mark)()
    with pytest.raises(RuntimeError, match=message):
        getattr(chrono, wrong)()


def test_accumulation_goes_from_backward_to_forward():
    run = Run()
    run.chrono.next_iter()
    run.chrono.transfer()
    for _ in range(3):
        run.chrono.forward()
        run.clock.now += 1
        run.chrono.backward()
        run.clock.now += 2
    run.chrono.update()
    run.chrono.next_iter()
    run.chrono.stop()
    _, host, _, _ = run.sink.steps[0]
    assert (host["forward"], host["backward"]) == pytest.approx((3000, 6000))


def test_the_window_begins_after_the_warm_up_and_ends_with_the_last_step():
    run = Run()
    run.steps(WARMUP_STEPS + 4, (0.1, 0, 0, 0, 0.1))
    run.clock.now += 50  # the loader shuts down: no part of a step
    run.chrono.validation()
    window = {"first_step": WARMUP_STEPS, "steps": 4, "wall_s": pytest.approx(0.8)}
    assert run.sink.windows == [window]


def test_a_second_epoch_has_a_window_of_its_own():
    run = Run()
    run.steps(WARMUP_STEPS + 1)
    run.chrono.validation()
    run.clock.now += 7
    run.chrono.idle()
    run.clock.now += 100
    run.steps(2)
    run.chrono.stop()
    assert [w["first_step"] for w in run.sink.windows] == [WARMUP_STEPS, WARMUP_STEPS + 1]
    assert [w["steps"] for w in run.sink.windows] == [1, 2]
    assert run.sink.validations == [pytest.approx(7)]
    assert run.measured_s == pytest.approx(3 * 0.096)


def test_a_checkpoint_in_the_middle_of_an_epoch_is_no_part_of_a_step():
    run = Run()
    run.steps(WARMUP_STEPS + 2)
    run.chrono.idle()
    run.clock.now += 1000
    run.steps(2)
    run.chrono.stop()
    assert [w["steps"] for w in run.sink.windows] == [2, 2]
    assert run.measured_s == pytest.approx(4 * 0.096)
    assert max(sum(host.values()) for _, host, _, _ in run.sink.steps) == pytest.approx(96)


def test_a_run_shorter_than_the_warm_up_has_steps_and_no_window():
    run = Run()
    run.steps(WARMUP_STEPS - 1)
    run.chrono.stop()
    assert len(run.sink.steps) == WARMUP_STEPS - 1
    assert run.sink.windows == []


def test_on_a_device_steps_wait_for_their_events_and_nothing_synchronizes():
    run = Run(on_device=True)
    run.steps(WARMUP_STEPS)
    assert run.device.synchronized == 1  # once, to open the window
    assert len(run.sink.steps) == WARMUP_STEPS
    for i in range(4):
        run.clock.now += 0.001
        run.marks(0.5, step=WARMUP_STEPS + i)
    assert run.device.synchronized == 1
    assert len(run.sink.steps) == WARMUP_STEPS, "the device is not there yet"
    run.chrono.stop()
    assert run.device.synchronized == 2
    assert [values["step"] for values, *_ in run.sink.steps] == list(range(WARMUP_STEPS + 4))


def test_a_step_waits_for_its_marks_on_a_stream_that_is_behind():
    run = Run(on_device=True)
    chrono, device, steps = run.chrono, run.device, run.sink.steps
    chrono.next_iter()
    chrono.transfer()
    chrono.forward()
    device.launch(5.0)  # on a side stream, with the next two marks
    chrono.backward()
    chrono.update()
    behind, device.busy_until = device.busy_until, 0.0
    chrono.next_iter(step=0)
    device.advance_to(run.clock.now)
    for mark in (chrono.transfer, chrono.forward, chrono.backward):
        mark()
    assert not steps
    device.advance_to(behind)
    chrono.update()
    chrono.next_iter(step=1)
    chrono.stop()
    assert [values["step"] for values, *_ in steps] == [0, 1]


def test_the_device_clock_says_how_long_it_waited_and_how_far_the_host_was_ahead():
    run = Run(on_device=True)
    run.steps(WARMUP_STEPS, (0, 0, 0, 0, 0))
    for data_s, work_s in ((0.3, 0.1), (0.0, 0.4)):
        run.clock.now += data_s
        run.marks(work_s)
    run.chrono.stop()
    (_, host, waiting, _), (_, _, busy, ahead) = run.sink.steps[-2:]
    assert host["data"] == pytest.approx(300)
    assert waiting["data"] == pytest.approx(300), "the device had nothing to do"
    assert busy["data"] == pytest.approx(0), "the device had work while the host fetched data"
    assert busy["forward"] == pytest.approx(400)
    assert ahead == pytest.approx(500)
    device_s = sum(sum(d.values()) for _, _, d, _ in run.sink.steps[-2:]) / 1000
    assert run.sink.windows[-1]["wall_s"] == pytest.approx(device_s, rel=0.01)


@pytest.mark.skipif(not torch.version.cuda, reason="this torch has no CUDA events")
def test_what_a_trainer_puts_into_torchs_events_is_not_called(monkeypatch):
    for name in ("record", "query", "elapsed_time"):
        monkeypatch.setattr(torch.cuda.Event, name, lambda *_: pytest.fail("called"))
    event = clocks.CudaClock("cuda").event()
    assert event.query()  # nothing was recorded, so nothing is left to do
    with pytest.raises(ValueError, match="must be recorded"):
        event.elapsed_time(event)


def test_events_are_used_again():
    run, made = Run(on_device=True), []
    run.device.event = lambda: made.append(1) or Event(run.device)
    run.device.advance_to(float("inf"))
    run.steps(100)
    assert len(run.sink.steps) == 99  # the last is handed over by the next step, or by stop()
    assert len(made) < 20


def test_tac_time_is_a_stopwatch():
    clock = Clock()
    chrono = Chronometer(clock=clock)
    assert chrono.tac_time() is None
    clock.now += 2.5
    assert chrono.tac_time() == pytest.approx(2.5)
    assert chrono.tac_time(clear=True) is None


@pytest.mark.parametrize("on_device", [False, True])
def test_steps_that_a_profiler_looks_at_are_not_measured(on_device):
    run = Run(on_device)
    n = WARMUP_STEPS + 4
    actions = ["NONE"] * n + ["WARMUP", "RECORD", "RECORD_AND_SAVE"]
    run.chrono.profiler = Profiler(run.clock, actions)
    run.steps(n + 3 + 1 + 2, slower=3)
    run.chrono.stop()
    step_s = 3 * 0.051 if on_device else 0.096  # the device is behind
    windows = run.sink.windows
    assert [(w["first_step"], w["steps"]) for w in windows] == [(WARMUP_STEPS, 4), (n + 4, 2)]
    for window in windows:  # without what the profiler took; the first work comes late
        late = window["wall_s"] - step_s * window["steps"]
        assert 0 <= late + 1e-9 < (0.096 if on_device else 1e-6)
    assert len(run.sink.steps) == n + 6, "the log has all steps"
    assert run.chrono.profiler.stopped


@pytest.mark.parametrize(
    ("actions", "begins"), [(["NONE"] * 9, 1), (["NONE"] * 4 + ["RECORD"] * 5, 0)]
)
def test_the_witness_leaves_the_last_step_to_a_profiler_that_wants_it(actions, begins):
    witness = Witness(last=5)
    run = Run(witness=witness)
    run.chrono.profiler = Profiler(run.clock, actions)
    run.steps(6)
    run.chrono.stop()
    assert witness.told.count("begins") == begins
    assert witness.told[-1] == actions[:6], "the witness hears of the profiler's actions"


def test_the_phases_are_ranges_of_the_profilers_trace():
    run = Run()
    wanted = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)
    run.chrono.profiler = torch.profiler.profile(
        schedule=wanted, on_trace_ready=lambda p: None, acc_events=True
    )
    run.chrono.profiler.start()
    run.steps(6)
    run.chrono.stop()
    names = [e.name for e in run.chrono.profiler.events()]
    for phase in ("transfer", "forward", "backward", "update"):
        assert names.count(phase) == 2, phase
