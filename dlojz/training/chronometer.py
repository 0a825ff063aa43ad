"""The chronometer, which splits the time of each training step into phases.

Each call marks a boundary: it ends one phase and begins the next, so the phases add up to the step,
and no call needs a matching one.

    chrono.start()
    chrono.next_iter()                      # once before the loop
    for images, labels in loader:
        chrono.transfer()                   # the batch has arrived; its copy to the device begins
        chrono.forward()
        chrono.backward()
        chrono.update()                     # optimizer, scheduler, metrics
        chrono.next_iter(images=32)         # last in the body: the wait for the next batch begins
    chrono.validation()
    chrono.idle()                           # checkpoints and reports belong to no phase
    chrono.stop()

On a GPU there are two clocks. The *host* clock (`time.perf_counter`) says when Python passed the
mark; it runs ahead of the GPU. The *device* clock is an event put into the current stream at each
mark; it says when the GPU passed it. Events are read after the GPU has reached them, without a
wait: nothing synchronises inside a step. On a CPU there is only the host clock.
"""

from dlojz.training import clocks
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
MARK = {"data": "next_iter", "stopped": "stop"}  # phases whose mark has another name


class Chronometer:
    """The marks between the phases of a run; finished steps and windows go to `sink`.

    sink, clock, device_clock: passed to the `Ledger` that reads the marks; the run log is a sink.
    witness: profiles one or two steps, which are then not measured: see `evidence.watch`.
    """

    FOLLOWS = FOLLOWS

    def __init__(self, device="cpu", sink=None, clock=clocks.host, device_clock=None, witness=None):
        self.phase = None  # the present one; None before the start
        self._clock = clock
        self._ledger = Ledger(device, sink, clock, device_clock)
        self._conductor = Conductor(witness)
        if witness:
            witness.chronometer = self
        self._step = 0  # steps begun and finished since start()
        self._validation = None  # its begin, in seconds
        self._tac = None

    @property
    def profiler(self):
        """Return the `torch.profiler.profile` of some of the steps; `stop()` stops it."""
        return self._conductor.profiler

    @profiler.setter
    def profiler(self, profiler):
        self._conductor.profiler = profiler

    def start(self):
        """Begin the run. Nothing is timed yet."""
        self.phase = "idle"

    def next_iter(self, **values):
        """End a step (except at the first call) and begin the wait for the next batch.

        values: numbers of the step for the log, such as `images=32, loss=loss`; scalar tensors are
        read once the device has computed them. Raises TypeError for a list.
        """
        for name, value in values.items():
            if isinstance(value, str | list | tuple | dict):
                raise TypeError(f"chrono.next_iter({name}=...): expected a number, found {value!r}")
        ended = self._enter("data") == "update"
        if ended:
            self._conductor.phase(None)
            self._ledger.end_step(values)
            self._step += 1
            self._conductor.ends(self._step)
        else:  # the first step of an epoch begins
            self._ledger.forget_marks()
        if ended and self._conductor.looks_at(self._step):
            self._ledger.close_window(self._step)
            self._ledger.forget_marks()
            self._conductor.begins(self._step)
        elif not self._ledger.measuring and self._conductor.measures(self._step):
            self._ledger.open_window(self._step)
        if not self._ledger.marks:
            self._ledger.mark("data")

    def transfer(self):
        """Begin the copy of the batch, now in host memory, to the device."""
        self._enter("transfer")
        if self._conductor.profiler_begins():
            self._ledger.close_window(self._step)
        self._mark()

    def forward(self):
        """Begin the model's forward pass and the loss."""
        self._enter("forward")
        self._mark()

    def backward(self):
        """Begin the backward pass."""
        self._enter("backward")
        self._mark()
        self._ledger.drain()  # costs nothing: the device is busy here

    def update(self):
        """Begin the optimizer's step, the scheduler and the metrics."""
        self._enter("update")
        self._mark()

    def validation(self):
        """Begin validation; its time ends at the next mark."""
        self._enter("validation")
        self._ledger.close_window(self._step)
        self._validation = self._clock()

    def idle(self):
        """Begin work that is not timed: a checkpoint, a report."""
        if self._enter("idle") == "data":  # in the middle of an epoch
            self._ledger.close_window(self._step)

    def stop(self):
        """End the run: wait for the device and hand over the remaining steps."""
        self._enter("stopped")
        self._ledger.close_window(self._step)
        self._conductor.stop()

    def tac_time(self, clear=False):
        """Return the seconds of host time since the last call; None at the first, or to clear.

        The stopwatch of the slides. It does not wait for the device: on a GPU it times the
        launches, not the work.
        """
        now, before = self._clock(), self._tac
        self._tac = now
        return None if before is None or clear else now - before

    def _enter(self, phase):
        """Begin `phase`; return the one before it. Raise if that may not precede it."""
        before, name = self.phase, MARK.get(phase, phase)
        if before is None:
            raise RuntimeError(f"chrono.{name}() came before chrono.start(): call start() first")
        if phase not in self.FOLLOWS[before]:
            expected = [f"chrono.{MARK.get(p, p)}()" for p in FOLLOWS if p in FOLLOWS[before]]
            raise RuntimeError(
                f"chrono.{name}() came during the phase {before!r}: expected "
                f"{' or '.join(expected) or 'nothing more'}; is a mark missing before it?"
            )
        if before == "validation":
            self._ledger.end_validation(self._validation)
        self.phase = phase
        return before

    def _mark(self):
        self._ledger.mark(self.phase)
        self._conductor.phase(self.phase)


class NoMarks:
    """A stand-in for the Chronometer, for a step without marks."""

    def forward(self):
        """Begin the forward pass."""

    def backward(self):
        """Begin the backward pass."""

    def update(self):
        """Begin the update."""
