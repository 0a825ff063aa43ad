"""The verdict on finished runs: from their logs, and nothing else."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from dlojz.check import audit, bars, ending, told, work
from dlojz.check.exercises import (
    FASTER,
    MECHANISM,
    SAME,
    Beside,
    Exercise,
    Finding,
    Prepared,
    Runs,
    State,
    Timed,
    common,
)
from dlojz.check.verdict import Verdict
from dlojz.launch import series
from dlojz.runs import log, outcome, stats

NOT_TIMED = Finding(
    *(FASTER, "speed", "speed", State.UNMEASURED, "not timed"),
    "fix what is marked ✗ first, then check again",
)
NOT_JUDGED = Finding(
    *(MECHANISM, "evidence", "evidence", State.UNMEASURED, "not judged"),
    "a run of your trainer that completes",
)
NOT_WATCHED = Finding(
    *(SAME, "evidence", "evidence", State.FAILED, "none: nothing watched the training"),
    *("a Chronometer with `witness=evidence.watch(...)`", "watched"),
)
BAND = "band-"  # runs of the solution with weights that are off by a rounding error, by number
FLOAT32 = "float32"  # a run of the trainee's trainer, beside those in 16 bits
SMALL = "small"  # another, whose updates are kept if a state of those is too large
OPEN = "the runs differ too much to tell: check again when nothing else runs"


@dataclass(frozen=True)
class Standards:
    """What a judge is given besides the logs."""

    recorded: str = ""  # what the step gained on a GPU, for trainees who have none
    trainer: str = "dlojz.py"  # the name of the trainee's file


def judge(
    exercise: Exercise, folders: Mapping[str, Path], standards: Standards, timed: bool = True
) -> Verdict:
    """Return the verdict on finished runs: "solution", "before-1", "after-1" and so on.

    timed: whether all pairs that measure the speed are among them.
    """
    ends = {name: ending.of(folder, standards.trainer) for name, folder in folders.items()}
    for name in ("solution", *_names(folders, BAND), *(_names(folders, "after-") or ["after-1"])):
        if not ends.get(name, MISSING).completed:
            return _stopped(exercise, folders, name, ends.get(name, MISSING))
    runs, broken = _read(exercise, folders, ends)
    if runs.mine.whole.backward is None and runs.reference.whole.backward is not None:
        found = [NOT_WATCHED, NOT_JUDGED, NOT_TIMED]
        return Verdict(exercise.step, found, exercise.hints, second_name=exercise.second_name)
    mechanism = _mechanism(exercise, _without_crashed(exercise, runs, ends))
    if broken:
        mechanism = [f for f in mechanism if f.reached or not f.fails]
    same = common.same_work(runs.mine, runs.reference)
    audited = _audit(exercise, folders, ends, runs, timed)
    findings = [
        *(replace(f, hint=exercise.hint_of.get(f.key, f.hint)) for f in same),
        *audited,
        *_short_runs(exercise, folders, ends, runs, audited),
        _work(folders, ends, runs),
        *mechanism,
    ]
    findings = _own_hints_first(findings)
    # Evidence names the cause; an error only says where it surfaced.
    seen = any(f.fails and f.key != "audit" for f in findings)
    findings += [replace(f, hint=None) if seen else f for f in broken]
    findings += exercise.second(runs)
    name = exercise.second_name
    if not timed:
        return Verdict(exercise.step, [*findings, NOT_TIMED], exercise.hints, second_name=name)
    comparison, faster = _speed(exercise, folders, ends, runs, standards.recorded)
    price = exercise.price(_timed(folders, comparison))
    # A single pair has no spread to warn about, and no more were asked for.
    pairs = len(_names(folders, "after-"))
    cautions = comparison.cautions if comparison else ()
    told = tuple(c for c in cautions if _tells(c, pairs, exercise))
    findings += [faster, *price]
    return Verdict(exercise.step, findings, exercise.hints, comparison, told, second_name=name)


def repaired(exercise: Prepared, folder: Path, failed: str) -> Verdict:
    """Return the verdict on a job that ran a prepared file. failed: how it ended, if not well."""
    cases, findings = {}, []
    with suppress(log.LogError):
        cases = exercise.read(folder)
    told = failed or "it logged nothing to compare: are the file's last two lines still there?"
    if not failed and exercise.last in cases:
        try:
            findings = list(exercise.findings(cases))
        except (LookupError, TypeError) as error:
            told = f"its log was written by something else, too: {error!r}. Leave that to the job"
    if not findings:
        ended = Finding(exercise.parts[0], "job", "job", State.FAILED, told, "completed", "failed")
        missing = replace(NOT_JUDGED, expected="a job that completes")
        findings = [ended, *(replace(missing, part=part) for part in exercise.parts)]
    return Verdict(exercise.step, findings, exercise.hints, parts=exercise.parts)


def _mechanism(exercise, runs) -> list[Finding]:
    """Return the findings on the mechanism, and those that fail only in the middle of the run."""
    found = exercise.mechanism(runs)
    if not (middle := runs.mine.middle):
        return found
    failing = {(f.key, f.precision) for f in found if f.fails}
    inside = exercise.mechanism(replace(runs, mine=runs.mine.in_the_middle))
    where = f" (step {middle.step})"
    return found + [
        replace(f, what=f"{f.what}, in the middle", yours=f.yours + where)
        for f in inside
        if f.fails and (f.key, f.precision) not in failing
    ]


def _without_crashed(exercise, runs, ends) -> Runs:
    """Return the runs without the extra ones that crashed: what they left undone is no mistake.

    A rehearsal stays, for a device that was forgotten makes it crash, and its evidence says which.
    """
    rehearsed = {extra.name for extra in exercise.extras(False) if extra.rehearse}
    left = {
        name: pair
        for name, pair in runs.extras.items()
        if name in rehearsed or ends[name].how != ending.How.FAILED
    }
    return replace(runs, extras=left)


MISSING = ending.Ending(ending.How.UNFINISHED, "it was not run")


def _read(exercise, folders, ends) -> tuple[Runs, list[Finding]]:
    """Return the logs to judge, and a finding for each extra run that did not complete."""
    extras, broken = {}, []
    flags = {extra.name: " ".join(extra.flags) for extra in _extras(exercise)}
    for name in (n for n in folders if f"{n}-solution" in folders):
        pair = name, f"{name}-solution"
        for run in pair:
            if not ends[run].completed:
                known = flags.get(name, "") if run == name else ""
                end = _ended(exercise, folders[run], ends[run], "run", "run-failed", run, known)
                broken.append(end)
        with suppress(log.NoLogError):  # it stopped at an unknown flag
            extras[name] = tuple(log.read(folders[run]) for run in pair)
    mine = log.read(folders[_names(folders, "after-")[0]])
    beside = {n: _beside(folders[n], ends[n]) for n in exercise.beside if n in folders}
    return Runs(mine, log.read(folders["solution"]), extras, beside), broken


def _beside(folder, end) -> Beside:
    """Return a run of the solution in another way, which may have run out of memory."""
    return Beside(log.read(folder), end.how == ending.How.OUT_OF_MEMORY)


def _timed(folders, comparison) -> Timed:
    """Return the runs of the pairs; those before only if they could be compared."""
    before = _names(folders, "before-") if comparison else []
    after = [log.read(folders[name]) for name in _names(folders, "after-")]
    return Timed([stats.summary(folders[name]) for name in before], after, comparison)


def _tells(caution, pairs, exercise):
    if caution.kind == stats.Caution.DATA_BOUND:
        return not exercise.of_files
    return pairs >= stats.MIN_PAIRS or caution.kind == stats.Caution.NOT_COMPARABLE


def _names(folders, prefix):
    names = [n for n in folders if n.startswith(prefix)]
    return sorted(names, key=lambda n: int(n.removeprefix(prefix)))


def _among(folders, *names):
    return [name for name in names if name in folders]


# Runs that crashed -------------------------------------------------------------------------------


def crashed(exercise: Exercise, folder: Path, end: ending.Ending) -> Verdict:
    """Return the verdict on a job that did not complete, from what it logged until then."""
    return _with_evidence(exercise, folder, folder, _ended(exercise, folder, end, "job", "failed"))


def _stopped(exercise, folders, name, end) -> Verdict:
    """Return the verdict if a run that the others are compared with did not complete."""
    folder = folders.get(name)
    ended = _ended(exercise, folder, end, "run", "run-failed", name)
    if folder is None:
        found = [ended, NOT_JUDGED, NOT_TIMED]
        return Verdict(exercise.step, found, exercise.hints, second_name=exercise.second_name)
    return _with_evidence(exercise, folder, folders.get("solution", folder), ended)


def _with_evidence(exercise, folder, reference, ended) -> Verdict:
    """Return the verdict on a run that did not complete, with the evidence that it left."""
    seen = []
    with suppress(log.LogError, KeyError):  # it may have crashed before it logged anything
        found = exercise.mechanism(Runs(log.read(folder), log.read(reference)))
        seen = [f for f in found if f.fails and f.reached]
    certain = {exercise.waited, *(hint for _, hint in exercise.causes)}
    if seen and ended.hint not in certain:  # else evidence shows only what was left undone
        ended = replace(ended, hint=None)
    evidence = seen or [NOT_JUDGED]
    found = [ended, *evidence, NOT_TIMED]
    return Verdict(exercise.step, found, exercise.hints, second_name=exercise.second_name)


def _ended(exercise, folder, end, key, hint, name="", flags="") -> Finding:
    """Return the finding on a run that did not complete.

    hint: for an error that the exercise does not know; flags: of the run, if they are not the job's
    """
    which = SAME, key, f"{key} {name}".strip()
    errors = outcome.errors(folder) if folder else ""
    if exercise.waited and folder:
        waited = end.cause == ending.Cause.TOO_LONG or outcome.only_waited(folder)
        hint = exercise.waited if waited else hint
    known = (*exercise.causes, *exercise.errors)
    hint = next((key for pattern, key in known if re.search(pattern, errors)), hint)
    if end.how in (ending.How.KILLED, ending.How.UNFINISHED):
        return Finding(*which, State.UNMEASURED, end.text, "its end: check again", hint)
    if end.how == ending.How.OUT_OF_MEMORY and key != "job":
        room = "room for what the check keeps beside it: submit with a smaller -b"
        return Finding(*which, State.UNMEASURED, end.text, room, hint)
    expected = f"completed, with {flags}" if flags else "completed"
    return Finding(*which, State.FAILED, end.text, expected, hint)


# The audit ---------------------------------------------------------------------------------------


def _audit(exercise, folders, ends, runs, timed) -> list[Finding]:
    """Return whether it is the same training, to the last step.

    timed: whether all pairs are there; else too few updates were kept, so far.
    """
    precision = audit.precision_of(runs.reference)
    names = dict.fromkeys([*_names(folders, "after-"), *_among(folders, SMALL)], precision)
    if precision in audit.COARSE:
        names[FLOAT32] = "fp32"
    found, broken = [], []
    for name, kind in names.items():
        folder = folders.get(name, Path(name))
        again = folder / series.REPLAY
        if ending.of(again).completed:
            found += audit.audited(folder, again, kind)
        else:
            ended = again if ends.get(name, MISSING).completed else folder
            broken.append(_ended(exercise, ended, ending.of(ended), "audit", "audit"))
    bands = [log.read(folders[name]) for name in _names(folders, BAND)]
    ranks = runs.mine.ranks, runs.reference.ranks
    of_mine = [r for r in found if r.folder == runs.mine.path.parent]
    links = audit.findings(found) if found else []
    return [
        *(audit.as_large(runs.mine, runs.reference) if SMALL in folders else []),
        *(f for f in links if timed or f.hint != audit.TOO_SHORT),
        *broken[:1],
        audit.losses(runs.mine, runs.reference, bands, precision, early=not timed),
        audit.validation(*ranks, precision, audit.computed_again(of_mine)),
        *audit.validated(found),
        told.finding(ranks[0], [r.every for r in of_mine]),
        told.rates(runs.mine, runs.reference),
        *audit.clocks(runs.mine, runs.reference),
        *_looks(folders, ends, runs.reference),
    ]


def _looks(folders, ends, solution) -> list[Finding]:
    """Return what the auditor's own time in the pairs shows."""
    after, before = (
        [log.read(folders[n]) for n in _names(folders, prefix) if ends[n].completed]
        for prefix in ("after-", "before-")
    )
    return audit.looks(after, before, solution)


