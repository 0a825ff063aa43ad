"""The speed of a timed run of a check, by the process's own clock, from outside the trainer."""

import atexit
import sys
from time import perf_counter

import torch

from dlojz.runs import records
from dlojz.runs.log import MOST_WARMUP_STEPS, WARMUP_STEPS
from dlojz.training import distributed
from dlojz.watch import calls, readings


class Stopwatch:
    """The windows of a run, from the forward pass of a warm step to that of an epoch's last one.

    It waits for the device at both ends of a window, and nowhere between; it counts the images that
    enter the model. No window holds a step under a profiler, nor the one before, for on a GPU a
    profiler begins slowly. The run ends with its training.

    witness: knows when the run is warm, and which step it profiles.
    """

    def __init__(self, run, model, args, witness, steps: int):
        self._run, self._steps = run, steps
        self._witness, self._per_epoch = witness, steps // args.epochs
        self._accumulate = getattr(args, "accumulate", 1)
        self._device = next(model.parameters()).device
        self._step = 0  # the next one
        self._window = None  # the open one: its first step, its begin in seconds
        self._images, self._windows = 0, []
        self._hooks = calls.hook(model, self._on_input)
        self._timed = "--profile" not in sys.argv  # a profiler's steps say nothing about the speed

    def _on_input(self, model, args, kwargs):
        if not (model.training and torch.is_grad_enabled()):
            if self._step >= self._steps:
                end(self._run)
            return
        step, last = self._step, self._witness.last
        ends = (step + 1) % self._per_epoch == 0 or (last is not None and step >= last - 1)
        if ends:
            self._close()
        elif self._window is None and self._is_warm(step):
            self._wait()
            self._window, self._images = (step, perf_counter()), 0
        self._images += len(readings.entered(args, kwargs))
        self._step += 1

    def _is_warm(self, step) -> bool:
        least = WARMUP_STEPS if self._witness.settled else MOST_WARMUP_STEPS
        return self._timed and step >= least and step % self._accumulate == 0

    def _wait(self):
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _close(self):
        if self._window is None:
            return
        self._wait()
        (first, begin), self._window = self._window, None
        steps, wall_s = self._step - first, perf_counter() - begin
        self._windows.append(
            {"first_step": first, "steps": steps, "images": self._images, "wall_s": wall_s}
        )

    def finish(self) -> records.Stopwatch:
        """Return the windows of the run, which is over."""
        for hook in self._hooks:
            hook.remove()
        self._close()
        return records.Stopwatch(self._windows)


def end(run):
    """End the process as if the trainer ended here; its `finally` clauses still run."""
    run.end()
    atexit.register(distributed.leave_group)
    sys.exit()
