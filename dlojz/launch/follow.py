"""The progress of a job, until it has ended."""

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

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


def follow(job, every_s: float = 0.2) -> Iterator[Now]:
    """Yield the progress of a job until it has ended; each line of its log is read once."""
    file, partial, now = events_file(job.directory), b"", Now(str(job.state))
    position = 0
    while True:
        state = job.state
        if file.exists():
            with file.open("rb") as stream:
                stream.seek(position)
                lines = (partial + stream.read()).split(b"\n")
                position = stream.tell()
            partial = lines.pop()  # a torn line, still being written
            for line in lines:
                with suppress(*MALFORMED):  # torn when the run was killed; `read` reports it
                    now = _after(now, json.loads(line))
        now = replace(now, state=str(state))
        yield now
        if state.final:
            return
        time.sleep(every_s)


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
