"""13_search: each trial of a study is a run with the flags suggested, and the best one is repeated.

Judged are Optuna's journal and the logs of the trials' jobs.
"""

import math
import os
import re
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from dlojz import course, launch
from dlojz.chapters.n13_search import study as studies
from dlojz.check.exercise import Finding, Prepared, State
from dlojz.check.verdict import CheckError
from dlojz.check.wording import number
from dlojz.course import FileError
from dlojz.jobs import keeper
from dlojz.runs import by_hand, log, outcome, stats
from dlojz.runs.folder import events_file

SPACE, TRIALS, PRUNING, AGAIN = "suggestions", "trials", "pruning", "the best trial, again"
PARTS = (SPACE, TRIALS, PRUNING, AGAIN)
FEW, RUNS = 4, 3  # at least: ended trials of a study, and runs of the best one
DECADE = 10  # a range whose ends differ by a larger factor is searched by the logarithm
SAME = 1e-6  # of a flag: it is a suggestion, and not a rounded one
POWER = 0.01  # of the slope of a flag that is a power of a suggestion
EQUAL = 1e-6  # accuracies
SLACK_S = 1.0  # between the clocks of a worker and of a job
OTHERS = {"data", "seed", "epochs"}  # flags with a finding of their own


@dataclass(frozen=True)
class Run:
    """A job: its flags, and the validation accuracy after each epoch, as far as it came."""

    job: str
    state: launch.State
    ended: float = math.inf  # Unix seconds
    cancelled: bool = False  # somebody wanted that
    flags: dict = field(default_factory=dict)
    accuracies: list = field(default_factory=list)


@dataclass(frozen=True)
class Trial:
    """A trial that ended, as the journal has it, and its run."""

    complete: bool
    value: float
    params: dict
    scales: dict  # by parameter: see `_scale`
    reports: dict  # accuracies, by epoch
    ended: float
    run: Run | None


@dataclass(frozen=True)
class Seen:
    """A study: its trials that ended, by number, and the later runs of the best one."""

    direction: str
    trials: dict[int, Trial]
    again: list[Run]
    asked: bool = False  # the pruner noted accuracies to compare with
    strays: int = 0  # jobs of trials that are not in the journal
    said: str = ""  # the last line of a worker

    @property
    def complete(self) -> dict[int, Trial]:
        return {n: t for n, t in self.trials.items() if t.complete}

    @property
    def flags(self) -> list[dict]:
        return [t.run.flags for t in self.trials.values() if t.run and t.run.flags]


# From the journal and the logs --------------------------------------------------------------------


def find(study=None) -> studies.Study:
    """Return the study to judge. Raise CheckError if a worker is still at it."""
    found = studies.find(study)
    if not found.state.final:
        raise CheckError(f"study {found.id} has a worker: wait until its search has ended")
    return found


def read(folder: Path) -> dict[str, Seen]:
    """Return all that is judged of the study in a folder, by the key "study"."""
    study = studies.Study(folder)
    ended = [t for t in study.found if t.state.name in ("COMPLETE", "PRUNED")]
    trials = {t.number: _trial(study, t) for t in ended}
    if study.found:
        direction = study.optuna.direction.name.lower()
        again, attributes = _again(direction, trials), [k for t in ended for k in t.system_attrs]
        asked = any("completed_rung" in key for key in attributes)  # by halving, or Hyperband
        return {"study": Seen(direction, trials, again, asked, said=_said(folder))}
    name = re.compile(re.escape(study.id) + r"-\d+")
    strays = sum(bool(name.fullmatch(job.name)) for job in launch.jobs())
    return {"study": Seen("", {}, [], strays=strays, said=_said(folder))}


def _said(folder) -> str:
    files = sorted(folder.glob("worker-*.txt"), key=lambda file: file.stat().st_mtime)
    return next((line for f in files[::-1] for line in outcome.tail(f).splitlines()[-1:]), "")


def _trial(study, trial) -> Trial:
    from dlojz.chapters.n13_search import worker

    job = worker.job_of(study.id, trial)
    return Trial(
        trial.state.name == "COMPLETE",
        math.nan if trial.value is None else trial.value,
        trial.params,
        {name: _scale(each) for name, each in trial.distributions.items()},
        dict(sorted(trial.intermediate_values.items())),
        trial.datetime_complete.timestamp(),
        _run(job) if job else None,
    )


