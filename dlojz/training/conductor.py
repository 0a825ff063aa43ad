"""The choice for each step: measured, profiled for the evidence, or profiled by the trainee.

The witness profiles the last step and, in a check, perhaps one in the middle; the trainee's
profiler follows its schedule. Profiling takes time, so such a step is not measured. The Chronometer
asks at each step's boundaries.
"""

import torch

from dlojz.runs.log import MOST_WARMUP_STEPS, WARMUP_STEPS


class Conductor:
    """The separation of the profiled steps from the measured ones.

    witness: profiles the steps `witness.middle` and `witness.last` (None: none), between its
        `begins(step)` and `ends()`; no window opens before it is `settled`. See
        `dlojz.watch.evidence`.
    profiler: an attribute, the trainee's `torch.profiler.profile` of some of the steps. The phases
        of those are ranges in its trace.
    """

    def __init__(self, witness=None):
        self.profiler = None
        self._witness = witness
        # Steps, numbered since start().
        self._last, self._middle = (getattr(witness, name, None) for name in ("last", "middle"))
        self._actions = []  # the profiler's action in each step
        self._profiled = False  # the profiler records the present step
        self._range = None

    def measures(self, step: int) -> bool:
        """Return whether `step` may be measured: the run is warm, and no profiler is on."""
        over = self._last is not None and step >= self._last
        if self._profiled or over or step == self._middle:
            return False
        settled = self._witness is None or self._witness.settled
        return step >= (WARMUP_STEPS if settled else MOST_WARMUP_STEPS)

    def looks_at(self, step: int) -> bool:
        """Return whether the witness profiles `step`."""
        return step in (self._middle, self._last)

    def begins(self, step: int):
        """Start the witness, unless the profiler is on: only one can run at a time."""
        wanted = self.profiler and self.profiler.schedule(step).name != "NONE"
        if not (wanted or self._profiled):
            self._witness.begins(step)

    def ends(self, step: int):
        """Stop the witness if it profiled the step before `step`."""
        if self.looks_at(step - 1):
            self._witness.ends()

    def profiler_begins(self) -> bool:
        """Note the profiler's action in this step; return whether it begins to record."""
        if not self.profiler:
            return False
        action = self.profiler.current_action.name
        self._actions.append(action)
        before, self._profiled = self._profiled, action != "NONE"
        return self._profiled and not before

    def phase(self, name: str | None):
        """Begin a range in the profiler's trace, which ends at the next call."""
        if self._range:
            self._range.__exit__(None, None, None)
            self._range = None
        if name and self._profiled:
            self._range = torch.profiler.record_function(name)
            self._range.__enter__()

    def stop(self):
        """Stop the profiler, and report its actions to the witness."""
        if self.profiler:
            self.profiler.stop()
            if self._witness:
                self._witness.profiled(self._actions)
