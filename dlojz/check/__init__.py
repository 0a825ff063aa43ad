"""The verdict of an exercise: same training, faster, by the mechanism.

    verdict = check("02_amp", job)      # takes the trainer and the flags of `job`
    verdict.passed; verdict.hint()

`plan` says which runs that needs: the step before (A) and the trainee's trainer (B) in turn,
A B B A ..., on the same devices, and the solution once, with which the trainee's losses and
evidence are compared. `run` submits them as one job, where the trainee's job ran. Completed runs
are reused, so a check can be repeated, and resumes after an interrupt. `judge` then reads the logs,
and nothing else.
"""

import time
from pathlib import Path

from dlojz import course, launch
from dlojz.check import ending, judge, plan, reuse, run
from dlojz.check import exercise as exercises
from dlojz.check.exercise import FASTER
from dlojz.check.verdict import CheckError, Verdict
from dlojz.course import progress
from dlojz.runs import reached, stats

__all__ = ["CheckError", "check"]


def check(step: str | int, job=None, pairs: int | None = None) -> Verdict:
    """Return the verdict on a job's trainer, for this step of the course.

    step: of the chain, or a prepared exercise such as "09_repair", which needs no further runs.
    job: a Job or its number, or a sweep, of which the last counts; by default the last one that
        was submitted. For "13_search" a study, or its name.
    pairs: runs before and after; by default 6 where a bar asks for a gain, else none. If 6 leave
    only the gain undecided, 6 more are run, once. The next check measures a speed that did not
    pass again.

    Wait for the runs that it needs, with a progress bar. Raise CheckError for a job that can't be
    checked: it has not ended, or is not a test run.
    """
    if pairs is not None and pairs < 1:
        raise ValueError(f"pairs={pairs}: expected at least 1, or None for the usual number")
    if step in course.PREPARED:
        exercise = exercises.find(step)
        return _repaired(exercise, (exercise.find or plan.ended)(job))
    exercise = exercises.find(course.step(step))
    job = plan.job_of(job)
    started = time.monotonic()
    if job.state != launch.State.COMPLETED:
        verdict = _crashed(exercise, job)
    else:
        verdict = _timed(exercise, job, pairs)
        for more in (stats.MIN_PAIRS, 2 * stats.MIN_PAIRS):
            if pairs is None and is_open(verdict):
                run.say(
                    f"check {exercise.step}: {verdict.comparison}. That leaves it open: "
                    f"running {more - verdict.comparison.pairs} more pairs"
                )
                verdict = _timed(exercise, job, more)
    if is_open(verdict) or (verdict.comparison and verdict.part(FASTER).fails):
        reuse.forget(plan.of(exercise, job, verdict.comparison.pairs))
    verdict.job = job
    verdict.notes = (*plan.notes(exercise, job), *verdict.notes)
    verdict.seconds = time.monotonic() - started
    _keep(verdict)
    return verdict


def _repaired(exercise, job):
    """Return the verdict on a job that ran a prepared file; its log holds all that is needed."""
    if Path(job.info["command"][0]).name != course.PREPARED[exercise.step]:
        raise CheckError(
            f"job {job.id} ran {job.info['command'][0]}, expected your copy of "
            f'{course.PREPARED[exercise.step]}: submit(course.own("{exercise.step}"))'
        )
    completed = job.state == launch.State.COMPLETED
    failed = "" if completed else _end(job, course.PREPARED[exercise.step]).text
    verdict = judge.repaired(exercise, job.directory, failed)
    verdict.job, verdict.notes = job, tuple(plan.notes(exercise, job))
    _keep(verdict)
    return verdict


def _crashed(exercise, job):
    standards = plan.standards(exercise, job)
    return judge.crashed(exercise, job.directory, _end(job, standards.trainer))


def _end(job, trainer) -> ending.Ending:
    """Return the ending of a job that failed. trainer: the name of the trainee's file."""
    status = job.status
    message = ending.error(job.directory, trainer) or status.get("reason") or "no error"
    cause = ending.Cause.TOO_LONG if status["state"] == launch.State.TIMEOUT else None
    return ending.Ending(ending.How.FAILED, f"{status['state']}: {message}", cause)


def _timed(exercise, job, pairs):
    planned = plan.of(exercise, job, pairs)
    standards = plan.standards(exercise, job, planned.log)
    runs = run.finished(planned, standards)
    timed = {entry.name for entry in planned.entries} <= set(runs)
    verdict = judge.judge(exercise, runs, standards, timed=timed)
    verdict.notes = (*planned.notes, *verdict.notes)
    verdict.reached = _reached(exercise, job, runs) if verdict.passed else {}
    return verdict


def _reached(exercise, job, runs):
    """Return the speed and memory of the trainee's job and the timed runs, for the ladder.

    The start of the course has no check of its own: the first step's check times it, too.
    """
    before, after = (
        [ended.summary for ended in runs.values() if ended.entry.role == role]
        for role in ending.PAIR
    )
    flags = " ".join(plan.flags_of(job))
    found = {exercise.step: reached.of(after or [job], [job], flags)}
    start = course.CHAIN[0]
    if before and course.before(exercise.step) == course.solution(start):
        found = {start: reached.of(before, [], flags)} | found
    return found


def is_open(verdict) -> bool:
    """Return whether only the speed is undecided: its interval includes the bar.

    A gain just at the bar then has three chances to pass, not one: 4.7 % in all, simulated. A gain
    well above it then seldom fails because the machine was busy with something else.
    """
    return any(f.open for f in verdict.findings) and all(f.open for f in verdict.failing)


def _keep(verdict):
    """Record the verdict as progress; add a note if that fails, because it took minutes to make."""
    try:
        progress.keep("verdicts", verdict.step, verdict.to_dict())
    except (OSError, ValueError) as error:
        verdict.notes += (f"this verdict could not be recorded: {error}",)
