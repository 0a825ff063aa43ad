"""The standing of a class: a board's numbers, from the files that trainees share."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from dlojz.classroom.members import Classroom, Entry, Member

PASSED, TRIED, BEGUN = "passed", "tried", "begun"  # of a trainee in a notebook
FRESH_S = 600  # a job that waited when it was last heard of waits no longer, for all we know
PAUSE_S = 4 * 3600  # without a sign of a trainee: the sitting has ended
PARTS = {  # the parts of a notebook, and what shows that a trainee has reached them
    "predicted": lambda e: e.kind == "predictions",
    "checked": lambda e: e.kind == "verdicts",
    "passed": lambda e: e.kind == "verdicts" and e.fields["passed"],
    "answered": lambda e: e.kind == "answers",
}
WORDS = {  # what a trainee did last
    "predictions": "a prediction",
    "scores": "a prediction scored",
    "verdicts": "a check",
    "hints": "a hint",
    "quizzes": "a quiz",
    "mysteries": "a mystery",
    "answers": "a question",
}


def state(member: Member, notebook: str) -> str | None:
    """Return the state of a trainee in a notebook: PASSED, TRIED, BEGUN; None without a sign."""
    found = [e for e in member.entries if e.notebook == notebook]
    verdicts = [e for e in found if e.kind == "verdicts"]
    if any(e.fields["passed"] and e.key == notebook for e in verdicts):
        return PASSED
    return TRIED if verdicts else BEGUN if found else None


def passed(member: Member) -> set[str]:
    """Return the steps that a trainee has passed."""
    return {e.key for e in member.entries if e.kind == "verdicts" and e.fields["passed"]}


def jobs(found: Classroom, state: str = "QUEUED") -> list[tuple[Member, float]]:
    """Return the jobs in this state, oldest first: whose, and for how many seconds.

    Only those of trainees heard of lately.
    """
    ages = [
        (member, found.time - (_began(run) or found.time))
        for member in found.members
        for run in member.runs
        if run.state == state and found.time - member.time < FRESH_S
    ]
    return sorted(ages, key=lambda job: -job[1])


def _began(run) -> float | None:
    return run.started if run.state == "RUNNING" and run.started else run.submitted


@dataclass(frozen=True)
class Failing:
    """A check that does not pass, and for what reason."""

    step: str
    stuck: int  # trainees whose last verdict did not pass
    tried: int  # trainees with a verdict
    failed: int  # trainees with a verdict that did not pass, at first or still
    attempts: int  # verdicts that did not pass
    hints: list[tuple[str, int]]  # by how many trainees got it, most first; "" for no hint


def failing(found: Classroom) -> list[Failing]:
    """Return the checks that did not pass, first the one that keeps most trainees."""
    by_step = defaultdict(lambda: defaultdict(list))
    for member, entry in _entries(found, "verdicts"):
        by_step[entry.key][member.name].append(entry.fields)
    rows = [_failing(step, tried) for step, tried in by_step.items()]
    return sorted((r for r in rows if r.attempts), key=lambda r: (-r.stuck, -r.attempts, r.step))


def _failing(step, tried) -> Failing:
    failed = {who: [v for v in verdicts if not v["passed"]] for who, verdicts in tried.items()}
    hints = Counter(h for given in failed.values() for h in {v["hint"] or "" for v in given})
    stuck = sum(not verdicts[-1]["passed"] for verdicts in tried.values())
    counts = sum(map(bool, failed.values())), sum(map(len, failed.values()))
    return Failing(step, stuck, len(tried), *counts, hints.most_common())


def speedups(found: Classroom) -> dict[str, list[float]]:
    """Return the ratios of each step's passed verdicts, the last of each trainee."""
    last = {
        (entry.key, member.name): entry.fields["ratio"]
        for member, entry in _entries(found, "verdicts")
        if entry.fields["passed"] and entry.fields["ratio"]
    }
    ratios = defaultdict(list)
    for (step, _), ratio in last.items():
        ratios[step].append(ratio)
    return dict(sorted(ratios.items()))


def calibration(found: Classroom) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Return (predicted, found) by quantity and how it was found: "measured" or "estimated".

    Of each trainee's prediction only the last score counts.
    """
    last = {
        (entry.fields["name"], entry.key, member.name): entry.fields
        for member, entry in _entries(found, "scores")
    }
    pairs = defaultdict(list)
    for (name, *_), fields in last.items():
        pair = fields["predicted"], fields["measured"]
        if min(pair) > 0:
            pairs[name, fields["how"] or "measured"].append(pair)
    return dict(sorted(pairs.items(), key=lambda item: -len(item[1])))


def _entries(found, kind) -> Iterator[tuple[Member, Entry]]:
    return ((m, entry) for m in found.members for entry in m.entries if entry.kind == kind)


# Stop and go: how the time in a notebook was spent ------------------------------------------------


@dataclass(frozen=True)
class Sitting:
    """The last time that a trainee sat at a notebook: when it began and what happened in it."""

    member: Member
    begin: float
    end: float  # of what is known; now, for those who are still there
    entries: list[Entry]
    queued: list[tuple[float, float]]  # from, to
    running: list[tuple[float, float]]
    waits: bool  # a job of this trainee is in the queue

    def reached(self, part: str) -> float | None:
        """Return the time at which a part was first reached."""
        return next((e.time for e in self.entries if PARTS[part](e)), None)


def busiest(found: Classroom) -> str | None:
    """Return the notebook in which most trainees are at present."""
    last = [m.entries[-1].notebook for m in found.members if m.entries]
    return statistics.mode(sorted(last)) if last else None


def sittings(found: Classroom, notebook: str | None) -> list[Sitting]:
    """Return each trainee's use of the time in a notebook, those who began first in front."""
    made = (_sitting(m, notebook, found.time) for m in found.members)
    return sorted(filter(None, made), key=lambda s: s.begin)


def _sitting(member, notebook, now) -> Sitting | None:
    entries = [e for e in member.entries if e.notebook == notebook]
    if not entries:
        return None
    pauses = [i for i, (a, b) in enumerate(pairwise(entries), 1) if b.time - a.time > PAUSE_S]
    entries = entries[pauses[-1] if pauses else 0 :]  # the others were on another day
    here = member.entries[-1].notebook == notebook and now - member.time < FRESH_S
    begin, end = entries[0].time, now if here else entries[-1].time
    queued = [(r.submitted, r.started or r.ended or now) for r in member.runs if r.submitted]
    running = [(r.started, r.ended or now) for r in member.runs if r.started]
    spans = (_within(spans, begin, end) for spans in (queued, running))
    waits = here and any(run.state == "QUEUED" for run in member.runs)
    return Sitting(member, begin, end, entries, *spans, waits)


def _within(spans, begin, end) -> list[tuple[float, float]]:
    cut = ((max(first, begin), min(last, end)) for first, last in spans)
    return [(first, last) for first, last in cut if first < last]
