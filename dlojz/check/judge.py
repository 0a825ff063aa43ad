"""The verdict on finished runs, from their logs alone."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from dlojz.check import audit, audited, common, ending, gain, reported, speed, work
from dlojz.check.ending import EndedRun, Role, with_role
from dlojz.check.exercise import (
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
BUSY = "busy"  # the hint for a run that took too long
ERRORS = ((r"does not require grad", "frozen"),)  # of any exercise


@dataclass(frozen=True)
class Standards:
    """The facts that a check needs besides the runs."""

    recorded: str = ""  # the step's gain on a GPU, for trainees who have none
    trainer: str = "dlojz.py"  # the name of the trainee's file
    job: log.Run | None = None  # the trainee's job itself, which nobody audits


def judge(
    exercise: Exercise, ended: Mapping[str, EndedRun], standards: Standards, timed: bool = True
) -> Verdict:
    """Return the verdict on the runs of a check that have ended, by name.

    timed: all pairs that measure the speed are among them.
    """
    for role in (Role.SOLUTION, Role.YOURS):
        if not with_role(ended, role):
            return _not_run(exercise, role)
    for run in with_role(ended, Role.SOLUTION, Role.YOURS, Role.AFTER):
        if not run.end.completed:
            return _stopped(exercise, run, *with_role(ended, Role.SOLUTION))
    runs, broken = _read(exercise, ended, standards.job)
    if runs.mine.whole.backward is None and runs.reference.whole.backward is not None:
        found = [NOT_WATCHED, NOT_JUDGED, NOT_TIMED]
        return Verdict(exercise.step, found, exercise.hints, second_name=exercise.second_name)
    mechanism = _mechanism(exercise, _without_crashed(exercise, runs, ended))
    if broken:
        mechanism = [f for f in mechanism if f.reached or not f.fails]
    shared = [*common.same_work(runs.mine, runs.reference), *_audit(exercise, ended, runs)]
    findings = [
        *(replace(f, hint=exercise.hint_of.get(f.key, f.hint)) for f in shared),
        *_short_runs(ended),
        _work(runs),
        *mechanism,
    ]
    findings = _causes_first(exercise, findings)
    seen = any(f.fails and f.key != "audit" for f in findings)
    findings += [replace(f, hint=None) if seen else f for f in broken]
    findings += exercise.second(runs)
    name = exercise.second_name
    if not timed:
        return Verdict(exercise.step, [*findings, NOT_TIMED], exercise.hints, second_name=name)
    findings += speed.finding([run.log for run in with_role(ended, Role.AFTER)])
    comparison, faster = gain.compared(exercise, ended, runs, standards.recorded)
    price = exercise.price(_timed(ended, comparison, standards.job))
    # A single pair has no spread to warn about, and the caller asked for no more.
    pairs = len(with_role(ended, Role.AFTER))
    cautions = comparison.cautions if comparison else ()
    shown = tuple(c for c in cautions if _tells(c, pairs, exercise))
    findings += [faster, *price]
    return Verdict(exercise.step, findings, exercise.hints, comparison, shown, second_name=name)


def repaired(exercise: Prepared, folder: Path, failed: str) -> Verdict:
    """Return the verdict on a job that ran a prepared file. failed: its error, or ""."""
    cases, findings = {}, []
    with suppress(log.LogError):
        cases = exercise.read(folder)
    why = failed or "it logged nothing to compare: are the file's last two lines still there?"
    if not failed and exercise.last in cases:
        try:
            findings = list(exercise.findings(cases))
        except (LookupError, TypeError) as error:
            why = f"its log was written by something else, too: {error!r}. Leave that to the job"
    if not findings:
        ended = Finding(exercise.parts[0], "job", "job", State.FAILED, why, "completed", "failed")
        missing = replace(NOT_JUDGED, expected="a job that completes")
        findings = [ended, *(replace(missing, part=part) for part in exercise.parts)]
    return Verdict(exercise.step, findings, exercise.hints, parts=exercise.parts)


def _mechanism(exercise, runs) -> list[Finding]:
    """Return the findings on the mechanism, with those that fail only in the middle of the run."""
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


def _without_crashed(exercise, runs, ended) -> Runs:
    """Return the runs without the extra ones that crashed, whose missing steps are no mistake.

    A rehearsal stays: a tensor left on another device makes it crash, and its evidence names it.
    One that took too long does not.
    """
    rehearsed = {extra.name for extra in exercise.extras(False) if extra.rehearse}
    ends = {name: ended[name].end for name in runs.extras}
    left = {
        name: pair
        for name, pair in runs.extras.items()
        if ends[name].how != ending.How.FAILED
        or (name in rehearsed and ends[name].cause != ending.Cause.TOO_LONG)
    }
    return replace(runs, extras=left)


def _read(exercise, ended, job) -> tuple[Runs, list[Finding]]:
    extras, broken = {}, []
    asked = [*exercise.extras(False), *exercise.extras(True)]
    flags = {extra.name: " ".join(extra.flags) for extra in asked} | {Role.EPOCHS: exercise.epochs}
    for mine, usual in _pairs(ended):
        for run in (mine, usual):
            if not run.end.completed:
                known = flags.get(run.entry.name, "") if run is mine else ""
                broken.append(_failed_run(exercise, run, known))
        with suppress(log.NoLogError):  # it stopped at an unknown flag
            extras[mine.entry.name] = mine.log, usual.log
    mine, usual = (with_role(ended, role)[0].log for role in (Role.YOURS, Role.SOLUTION))
    beside = {n: _beside(ended[n]) for n in exercise.beside if n in ended}
    return Runs(mine, usual, extras, beside, job), broken


def _beside(run) -> Beside:
    return Beside(run.log, run.end.how == ending.How.OUT_OF_MEMORY)


def _timed(ended, comparison, job) -> Timed:
    """Return the runs of the pairs; without a comparison, only the trainee's."""
    before = [run.summary for run in with_role(ended, Role.BEFORE)] if comparison else []
    after = [run.log for run in with_role(ended, Role.AFTER)]
    return Timed(before, after or [job or with_role(ended, Role.YOURS)[0].log], comparison)


