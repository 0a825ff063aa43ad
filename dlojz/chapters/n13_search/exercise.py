"""13_search: each trial of a study is a run with the flags suggested, and the best one is repeated.

Judged are Optuna's journal and the logs of the trials' jobs.
"""

import math
import os
import re
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from dlojz import course, launch
from dlojz.chapters.n13_search import study as studies
from dlojz.chapters.n13_search.study import Study
from dlojz.check.exercise import Finding, Prepared, State
from dlojz.check.verdict import CheckError
from dlojz.check.wording import number
from dlojz.course import FileError
from dlojz.jobs import keeper
from dlojz.runs import by_hand, log, outcome, stats
from dlojz.runs.folder import events_file

SPACE, TRIALS, PRUNING, AGAIN = PARTS = (
    "suggestions",
    "trials",
    "pruning",
    "the best trial, again",
)
FEW, SEEDS = 4, 3  # ended trials of a study, and runs of the best one, at least
DECADE = 10  # a range whose ends differ by more than this factor is searched by its logarithm
ROUNDED = 0.01  # of a flag: f"{lr:.3g}" is near enough
EQUAL = 1e-6  # accuracies
OWN = {"data", "seed", "checkpoint", "resume"}  # flags that parts of their own are about


def find(study=None) -> Study:
    """Return the study to judge. Raise CheckError if a worker is still at it."""
    found = studies.find(study)
    if not found.state.final:
        raise CheckError(f"study {found.id} has a worker: wait until its search has ended")
    return found


# From the journal and the logs --------------------------------------------------------------------


def read(folder: Path) -> dict[str, dict]:
    """Return a study, its trials by number, and the runs of its best trial, as plain values."""
    study = Study(folder)
    found = study.found
    trials = {trial.number: _trial(study, trial) for trial in found}
    about = {"said": _said(folder), "jobs": 0, "direction": ""}
    if found:
        about["direction"] = study.optuna.direction.name.lower()
    else:
        name = re.compile(re.escape(study.id) + r"-\d+")
        about["jobs"] = sum(bool(name.fullmatch(job.name)) for job in launch.jobs())
    return {"study": about, "trials": trials, "again": _again(about["direction"], trials)}


def _said(folder) -> str:
    """Return the last line that a worker said."""
    files = sorted(folder.glob("worker-*.txt"), key=lambda file: file.stat().st_mtime)
    lines = [line for file in files for line in outcome.tail(file).splitlines() if line.strip()]
    return lines[-1] if lines else "nothing"


def _trial(study, trial) -> dict:
    from dlojz.chapters.n13_search import worker

    job = worker.job_of(study.id, trial)
    return {
        "state": trial.state.name.lower(),
        "value": trial.value,
        "params": trial.params,
        "scales": {name: _scale(each) for name, each in trial.distributions.items()},
        "reports": [value for _, value in sorted(trial.intermediate_values.items())],
        "ended": trial.datetime_complete.timestamp() if trial.datetime_complete else None,
        "run": _run(job) if job else None,
    }


def _scale(distribution) -> str:
    """Return the scale of a range that spans decades: log or linear; "" for any other choice."""
    low, high = getattr(distribution, "low", 0), getattr(distribution, "high", 0)
    if not hasattr(distribution, "log") or high <= DECADE * low or high <= low:
        wide = hasattr(distribution, "log") and low <= 0 < high
        return "from zero" if wide else ""
    return "log" if distribution.log else "linear"


def _run(job) -> dict:
    """Return what a job was, as far as it came."""
    found = {
        "job": job.id,
        "status": job.status,
        "cancelled": keeper.wish(job.directory) is not None,
    }
    found |= {"arguments": {}, "accuracies": [], "steps": 0}
    with suppress(log.LogError):
        run = log.read(job.directory)
        found["arguments"] = run.start.get("arguments", {})
        found["accuracies"] = [epoch.get("val_accuracy", math.nan) for epoch in run.epochs]
        found["steps"] = len(run.steps)
    return found