def _scale(distribution) -> str:
    """Return log or linear for a range of decades, or that it begins at zero; "" for others."""
    low, high = getattr(distribution, "low", -1), getattr(distribution, "high", 0)
    if low == 0 < high:
        return "from zero"
    if low < 0 or high <= DECADE * low:
        return ""
    return "log" if distribution.log else "linear"


def _run(job) -> Run:
    status, cancelled = job.status, keeper.wish(job.directory) is not None
    found = (job.id, launch.State(status["state"]), status.get("ended") or math.inf, cancelled)
    with suppress(log.LogError):
        run = log.read(job.directory)
        accuracies = [epoch.get("val_accuracy", math.nan) for epoch in run.epochs]
        return Run(*found, run.start.get("arguments", {}), accuracies)
    return Run(*found)


def _best(direction, trials) -> Trial | None:
    choose = min if direction == "minimize" else max
    return choose((t for t in trials if t.complete), key=lambda t: t.value, default=None)


def _again(direction, trials) -> list[Run]:
    """Return the later, completed runs with the flags of the best trial, but for data and seed."""
    best, found = _best(direction, trials.values()), []
    last = max((int(t.run.job) for t in trials.values() if t.run), default=0)
    for job in launch.jobs() if best and best.run and best.run.flags else ():
        with suppress(OSError, FileError):
            if int(job.id) > last and job.state == launch.State.COMPLETED:
                start, _ = by_hand.ends(events_file(job.directory))
                flags = (start or {}).get("arguments", {})
                if not _differing([best.run.flags, flags]) - {"data", "seed"}:
                    found.append(_run(job))
    return found


def _differing(flags: list[dict]) -> set[str]:
    """Return the flags that are not the same in all of these runs."""
    names = {name for each in flags for name in each}
    return {n for n in names for a, b in pairwise(flags) if not _near(a.get(n), b.get(n))}


def _near(a, b) -> bool:
    if isinstance(a, float) and isinstance(b, float | int):
        return math.isclose(a, b, rel_tol=SAME)
    return a == b


# Findings -----------------------------------------------------------------------------------------


def findings(cases: dict[str, Seen]) -> list[Finding]:
    """Return the findings on a study, from `read`."""
    seen = cases["study"]
    if len(seen.trials) < FEW:
        return [_too_few(seen), *map(_unjudged, PARTS[1:])]
    return [*_space(seen), *_trials(seen), *_pruning(seen), *_repeated(seen)]


def _too_few(seen):
    text, hint = f"{len(seen.trials)} ended", "few"
    if seen.strays:
        text, hint = f"none in the journal, and {seen.strays} jobs of trials", "memory"
    elif "NotImplementedError" in seen.said:
        text, hint = "still to be written", "unwritten"
    elif not seen.trials:
        text, hint = f"none ended; a worker said: {seen.said}", "failed"
    return Finding(SPACE, "ended", "trials", False, text, f"at least {FEW} that ended", hint)


def _unjudged(part):
    return Finding(part, "judged", part, State.UNMEASURED, "not judged", "a study with more trials")


def _row(part, what, wrong: dict, right: str, hint):
    """Return a finding that fails if something is wrong: texts, by trial or by flag."""
    texts = [f"trial {n}: {w}" if isinstance(n, int) else f"{n} {w}" for n, w in wrong.items()]
    text = "; ".join(texts[:3]) + (f"; and {len(texts) - 3} more" if len(texts) > 3 else "")
    return Finding(part, f"{what}, {hint}", what, not wrong, text or right, right, hint)


