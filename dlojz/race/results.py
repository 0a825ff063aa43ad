"""The results of a race: `results.jsonl`, to which each organiser appends, a line for each event.

{"event": "round", "round": 1, "entries": {"starter": "9f86d0..."}, "seeds": [7, 8, 9], "rules": {"seconds": 20}, "place": "AMD EPYC, machine 3f2a10", "time": 1764000000.0}
{"event": "run", "round": 1, "entry": "starter", "seed": 7, "why": "", "seconds": 14.2, "cut": false, "joules": null, "idle_w": null, "images": 3000, "updates": 94, "disturbed": "", "run": "../../runs/0012"}
{"event": "draw", "round": 1, "seed": 2026}
{"event": "judged", "round": 1, "entry": "starter", "seed": 7, "why": "", "accuracy": 0.512, "of": 500, "floor_s": 0.8}

A run or a judgement that failed says why. `cut`: the run was ended at its budget. What is not
measured is null.
"""  # noqa: E501  a sample line stays one line: a test parses them

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from dlojz import course
from dlojz.race.rules import Race, RaceError

FILE = "results.jsonl"
FIELDS = {  # of each event, beside the number of the round
    "round": {"entries": dict, "seeds": list, "rules": dict, "place": str},
    "run": {"entry": str, "seed": int, "why": str},
    "draw": {"seed": int},
    "judged": {"entry": str, "seed": int, "why": str},
}


@dataclass
class Round:
    """A round: its entries are run in turn with the same seeds, and judged on the same images."""

    number: int
    entries: dict[str, str]  # checksums, by name, the best so far first
    seeds: list[int]
    rules: dict
    place: str  # the machine and its device
    drawn: int | None = None  # the seed of the images that judge
    runs: dict[tuple[str, int], dict] = field(default_factory=dict)  # by entry and seed
    judged: dict[tuple[str, int], dict] = field(default_factory=dict)

    def failure(self, name: str) -> str:
        """Return the first reason for which an entry is out of this round; "" if there is none."""
        mine = [found for told in (self.runs, self.judged) for found in told.items()]
        return next((one["why"] for (entry, _), one in mine if entry == name and one["why"]), "")

    def due(self) -> list[tuple[str, int]]:
        """Return the runs that are still due, in turn: A B, B A, A B. One that failed is out."""
        order = [*self.entries]
        every = [
            (name, seed)
            for i, seed in enumerate(self.seeds)
            for name in (order if i % 2 == 0 else order[::-1])
        ]
        return [key for key in every if key not in self.runs and not self.failure(key[0])]

    def to_judge(self) -> dict[str, list[int]]:
        """Return the seeds of each entry whose weights are still to be judged."""
        waiting = {}
        for name, seed in self.runs:
            if (name, seed) not in self.judged and not self.failure(name):
                waiting.setdefault(name, []).append(seed)
        return waiting

    @property
    def done(self) -> bool:
        """Return whether all is run and judged."""
        return not self.due() and not self.to_judge()


def read(race: Race) -> list[Round]:
    """Return the rounds so far. A torn last line was never a result. Raises RaceError."""
    file, rounds = race.folder / FILE, {}
    try:
        content = course.read_small(file, course.LARGE)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise RaceError(f"{file} can't be read: {error}") from None
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        try:
            _take(rounds, course.table_of(line))
        except (KeyError, TypeError, ValueError) as error:
            raise RaceError(f"{file}:{number}: damaged ({error}): put a copy of it back") from None
    return [*rounds.values()]


def _take(rounds, event):
    kind, number = event["event"], event["round"]
    for name, form in FIELDS[kind].items():
        if not isinstance(event[name], form):
            raise ValueError(f"{name} is {event[name]!r}")
    if kind == "round":
        names = ("entries", "seeds", "rules", "place")
        rounds[number] = Round(number, *(event[name] for name in names))
    elif kind == "draw":
        rounds[number].drawn = event["seed"]
    else:
        found = rounds[number].runs if kind == "run" else rounds[number].judged
        found[event["entry"], event["seed"]] = event


def append(race: Race, event: str, number: int, **more):
    """Append an event, whole or not at all; only an organiser who holds the lock does."""
    file = race.folder / FILE
    line = json.dumps({"event": event, "round": number, **more}).encode() + b"\n"
    with course.needs_room(file), open(file, "ab", buffering=0) as stream:
        size, left = _whole(file, stream), line
        try:
            while left:
                left = left[stream.write(left) :]
            os.fsync(stream.fileno())
        except OSError:
            with suppress(OSError):
                stream.truncate(size)
            raise


def _whole(file, stream) -> int:
    """Cut off a torn last line, which a killed organiser left; return the file's size."""
    content = file.read_bytes()
    size = content.rfind(b"\n") + 1
    if size < len(content):
        stream.truncate(size)
    return size


@contextmanager
def turn(race: Race) -> Iterator[bool]:
    """Hold the race for one step of an organiser; yield whether it was free."""
    with course.locked(race.folder / "organiser.lock", 0) as holder:
        yield not holder
