"""04_profiler: a trace of a few steps of the training, and nothing of it anywhere else."""

from dlojz.check.exercises import MECHANISM, Exercise, Extra, Finding, Hint, Runs
from dlojz.check.exercises.common import DOCS, hints, last, like, no_brake
from dlojz.runs import log, trace
from dlojz.runs.folder import trace_file

SMALL = "--test --data synthetic --model shufflenet_v2_x0_5 --image-size 32 -b 8 --test-nsteps 8"
QUIET = "without-the-flag"
MOST_STEPS = 10  # a trace of more is large, and says no more
PHASES = {"transfer", "forward", "backward", "update"}
PROFILER = DOCS + "profiler.html"
RECIPE = "https://docs.pytorch.org/tutorials/recipes/recipes/profiler_recipe.html"

OWN_HINTS = {
    "flag": Hint(
        "The trainer does not know the flag --profile yet.",
        'In `parse_args`: `flag("--profile", action=switch, default=False, help=...)`.',
        "https://docs.python.org/3/library/argparse.html#argparse.BooleanOptionalAction",
    ),
    "short": Hint(
        "The run ends before the profiler does: nothing is left to be measured.",
        "Submit it with `--test-nsteps 12`, or more.",
        PROFILER,
    ),
    "asked": Hint(
        "This run was not told to profile: there is nothing to see.",
        "Submit it with `--profile`.",
        PROFILER,
    ),
    "always": Hint(
        "The profiler runs although nobody asked for it: each later measurement would suffer.",
        "`if args.profile:` around all of it.",
        PROFILER,
    ),
    "none": Hint(
        "No profiler was seen in the training's steps: the Chronometer must hold it.",
        "`chrono.profiler = torch.profiler.profile(...)`, then `chrono.profiler.start()`.",
        PROFILER,
    ),
    "where": Hint(
        "The trace has steps, but they are not the training's: there is no backward pass in them.",
        "`chrono.profiler.step()` after `chrono.next_iter(...)`, in `train_one_epoch`, and nowhere "
        "else.",
        PROFILER,
    ),
    "step": Hint(
        "The profiler never got to the steps that it should look at: nobody tells it that a step "
        "has ended.",
        "`chrono.profiler.step()` after `chrono.next_iter(...)`.",
        RECIPE,
    ),
    "left-on": Hint(
        "The profiler does not stop. It slows all that it looks at, and its trace has no end.",
        "`schedule=torch.profiler.schedule(wait=2, warmup=1, active=2, repeat=1)`: a few steps, "
        "once.",
        RECIPE,
    ),
    "warm-up": Hint(
        "The first step in the trace is the one in which the profiler itself starts. What it shows "
        "is the profiler.",
        "`warmup=1` or more in the schedule: these steps are looked at and thrown away.",
        RECIPE,
    ),
    "saved": Hint(
        "The profiler looked, and nothing was kept.",
        "`on_trace_ready=run.save_trace`.",
        PROFILER,
    ),
}


def mechanism(runs: Runs) -> list[Finding]:
    """What the profiler did in each step, and what the trace holds."""
    mine, reference = runs.mine, runs.reference
    asked = bool(runs.arguments["profile"])
    found = [Finding(MECHANISM, "flag", asked, f"--profile: {asked}", "True", "asked")]
    # The witness looks at the last step; also the solution's profiler leaves it no room.
    if not last(reference):
        steps = f"{len(reference.steps)}"
        return [*found, Finding(MECHANISM, "steps", False, steps, "8 or more", "short")]
    if asked:
        found += [*_schedule(_actions(mine)), *_trace(mine, _actions(mine))]
    if QUIET in runs.extras:
        found.append(like(MECHANISM, "without the flag", *runs.extras[QUIET], _quiet, "always"))
    return [*found, *no_brake(mine, reference)]


def _actions(run) -> list[str]:
    """Of torch's profiler in each step: NONE, WARMUP, RECORD, RECORD_AND_SAVE."""
    return run.evidence.get("profiler", {}).get("actions", [])


def _quiet(run):
    return "profiled" if _actions(run) or _file(run).exists() else "no profiler"


def _schedule(actions):
    """Some steps, once, and a warm-up before them."""
    recorded = [i for i, a in enumerate(actions) if a.startswith("RECORD")]
    if not recorded:
        return []
    ends = recorded[-1] < len(actions) - 1
    few = f"1 to {MOST_STEPS}, and an end"
    text = f"{len(recorded)} of {len(actions)}" + ("" if ends else ", to the end")
    enough = ends and len(recorded) <= MOST_STEPS
    warm = recorded[0] > 0 and actions[recorded[0] - 1] == "WARMUP"
    return [
        Finding(MECHANISM, "steps that were looked at", enough, text, few, "left-on"),
        Finding(MECHANISM, "warm-up before them", warm, str(warm), "True", "warm-up"),
    ]


def _trace(run, actions):
    """Is it there, and are the phases of the training in each of its steps?"""
    recorded = any(a.startswith("RECORD") for a in actions)
    try:
        found = trace.read(_file(run))
    except trace.TraceError as error:
        hint = "saved" if recorded else "step" if actions else "none"
        file = _file(run)
        yours = str(error).removeprefix(f"{file}: ") if file.exists() else "none"
        return [Finding(MECHANISM, "trace", False, yours, "a trace", hint)]
    names = [
        {r.name for r in found.ranges if step.begin <= r.begin < step.end} for step in found.steps
    ]
    whole = sum(seen >= PHASES for seen in names)
    expected = f"{len(names)} of {len(names)}"
    text = f"{whole} of {len(names)}"
    hint = "none" if not actions else "left-on" if whole else "where"
    what = "steps of the trace with all phases"
    return [Finding(MECHANISM, what, whole == len(names), text, expected, hint)]


def _file(run: log.Run):
    return trace_file(run.path.parent)


def extras(on_gpu: bool) -> list[Extra]:
    """A short run without --profile: then there must be no profiler."""
    return [Extra(QUIET, tuple(SMALL.split()))]


EXERCISE = Exercise(
    step="04_profiler",
    own_flags={"--profile": 0, "--no-profile": 0},
    mechanism=mechanism,
    extras=extras,
    hints=hints(OWN_HINTS),
    errors=((r"unrecognized arguments: .*--(no-)?profile", "flag"),),
)