def _again(direction, trials) -> list[dict]:
    """Return the later, completed runs with the flags of the best trial, but for data and seed."""
    best = _best(direction, trials)
    if not best or not best["run"] or not best["run"]["arguments"]:
        return []
    wanted, last = (
        best["run"]["arguments"],
        max(t["run"]["job"] for t in trials.values() if t["run"]),
    )
    found = []
    for job in launch.jobs():
        if int(job.id) > int(last):
            with suppress(OSError, FileError):
                start, _ = by_hand.ends(events_file(job.directory))
                mine = (start or {}).get("arguments", {})
                if not _differing([wanted, mine]) - OWN and job.state == launch.State.COMPLETED:
                    found.append(_run(job))
    return found


def _best(direction, trials) -> dict | None:
    """Return the best of the completed trials."""
    complete = [t for t in trials.values() if t["state"] == "complete" and t["value"] is not None]
    choose = min if direction == "minimize" else max
    return choose(complete, key=lambda t: t["value"], default=None)


def _differing(arguments: list[dict]) -> set[str]:
    """Return the flags that are not the same in all of these runs."""
    names = {name for each in arguments for name in each}
    return {
        name
        for name in names
        if any(not _near(*pair) for pair in pairwise(each.get(name) for each in arguments))
    }


def _near(a, b) -> bool:
    if isinstance(a, bool | str | None) or isinstance(b, bool | str | None | list):
        return a == b
    return a == b if isinstance(a, list) else math.isclose(a, b, rel_tol=ROUNDED)


# Findings -----------------------------------------------------------------------------------------


def findings(cases: dict[str, dict]) -> list[Finding]:
    """Return the findings on a study, from `read`."""
    about, trials = cases["study"], cases["trials"]
    ended = {n: t for n, t in trials.items() if t["state"] in ("complete", "pruned")}
    if len(ended) < FEW:
        return [_too_few(about, trials, ended), *map(_unjudged, PARTS[1:])]
    return [
        *_space(about, ended),
        *_trials({n: t for n, t in ended.items() if t["state"] == "complete"}),
        *_pruning(ended),
        *_repeated(_best(about["direction"], ended), cases["again"], ended),
    ]


def _too_few(about, trials, ended):
    text, hint = f"{len(ended)} ended", "few"
    if not trials and about["jobs"]:
        text, hint = f"none in the journal, and {about['jobs']} jobs of trials", "memory"
    elif "NotImplementedError" in about["said"]:
        text, hint = "still to be written", "unwritten"
    elif not ended:
        text, hint = f"none ended; a worker said: {about['said']}", "failed"
    return Finding(SPACE, "ended", "trials", False, text, f"at least {FEW} that ended", hint)


def _unjudged(part):
    return Finding(part, "judged", part, State.UNMEASURED, "not judged", "a study with more trials")


def _listed(wrong: dict[int, str]) -> str:
    """Return what is wrong with trials, by number, as a short text."""
    texts = [f"trial {number}: {text}" for number, text in wrong.items()]
    return "; ".join(texts[:3]) + (f"; and {len(texts) - 3} more" if len(texts) > 3 else "")


def _row(part, key, what, wrong: dict[int, str], right: str, hint):
    """Return a finding that fails if something is wrong with a trial."""
    return Finding(part, key, what, not wrong, _listed(wrong) or right, right, hint)


def _space(about, ended):
    direction = about["direction"]
    text, right = (f"the accuracy is {word}d" for word in (direction, "maximize"))
    yield Finding(
        SPACE, "direction", "direction", direction == "maximize", text, right, "direction"
    )
    runs = [t["run"]["arguments"] for t in ended.values() if t["run"] and t["run"]["arguments"]]
    varied = _differing(runs) - OWN - {"epochs"}
    drawn = varied & {"lr", "mom", "wd", *(n for t in ended.values() for n in t["params"])}
    text = ", ".join(f"--{name}" for name in sorted(drawn)) or "no flag"
    yield Finding(SPACE, "varied", "flags that vary", bool(drawn), text, "--lr, at least", "fixed")
    unasked = sorted(name for name in varied if not _asked(name, ended))
    text = ", ".join(f"--{n} varies, and no suggestion explains it" for n in unasked)
    right = "each is suggested by its trial"
    yield Finding(
        SPACE, "asked", "where they come from", not unasked, text or right, right, "outside"
    )
    linear = sorted({n for t in ended.values() for n, s in t["scales"].items() if s == "linear"})
    linear += sorted(n for n in {"lr", "wd"} & varied if _scales(n, ended) & {"from zero"})
    text = ", ".join(f"{name} by its value" for name in linear)
    right = "by the logarithm, where it spans more than a factor of 10"
    yield Finding(SPACE, "scale", "scale", not linear, text or right, right, "linear")
    seen, twins = {}, {}
    for n, trial in ended.items():
        first = seen.setdefault(tuple(sorted(trial["params"].items())), n)
        if first != n and any(isinstance(v, float) for v in trial["params"].values()):
            twins[n] = f"as in trial {first}"
    yield _row(SPACE, "twins", "suggestions", twins, "each another one", "twins")


