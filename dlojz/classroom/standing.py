"""The standing of a class: a board's numbers, from the files that trainees share."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from dlojz.classroom.members import Classroom, Entry, Member, Run

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


def waiting(found: Classroom, of: str = "QUEUED") -> list[tuple[Member, Run]]:
    """Return the jobs that are in this state, of trainees heard of lately; oldest first."""
    jobs = [(member, run) for member in found.members for run in jobs_of(found, member, of)]
    return sorted(jobs, key=lambda job: began(job[1]) or 0)


def jobs_of(found: Classroom, member: Member, state: str) -> list[Run]:
    """Return a trainee's jobs in this state, oldest first; none if not heard of lately."""
    fresh = found.time - member.time < FRESH_S
    own = [run for run in member.runs if fresh and run.state == state]
    return sorted(own, key=lambda run: began(run) or 0)


def began(run: Run) -> float | None:
    """Return since when a job is in its state."""
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
    for member in found.members:
        for entry in member.entries:
            if entry.kind == "verdicts":
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
    ratios = defaultdict(list)
    for member in found.members:
        own = {
            e.key: e.fields["ratio"]
            for e in member.entries
            if e.kind == "verdicts" and e.fields["passed"] and e.fields["ratio"]
        }
        for step, ratio in own.items():
            ratios[step].append(ratio)
    return dict(sorted(ratios.items()))


def calibration(found: Classroom) -> dict[str, list[tuple[float, float]]]:
    """Return (predicted, measured) by what was predicted: the last score of each prediction."""
    pairs = defaultdict(list)
    for member in found.members:
        own = {(e.key, e.fields["name"]): e.fields for e in member.entries if e.kind == "scores"}
        for (_, name), fields in own.items():
            if fields["predicted"] > 0 and fields["measured"] > 0:
                pairs[name].append((fields["predicted"], fields["measured"]))
    return dict(sorted(pairs.items(), key=lambda item: -len(item[1])))


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
    for before, after in zip(entries[-2::-1], entries[:0:-1], strict=True):
        if after.time - before.time > PAUSE_S:  # another day
            entries = entries[entries.index(after) :]
            break
    here = member.entries[-1].notebook == notebook and now - member.time < FRESH_S
    begin, end = entries[0].time, now if here else entries[-1].time
    queued = [(r.submitted, r.started or r.ended or now) for r in member.runs if r.submitted]
    running = [(r.started, r.ended or now) for r in member.runs if r.started]
    spans = (_within(spans, begin, end) for spans in (queued, running))
    waits = here and any(run.state == "QUEUED" for run in member.runs)
    return Sitting(member, begin, end, entries, *spans, waits)


def _within(spans: Iterable, begin, end) -> list[tuple[float, float]]:
    cut = ((max(first, begin), min(last, end)) for first, last in spans)
    return [(first, last) for first, last in cut if first < last]