def _short_runs(exercise, folders, ends, runs, audited) -> list[Finding]:
    """Return whether the extra runs are the solution's. audited: what the job's own audit found."""
    ended = [n for n in runs.extras if ends[n].completed and ends[f"{n}-solution"].completed]
    validated = not any(f.fails and f.hint == audit.EVALUATION for f in audited)
    instead = "later" if validated else audit.EVALUATION
    if any(f.state == State.FAILED and f.hint in ("audit", "told") for f in audited):
        instead = None  # what is wrong in the job itself is no later mistake
    found = [f for name in ended for f in common.still_trains(name, *runs.extras[name])]
    replayed = [name for name in ended if name in _replayed(exercise)]
    found += [_later(name, folders, runs, validated) for name in replayed]
    return [replace(f, hint=_hint(f, instead)) for f in found]


def _replayed(exercise) -> set[str]:
    """Return the extra runs whose updates are done again."""
    return {extra.name for extra in _extras(exercise) if extra.replayed}


def _extras(exercise):
    """Return the extra runs of an exercise, those on a CPU and those on a GPU."""
    return [*exercise.extras(False), *exercise.extras(True)]


OF_EPOCHS = ("epochs", common.ALL_STEPS)  # keys


def _own_hints_first(findings) -> list[Finding]:
    """Return findings: those on the epochs of a short run have a hint only if no others have one.

    They find all that is wrong from the first step on, too, and say of less what it is.
    """
    others = {f.hint for f in findings if f.state == State.FAILED and f.key not in OF_EPOCHS}
    if not others - {None, "later"}:
        return findings
    return [replace(f, hint=None) if f.key in OF_EPOCHS else f for f in findings]