def _space(seen):
    trials = seen.trials.values()
    wrong = {} if seen.direction == "maximize" else {"the accuracy": f"is {seen.direction}d"}
    yield _row(SPACE, "direction", wrong, "the accuracy is maximized", "direction")
    varied = _differing(seen.flags) - OTHERS
    wrong = {} if varied or not seen.flags else {"no flag": "varies"}
    yield _row(SPACE, "flags", wrong, "--lr varies, at least", "fixed")
    wrong = {f"--{name}": "varies" for name in sorted(varied) if not _suggested(name, trials)}
    yield _row(SPACE, "where they come from", wrong, "suggestions of the trials", "outside")
    scales = {(name, scale) for t in trials for name, scale in t.scales.items()}
    linear = {"linear": "by its value", "from zero": "by its value, from zero"}
    zero = {"lr", "wd"}  # others, such as a share, may begin there
    wrong = {
        n: linear[s] for n, s in sorted(scales) if s == "linear" or (s in linear and n in zero)
    }
    right = "by the logarithm, where it spans more than a factor of 10"
    yield _row(SPACE, "scale", wrong, right, "linear")
    first, twins = {}, {}
    for n, trial in seen.trials.items():
        other = first.setdefault(tuple(sorted(trial.params.items())), n)
        if other != n and any(isinstance(v, float) for v in trial.params.values()):
            twins[n] = f"the same as {other}"
    yield _row(SPACE, "suggestions", twins, "each another one", "twins")


def _suggested(name, trials) -> bool:
    """Return whether a flag is a suggestion, or a power of one: 10 ** suggested."""
    if all(name in t.params for t in trials):
        return True
    pairs = [(t.params, t.run.flags[name]) for t in trials if t.run and name in t.run.flags]
    for each in {n for params, _ in pairs for n, v in params.items() if isinstance(v, float)}:
        with suppress(KeyError, TypeError, ValueError, ZeroDivisionError):
            points = sorted((params[each], math.log(value)) for params, value in pairs)
            slopes = [(b - y) / (a - x) for (x, y), (a, b) in pairwise(points)]
            if max(slopes) - min(slopes) < POWER * max(map(abs, slopes)):
                return True
    return False


def _trials(seen):
    ends = {n: _end(t.run) for n, t in seen.complete.items()}
    for hint, what in (
        ("told-complete", "cancelled jobs"),
        ("zero", "failed jobs"),
        ("unrun", "trials without a job"),
        ("early", "jobs that go on"),
    ):
        wrong = {n: text for n, (text, why) in ends.items() if why == hint}
        yield _row(TRIALS, what, wrong, "none is complete", hint)
    judged = {n: t for n, t in seen.complete.items() if not ends[n][1]}
    wrong = {"rounded": {}, "flags": {}}
    for name in {name for t in judged.values() for name in t.params}:
        pairs = {n: (t.params.get(name), t.run.flags.get(name)) for n, t in judged.items()}
        found = {n: own for n, own in pairs.items() if None not in own and not _near(*own)}
        hint = "rounded" if all(_is_rounded(*own) for own in found.values()) else "flags"
        for n, own in found.items():
            text = "{} {!r} was suggested, and {!r} used".format(name, *own)
            wrong[hint].setdefault(n, text)
    for hint, found in wrong.items():
        yield _row(TRIALS, "flags", found, "as suggested", hint)
    for name, hint in (("seed", "seed"), ("epochs", "budget"), ("data", "images")):
        every = {n: t.run.flags for n, t in seen.trials.items() if t.run and t.run.flags}
        values = {n: f"{name} {flags.get(name)}" for n, flags in every.items()}
        wrong = values if len({*values.values()}) > 1 else {}
        yield _row(TRIALS, name, wrong, "the same in all", hint)
    yield from _values(judged)


def _is_rounded(value, used) -> bool:
    """Return whether a flag is a suggestion with fewer digits, such as {lr:.3f}."""
    return isinstance(value, float) and any(
        float(f"{value:.{digits}{form}}") == used for digits in range(17) for form in "fg"
    )


def _end(run) -> tuple[str, str]:
    """Return the end of a complete trial's job, and the hint if it is not COMPLETED."""
    if run is None:
        return "no job", "unrun"
    if not run.state.final:
        return f"job {run.job} is {run.state}", "early"
    if run.state == launch.State.CANCELLED:
        return f"job {run.job} was cancelled after {len(run.accuracies)} epochs", "told-complete"
    if run.state != launch.State.COMPLETED or not run.accuracies:
        return f"job {run.job} {run.state}, {len(run.accuracies)} epochs", "zero"
    return "", ""


