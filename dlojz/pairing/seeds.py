"""Whole trainings of two programs, paired by seed: submitted, awaited and read.

Each training is a job. Their order is before, after, after, before, so that a machine that warms up
favours neither. A training of the same sources, flags and seed is kept: more seeds, or another
number to read, train only what is missing.
"""

import hashlib
import json
import math
import re
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from dlojz import course, launch
from dlojz.course import UserError
from dlojz.launch import Request, beside, sites
from dlojz.pairing.differences import Pairs
from dlojz.runs import log, outcome

KEY = "pair.json"  # in a job's folder: which training it is
SIDES = BEFORE, AFTER = "before", "after"
AGAIN = "before again"  # with the first seed, for check_seed
SEED = "{seed}"  # in a command: the seed's place
LINES = 8  # of a program's output, in an error
EXPECTED = "expected one group around the number, as in --read 'accuracy: ([0-9.]+)'"


@dataclass(frozen=True)
class Training:
    """One whole training."""

    side: str
    seed: int
    job: launch.Job

    @property
    def completed(self) -> bool:
        return self.job.state == launch.State.COMPLETED

    @property
    def seconds(self) -> float:
        return self.job.status["ended"] - self.job.status["started"]

    def error(self, why: str, *files: str) -> str:
        """Return a sentence on this training, with the last lines of its output."""
        tails = [outcome.tail(self.job.directory / name).splitlines() for name in files]
        lines = [f"  | {line}" for line in next(filter(None, tails), [])[-LINES:]]
        return "\n".join([f"{self.side}, seed {self.seed}: {why}", *lines])


def by_seed(
    before: str,
    after: str,
    seeds: int = 5,
    read: str | None = None,
    time_max: str = "01:00:00",
    check_seed: bool = False,
    again: bool = False,
    **where,
) -> Pairs:
    """Return the numbers that two programs give with seeds 1 to `seeds`, and their differences.

    before, after: commands, "train.py --lr 0.1". The seed is put where one has {seed}; otherwise
        `--seed 1` is added.
    read: a regular expression with one group: its last match in the output is the number. By
        default it is the last validation accuracy in our log, in percent.
    time_max: of each training. where: n_gpu, account and module, as in `launch.submit`.
    check_seed: also train before again with the first seed, to see whether it gives the same.
    again: keep none of the earlier trainings, because data has changed, for example.

    Raises UserError; all trainings are kept that have completed by then.
    """
    if seeds < 1:
        raise UserError(f"--seeds {seeds}: expected at least 1, and 5 are a good beginning")
    pattern = read and _compiled(read)
    for command in (before, after):  # raises what would fail later
        launch.submit(command, time_max=time_max, dry_run=True, **where)
    commands = {BEFORE: before, AFTER: after, AGAIN: before}
    plan = [(s, seed) for seed in range(1, seeds + 1) for s in (SIDES if seed % 2 else SIDES[::-1])]
    plan[2:2] = [(AGAIN, 1)] * check_seed
    request = Request(time_max_s=sites.seconds(time_max), **where)
    trainings, numbers, missing, unit = _submitted(plan, commands, request, again), {}, [], ""
    for training in _as_they_end(trainings):
        number, why = math.nan, "" if training.completed else _failure(training, commands)
        if not why:
            number, unit = _number(training, pattern)
            why = training.error(f"gave {number}", "stdout.txt")
        if math.isfinite(number):
            numbers[training.side, training.seed] = number
        elif any(side == training.side for side, _ in numbers):
            missing.append(why)
        else:  # all of this side would; those of the other that have begun are kept
            for other in trainings:
                if other.side == training.side or other.job.state == launch.State.QUEUED:
                    other.job.cancel("another training of its pair failed")
            raise UserError(why)
    return _pairs(commands, trainings, numbers, unit, missing)


def _compiled(read):
    try:
        pattern = re.compile(read)
    except re.error as error:
        raise UserError(f"{read!r} is not a regular expression ({error}): {EXPECTED}") from None
    if pattern.groups != 1:
        raise UserError(f"{read!r} has {pattern.groups} groups: {EXPECTED}")
    return pattern


# The jobs ----------------------------------------------------------------------------------


def _submitted(plan, commands, request, again) -> list[Training]:
    """Return the trainings of the plan: those that are there, and new ones for the others."""
    words = {one: _with_seed(commands[one[0]], one[1]) for one in plan}
    programs = {side: _digest(words[side, seed]) for side, seed in plan[:3]}
    asked = [request.n_gpu, request.account, request.module]
    where = [str(Path.cwd()), launch.launcher().name, *asked]
    keys = {one: json.dumps([*one, *words[one], programs[one[0]], where]).encode() for one in plan}
    found = {} if again else _kept(keys)
    requests = {
        (side, seed): replace(
            request, command=words[side, seed], name=f"pair, seed {seed}", files={KEY: key}
        )
        for (side, seed), key in keys.items()
        if (side, seed) not in found
    }
    jobs = launch.send([*requests.values()]) if requests else []
    found |= {one: Training(*one, job) for one, job in zip(requests, jobs, strict=True)}
    return [found[one] for one in plan]


