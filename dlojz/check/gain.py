"""The gain in speed of the pairs, against the bar of the hardware."""

from dataclasses import replace

from dlojz.check import bars, ending
from dlojz.check.ending import Role, with_role
from dlojz.check.exercise import FASTER, Finding, State
from dlojz.runs import stats

OPEN = "the runs differ too much to tell: check again when nothing else runs"
SPEED = FASTER, "speed", "speed"


def compared(exercise, ended, runs, recorded) -> tuple[stats.Comparison | None, Finding]:
    """Return the comparison of the pairs, and the finding on the bar for this hardware."""
    bar = bars.bar(exercise, bars.hardware(runs.reference.setup), runs.arguments)
    known = runs.reference.start.get("instructions") or ["unknown instructions"]
    bar = replace(bar, source=bar.source.format(instructions=", ".join(known)))
    sides = [with_role(ended, role) for role in (Role.BEFORE, Role.AFTER)]
    if not sides[0] and bar.at_least is None:
        why = f"no gain asked: {bar.source}{recorded}"
        return None, Finding(*SPEED, State.NOT_ASKED, "not compared", why)
    for run in sides[0]:
        if not run.end.completed:
            return None, _unmeasured(bar, run.entry.name, run.end)
    before, after = ([run.summary for run in side] for side in sides)
    try:
        found = stats.compare(before, after, exercise.same_hardware, least=stats.EARLY_PAIRS)
    except ValueError as error:
        return None, _too_short(bar, [*before, *after], error)
    if why := _not_asked(exercise, bar, before, runs, recorded):
        return found, Finding(*SPEED, State.NOT_ASKED, _speed_text(found), why)
    return found, asked(bar, found)


def _unmeasured(bar, name, end) -> Finding:
    """Return the finding for pairs with a run that did not complete."""
    full = end.how == ending.How.OUT_OF_MEMORY
    todo = "submit with a smaller -b" if full else "check again"
    yours = f"{name} ran out of memory" if full else f"{name}: {end.text}"
    return _without_speed(bar, yours, todo)


def _too_short(bar, summaries, error) -> Finding:
    """Return the finding for pairs that completed without a measured speed."""
    if short := [s for s in summaries if not s.windows]:
        steps = short[0].arguments.get("test_nsteps", "its")
        yours = f"of {steps} steps the first are warm-up, the last is inspected: none is left"
        return _without_speed(bar, yours, "submit with --test-nsteps 30")
    return _without_speed(bar, str(error), "check again")


def _without_speed(bar, yours, todo) -> Finding:
    """Return the finding for pairs without a speed: it fails where a bar asks for one."""
    if bar.at_least is None:
        return Finding(*SPEED, State.NOT_ASKED, yours, f"no gain asked: {bar.source}")
    wanted = f"a measured speed: {todo}"
    return Finding(*SPEED, State.UNMEASURED, yours, wanted, "unmeasured")


def _not_asked(exercise, bar, before, runs, recorded) -> str:
    """Return the reason why the speed is only reported; "" if a bar asks for it."""
    if fed := _is_fed(exercise, before, runs.reference):
        return f"no gain asked: {fed}"
    return f"no gain asked: {bar.source}{recorded}" if bar.at_least is None else ""


def asked(bar, found) -> Finding:
    """Return the finding on a comparison that a bar asks for.

    An interval that includes the bar leaves it open. A gain does not pass then; where the bar
    refuses only a loss, nothing is held against the trainer, and the verdict says that its speed
    was not measured. The next check measures again.
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
        todo = f"at least {stats.EARLY_PAIRS} pairs: check again without pairs={found.pairs}"
        return Finding(*which, State.UNMEASURED, _speed_text(found), todo, "unmeasured")
    cleared = bar.is_cleared(found)
    if cleared is not None:
        return Finding(*which, cleared, str(found), wanted, "speed")
    state = State.OPEN if bar.not_slower else State.UNMEASURED
    return Finding(*which, state, f"not measured; {found}", f"{wanted}; {OPEN}", "open", open=True)


def _is_fed(exercise, before, run) -> str:
    """Return the reason why loading was not the baseline's bottleneck; "" if it was."""
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