def _scales(name, ended):
    return {t["scales"].get(name) for t in ended.values()}


def _asked(name, ended) -> bool:
    """Return whether a flag is a suggestion, or a power of one: 10 ** suggested."""
    if all(name in t["params"] for t in ended.values()):
        return True
    pairs = [(t["params"], t["run"]["arguments"].get(name)) for t in ended.values() if t["run"]]
    pairs = [(p, v) for p, v in pairs if isinstance(v, int | float) and v > 0]
    for each in pairs[0][0] if pairs else ():
        points = sorted((p[each], math.log(v)) for p, v in pairs if isinstance(p.get(each), float))
        slopes = [(b - y) / (a - x) for (x, y), (a, b) in pairwise(points) if a > x]
        if len(points) == len(pairs) and slopes and max(slopes) - min(slopes) < 0.05:
            return True
    return False


def _trials(complete):
    ends = {n: _end(t["run"]) for n, t in complete.items()}
    for hint, what in (
        ("told-complete", "jobs that were cancelled"),
        ("zero", "jobs that failed"),
        ("unrun", "trials without a job"),
        ("early", "jobs that went on"),
    ):
        wrong = {n: text for n, (text, why) in ends.items() if why == hint}
        yield _row(TRIALS, hint, what, wrong, "none is complete", hint)
    judged = {n: t for n, t in complete.items() if ends[n][1] is None}
    arguments = {n: t["run"]["arguments"] for n, t in judged.items()}
    wrong = {}
    for n, trial in judged.items():
        for name, value in trial["params"].items():
            used = arguments[n].get(name, value)
            if not _near(value, used):
                wrong[n] = f"{name} {_word(value)} was suggested, and {_word(used)} used"
    yield _row(TRIALS, "flags", "flags", wrong, "as suggested", "flags")
    for name, what, hint in (
        ("seed", "seed", "seed"),
        ("epochs", "epochs", "budget"),
        ("data", "images", "images"),
    ):
        values = {n: str(each.get(name)) for n, each in arguments.items()}
        wrong = values if len({*values.values()}) > 1 else {}
        yield _row(TRIALS, name, what, wrong, "the same in all", hint)
    yield from _values(judged)


def _end(run) -> tuple[str, str | None]:
    """Return the state of a complete trial's job, and the hint if that is wrong."""
    if run is None:
        return "no job", "unrun"
    state, text = launch.State(run["status"]["state"]), f"job {run['job']} "
    if not state.final:
        return f"{text} is {state}", "early"
    if state == launch.State.CANCELLED:
        return text + f"was cancelled after {len(run['accuracies'])} epochs", "told-complete"
    if state != launch.State.COMPLETED or not run["accuracies"]:
        return text + (state if state != launch.State.COMPLETED else "logged no epoch"), "zero"
    return text, None


def _values(judged):
    """Yield findings on what was told to Optuna, beside the log: the last epoch's accuracy."""
    wrong = {"early": {}, "best-epoch": {}, "value": {}}
    for n, trial in judged.items():
        value, (*before, last) = trial["value"], trial["run"]["accuracies"]
        if _equal([value], [last]):
            continue
        text = f"{_percent(value)}, after the last epoch {_percent(last)}"
        known = [epoch for epoch, each in enumerate(before) if _equal([value], [each])]
        if known and _equal([value], [max(*before, last)]):
            wrong["best-epoch"][n] = text
        elif known:
            wrong["early"][n] = f"{_percent(value)} after epoch {known[0]}, then {_percent(last)}"
        else:
            wrong["value"][n] = text
    for hint, found in wrong.items():
        what, right = "accuracy of a trial", "that of its last epoch, in validation"
        yield _row(TRIALS, f"value-{hint}", what, found, right, hint)
    wrong = {}
    for n, trial in judged.items():
        told, seen = trial["reports"], trial["run"]["accuracies"]
        if not _equal(told, seen):
            wrong[n] = f"{len(told)} of {len(seen)} epochs" if len(told) < len(seen) else "others"
    yield _row(TRIALS, "reports", "reports", wrong, "the accuracy of each epoch", "reports")