def _with_seed(command, seed) -> tuple[str, ...]:
    words = shlex.split(command if SEED in command else f"{command} --seed {SEED}")
    return tuple(word.replace(SEED, str(seed)) for word in words)


def _digest(words) -> str:
    """Return a digest of a program's files, which are what runs."""
    trainer, _ = launch.trainer_and_flags(words)
    program = beside.program(trainer, words[1] if words[0] == "-m" else "")
    files = (part for path, text in program.copies.items() for part in (path.encode(), text))
    return hashlib.sha256(b"\0".join(files)).hexdigest()


def _kept(keys) -> dict[tuple[str, int], Training]:
    """Return those of these trainings that have completed, or are still to come."""
    wanted, found = {key: one for one, key in keys.items()}, {}
    for job in reversed(launch.jobs()):
        with suppress(FileNotFoundError):
            one = wanted.get((job.directory / KEY).read_bytes())
            if one and one not in found and (Training(*one, job).completed or not job.state.final):
                found[one] = Training(*one, job)
    return found


def _as_they_end(trainings: list[Training]) -> Iterator[Training]:
    """Yield the trainings in the order in which they end, below a progress bar."""
    from tqdm.auto import tqdm

    waiting, seen = list(trainings), launch.in_a_notebook() or sys.stderr.isatty()
    with tqdm(total=len(waiting), unit="training", disable=not seen) as bar:
        while waiting:
            for training in [t for t in waiting if t.job.state.final]:
                waiting.remove(training)
                yield training
                bar.update()
            time.sleep(waiting[0].job.launcher.poll_s if waiting else 0)


def _failure(training, commands) -> str:
    """Return the reason why a training failed, with its last lines."""
    is_added = SEED not in commands[training.side]
    if is_added and "--seed" in outcome.tail(training.job.directory / "stderr.txt"):
        why = f"job {training.job.id} FAILED, perhaps because --seed was added to its flags; write "
        return training.error(f"{why}{SEED} where its own takes the seed", "stderr.txt")
    return training.error(training.job.explain(LINES))


# The numbers -------------------------------------------------------------------------------


def _number(training, pattern) -> tuple[float, str]:
    """Return the number that a training gave, and "points" if it is a percentage."""
    if pattern is None:
        try:
            return 100 * log.read(training.job).epochs[-1]["val_accuracy"], "points"
        except (log.LogError, IndexError):
            why = "no validation accuracy in a log of ours: --read finds a number in the output"
    else:
        why = f"{pattern.pattern!r} matches nothing in its stdout.txt or stderr.txt"
        for name in ("stdout.txt", "stderr.txt"):  # many programs log to the second
            text = _output(training.job.directory / name)
            for found in [*pattern.finditer(text)][-1:]:
                try:
                    return float(found[1]), "points" * text[found.end(1) :].startswith("%")
                except (TypeError, ValueError):
                    why = f"{pattern.pattern!r} found {found[1]!r}, which is not a number"
    why += f"; {EXPECTED}. What has run is kept. In {training.job.directory}, at the end:"
    raise UserError(training.error(why, "stdout.txt", "stderr.txt"))


def _output(file) -> str:
    """Return the text of a program's output, without colours: of a long one the end."""
    with course.open_regular(file) as stream:
        stream.seek(max(0, stream.seek(0, 2) - course.SMALL))
        return outcome.ESCAPES.sub("", stream.read().decode(errors="replace"))


def _pairs(commands, trainings, numbers, unit, missing) -> Pairs:
    made = {(t.side, t.seed): t for t in trainings}
    seeds = sorted({s for _, s in numbers if all((side, s) in numbers for side in SIDES)})
    if not seeds:
        raise UserError("\n".join([*missing, "no seed has both numbers"]))
    values, seconds = {}, {}
    for seed in seeds:
        pair = made[BEFORE, seed], made[AFTER, seed]
        values[seed] = tuple(numbers[side, seed] for side in SIDES)
        if abs(int(pair[0].job.id) - int(pair[1].job.id)) == 1:  # one ran after the other
            seconds[seed] = tuple(training.seconds for training in pair)
    notes = tuple(_on_seeds(values, numbers))
    return Pairs(commands[BEFORE], commands[AFTER], values, seconds, unit, notes, tuple(missing))


def _on_seeds(values, numbers) -> Iterator[str]:
    """Yield notes on programs that ignore the seed."""
    for side, column in zip(SIDES, zip(*values.values(), strict=True), strict=True):
        if len(column) > 1 == len({*column}):
            yield f"{side} gave {column[0]:g} with each seed: is it coarse, or the seed unused?"
    first, again = numbers.get((BEFORE, 1)), numbers.get((AGAIN, 1))
    if first is not None and first == again:
        yield f"before gave {first:g} again with seed 1: it is seeded"
    elif None not in (first, again):
        yield f"before gave {first:g}, then {again:g}, with seed 1: the seed does not fix it all"