def _hint(finding, instead: str | None) -> str | None:
    """Return the hint of a finding on an extra run.

    instead: of one that blames a later epoch; None: the job itself has another failing.
    """
    if finding.hint == "later":
        return instead
    follows = finding.key in (*OF_EPOCHS, common.TRAINING_MODE)
    return None if follows and not instead else finding.hint


def _later(name, folders, runs, validated) -> Finding:
    """Return what the audit of a short run with several epochs found that is not the solution's.

    validated: whether the first epoch's validation is right. If not, that is no later mistake.
    """
    again = folders[name] / series.REPLAY
    which = SAME, "epochs", f"audit of each epoch, run {name}"
    asked = "the solution's updates"
    end = ending.of(again)
    if not end.completed:
        return Finding(*which, State.UNMEASURED, end.text, f"{asked}: check again", "later")
    reference = runs.extras[name][1]
    found = audit.audited(folders[name], again, audit.precision_of(reference))
    ranks = runs.extras[name][0].ranks
    every = [r.every for r in found]
    looked = [*audit.links(found), told.finding(ranks, every)]
    if validated:
        looked += [*audit.validated(found), *filter(None, [audit.another_model(ranks)])]
    failing = [f for f in looked if f.fails]
    words = "; ".join(f"{f.what}: {f.yours}" for f in failing)
    epochs = reference.start["arguments"].get("epochs", 1)
    early = [*audit.links([r.first_of(epochs) for r in found]), told.finding(ranks, every, True)]
    hint = next((f.hint for f in early if f.state == State.FAILED), "later")
    return Finding(*which, not failing, words or "the same", asked, hint)


