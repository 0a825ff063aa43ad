"""Chronometer: where does the time of a training step go?

Each call marks a boundary: it ends one phase and begins the next, so the phases of a step sum to
the step, and no call can be left without its pair.

    chrono.start()
    chrono.next_iter()                      # once before the loop
    for images, labels in loader:
        chrono.transfer()                   # the batch has arrived; its copy to the device begins
        chrono.forward()
        chrono.backward()
        chrono.update()                     # optimizer, scheduler, metrics
        chrono.next_iter(images=32)         # the last line of the body: the next wait for data
    chrono.validation()
    chrono.idle()                           # checkpoints and reports: nobody's phase
    chrono.stop()

On a GPU there are two clocks. The *host* clock (`time.perf_counter`) says when Python passed the
mark; it runs ahead of the GPU. The *device* clock is an event put into the current stream at each
mark; it says when the GPU passed it. Events are read when the GPU has got there, never waited for:
inside a step nothing synchronises. On a CPU there is only the host clock.
"""

import itertools
import time
from collections import deque

from dlojz.runs.log import MOST_WARMUP_STEPS, PHASES, WARMUP_STEPS

# The marks that may follow each phase. backward -> forward is gradient accumulation.
FOLLOWS = {
    "data": {"transfer", "validation", "idle", "stopped"},
    "transfer": {"forward"},
    "forward": {"backward"},
    "backward": {"update", "forward"},
    "update": {"data"},
    "validation": {"idle", "data", "stopped"},
    "idle": {"data", "validation", "stopped"},
    "stopped": set(),
}
MARK = {"data": "next_iter", "stopped": "stop"}  # where the names differ


class CudaClock:
    """The clock of a CUDA device: events on the current stream."""

    def __init__(self, device):
        import torch

        self._torch, self._device = torch, device

    def event(self):
        """An event, to be recorded and read."""
        return self._torch.cuda.Event(enable_timing=True)

    def record(self, event):
        """Put `event` behind all that the device was asked so far."""
        event.record(self._torch.cuda.current_stream(self._device))

    def synchronize(self):
        """Wait until the device has done all it was asked."""
        self._torch.cuda.synchronize(self._device)

    def fetch(self, tensor):
        """A copy of a scalar to pinned memory, under way; valid once a later event has passed.

        Copied at once because CUDA graphs overwrite their outputs, and without waiting, which
        `.item()` would do.
        """
        host = self._torch.empty((), dtype=self._torch.float32, pin_memory=True)
        return host.copy_(tensor.detach(), non_blocking=True)


