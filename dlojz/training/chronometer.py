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

import time

from dlojz.training.clocks import Ledger
from dlojz.training.conductor import Conductor

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


class Chronometer:
    """Marks the phases of each step, and hands finished steps and windows to `sink`.

    sink, clock, device_clock: of the `Ledger` that reads the marks; the run log is a sink.
    conductor: knows which steps are measured, and who looks at the others.
    """

    def __init__(
        self, device="cpu", sink=None, clock=time.perf_counter, device_clock=None, conductor=None
    ):
        self._clock = clock
        self._ledger = Ledger(device, sink, clock, device_clock)
        self._conductor = conductor or Conductor()
        self._phase = None
        self._step = 0  # steps begun and finished since start()
        self._validation = None  # seconds, as it began
        self._tac = None

    @property
    def profiler(self):
        """The `torch.profiler.profile` that looks at some of the steps; `stop()` stops it."""
        return self._conductor.profiler

    @profiler.setter
    def profiler(self, profiler):
        self._conductor.profiler = profiler

    def start(self):
        """Begin the run. Nothing is timed yet."""
        self._phase = "idle"

    def next_iter(self, **values):
        """End of a step (but for the first call) and beginning of the wait for the next batch.

        values: what the log shall keep of the step that ends, such as `images=32, loss=loss`;
            scalar tensors are read once the device has computed them.
        """
        ended = self._phase == "update"
        self._enter("data")
        if ended:
            if self._conductor.profiler:
                self._conductor.phase(None)
            self._ledger.end_step(values)
            self._step += 1
            self._conductor.ends(self._step)
        else:  # the first step of an epoch begins
            self._end_validation()
            self._ledger.forget_marks()
        self._phase = "data"
        if ended and self._conductor.looks_at(self._step):
            self._ledger.close_window(self._step)
            self._conductor.begins(self._step)
        elif not self._ledger.measuring and self._conductor.measures(self._step):
            self._ledger.open_window(self._step)
        if not self._ledger.marks:
            self._ledger.mark("data")

    def transfer(self):
        """The batch has arrived in host memory; its copy to the device begins."""
        if self._conductor.profiler:
            self._enter("transfer")
            if self._conductor.profiler_begins():
                self._ledger.close_window(self._step, keep_marks=True)
        self._to("transfer")

    def forward(self):
        """The model's forward pass and the loss begin."""
        self._to("forward")

    def backward(self):
        """The backward pass begins."""
        self._to("backward")
        self._ledger.drain()  # here the device is busy: it never waits for what the host does now

    def update(self):
        """The optimizer's step, the scheduler and the metrics begin."""
        self._to("update")

    def validation(self):
        """Validation begins; its time ends at the next mark."""
        self._enter("validation")
        self._ledger.close_window(self._step)
        self._validation, self._phase = self._clock(), "validation"

    def idle(self):
        """What follows is no part of the training: a checkpoint, a report."""
        self._enter("idle")
        self._end_validation()
        if self._phase == "data":  # in the middle of an epoch
            self._ledger.close_window(self._step)
        self._phase = "idle"

    def stop(self):
        """End of the run: waits for the device and hands over what is left."""
        self._enter("stopped")
        self._end_validation()
        self._ledger.close_window(self._step)
        self._phase = "stopped"
        self._conductor.stop()

    def tac_time(self, clear=False):
        """A stopwatch: seconds of host time since the last call; None at the first, or to clear.

        It does not wait for the device: on a GPU it times the launches, not the work.
        """
        now, before = self._clock(), self._tac
        self._tac = now
        return None if before is None or clear else now - before

    def _enter(self, phase):
        """Raise unless `phase` may follow the present one."""
        if phase in FOLLOWS.get(self._phase, ()):
            return
        name = MARK.get(phase, phase)
        if self._phase is None:
            raise RuntimeError(f"chrono.{name}() came before chrono.start(): call start() first")
        expected = [f"chrono.{MARK.get(p, p)}()" for p in FOLLOWS if p in FOLLOWS[self._phase]]
        raise RuntimeError(
            f"chrono.{name}() came during the phase {self._phase!r}: expected "
            f"{' or '.join(expected) or 'nothing more'}; is a mark missing before it?"
        )

    def _to(self, phase):
        self._enter(phase)
        self._phase = phase
        self._ledger.mark(phase)
        if self._conductor.profiler:
            self._conductor.phase(phase)

    def _end_validation(self):
        if self._phase == "validation":
            self._ledger.end_validation(self._validation)
