"""The runs that a verdict needs, from the job, the exercise and the trainers before and after."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from dlojz import course, launch, presets
from dlojz.check import audit, bars
from dlojz.check.exercises import Exercise
from dlojz.jobs import several
from dlojz.launch import series
from dlojz.machine import facts
from dlojz.runs import log, stats


class CheckError(ValueError):
    """A job that can't be checked, with what to do instead."""


def job_of(job):
    job = job or launch.latest()
    job = job[-1] if isinstance(job, list) else job  # of a sweep, its last
    job = job if isinstance(job, launch.Job) else launch.find(job)
    if not job.state.final:
        raise CheckError(f"job {job.id} is {job.state}: wait until it has ended, with job.wait()")
    if not job.info:
        raise CheckError(f"{job.directory} was run by hand: submit the trainer, and check that job")
    if "--test" not in flags_of(job):
        raise CheckError(
            f"job {job.id} is not a test run: submit it again with --test, as in "
            f'submit("{job.command} --test")'
        )
    return job


def flags_of(job):
    return job.info["command"][1:]


def entries(exercise: Exercise, job, pairs):
    """Return the series: the solution, what else the exercise needs, the pairs A B B A ...

    The solution runs twice: its losses, with weights off by a rounding error, make the band. The
    trainee's runs are audited; in 16 bits one more of them, in float32, whose gradients tell more.
    """
    mine, flags = job.directory / "trainer.py", flags_of(job)
    solution, before = course.solution(exercise.step), course.before(exercise.step)
    known = [*_without(flags, exercise.own_flags), *exercise.before_flags]
    if pairs is None:
        wanted = bars.bar(*what(exercise, job))
        pairs = 1 if wanted.at_least is None else stats.MIN_PAIRS
    keep = _kept(pairs)
    entries = [
        series.Entry("solution", solution, flags, audit=LEDGER),
        series.Entry("band", solution, flags, audit={"perturb": True}),
    ]
    if log.read(job.directory).start["arguments"].get("precision") in audit.HALF:
        wide = [*flags, "--precision", "fp32"]
        entries.append(series.Entry("float32-solution", solution, wide, audit=LEDGER))
        entries.append(_audited("float32", mine, wide, audit.AUDITED // 2, "{float32-solution}"))
    for extra in exercise.extras(bool(presets.gpus())):
        entries.append(series.Entry(extra.name, mine, extra.flags, extra.rehearse))
        entries.append(
            series.Entry(f"{extra.name}-solution", solution, extra.flags, extra.rehearse)
        )
    for i in range(1, pairs + 1):
        pair = [
            series.Entry(f"before-{i}", before, known, audit={"keep": keep}),
            _audited(f"after-{i}", mine, flags, keep, "{solution}"),
        ]
        entries += pair if i % 2 else reversed(pair)
    return entries


LEDGER = {"write": True}  # of each step, but no update


def _kept(pairs):
    """Return how many updates of each run are kept: each replay takes time."""
    return max(-(-audit.AUDITED // pairs), 4 if presets.gpus() else 2)


def _audited(name, trainer, flags, keep, solution):
    """Return a run of the trainee's trainer, which the solution then replays.

    solution: the name of its run with the same flags, in braces.
    """
    program = Path(find_spec("dlojz.training.replay").origin)
    replay = series.Entry(several.REPLAY, program, [solution, "{run}/..", *flags])
    return series.Entry(name, trainer, flags, audit={"keep": keep, "write": True}, replay=replay)


def _without(flags: Sequence[str], own: Mapping[str, int]) -> list[str]:
    """Return the flags that the step before knows: without `own` and the words that follow them."""
    kept, skip = [], 0
    for word in flags:
        name, assigned, _ = word.partition("=")
        if skip:
            skip -= 1
        elif name in own:
            skip = 0 if assigned else own[name]
        else:
            kept.append(word)
    return kept


def what(exercise, job):
    """Return what a bar is looked up by: the step, the hardware and the arguments."""
    return exercise.step, hardware_here(job), log.read(job.directory).start["arguments"]


def hardware_here(job):
    """Return the hardware that the solution will compute on: this machine's GPU, if it has one."""
    setup = log.read(job.directory).setup
    if presets.gpus() and not setup["device"].startswith("cuda"):
        return f"cuda: {facts.gpus()['cards'][0]['name']}"
    return bars.hardware(setup)
