"""The runs of a plan: found among those of earlier checks, or submitted."""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from dlojz import launch
from dlojz.check import judge, reuse
from dlojz.check.ending import PAIR, Cause, EndedRun, How, Role
from dlojz.check.exercise import FASTER, State
from dlojz.check.plan import Plan, placed
from dlojz.check.verdict import CheckError
from dlojz.course import progress
from dlojz.launch import series

SMALL_S = 5  # for a small run
IMPORTS_S = 6  # for importing torch: once in a job, and in each run that begins afresh
# A run of a check that takes longer, and ten times as long as its job, stands still.
STANDS_STILL_S, COMPILES_S = 180, 1200
FIRST, ALL = "first", "all"  # the runs before the pairs, and these, too
SOLUTIONS = (Role.EXTRA_SOLUTION, Role.EPOCHS_SOLUTION)  # named as the trainee's
ENOUGH = "the first runs tell the check enough"
BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} runs, {elapsed}"


def finished(plan: Plan, standards: judge.Standards) -> dict[str, EndedRun]:
    """Return the runs by name; submit those that no earlier check has completed.

    Stop waiting once the finished ones are enough. Raises CheckError for a run that failed for
    another reason than the trainee's file.
    """
    keys = reuse.keys_of(plan)
    found = reuse.known(plan, standards.trainer)
    judged, shown = set(), []

    def enough_so_far():
        stage = _stage(plan.entries, found)
        if stage == FIRST and stage in judged:
            return None  # not enough: the next pairs are judged together
        judged.add(stage)
        return telling(plan, found, standards)

    def enough():
        reuse.made(job, plan, keys, found, standards.trainer)
        refuse(found)
        return enough_so_far()

    def failing():
        if not shown and not _stage(plan.entries, found):
            shown.extend(first_failing(plan, found, standards))
            return shown
        return []

    if len(found) == len(keys):
        return found
    runs = enough_so_far()
    missing = {name: key for name, key in keys.items() if name not in found}
    job = reuse.under_way(plan, keys, missing.values())
    if runs:
        if job:  # of a check that was interrupted
            job.end_early(ENOUGH)
        return runs
    job = job or _submit(plan, missing, found)
    if runs := _wait(job, plan, enough, failing):
        return runs
    if runs := enough():
        return runs
    if lost := [name for name in keys if name not in found]:
        raise CheckError(f"the check's job ended without {', '.join(lost)}: {job.explain()}")
    return found


def telling(plan: Plan, found: Mapping[str, EndedRun], standards) -> dict[str, EndedRun] | None:
    """Return the finished runs if they are enough for a verdict, else None.

    Those before the pairs are enough if something in them is wrong. If the trainee's trainer did
    not complete with the job's flags, no other run can change the verdict.
    """
    base = _by_role(found, Role.SOLUTION, Role.YOURS)
    if len(base) == 2 and not base[str(Role.YOURS)].end.completed:
        return base
    stage = _stage(plan.entries, found)
    if stage == ALL:
        return {entry.name: found[entry.name] for entry in plan.entries}
    if stage != FIRST:
        return None
    ended = {name: run for name, run in found.items() if name in _first(plan.entries)}
    findings = judge.judge(plan.exercise, ended, standards, timed=False).findings
    return ended if any(f.fails and f.part != FASTER for f in findings) else None


def first_failing(plan: Plan, found: Mapping[str, EndedRun], standards) -> list[str]:
    """Return the first row that fails in the runs so far, in words; [] if none does.

    It is no verdict yet: a run that is still to come may show an earlier cause.
    """
    ended = {name: run for name, run in found.items() if name in _first(plan.entries)}
    if len(_by_role(ended, Role.SOLUTION, Role.YOURS)) < 2:
        return []
    verdict = judge.judge(plan.exercise, ended, standards, timed=False)
    rows = [f for f in verdict.failing if f.state == State.FAILED and f.hint]
    order = list(plan.exercise.hints)
    rows.sort(key=lambda row: order.index(row.hint))
    more = "The other runs show whether anything comes before it"
    return [f"  ✗ {row.what}: {row.yours}, expected: {row.expected}. {more}" for row in rows[:1]]


def _by_role(found, *roles) -> dict[str, EndedRun]:
    return {name: run for name, run in found.items() if run.entry.role in roles}


