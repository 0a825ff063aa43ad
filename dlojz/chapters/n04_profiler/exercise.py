"""04_profiler: a trace of a few steps of the training, and no profiler in any other step."""

from dlojz.check.bars import Bar
from dlojz.check.common import flag, like, no_brake
from dlojz.check.ending import Role
from dlojz.check.exercise import MECHANISM, Exercise, Finding, Runs, Unseen, shown
from dlojz.runs import log
from dlojz.runs.folder import trace_file
from dlojz.traces import trace

QUIET = Role.EPOCHS
MOST_STEPS = 10  # a trace of more steps is larger without telling more
PHASES = {"transfer", "forward", "backward", "update"}


def mechanism(runs: Runs) -> list[Finding]:
    """Return findings on the profiler's actions in each step, and on the trace."""
    mine, reference = runs.mine, runs.reference
    asked = bool(runs.arguments["profile"])
    found = [flag(mine, "--profile", bool, "yes", "asked")]
    # The evidence lacks the last step while a profiler runs: the solution's was still running.
    if reference.end.get("outcome") == "completed" and not reference.last:
        steps = f"{len(reference.steps)}"
        return [*found, Finding(MECHANISM, "steps", "steps", False, steps, "8 or more", "short")]
    if asked:
        actions = _actions(mine)
        # A profiler that begins again overwrites its trace, perhaps without a whole step.
        found += [*_schedule(actions), *([] if _begins_again(actions) else _trace(mine, actions))]
    if QUIET in runs.extras:
        which = "quiet", "without the flag"
        found.append(like(MECHANISM, *which, *runs.extras[QUIET], _quiet, "always"))
    return [*found, *no_brake(mine, reference)]


def _actions(run) -> list[str]:
    """Return the action of torch's profiler in each step: NONE, WARMUP, RECORD, RECORD_AND_SAVE."""
    return run.profiler.actions


def _quiet(run):
    return "profiled" if _actions(run) or _file(run).exists() else "no profiler"


def _schedule(actions):
    """Return findings on the schedule: a few steps are recorded, once, after a warm-up."""
    recorded = [i for i, a in enumerate(actions) if a.startswith("RECORD")]
    if not recorded:
        return []
    ends = recorded[-1] < len(actions) - 1
    few = f"1 to {MOST_STEPS}, then off"
    again = _begins_again(actions)
    text = f"{len(recorded)} of {len(actions)}"
    text += ", and it begins again" * again + ", never off" * (not ends and not again)
    enough = ends and not again and len(recorded) <= MOST_STEPS
    warm = recorded[0] > 0 and actions[recorded[0] - 1] == "WARMUP"
    return [
        Finding(
            *(MECHANISM, "recorded", "steps recorded by the profiler", enough, text, few, "left-on")
        ),
        Finding(MECHANISM, "warm-up", "warm-up before them", warm, shown(warm), "yes", "warm-up"),
    ]


def _begins_again(actions):
    """Return whether the profiler is on again after saving its first trace."""
    rest = actions[actions.index("RECORD_AND_SAVE") + 1 :] if "RECORD_AND_SAVE" in actions else []
    return set(rest) - {"NONE"} != set()


def _trace(run, actions):
    """Return a finding on the trace: each step has all phases of the training."""
    recorded = any(a.startswith("RECORD") for a in actions)
    try:
        found = trace.read(_file(run), marked=True)
    except trace.TraceError as error:
        hint = "saved" if recorded else "step" if actions else "none"
        file = _file(run)
        yours = str(error).removeprefix(f"{file}: ") if file.exists() else Unseen.NONE
        return [Finding(MECHANISM, "trace", "trace", False, yours, "a trace", hint)]
    names = [
        {r.name for r in found.ranges if step.begin <= r.begin < step.end} for step in found.steps
    ]
    whole = sum(seen >= PHASES for seen in names)
    expected = f"{len(names)} of {len(names)}"
    text = f"{whole} of {len(names)}"
    hint = "none" if not actions else "left-on" if whole else "where"
    what = "steps of the trace with all phases"
    return [Finding(MECHANISM, "phases-traced", what, whole == len(names), text, expected, hint)]


def _file(run: log.Run):
    return trace_file(run.path.parent)


EXERCISE = Exercise(
    step="04_profiler",
    own_flags={"--profile": 0, "--no-profile": 0},
    mechanism=mechanism,
    bars=(Bar("", None, "a profiler makes nothing faster"),),
    epochs="--precision fp32 --no-profile",
    errors=(
        (r"unrecognized arguments: .*--(no-)?profile", "flag"),
        (r"'NoneType' object has no attribute 'step'", "not-there"),
        (r"save_trace\(\) missing", "handler"),
    ),
    # A profiler left on also keeps the Chronometer from measuring.
    first_hints=("images", "validation", "backward", "flag"),
)