def _tells(caution, pairs, exercise):
    if caution.kind == stats.Caution.DATA_BOUND:
        return not exercise.of_files
    return pairs >= stats.EARLY_PAIRS or caution.kind == stats.Caution.NOT_COMPARABLE


def _pairs(ended) -> list[tuple[EndedRun, EndedRun]]:
    """Return the extra runs of the trainee's trainer, each with the solution's."""
    mine = (run for run in ended.values() if run.entry.role in (Role.EXTRA, Role.EPOCHS))
    return [(r, ended[r.entry.reference]) for r in mine if r.entry.reference in ended]


# Runs that crashed -------------------------------------------------------------------------------


def crashed(exercise: Exercise, folder: Path, end: ending.Ending) -> Verdict:
    """Return the verdict on a job that did not complete, from its log so far."""
    run = EndedRun(folder)
    return _with_evidence(exercise, run, run, _ended(exercise, folder, end, "job", "failed"))


def _not_run(exercise, name) -> Verdict:
    """Return the verdict if a run that others are compared with was not made."""
    end = ending.Ending(ending.How.UNFINISHED, "it was not run")
    found = [_ended(exercise, None, end, "run", "run-failed", name), NOT_JUDGED, NOT_TIMED]
    return Verdict(exercise.step, found, exercise.hints, second_name=exercise.second_name)


def _stopped(exercise, run, solution) -> Verdict:
    """Return the verdict if a run that others are compared with did not complete."""
    return _with_evidence(exercise, run, solution, _failed_run(exercise, run))


def _failed_run(exercise, run, flags="") -> Finding:
    return _ended(exercise, run.folder, run.end, "run", "run-failed", run.entry.name, flags)


def _with_evidence(exercise, run, reference, ended) -> Verdict:
    """Return the verdict on a run that did not complete, with its evidence so far."""
    seen = []
    with suppress(log.LogError, KeyError):  # it may have crashed before it logged anything
        found = exercise.mechanism(Runs(run.log, reference.log))
        seen = [f for f in found if f.fails and f.reached]
    certain = {exercise.waited, *(hint for _, hint in exercise.causes)}
    if ended.hint == BUSY:
        seen = []  # it was ended in the middle of its work
    if seen and ended.hint not in certain:  # else evidence only shows the steps not reached
        ended = replace(ended, hint=None)
    evidence = seen or [NOT_JUDGED]
    found = [ended, *evidence, NOT_TIMED]
    return Verdict(exercise.step, found, exercise.hints, second_name=exercise.second_name)


def _ended(exercise, folder, end, key, hint, name="", flags="") -> Finding:
    """Return the finding on a run that did not complete.

    hint: for an error unknown to the exercise; flags: the run's, if they differ from the job's
    """
    which = SAME, key, f"{key} {name}".strip()
    errors = outcome.errors(folder) if folder else ""
    too_long = end.cause == ending.Cause.TOO_LONG
    if too_long and key != "job":  # never a cross: the machine may have been busy
        waits = exercise.waited if folder.name != series.REPLAY else None
        stands = waits and ending.stood_still(folder)
        asked = "its end: check again when nothing else runs"
        return Finding(*which, State.UNMEASURED, end.text, asked, waits if stands else BUSY)
    if exercise.waited and folder:
        hint = exercise.waited if too_long or outcome.only_waited(folder) else hint
    known = (*exercise.causes, *exercise.errors, *ERRORS)
    told = f"{errors}\n{end.text}"  # a process that a signal ended has no error
    hint = next((key for pattern, key in known if re.search(pattern, told)), hint)
    if end.how in (ending.How.KILLED, ending.How.UNFINISHED):
        return Finding(*which, State.UNMEASURED, end.text, "its end: check again", hint)
    if end.how == ending.How.OUT_OF_MEMORY and key != "job":
        room = "room for what the check keeps beside it: submit with a smaller -b"
        return Finding(*which, State.UNMEASURED, end.text, room, hint)
    expected = f"completed, with {flags}" if flags else "completed"
    return Finding(*which, State.FAILED, end.text, expected, hint)