def _pruning(ended):
    pruned = {n: t for n, t in ended.items() if t["state"] == "pruned"}
    some = State.PASSED if pruned else State.UNMEASURED
    text, more = f"{len(pruned)} of {len(ended)}", "at least one: search more trials"
    yield Finding(PRUNING, "pruned", "pruned trials", some, text, more, "unpruned")
    full = max((t["run"]["steps"] for t in ended.values() if t["run"]), default=0)
    left = {}
    for n, trial in pruned.items():
        run = trial["run"] or {"cancelled": True, "steps": 0, "job": "", "status": {}}
        if not run["cancelled"] and run["steps"] and len(trial["reports"]) < len(run["accuracies"]):
            left[n] = f"its job {run['job']} did {run['steps']} of {full} steps"
        elif not run["cancelled"] and run["status"].get("state") in ("QUEUED", "RUNNING"):
            left[n] = f"its job {run['job']} still goes on"
    yield _row(PRUNING, "left", "jobs of pruned trials", left, "cancelled", "left")
    silent = {n: "no report" for n, t in pruned.items() if not t["reports"]}
    yield _row(PRUNING, "silent", "reports before", silent, "the accuracy of each epoch", "reports")


def _repeated(best, runs, ended):
    used = [t["run"]["arguments"] for t in ended.values() if t["run"] and t["run"]["arguments"]]
    enough = f"at least {SEEDS}, complete, with its flags"
    if not best:
        yield Finding(AGAIN, "runs", "runs", False, "no complete trial", enough, "again")
        return
    text, ok = f"{len(runs)} with its flags", len(runs) >= SEEDS
    yield Finding(AGAIN, "runs", "runs", ok, text, enough, "again")
    if not runs:
        return
    mine = [run["arguments"] for run in runs]
    seeds, old = [each.get("seed") for each in mine], {each.get("seed") for each in used}
    fresh = {*seeds} - old
    text = ", ".join(map(str, seeds)) + f"; of the trials {', '.join(map(str, sorted(old)))}"
    right = f"at least {SEEDS} that no trial had"
    yield Finding(AGAIN, "seeds", "seeds", len(fresh) >= SEEDS, text, right, "again-seeds")
    seen = {_images(each.get("data")) for each in used}
    same = sorted({str(each.get("data")) for each in mine if _images(each.get("data")) in seen})
    text, right = ", ".join(same), "images that no trial was judged by"
    what = "validation images"
    yield Finding(AGAIN, "images", what, not same, text or right, right, "judge")
    found = [run["accuracies"][-1] for run in runs if run["accuracies"]]
    if len(found) > 1:
        text = f"{_percent(best['value'])} when it was chosen"
        half = stats.half_width(found)
        mean = sum(found) / len(found)
        text_again = f"{_percent(mean)} ± {100 * half:.1f} again, in {len(found)} runs"
        yield Finding(AGAIN, "luck", "accuracy", State.NOT_ASKED, text, text_again)


def _images(data) -> str:
    """Return which validation images a folder has: links to one set are the same, and copies."""
    folder = course.base_folder() / str(data)
    held = {}
    with suppress(FileError):
        held = course.read_table(folder / "dataset.json")
    if "seed" in held and "judge" not in held:
        return f"seed {held['seed']}"
    return os.path.realpath(folder / "val")


def _equal(told, seen) -> bool:
    pairs = zip(told, seen, strict=False)
    return len(told) == len(seen) and all(abs(a - b) < EQUAL for a, b in pairs)


def _word(value) -> str:
    return number(value) if isinstance(value, int | float) else str(value)


def _percent(value) -> str:
    return f"{100 * value:.1f} %"


EXERCISE = Prepared("13_search", PARTS, findings, last="study", read=read, find=find)