def _stage(entries, found) -> str:
    """Return the stage that can be judged: the FIRST runs, or ALL; "" for neither."""
    if {entry.name for entry in entries} <= set(found):
        return ALL
    return FIRST if _first(entries) <= set(found) else ""


def _first(entries) -> set[str]:
    return {entry.name for entry in entries if entry.role not in PAIR}


def refuse(found: Mapping[str, EndedRun]):
    """Raise CheckError for a run that failed for another reason than the trainee's file."""
    for name, run in found.items():
        role, end = run.entry.role, run.end
        if role in (Role.BEFORE, Role.BESIDE) and end.how == How.OUT_OF_MEMORY:
            continue  # the judge reports it
        if end.how == How.KILLED or not (role.mine or end.completed):
            of = "step before" if role == Role.BEFORE else "solution"
            whose = "" if role.mine else f", of the {of},"
            raise CheckError(
                f"the check's run {name}{whose} did not complete, which says nothing about your "
                f"trainer: {end.text}. {_todo(end)} ({run.folder})"
            )


def _todo(end):
    if end.how == How.OUT_OF_MEMORY:
        return "Submit with a smaller -b"
    if end.cause == Cause.UNKNOWN_FLAG:
        return "Submit without that flag"
    if end.cause == Cause.NO_ROOM:
        return "`du -sh runs/*` shows what is large: make room, and check again"
    if end.how == How.KILLED:
        return "Check again; if that repeats, memory may be short: submit with a smaller -b"
    return "Check again"