# The audit ---------------------------------------------------------------------------------------


def _audit(exercise, ended, runs) -> list[Finding]:
    """Return the findings on the training: it is the solution's, to the last step."""
    epochs = with_role(ended, Role.EPOCHS)
    found, broken = [], []
    for run in [*with_role(ended, Role.YOURS), *(epochs or [EndedRun(Path(Role.EPOCHS))])]:
        if run.end.completed and run.replay.end.completed:
            kind = "fp32" if run in epochs else audited.precision_of(runs.reference)
            found += audited.audited(run.log, run.replay.log, kind)
        else:
            last = run.replay if run.end.completed else run
            broken.append(_ended(exercise, last.folder, last.end, "audit", "audit"))
    mine, usual = runs.mine.ranks, runs.reference.ranks
    completed = [run.log.ranks for run in epochs if run.end.completed]
    told = [reported.finding(ranks) for ranks in [mine, *completed]]
    validation = audit.validation(mine, usual)
    first = audit.findings([r.first_epoch for r in found])
    first += [validation, *(reported.finding(ranks, first=True) for ranks in [mine, *completed])]
    early = {f.key for f in first if f.fails}
    findings = [
        *audit.findings(found),
        reported.losses(runs.mine, runs.reference),
        validation,
        *(() if validation.fails else filter(None, map(audit.another_model, completed))),
        next((row for row in told if row.fails), told[0]),
        reported.rates(runs.mine, runs.reference),
    ]
    if Role.EPOCHS in runs.extras:
        findings += audit.as_large(runs.mine, runs.reference, runs.extras[Role.EPOCHS][1])
    late = [f for f in findings if f.state == State.FAILED and f.key not in early]
    hints = exercise.later if common.same_images(*runs.extras.get(Role.EPOCHS, ())) else {}
    return [*broken[:1], *(_later(f, hints) if f in late else f for f in findings)]


def _later(finding, hints) -> Finding:
    """Return a finding that fails in the second epoch only. hints: by key, for some."""
    if finding.key in ALWAYS:
        return finding
    hint = hints.get(finding.key, "later")
    return replace(finding, what=f"{finding.what}, in the second epoch", hint=hint)


def _short_runs(ended) -> list[Finding]:
    """Return the findings on the passes of the runs besides the job's."""
    return [
        finding
        for mine, usual in _pairs(ended)
        if mine.end.completed and usual.end.completed
        for finding in common.still_trains(mine.entry.name, mine.log, usual.log)
    ]


MODES = ("eval-mode", "train-mode")  # hints
# Keys of rows that other rows explain better, and of those that no second epoch can bring.
FOLLOW, ALWAYS = ("training-mode", "validated"), ("losses", "rates", "memory", "touched", "random")
# The links of an update, up to the gradients.
LINKS = {"settings", "rate", "rates", "images", "drawn", "labels", "pixels", "criterion", "frozen"}
LINKS |= {"missing", "outputs", "last", "gradients", "tensors"}


def _causes_first(exercise, findings) -> list[Finding]:
    """Return findings in which a consequence has no hint if its cause has one.

    The passes of another run and a second epoch also show mistakes that begin at step 1, with a
    less specific hint. And an exercise's own looks at norms and losses follow from the links of the
    update.
    """
    failed = {f.key: f.hint for f in findings if f.state == State.FAILED}
    silent = {*(exercise.follows if LINKS & {*failed} else ())}
    causes = (hint for key, hint in failed.items() if key not in {*FOLLOW, *silent})
    if {*causes} - {None, "later"}:
        findings = [replace(f, hint=None) if _follows(f) else f for f in findings]
    return [replace(f, hint=None) if f.key in silent else f for f in findings]


def _follows(finding) -> bool:
    return finding.hint == "later" or (finding.key in FOLLOW and finding.hint not in MODES)


def _work(runs) -> Finding:
    middle = [(runs.mine.in_the_middle, runs.reference)] if runs.mine.middle else []
    return work.finding([(runs.mine, runs.reference), *middle])