def _values(judged):
    """Yield findings on the values of trials, beside the accuracies in their logs."""
    wrong = {"early": {}, "best-epoch": {}, "value": {}, "reports": {}}
    for n, trial in judged.items():
        accuracies = trial.run.accuracies
        if abs(trial.value - accuracies[-1]) > EQUAL:
            near = any(abs(trial.value - each) < EQUAL for each in accuracies)
            best = abs(trial.value - max(accuracies)) < EQUAL
            all_told = len(trial.reports) == len(accuracies)
            hint = "value" if not near else "best-epoch" if best and all_told else "early"
            text = f"{_percent(trial.value)}, after the last epoch {_percent(accuracies[-1])}"
            wrong[hint][n] = text
        logged = dict(enumerate(accuracies, 1))
        if trial.reports.keys() != logged.keys() or any(
            abs(trial.reports[epoch] - accuracy) > EQUAL for epoch, accuracy in logged.items()
        ):
            told = (f"{number(value)} after {epoch}" for epoch, value in trial.reports.items())
            wrong["reports"][n] = ", ".join(told) or "nothing"
    for hint, found in wrong.items():
        what = "reports" if hint == "reports" else "accuracy of a trial"
        right = "as in its log: each epoch" if hint == "reports" else "that of its last epoch"
        yield _row(TRIALS, what, found, right, hint)


def _pruning(seen):
    pruned = {n: t for n, t in seen.trials.items() if not t.complete}
    some = State.PASSED if pruned or seen.asked else State.UNMEASURED
    text, more = f"{len(pruned)} of {len(seen.trials)}", "at least one: search for more trials"
    yield Finding(PRUNING, "pruned", "pruned trials", some, text, more, "unpruned")
    done = [len(t.run.accuracies) for t in pruned.values() if t.run]
    if done:
        mean = f"{sum(done) / len(done):.1f} of {max(len(t.reports) for t in seen.trials.values())}"
        yield Finding(PRUNING, "epochs", "epochs", State.NOT_ASKED, mean, "of a pruned trial's job")
    left = {n: f"job {t.run.job} went on" for n, t in pruned.items() if _went_on(t)}
    yield _row(PRUNING, "jobs of pruned trials", left, "cancelled", "left")


def _went_on(trial) -> bool:
    """Return whether a job went on after its trial was pruned; it may have ended just before."""
    run = trial.run
    return bool(run) and not run.cancelled and run.ended > trial.ended + SLACK_S


def _repeated(seen):
    best, runs = _best(seen.direction, seen.trials.values()), seen.again
    right, ok = f"at least {RUNS}, complete, with the flags of the best trial", len(runs) >= RUNS
    yield Finding(AGAIN, "runs", "runs", ok, str(len(runs)), right, "again")
    if not runs:
        return
    seeds, old = [run.flags.get("seed") for run in runs], {f.get("seed") for f in seen.flags}
    text = f"{', '.join(map(str, seeds))}; of the trials {', '.join(map(str, old))}"
    ok, right = len({*seeds} - old) >= RUNS, f"at least {RUNS} that no trial had"
    yield Finding(AGAIN, "seeds", "seeds", ok, text, right, "again-seeds")
    known = {_images(flags.get("data")) for flags in seen.flags}
    same = {data: "" for run in runs if _images(data := run.flags.get("data")) in known}
    yield _row(AGAIN, "validation images", same, "images that no trial was judged by", "judge")
    found = [run.accuracies[-1] for run in runs if run.accuracies]
    if len(found) > 1:
        spread, mean = 100 * stats.half_width(found), sum(found) / len(found)
        text = f"{_percent(mean)} ± {spread:.1f} again, in {len(found)} runs"
        chosen = f"{_percent(best.value)} when it was chosen"
        yield Finding(AGAIN, "accuracy", "accuracy", State.NOT_ASKED, chosen, text)


def _images(data) -> str:
    """Return the identity of validation images: their place, or the seed of a usual set."""
    folder = course.base_folder() / str(data)
    with suppress(FileError):
        drawn = course.read_table(folder / "dataset.json")
        if "seed" in drawn and "judge" not in drawn:
            return f"seed {drawn['seed']}"
    return os.path.realpath(folder / "val")


def _percent(value) -> str:
    return f"{100 * value:.1f} %"


EXERCISE = Prepared("13_search", PARTS, findings, last="study", read=read, find=find)
