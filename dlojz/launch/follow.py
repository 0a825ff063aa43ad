"""The progress of a job, until it has ended."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from dlojz.course import SMALL, FileError, open_regular
from dlojz.runs.folder import events_file
from dlojz.runs.log import MALFORMED


@dataclass(frozen=True)
class Now:
    """The progress of a job: training steps done, their total, and the pace.

    total: None until it is known; 0 for a small experiment, which has no training steps.
    """

    state: str
    done: int = 0
    total: int | None = None
    loss: float | None = None
    images_per_s: float | None = None  # of the last step, all processes together
    processes: int = 1


def events(job, every_s: float = 0.2) -> Iterator[tuple]:
    """Yield the state of a job and the new events in its log, until it has ended.

    Each line of the log is read once.
    """
    file, partial, position = events_file(job.directory), b"", 0
    while True:
        state = job.state
        chunk = b""
        with suppress(OSError, FileError), open_regular(file) as stream:
            stream.seek(position)
            chunk = stream.read(SMALL)
            position = stream.tell()
        lines = (partial + chunk).split(b"\n")
        partial = lines.pop()[-SMALL:]  # a torn line, still being written
        found = []
        for line in lines:
            with suppress(*MALFORMED):  # torn when the run was killed; `read` reports it
                event = json.loads(line)
                found += [event] if isinstance(event, dict) and "event" in event else []
        ended = state.final and len(chunk) < SMALL
        yield state, found
        if ended:
            return
        time.sleep(every_s)


def follow(job, every_s: float = 0.2) -> Iterator[Now]:
    """Yield the progress of a job until it has ended."""
    now = Now(str(job.state))
    for state, found in events(job, every_s):
        for event in found:
            with suppress(*MALFORMED):
                now = _after(now, event)
        now = replace(now, state=str(state))
        yield now


class Bar:
    """A progress bar of a job, in notebooks and terminals; not of a job that ends at once."""

    SOON_S, REFRESH_S = 1.5, 0.5
    STATE = "{desc}{postfix}, {elapsed}"
    STEPS = "{l_bar}{bar}| {n_fmt}/{total_fmt} steps, {elapsed}"

    def __init__(self, job):
        self._name = f"job {job.id}, {job.name}"
        self._seen = in_a_notebook() or sys.stderr.isatty()
        self._bar, self._next = None, time.monotonic() + self.SOON_S
        self._progress = follow(job, every_s=0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._bar is not None:
            self._bar.close()

    def show(self):
        """Read the job's log and draw its progress, if it can be seen: twice a second at most."""
        if not self._seen or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self.REFRESH_S
        if (now := next(self._progress, None)) is None:  # it has just ended
            return
        if self._bar is None:
            from tqdm.auto import tqdm  # a tenth of a second

            self._bar = tqdm(desc=self._name, bar_format=self.STATE, leave=False)
        if now.total and self._bar.total != now.total:
            self._bar.reset(now.total)
        self._bar.bar_format = self.STEPS if now.total else self.STATE
        self._bar.set_postfix_str(now.state.lower(), refresh=False)
        self._bar.n = now.done
        self._bar.refresh()


def in_a_notebook() -> bool:
    """Return whether this is a notebook's kernel, without importing IPython."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def _after(now, event):
    kind = event["event"]
    if kind == "start":
        return replace(now, processes=event.get("size", 1))
    if kind == "setup":
        return Now(now.state, 0, event.get("steps", 0), processes=now.processes)
    if kind == "step":
        ms = sum(event["host_ms"].values())
        rate = 1000 * now.processes * event["images"] / ms if ms else None
        return replace(now, done=now.done + 1, loss=event["loss"], images_per_s=rate)
    return now
