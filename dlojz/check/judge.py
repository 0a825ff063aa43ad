"""From the logs of finished runs, and nothing else, to the findings and the verdict."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from dlojz import course
from dlojz.check import audit, bars
from dlojz.check.exercises import FASTER, SAME, Exercise, Finding, Runs, State, common
from dlojz.check.verdict import Verdict
from dlojz.jobs.several import REPLAY
from dlojz.machine import facts
from dlojz.runs import log, outcome, stats
from dlojz.runs.folder import events_file

NOT_TIMED = Finding(
    FASTER, "speed", State.UNMEASURED, "not timed", "fix what is marked ✗ first, then check again"
)
OPEN = "the runs differ too much to tell: check again when nothing else runs"
NOT_REACHED = ("none", "unknown", "None")  # what a finding says of a run that crashed first


def judge(exercise: Exercise, folders: Mapping[str, Path], job=None, timed: bool = True) -> Verdict:
    """Return the verdict on finished runs: "solution", "before-1", "after-1" and so on.

    timed: whether all pairs that measure the speed are among them.
    """
    mine, reference = _names(folders, "after-"), folders["solution"]
    extras = [n for n in folders if f"{n}-solution" in folders]
    for name in mine:
        if _exit_code(folders[name]) != 0:
            return failed(exercise, job, folders[name], reference)
    runs = Runs(
        log.read(folders[mine[0]]),
        log.read(reference),
        {
            n: (log.read(folders[n]), log.read(folders[f"{n}-solution"]))
            for n in extras
            if events_file(folders[n]).exists()  # otherwise it stopped at an unknown flag
        },
    )
    mechanism = exercise.mechanism(runs)
    if broken := [folders[n] for n in extras if _exit_code(folders[n]) != 0]:
        mechanism = [f for f in mechanism if not f.fails or f.yours not in NOT_REACHED]
    work = common.same_work(runs.mine, runs.reference)
    findings = [
        *(replace(f, hint=exercise.hint_of.get(f.what, f.hint)) for f in work),
        *_audit(folders, runs),
        *mechanism,
    ]
    # Evidence names the cause; an error only says where it surfaced.
    seen = any(f.fails for f in findings)
    findings += [_ended(exercise, folder, give_hint=not seen) for folder in broken]
    if not timed:
        return Verdict(exercise.step, [*findings, NOT_TIMED], exercise.hints, job)
    comparison, faster = _speed(exercise, folders, runs)
    findings.append(faster)
    # A single pair has no spread to warn about, and no more were asked for.
    told = comparison.warnings if comparison else ()
    advice = [w for w in told if _tells(w, len(mine), exercise)]
    return Verdict(exercise.step, findings, exercise.hints, job, comparison, tuple(advice))


def _tells(warning, pairs, exercise):
    if warning.startswith("data-bound"):
        return not exercise.of_files
    return pairs >= stats.MIN_PAIRS or warning.startswith("not comparable")


def _names(folders, prefix):
    names = [n for n in folders if n.startswith(prefix)]
    return sorted(names, key=lambda n: int(n.removeprefix(prefix)))


def _exit_code(folder):
    return int((folder / "exit_code").read_text())


def failed(exercise, job, folder=None, reference=None) -> Verdict:
    """Return the verdict on a run that crashed."""
    folder = folder or job.directory
    seen = []
    with suppress(log.LogError, KeyError):  # it may have crashed before it logged anything
        found = exercise.mechanism(Runs(log.read(folder), log.read(reference or folder)))
        seen = [f for f in found if f.fails and f.yours not in NOT_REACHED]
    ended = _ended(exercise, folder, give_hint=not seen)
    return Verdict(exercise.step, [ended, *seen, NOT_TIMED], exercise.hints, job)


def _ended(exercise, folder, give_hint) -> Finding:
    """Return how a failed run ended, with its last line of stderr."""
    errors = outcome.errors(folder)
    hint = next((key for pattern, key in exercise.errors if re.search(pattern, errors)), "failed")
    state = stats.summary(folder).state if events_file(folder).exists() else "FAILED"
    said = next((line for line in reversed(errors.splitlines()) if line.strip()), state)
    text = f"{state}: {said.strip()[:200]}"
    return Finding(
        SAME, f"run {folder.name}", False, text, "COMPLETED", hint if give_hint else None
    )


def _audit(folders, runs) -> list[Finding]:
    """Return whether it is the same training to the last step."""
    precision = runs.arguments.get("precision", "fp32")
    names = {n: precision for n in _names(folders, "after-")}
    if "float32" in folders:
        names["float32"] = "fp32"
    found, broken = [], []
    for name, kind in names.items():
        replay = folders[name] / REPLAY
        if not replay.exists() or outcome.errors(replay) or not log.read(replay).end:
            broken.append(replay)
        else:
            found += audit.audited(folders[name], replay, kind)
    findings = audit.findings(found) if found else []
    findings += [_unreplayed(folder) for folder in broken[:1]]
    band = log.read(folders["band"])
    return [
        *findings,
        audit.losses(runs.mine, runs.reference, band, precision),
        *audit.clocks(runs.mine),
    ]


def _unreplayed(folder):
    said = [line for line in outcome.errors(folder).splitlines() if line.strip()]
    text = said[-1].strip()[:200] if said else "no replay"
    asked = "the solution can go on from any update of yours"
    return Finding(SAME, "audit", False, text, asked, "audit")


def _speed(exercise, folders, runs) -> tuple[stats.Comparison | None, Finding]:
    """Return the comparison of the pairs, and whether it clears the bar for this hardware."""
    before, after = (
        [stats.summary(folders[n]) for n in _names(folders, prefix)]
        for prefix in ("before-", "after-")
    )
    bar = bars.bar(exercise.step, bars.hardware(runs.reference.setup), runs.arguments)
    try:
        found = stats.compare(before, after, exercise.same_hardware)
    except ValueError as error:
        return None, _unmeasured(bar, [*before, *after], error)
    if why := _not_asked(exercise, bar, before, runs):
        return found, Finding(FASTER, "speed", State.NOT_ASKED, _speed_text(found), why)
    return found, _asked(bar, found)


def _unmeasured(bar, sides, error) -> Finding:
    """Return the finding of pairs without a speed: it fails wherever a bar asks for one."""
    if bar.at_least is None:
        return Finding(FASTER, "speed", State.NOT_ASKED, str(error), f"no gain asked: {bar.source}")
    full = [s for s in sides if s.state == "OUT_OF_MEMORY"]
    if full:
        yours, todo = f"{full[0].name} ran out of memory", "submit with a smaller -b"
    elif any(s.completed and not s.windows for s in sides):
        steps = sides[-1].arguments.get("test_nsteps")
        yours = f"not measured: of {steps} steps the first are warm-up, the last is inspected"
        todo = "submit with --test-nsteps 30"
    else:
        yours, todo = str(error), "check again"
    return Finding(FASTER, "speed", State.UNMEASURED, yours, f"a speed: {todo}", "unmeasured")


def _not_asked(exercise, bar, before, runs) -> str:
    """Return why the speed is reported and nothing is asked of it; "" if a bar asks for it."""
    if fed := _is_fed(exercise, before, runs.reference):
        return f"no gain asked: {fed}"
    if bar.at_least is None:
        instructions = ", ".join(facts.cpu().get("instructions", ["unknown instructions"]))
        return f"no gain asked: {bar.source.format(instructions=instructions)}{_recorded(exercise)}"
    return ""


def _asked(bar, found) -> Finding:
    """Return whether a comparison clears a bar.

    An interval that includes the bar leaves it open. Then a gain that was asked for is not proven,
    and does not pass. Where only a loss is refused, none was shown: that is neither passed nor
    failed, because no machine this disturbed could answer it.
    """
    if bar.not_slower:
        what, wanted = "not slower", f"at most {found.margin:.0%} slower ({bar.source})"
    else:
        what = "speed"
        wanted = (
            f"at least {bar.at_least:g} times as fast (the bar for this hardware; {bar.source})"
        )
    if not found.comparable:
        yours = "; ".join(found.warnings)
        return Finding(FASTER, what, State.UNMEASURED, yours, "equal settings", "unmeasured")
    if found.low is None:
        todo = f"at least {stats.MIN_PAIRS} pairs: check again without pairs={found.pairs}"
        return Finding(FASTER, what, State.UNMEASURED, _speed_text(found), todo, "unmeasured")
    cleared = bar.is_cleared(found)
    if cleared is not None:
        return Finding(FASTER, what, cleared, str(found), wanted, "speed")
    state = State.NOT_ASKED if bar.not_slower else State.UNMEASURED
    yours = f"open: {found}"
    return Finding(FASTER, what, state, yours, f"{wanted}; {OPEN}", "speed", open=True)


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


def _recorded(exercise):
    """Return what the step gained on a GPU, for trainees who have none."""
    folder = course.course_root() / "reference"
    files = [folder / name for name in exercise.recorded or ()]
    if not files or not all(file.exists() for file in files):
        return ""
    before, after = (stats.summary(file) for file in files)
    ratio = after.images_per_s / before.images_per_s
    each = f" in each of {after.size} processes instead of one" if after.size > 1 else ""
    return (
        f". Recorded on {after.device_name}: {ratio:.2g} times as fast ({after.model}, batch "
        f"{after.batch_size}{each})"
    )


def _speed_text(found):
    if found.low is None:
        return f"{found.ratio:.2f} times as fast in {found.pairs} pair{'s' * (found.pairs > 1)}"
    return str(found)