class Chronometer:
    """Marks the phases of each step and hands finished steps and windows to `sink`.

    sink: receives `step(values, host_ms, device_ms, ahead_ms)`, `window_opens()`,
        `window(first_step, steps, wall_s)` and `validation(seconds)`; the run log is one. None
        keeps nothing.
    clock: seconds, as `time.perf_counter`.
    device_clock: an object like `CudaClock`; by default one where `device` is a CUDA device.
    witness: looks at one step after the window, `witness.last` (None: at none): it is told by
        `begins()` and `ends()`; see `dlojz.training.evidence`.

    profiler: an attribute, for a `torch.profiler.profile` that looks at some of the steps. Those
        are not measured, and their phases are ranges in its trace. `stop()` stops it.
    """

    def __init__(
        self, device="cpu", sink=None, clock=time.perf_counter, device_clock=None, witness=None
    ):
        if device_clock is None and str(device).startswith("cuda"):
            device_clock = CudaClock(device)
        self._sink, self._clock, self._device_clock = sink, clock, device_clock
        self._look_at = getattr(witness, "last", None)  # a step, by its number since start()
        self._witness = witness
        self._phase = None
        self._step = 0  # steps begun and finished since start()
        self._marks = []  # of the step under way: (phase that begins, seconds, event)
        self._pending = deque()  # steps whose last event the device has not reached
        self._free_events = []
        self._window = None  # (first step, seconds, event) of the measured window
        self._last = None  # (seconds, event) at the end of the last step
        self._tac = None
        self.profiler = None
        self._actions = []  # of the profiler, in each step
        self._profiled = False  # does it look at the step under way?
        self._range = None

    def start(self):
        """Begin the run. Nothing is timed yet."""
        self._phase = "idle"

    def next_iter(self, **values):
        """End of a step (but for the first call) and beginning of the wait for the next batch.

        values: what the log shall keep of the step that ends, such as `images=32, loss=loss`;
            scalar tensors are read once the device has computed them.
        """
        self._enter("data")
        if self._phase != "update":  # the first step of an epoch begins
            self._end_validation()
            self._phase, self._marks = "data", []
            self._open_window()
            self._mark("data")
            return
        self._phase = "data"
        if self.profiler:
            self._name(None)
        self._end_step(values)
        if self._look_at is not None and self._step > self._look_at:
            self._witness.ends()
        if self._step == self._look_at:
            self._close_window()
            if not self._profiler_wants(self._step):  # there is one profiler at a time
                self._witness.begins()
            self._mark("data")
        elif self._window is None and self._warm():
            self._marks = []
            self._open_window()
            self._mark("data")

    def transfer(self):
        """The batch has arrived in host memory; its copy to the device begins."""
        if self.profiler:
            self._enter("transfer")
            self._notice_profiler()
        self._to("transfer")

    def forward(self):
        """The model's forward pass and the loss begin."""
        self._to("forward")

    def backward(self):
        """The backward pass begins."""
        self._to("backward")
        self._drain()  # here the device is busy: it never waits for what the host does now

    def update(self):
        """The optimizer's step, the scheduler and the metrics begin."""
        self._to("update")

    def validation(self):
        """Validation begins; its time ends at the next mark."""
        self._enter("validation")
        self._close_window()
        self._phase, self._marks = "validation", [("validation", self._clock(), None)]

    def idle(self):
        """What follows is no part of the training: a checkpoint, a report."""
        self._enter("idle")
        self._end_validation()
        if self._phase == "data":  # in the middle of an epoch
            self._close_window()
        self._phase = "idle"

    def stop(self):
        """End of the run: waits for the device and hands over what is left."""
        self._enter("stopped")
        self._end_validation()
        self._close_window()
        self._phase = "stopped"
        if self.profiler:
            self.profiler.stop()
            if self._witness:
                self._witness.profiled(self._actions)

    def tac_time(self, clear=False):
        """A stopwatch: seconds of host time since the last call; None at the first, or to clear.

        It does not wait for the device: on a GPU it times the launches, not the work.
        """
        now, before = self._clock(), self._tac
        self._tac = now
        return None if before is None or clear else now - before

    def _enter(self, phase):
        """Raise unless `phase` may follow the present one."""
        name = MARK.get(phase, phase)
        if self._phase is None:
            raise RuntimeError(f"chrono.{name}() came before chrono.start(): call start() first")
        if phase not in FOLLOWS[self._phase]:
            expected = [f"chrono.{MARK.get(p, p)}()" for p in FOLLOWS if p in FOLLOWS[self._phase]]
            raise RuntimeError(
                f"chrono.{name}() came during the phase {self._phase!r}: expected "
                f"{' or '.join(expected) or 'nothing more'}; is a mark missing before it?"
            )

    def _to(self, phase):
        self._enter(phase)
        self._phase = phase
        self._mark(phase)
        if self.profiler:
            self._name(phase if self._profiled else None)

    def _profiler_wants(self, step):
        wanted = self.profiler and self.profiler.schedule(step).name != "NONE"
        return wanted or self._profiled

    def _notice_profiler(self):
        """A step that the profiler looks at is not measured, nor what it did before it began."""
        action = self.profiler.current_action.name
        self._actions.append(action)
        before, self._profiled = self._profiled, action != "NONE"
        if self._profiled and not before:
            marks = self._marks  # of the step under way
            self._close_window()
            self._marks = marks

    def _name(self, phase):
        """From here on, and up to the next call, a range in the profiler's trace."""
        if self._range:
            self._range.__exit__(None, None, None)
            self._range = None
        if phase:
            import torch

            self._range = torch.profiler.record_function(phase)
            self._range.__enter__()

    def _mark(self, phase, at=None):
        event = None
        if self._device_clock:
            event = self._free_events.pop() if self._free_events else self._device_clock.event()
            self._device_clock.record(event)
        self._marks.append((phase, self._clock() if at is None else at, event))

    def _end_step(self, values):
        if self._device_clock:
            values = {
                k: self._device_clock.fetch(v) if hasattr(v, "detach") else v
                for k, v in values.items()
            }
        self._mark("data")
        self._pending.append((values, self._marks, self._window))
        self._last = self._marks[-1][1:]
        self._marks = self._marks[-1:]  # the end of this step is the beginning of the next
        self._step += 1

    def _end_validation(self):
        if self._phase == "validation":
            if self._device_clock:
                self._device_clock.synchronize()
            if self._sink:
                self._sink.validation(seconds=self._clock() - self._marks[0][1])
            self._marks = []

    def _warm(self):
        if self._profiled:
            return False
        settled = self._witness is None or self._witness.settled
        return self._step >= (WARMUP_STEPS if settled else MOST_WARMUP_STEPS)

    def _open_window(self):
        """Begin to measure, once the warm-up is over. The only wait between two steps."""
        if self._window is not None or not self._warm():
            return
        if self._look_at is not None and self._step >= self._look_at:
            return
        event = None
        if self._device_clock:
            self._device_clock.synchronize()
        self._drain()
        if self._sink:
            self._sink.window_opens()
        if self._device_clock:
            event = self._device_clock.event()
            self._device_clock.record(event)
        self._window = (self._step, self._clock(), event)

    def _close_window(self):
        """Wait for the device, hand over the steps that are left and the window's wall time."""
        if self._device_clock:
            self._device_clock.synchronize()
        self._drain()
        if self._window is not None and self._step > self._window[0]:
            first, begin, event = self._window
            wall = self._last[0] - begin
            if self._device_clock:  # it finished later than the host passed the last mark
                wall = max(wall, event.elapsed_time(self._last[1]) / 1000)
            if self._sink:
                self._sink.window(first_step=first, steps=self._step - first, wall_s=wall)
        self._window, self._marks, self._last = None, [], None

    def _drain(self):
        """Hand over the steps that the device has finished."""
        while self._pending and self._finished(self._pending[0]):
            values, marks, window = self._pending.popleft()
            host = _durations(marks, lambda a, b: 1000 * (b[1] - a[1]))
            device = ahead = None
            if self._device_clock:
                device = _durations(marks, lambda a, b: a[2].elapsed_time(b[2]))
                if window:
                    on_device = window[2].elapsed_time(marks[-1][2])
                    ahead = on_device - 1000 * (marks[-1][1] - window[1])
            if self._sink:
                values = {k: _number(v) for k, v in values.items()}
                self._sink.step(values, host, device, ahead)
            self._recycle(marks)

    def _finished(self, step):
        event = step[1][-1][2]
        return event is None or event.query()

    def _recycle(self, marks):
        """Keep the events for later steps, but for the last, which begins the next step."""
        if self._device_clock:
            self._free_events += [event for _, _, event in marks[:-1]]


def _number(value):
    """A scalar tensor's value; NaN on the meta device, whose tensors have none."""
    if not hasattr(value, "detach"):
        return value
    return float("nan") if value.is_meta else value.item()


def _durations(marks, between):
    """Milliseconds in each phase; accumulation passes through a phase more than once."""
    total = dict.fromkeys(PHASES, 0.0)
    for a, b in itertools.pairwise(marks):
        total[a[0]] += between(a, b)
    return total