def _submit(plan, missing: dict[str, str], found: Mapping[str, EndedRun]) -> launch.Job:
    places = {name: run.folder for name, run in found.items()}
    wanted = [placed(entry, places) for entry in plan.entries if entry.name in missing]
    about, step = about_s(plan, wanted), plan.exercise.step
    say(f"check {step} of job {plan.job.id}: {announced(wanted, about)}")
    seconds = 3600 * (1 + int(3 * about // 3600))
    wanted = [limited(entry, plan) for entry in wanted]
    check = {reuse.CHECK_FILE: json.dumps(missing).encode()}
    return series.submit(
        wanted, replace(plan.request, name=f"check-{step}", time_max_s=seconds, files=check)
    )


def limited(entry: series.Entry, plan: Plan) -> series.Entry:
    """Return an entry with a time limit, far above the job's time, for it and its replay.

    If a process leaves out a collective, the others wait for it without an error. The limit is
    generous: the step before may take longer on a processor, and compiled code may have left the
    cache.
    """
    if not entry.role.mine:
        return entry
    most_s = max(COMPILES_S if plan.compile_s else STANDS_STILL_S, 10 * plan.seconds)
    replay = entry.replay and replace(entry.replay, most_s=most_s)
    return replace(entry, most_s=most_s, replay=replay)


def about_s(plan: Plan, entries: Sequence[series.Entry]) -> float:
    """Return an estimate of the seconds that these runs of a plan take.

    They may have to compile code, once, that the job found in its cache.
    """
    each_s = max(2.0, plan.seconds - plan.compile_s)
    small = [entry for entry in entries if entry.aside]
    large = [entry for entry in entries if not (entry.aside or entry.rehearse)]
    seconds = max(_programs(large) * each_s, _programs(small) * min(each_s, SMALL_S))
    imports_s = IMPORTS_S * (1 + sum(entry.fresh for entry in entries))
    return imports_s + plan.compile_s + seconds


def _programs(entries) -> int:
    return sum(1 + (entry.replay is not None) for entry in entries)


def say(text: str):
    """Print a line about the check, apart from the verdict and above a progress bar."""
    from tqdm.auto import tqdm

    # In a terminal, stdout is for the verdict.
    tqdm.write(text, file=sys.stdout if launch.in_a_notebook() else sys.stderr)


def _wait(
    job, plan, enough: Callable[[], dict | None], failing: Callable[[], list[str]]
) -> dict[str, EndedRun] | None:
    """Wait for the end of the job. Once `enough()` returns runs, end it and return them.

    failing: returns lines to show meanwhile
    """
    from tqdm.auto import tqdm

    step, entries, answer = plan.exercise.step, series.entries(job), None
    silent = False if launch.in_a_notebook() else None
    with (
        _reported_if_interrupted(job),
        Ended(job, entries) as ended,
        tqdm(total=len(entries), bar_format=BAR, leave=False, disable=silent) as bar,
    ):
        while not (state := job.state).final:
            progress.share_state(job, state)
            left = series.unfinished(job)
            done = len(entries) - len(left)
            present = doing(entries, left, compiles=plan.compile_s > 0)
            bar.set_description(f"{step}: {present}", refresh=done == bar.n)
            if done > bar.n:
                ended.show()
                bar.total = max(bar.total, done)
                bar.update(done - bar.n)
                try:
                    answer = enough() if answer is None else answer
                    ended.say(failing() if answer is None else [])
                except CheckError:
                    job.cancel("one of the check's own runs failed")
                    raise
                if answer and done < len(entries):
                    job.end_early(ENOUGH)
            time.sleep(0.2)
        ended.show()
        bar.update(len(entries) - len(series.unfinished(job)) - bar.n)
        if answer or bar.n > bar.total:
            bar.total = bar.n  # the others are not needed, and a bar that is not full ends in red
    return answer


@contextmanager
def _reported_if_interrupted(job):
    """Say that the job goes on, and how to end it, if the wait for it is interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        text = f"job {job.id} of this check goes on, and the next check finds it"
        say(f"{text}: `dlojz cancel {job.id}` ends it")
        raise


class Ended:
    """The runs of a check that have ended, shown as they end, each with its seconds.

    In a terminal each has a line; in a notebook one line grows.
    """

    def __init__(self, job, entries: Sequence[series.Entry]):
        self._job, self._left, self._begun = job, named(entries), False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._begun and launch.in_a_notebook():
            print(flush=True)

    def say(self, lines: Sequence[str]):
        """Show lines about the runs so far."""
        if lines:
            self.__exit__()
            self._begun = False
        for line in lines:
            say(line)

    def show(self):
        """Show what has ended since the last call."""
        for name, runs in [*self._left.items()]:
            folders = [self._job.directory / run.name for run in runs]
            if not all((folder / "exit_code").exists() for folder in folders):
                continue
            del self._left[name]
            text = f"{name} ({sum(map(_seconds, folders)):.0f} s)"
            if launch.in_a_notebook():
                print(f", {text}" if self._begun else f"done: {text}", end="", flush=True)
            else:
                say(f"  {text}")
            self._begun = True


def _seconds(folder) -> float:
    """Return the seconds of a run that has ended, from the times of its files."""
    first = min(file.stat().st_mtime for file in folder.iterdir())
    return (folder / "exit_code").stat().st_mtime - first


def announced(entries: Sequence[series.Entry], seconds: float) -> str:
    """Return the runs of a check and their time in words."""
    names = [name for name, (run, *_) in named(entries).items() if run.role not in PAIR]
    pairs = len(named(entries)) - len(names)
    names += [f"{pairs} pair{'s' * (pairs > 1)}"] if pairs else []
    runs = f"{len(entries)} run{'s' * (len(entries) > 1)}"
    about = f"{seconds / 60:.0f} minutes" if seconds > 100 else f"{seconds:.0f} s"
    return f"{', '.join(names)}: {runs}, about {about}"


def doing(entries: Sequence[series.Entry], left: Sequence[str], compiles: bool = False) -> str:
    """Return the present run in words: "your trainer", "two epochs", "pair 3 of 6".

    left: the names of the runs that have not ended, in order
    compiles: the job did, so the runs before the pairs do, unless a flag switches it off. Those of
    the pairs find the compiled code in the cache.
    """
    now = next((entry for entry in entries if entry.name in left), entries[-1])
    name = next(name for name, runs in named(entries).items() if now in runs)
    if now.role in PAIR or now.rehearse or "--compile off" in " ".join(now.flags):
        return name
    return name + ", which compiles" * compiles


CALLED = {Role.SOLUTION: "the solution", Role.YOURS: "your trainer"}


def named(entries: Sequence[series.Entry]) -> dict[str, list[series.Entry]]:
    """Return runs by their name in words, in order: "the solution", "two epochs", "pair 3 of 6".

    Both runs of a pair have one name, and so have both with the same other flags.
    """
    pairs = sorted({entry.number for entry in entries if entry.role in PAIR})
    found = {}
    for entry in entries:
        own = entry.reference if entry.role in SOLUTIONS else entry.name
        name = CALLED.get(entry.role, own.replace("-", " "))
        if entry.role in PAIR:
            name = f"pair {pairs.index(entry.number) + 1} of {len(pairs)}"
        found.setdefault(name, []).append(entry)
    return found