def _work(folders, ends, runs) -> Finding:
    """Return whether each step that was looked at did the solution's work."""
    beside = runs.extras[SMALL][1] if SMALL in runs.extras else runs.reference
    usual = dict.fromkeys(_names(folders, "after-"), runs.reference)
    usual |= dict.fromkeys(_among(folders, SMALL, FLOAT32), beside)
    pairs = [(log.read(folders[name]), of) for name, of in usual.items() if ends[name].completed]
    return work.finding(pairs + [(run.in_the_middle, of) for run, of in pairs if run.middle])


# The speed ---------------------------------------------------------------------------------------

SPEED = FASTER, "speed", "speed"


def _speed(exercise, folders, ends, runs, recorded) -> tuple[stats.Comparison | None, Finding]:
    """Return the comparison of the pairs, and whether it clears the bar for this hardware."""
    bar = bars.bar(exercise.step, bars.hardware(runs.reference.setup), runs.arguments)
    known = runs.reference.start.get("instructions") or ["unknown instructions"]
    bar = replace(bar, source=bar.source.format(instructions=", ".join(known)))
    names = _names(folders, "before-")
    if not names and bar.at_least is None:
        why = f"no gain asked: {bar.source}{recorded}"
        return None, Finding(*SPEED, State.NOT_ASKED, "not compared", why)
    for name in names:
        if not ends[name].completed:
            return None, _unmeasured(bar, name, ends[name])
    before, after = (
        [stats.summary(folders[n]) for n in _names(folders, prefix)]
        for prefix in ("before-", "after-")
    )
    try:
        found = stats.compare(before, after, exercise.same_hardware)
    except ValueError as error:
        return None, _too_short(bar, [*before, *after], error)
    if why := _not_asked(exercise, bar, before, runs, recorded):
        return found, Finding(*SPEED, State.NOT_ASKED, _speed_text(found), why)
    return found, _asked(bar, found)


