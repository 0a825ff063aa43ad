"""The clocks of the host and the device, and the ledger of the marks on them."""

import itertools
from collections import deque
from contextlib import contextmanager
from functools import cache
from time import perf_counter
from typing import NamedTuple

import torch

from dlojz.runs.columns import PHASES
from dlojz.training import private

_paused = 0.0  # seconds that belong to no clock
_depth = 0  # of pauses within pauses


@contextmanager
def pause():
    """Leave this context out of all times of the run: the course reads sensors, or audits."""
    global _paused, _depth
    begin, _depth = perf_counter(), _depth + 1
    try:
        yield
    finally:
        _depth -= 1
        if _depth == 0:
            _paused += perf_counter() - begin


def paused() -> float:
    """Return the seconds left out so far."""
    return _paused


def host() -> float:
    """Return the time in seconds, like `time.perf_counter`, without the pauses."""
    return perf_counter() - _paused


_event_type = cache(private.event_type)


class Mark(NamedTuple):
    """A moment on the clocks of the host and the device."""

    begins: object  # a phase, or the number of a window's first step
    seconds: float  # of the host's clock
    event: object  # on the device; None without one
    paused: float  # seconds left out so far


class CudaClock:
    """The clock of a CUDA device: events on the current stream."""

    def __init__(self, device):
        self._device = device

    def event(self):
        """Return an event, to be recorded and read."""
        return _event_type()(enable_timing=True)

    def record(self, event):
        """Queue `event` behind all work of the device."""
        event.record(torch.cuda.current_stream(self._device))

    def synchronize(self):
        """Wait until the device has finished all its work."""
        torch.cuda.synchronize(self._device)

    def fetch(self, tensor):
        """Return a copy of a scalar in pinned memory, valid once a later event has passed.

        It is copied now because CUDA graphs overwrite their outputs, and without the wait of
        `.item()`.
        """
        host = torch.empty((), dtype=torch.float32, pin_memory=True)
        return host.copy_(tensor.detach(), non_blocking=True)


class Ledger:
    """The marks that the device has yet to pass, to become steps and windows.

    sink: receives `step(values, host_ms, device_ms, ahead_ms)`, `window_opens()`,
        `window(first_step, steps, wall_s)` and `validation(seconds)`; None discards all.
    clock: returns seconds, like `time.perf_counter`.
    device_clock: an object like `CudaClock`, which is the default on a CUDA device.
    """

    def __init__(self, device, sink, clock, device_clock=None):
        if device_clock is None and str(device).startswith("cuda"):
            device_clock = CudaClock(device)
        self._sink, self._clock, self._device_clock = sink, clock, device_clock
        self.marks = []  # of the present step
        self._end = None  # a mark after these, with which the step may have ended
        self._pending = deque()  # steps whose last event the device has not reached
        self._free_events = []
        self._window = None  # the mark at the begin of the measured window
        self._last = None  # the mark at the end of the last step

    @property
    def measuring(self) -> bool:
        """Return whether a window is open."""
        return self._window is not None

    def mark(self, phase):
        """Begin a phase, on both clocks."""
        self.marks.append(self._now(phase))
        self._end = None

    def may_end(self):
        """Note now as the end of the step, in case `end_step` follows without another mark."""
        self._end = self._now("data")

    def _now(self, begins):
        event = None
        if self._device_clock:
            event = self._free_events.pop() if self._free_events else self._device_clock.event()
            self._device_clock.record(event)
        return Mark(begins, self._clock(), event, paused())

    def forget_marks(self):
        """Drop the marks of a step that will not take place."""
        self.marks, self._end = [], None

    def end_step(self, values):
        """Keep the step until the device has finished it, and begin the next one."""
        if self._device_clock:
            values = {
                k: self._device_clock.fetch(v) if hasattr(v, "detach") else v
                for k, v in values.items()
            }
        end, self._end = self._end, None
        self.marks.append(end or self._now("data"))
        self._pending.append((values, self.marks, self._window))
        self._last = self.marks[-1]
        self.marks = [self._last]  # the end of this step is the beginning of the next

    def end_validation(self, begin):
        """Hand over the time since `begin`, in seconds, once the device is done."""
        self._synchronize()
        if self._sink:
            self._sink.validation(seconds=self._clock() - begin)

    def open_window(self, step):
        """Begin to measure at this step: the only wait for the device between two steps."""
        self._synchronize()
        self.drain()
        self.marks = []
        with pause():  # it reads sensors
            if self._sink:
                self._sink.window_opens()
        self._window = self._now(step)

    def close_window(self, step):
        """Wait for the device, hand over the steps before `step` and the window's wall time."""
        self._synchronize()
        self.drain()
        if self._window and step > self._window.begins:
            first, wall = self._window.begins, self._last.seconds - self._window.seconds
            if self._device_clock:  # it may pass the last mark after the host
                wall = max(wall, _on_device(self._window, self._last) / 1000)
            with pause():
                if self._sink:
                    self._sink.window(first_step=first, steps=step - first, wall_s=wall)
        self._window = self._last = None

    def drain(self):
        """Hand over the steps that the device has finished."""
        while self._pending and _finished(self._pending[0]):
            values, marks, window = self._pending.popleft()
            host = _durations(marks, lambda a, b: 1000 * (b.seconds - a.seconds))
            device = ahead = None
            if self._device_clock:
                device = _durations(marks, _on_device)
                if window:
                    on_host = 1000 * (marks[-1].seconds - window.seconds)
                    ahead = _on_device(window, marks[-1]) - on_host
                # The last event begins the next step; the others are used again.
                self._free_events += [mark.event for mark in marks[:-1]]
            if self._sink:
                values = {k: _number(v) for k, v in values.items()}
                self._sink.step(values, host, device, ahead)

    def _synchronize(self):
        if self._device_clock:
            self._device_clock.synchronize()


def _finished(step):
    # The last mark first, which nearly always decides. Others may be on streams behind it.
    return all(mark.event is None or mark.event.query() for mark in reversed(step[1]))


def _number(value):
    """Return a scalar tensor's value; NaN on the meta device, which has none."""
    if not hasattr(value, "detach"):
        return value
    return float("nan") if value.is_meta else value.item()


def _on_device(a, b):
    """Return the milliseconds between two marks by the device's clock, without the pauses.

    The device is idle in a pause.
    """
    return a.event.elapsed_time(b.event) - 1000 * (b.paused - a.paused)


def _durations(marks, between):
    """Return the milliseconds in each phase; with accumulation some occur more than once."""
    total = dict.fromkeys(PHASES, 0.0)
    for a, b in itertools.pairwise(marks):
        total[a.begins] += between(a, b)
    return total