def _unmeasured(bar, name, end) -> Finding:
    """Return the finding of pairs one run of which did not complete."""
    full = end.how == ending.How.OUT_OF_MEMORY
    todo = "submit with a smaller -b" if full else "check again"
    yours = f"{name} ran out of memory" if full else f"{name}: {end.text}"
    return _without_speed(bar, yours, todo)


def _too_short(bar, summaries, error) -> Finding:
    """Return the finding of pairs that completed, and yet have no speed."""
    if short := [s for s in summaries if not s.windows]:
        steps = short[0].arguments.get("test_nsteps", "its")
        yours = f"of {steps} steps the first are warm-up, the last is inspected: none is left"
        return _without_speed(bar, yours, "submit with --test-nsteps 30")
    return _without_speed(bar, str(error), "check again")


def _without_speed(bar, yours, todo) -> Finding:
    """Return the finding of pairs without a speed: it fails wherever a bar asks for one."""
    if bar.at_least is None:
        return Finding(*SPEED, State.NOT_ASKED, yours, f"no gain asked: {bar.source}")
    wanted = f"a measured speed: {todo}"
    return Finding(*SPEED, State.UNMEASURED, yours, wanted, "unmeasured")


def _not_asked(exercise, bar, before, runs, recorded) -> str:
    """Return why the speed is reported and nothing is asked of it; "" if a bar asks for it."""
    if fed := _is_fed(exercise, before, runs.reference):
        return f"no gain asked: {fed}"
    return f"no gain asked: {bar.source}{recorded}" if bar.at_least is None else ""


def _asked(bar, found) -> Finding:
    """Return whether a comparison clears a bar.

    An interval that includes the bar leaves it open. Then a gain that was asked for is not proven,
    and does not pass. Where only a loss is refused, a best estimate that is no loss is not held
    against the trainer: that is neither passed nor failed. The next check measures again.
    """
    if bar.not_slower:
        which = FASTER, "speed", "not slower"
        wanted = f"at most {found.margin:.0%} slower ({bar.source})"
    else:
        which = SPEED
        wanted = (
            f"at least {bar.at_least:g} times as fast (the bar for this hardware; {bar.source})"
        )
    if not found.comparable:
        yours = "; ".join(found.warnings)
        return Finding(*which, State.UNMEASURED, yours, "equal settings", "unmeasured")
    if found.low is None:
        todo = f"at least {stats.MIN_PAIRS} pairs: check again without pairs={found.pairs}"
        return Finding(*which, State.UNMEASURED, _speed_text(found), todo, "unmeasured")
    cleared = bar.is_cleared(found)
    if cleared is not None:
        return Finding(*which, cleared, str(found), wanted, "speed")
    unharmed = bar.not_slower and found.ratio >= bar.least(found.margin)
    state = State.NOT_ASKED if unharmed else State.UNMEASURED
    return Finding(*which, state, f"open: {found}", f"{wanted}; {OPEN}", "speed", open=True)


def _is_fed(exercise, before, run) -> str:
    """Return why loading was not the bottleneck of the baseline runs; "" if it was."""
    waited = min(s.shares["data"] for s in before)
    loader, start = run.probe.loader, run.start
    together = (loader.num_workers or 0) + start.get("threads", 1)
    share_cores = run.setup["device"] == "cpu" and together > start.get("cpu_count", 1)
    if not exercise.of_files or share_cores or waited > stats.DATA_BOUND:
        return ""
    return (
        f"the baseline runs waited for images for only {waited:.0%} of a step, and no worker "
        "shared a core with the training"
    )


def _speed_text(found):
    if found.low is None:
        return f"{found.ratio:.2f} times as fast in {found.pairs} pair{'s' * (found.pairs > 1)}"
    return str(found)
