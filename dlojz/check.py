"""The verdict of an exercise: same training, faster, by the mechanism.

    verdict = check("02_amp", job)      # takes the trainer and the flags of `job`
    verdict.passed; verdict.hint()

`check` submits one job, which runs the step before (A) and the trainee's trainer (B) in turn,
A B B A ..., on the same devices, and beside them the solution once: what the trainee's losses and
evidence are compared with. Runs that are finished are used again, so a check can be repeated, and
goes on after an interrupt. `judge` then reads the logs, and nothing else.
"""

import hashlib
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from dlojz import course, exercises, launch, presets, progress
from dlojz.exercises import FASTER, SAME, Exercise, Finding, Runs, bars, common
from dlojz.launch import series
from dlojz.machine import facts
from dlojz.runs import log, outcome, stats
from dlojz.runs.folder import events_file
from dlojz.verdict import Verdict

PAIRS = stats.MIN_PAIRS
IMPORTS_S = 6  # of a job, which the runs of a series do not pay again
CHECK_FILE = "check.json"  # in a job's folder: which check it belongs to
# Rooms whose code decides what a run logs: runs of another version of it are not used again.
MEASURING = ("jobs", "machine", "runs", "training")
NOT_REACHED = ("none", "unknown", "None")  # what a finding says of a run that ended before


class CheckError(ValueError):
    """A run that can't be checked, with what to do."""


def check(step: str | int, job=None, pairs: int | None = None) -> Verdict:
    """The verdict on a job's trainer, for this step of the course.

    job: a Job or its number; by default the last one that was submitted.
    pairs: runs before and after; by default 6 where a gain is asked for, else 1. Where 6 leave it
        open whether the gain is large enough, and all else is right, another 6 are made, once.

    Waits for the runs that it needs, with a progress bar. Raises CheckError for a job that can't be
    checked: not ended, or not a test run.
    """
    exercise = exercises.find(course.step(step))
    job = _job(job)
    started = time.monotonic()
    if job.state != launch.State.COMPLETED:
        verdict = _failed(exercise, job)
    else:
        verdict = _timed(exercise, job, pairs)
        if pairs is None and _is_open(verdict, bars.bar(*_what(exercise, job))):
            print(
                f"check {exercise.step}: {verdict.comparison}. That leaves it open: "
                f"{PAIRS} pairs more",
                file=_output(),
                flush=True,
            )
            verdict = _timed(exercise, job, 2 * PAIRS)
    verdict.seconds = time.monotonic() - started
    progress.keep("verdicts", exercise.step, verdict.to_dict())
    return verdict


def _timed(exercise, job, pairs):
    entries = _entries(exercise, job, pairs)
    runs = _run(entries, exercise, job)
    return judge(exercise, runs, job, timed=len(runs) == len(entries))


def _is_open(verdict, bar) -> bool:
    """Does only the gain fail, and may it still be as large as the bar?

    A gain just at the bar then has two chances to pass, not one: 4.5 % in all, simulated. A gain
    well above it seldom fails any more because others used the machine.
    """
    if [finding.part for finding in verdict.failing] != [FASTER]:
        return False
    found = verdict.comparison
    return found.comparable and found.low is not None and found.high >= bar.at_least


# What is to be run ----------------------------------------------------------------------------


def _job(job):
    if job is None or isinstance(job, list):
        job = job[-1] if job else launch.latest()
    job = job if isinstance(job, launch.Job) else launch.find(job)
    if not job.state.final:
        raise CheckError(f"job {job.id} is {job.state}: wait for its end, with job.wait()")
    if not job.info:
        raise CheckError(f"{job.directory} was run by hand: submit it, and check that job")
    if "--test" not in _flags(job):
        raise CheckError(
            f"job {job.id} is no test run: submit it again with --test, as in "
            f'submit("{job.command} --test")'
        )
    return job


def _flags(job):
    return job.info["command"][1:]


def _entries(exercise: Exercise, job, pairs):
    """The series: the solution once, what else the exercise needs, and the pairs A B B A ..."""
    mine, flags = job.directory / "trainer.py", _flags(job)
    solution, before = course.solution(exercise.step), course.before(exercise.step)
    known = [*_without(flags, exercise.own_flags), *exercise.before_flags]
    entries = [series.Entry("solution", solution, flags)]
    for extra in exercise.extras(bool(presets.gpus())):
        entries.append(series.Entry(extra.name, mine, extra.flags, extra.rehearse))
        entries.append(
            series.Entry(f"{extra.name}-solution", solution, extra.flags, extra.rehearse)
        )
    if pairs is None:
        wanted = bars.bar(*_what(exercise, job))
        pairs = 1 if wanted.at_least is None else PAIRS
    for i in range(1, pairs + 1):
        pair = [
            series.Entry(f"before-{i}", before, known),
            series.Entry(f"after-{i}", mine, flags),
        ]
        entries += pair if i % 2 else reversed(pair)
    return entries


def _without(flags: Sequence[str], own: Mapping[str, int]) -> list[str]:
    """The flags that the step before knows: its own are left out, with the words that follow."""
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


def _what(exercise, job):
    """What a bar is looked up by."""
    return exercise.step, _hardware_here(job), log.read(job.directory).start["arguments"]


def _hardware_here(job):
    """Where the solution will compute: on this machine's GPU, if it has one."""
    setup = log.read(job.directory).setup
    if presets.gpus() and not setup["device"].startswith("cuda"):
        return f"cuda: {facts.gpus()['cards'][0]['name']}"
    return _hardware(setup)


def _hardware(setup):
    return f"{setup['device'].split(':')[0]}: {setup['device_name']}"


# Running it -------------------------------------------------------------------------------------


def _run(entries, exercise, job) -> dict[str, Path]:
    """The folder of each entry's run, finished; submits those that no earlier check has run.

    Where the first of them show that something is wrong, the other pairs are not waited for.
    """
    pair = b"".join(e.trainer.read_bytes() for e in entries if e.name in ("before-1", "after-1"))
    keys = {entry.name: _key(entry, pair, job.info["n_gpu"]) for entry in entries}
    while missing := {n: k for n, k in keys.items() if k not in (known := _known_runs())}:
        if wrong := _wrong_already(exercise, keys):
            return wrong
        active = _active_check(missing.values())
        if active is None:
            wanted = [e for e in entries if e.name in missing]
            active = _submit(wanted, keys, exercise, job)
        if _wait(active, exercise, lambda: _wrong_already(exercise, keys)):
            continue
        known = _known_runs()
        if still := [n for n, k in missing.items() if k not in known]:
            raise CheckError(
                f"the check's job ended without {', '.join(still)}: {active.explain()}"
            )
    return {name: known[key] for name, key in keys.items()}


def _wrong_already(exercise, keys) -> dict[str, Path] | None:
    """The runs up to the first pair, if they show something wrong without the other pairs.

    {} if all is right, or if there are no other pairs; None while one of them is not finished.
    """
    first = {n: k for n, k in keys.items() if not re.fullmatch(r"(before|after)-(?!1$)\d+", n)}
    known = _known_runs()
    if not set(first.values()) <= set(known):
        return None
    if len(first) == len(keys):
        return {}
    folders = {name: known[key] for name, key in first.items()}
    findings = judge(exercise, folders, timed=False).findings
    return folders if any(finding.ok is False for finding in findings) else {}


def _key(entry, pair: bytes, n_gpu: int) -> str:
    """Equal for runs that may stand for each other: same sources, flags, name and devices.

    pair: the sources of both sides; what ran in a pair is compared with its partner only.
    """
    package = Path(__file__).parent
    sources = sorted(f for room in MEASURING for f in (package / room).glob("*.py"))
    words = json.dumps([entry.name, list(entry.flags), entry.rehearse, presets.gpus(), n_gpu])
    in_pair = entry.name.startswith(("before-", "after-"))
    parts = (pair if in_pair else b"", entry.trainer.read_bytes(), words.encode())
    return hashlib.sha256(b"\0".join([*parts, *(f.read_bytes() for f in sources)])).hexdigest()[:20]


def _checks():
    """The jobs that checks submitted, with the key of each run."""
    for job in reversed(launch.jobs()):
        file = job.directory / CHECK_FILE
        if file.exists():
            yield job, json.loads(file.read_text())


def _known_runs() -> dict[str, Path]:
    """The runs of earlier checks that are finished, by key; the latest first."""
    known = {}
    for job, keys in _checks():
        for name, key in keys.items():
            folder = job.directory / name
            if (folder / "exit_code").exists():
                known.setdefault(key, folder)
    return known


def _active_check(missing):
    """A check under way that will bring all that is missing: another kernel submitted it."""
    for job, keys in _checks():
        if not job.state.final and set(missing) <= set(keys.values()):
            return job
    return None


def _submit(entries, keys, exercise, job):
    status = job.status
    each = max(2.0, status["ended"] - status["started"] - IMPORTS_S)
    about = IMPORTS_S + each * len(entries)
    text = f"{about / 60:.0f} minutes" if about > 100 else f"{about:.0f} s"
    print(f"check {exercise.step}: {len(entries)} runs, about {text}", file=_output(), flush=True)
    hours = 1 + int(3 * about // 3600)
    files = {CHECK_FILE: json.dumps({e.name: keys[e.name] for e in entries}).encode()}
    time_max, n_gpu = f"{hours:02d}:00:00", job.info["n_gpu"]
    return series.submit(entries, f"check-{exercise.step}", time_max, files, n_gpu)


def _output():
    return sys.stdout if _in_a_notebook() else sys.stderr  # a terminal's stdout is for the verdict


def _in_a_notebook():
    """Is this a notebook's kernel? Without importing IPython for it."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def _wait(job, exercise, enough) -> bool:
    """Wait for the end of the job; True if it was ended because `enough()` was known.

    enough: None until it can tell; then it is asked no more.
    """
    from tqdm.auto import tqdm

    total, silent = len(series.folders(job)), False if _in_a_notebook() else None
    with tqdm(total=total, desc=exercise.step, unit="run", leave=False, disable=silent) as bar:
        answer = None
        while not job.state.final:
            if series.finished(job) > bar.n:
                bar.update(series.finished(job) - bar.n)
                if answer is None and (answer := enough()):
                    job.cancel()
            time.sleep(0.2)
        bar.update(series.finished(job) - bar.n)
    return bool(answer)


# Judging ----------------------------------------------------------------------------------------


def judge(exercise: Exercise, folders: Mapping[str, Path], job=None, timed: bool = True) -> Verdict:
    """The verdict on runs that are finished: "solution", "before-1", "after-1" and so on.

    timed: are there all the pairs that tell the speed?
    """
    mine, reference = _names(folders, "after-"), folders["solution"]
    extras = [n for n in folders if f"{n}-solution" in folders]
    for name in mine:
        if _exit_code(folders[name]) != 0:
            return _failed(exercise, job, folders[name], reference)
    runs = Runs(
        log.read(folders[mine[0]]),
        log.read(reference),
        {
            n: (log.read(folders[n]), log.read(folders[f"{n}-solution"]))
            for n in extras
            if events_file(folders[n]).exists()  # else it ended at its flags
        },
    )
    mechanism = exercise.mechanism(runs)
    if failed := [folders[n] for n in extras if _exit_code(folders[n]) != 0]:
        mechanism = [f for f in mechanism if f.ok is not False or f.yours not in NOT_REACHED]
    work = common.same_work(runs.mine, runs.reference)
    findings = [
        *(replace(f, hint=exercise.hint_of.get(f.what, f.hint)) for f in work),
        common.same_losses(runs.mine, runs.reference, tolerance(exercise.step, runs)),
        *mechanism,
    ]
    # What was seen names the cause; an error only names the place where it came out.
    seen = any(f.ok is False for f in findings)
    findings += [_ended(exercise, folder, give_hint=not seen) for folder in failed]
    if not timed:
        later = Finding(FASTER, "speed", None, "not timed", "first what is red above")
        return Verdict(exercise.step, [*findings, later], exercise.hints, job)
    comparison, faster = _speed(exercise, folders, runs)
    findings.append(faster)
    # A single pair has no spread to warn of, and was not asked for more.
    told = comparison.warnings if comparison else ()
    advice = [w for w in told if _tells(w, len(mine), exercise)]
    return Verdict(exercise.step, findings, exercise.hints, job, comparison, tuple(advice))


def _tells(warning, pairs, exercise):
    if warning.startswith("data-bound"):
        return not exercise.of_files
    return pairs >= PAIRS or warning.startswith("not comparable")


def _names(folders, prefix):
    names = [n for n in folders if n.startswith(prefix)]
    return sorted(names, key=lambda n: int(n.removeprefix(prefix)))


def _exit_code(folder):
    return int((folder / "exit_code").read_text())


def _failed(exercise, job, folder=None, reference=None) -> Verdict:
    """The verdict on a run that did not get to its end."""
    folder = folder or job.directory
    seen = []
    with suppress(log.LogError, KeyError):  # it may have ended before it logged anything
        found = exercise.mechanism(Runs(log.read(folder), log.read(reference or folder)))
        seen = [f for f in found if f.ok is False and f.yours not in NOT_REACHED]
    ended = _ended(exercise, folder, give_hint=not seen)
    return Verdict(exercise.step, [ended, *seen], exercise.hints, job)


def _ended(exercise, folder, give_hint) -> Finding:
    """What a run that failed said at its end."""
    errors = outcome.errors(folder)
    hint = next((key for pattern, key in exercise.errors if re.search(pattern, errors)), "failed")
    state = stats.summary(folder).state if events_file(folder).exists() else "FAILED"
    said = next((line for line in reversed(errors.splitlines()) if line.strip()), state)
    text = f"{state}: {said.strip()[:200]}"
    return Finding(
        SAME, f"run {folder.name}", False, text, "COMPLETED", hint if give_hint else None
    )


def tolerance(step: str, runs: Runs) -> list[float] | None:
    """How far the losses of the first steps may be from the solution's, as a share, by step.

    Measured: `tools/envelope.py` runs the solution with initial weights that are off by a rounding
    error, and writes how far the losses went, for some sizes: the nearest smaller one counts. None
    where that was not done.
    """
    file = course.course_root() / "reference" / "envelopes" / f"{step}.json"
    if not file.exists():
        return None
    kept = json.loads(file.read_text())["tolerance"].get("cuda" if runs.on_gpu else "cpu", {})
    sizes = sorted(kept.get(runs.arguments.get("precision", "fp32"), []), key=lambda s: s["pixels"])
    pixels = runs.arguments["batch_size"] * runs.arguments["image_size"] ** 2
    smaller = [size for size in sizes if size["pixels"] <= pixels]
    return (smaller or sizes[:1] or [{"tolerance": None}])[-1]["tolerance"]


def _speed(exercise, folders, runs):
    """The comparison of the pairs, and what the bar of this hardware says to it."""
    before, after = (
        [stats.summary(folders[n]) for n in _names(folders, prefix)]
        for prefix in ("before-", "after-")
    )
    bar = bars.bar(exercise.step, _hardware(runs.reference.setup), runs.arguments)
    try:
        found = stats.compare(before, after, exercise.same_hardware)
    except ValueError as error:  # too short to measure anything
        return None, Finding(FASTER, "speed", None, str(error), "steps to measure")
    if fed := _is_fed(exercise, before, runs.reference):
        return found, Finding(FASTER, "speed", None, _speed_text(found), f"no gain asked: {fed}")
    if bar.at_least is None:
        instructions = ", ".join(facts.cpu().get("instructions", ["unknown instructions"]))
        why = f"no gain asked: {bar.source.format(instructions=instructions)}{_recorded(exercise)}"
        return found, Finding(FASTER, "speed", None, _speed_text(found), why)
    if not found.comparable:
        return found, Finding(
            *(FASTER, "speed", False, "; ".join(found.warnings), "equal settings", "speed")
        )
    if bar.not_slower:
        ok = found.low is not None and found.word != stats.SLOWER
        return found, Finding(FASTER, "not slower", ok, str(found), bar.source, "speed")
    ok = found.low is not None and found.low >= bar.at_least
    wanted = f"at least {bar.at_least:g} times as fast (bar of this hardware; {bar.source})"
    return found, Finding(FASTER, "speed", ok, str(found), wanted, "speed")


def _is_fed(exercise, before, run) -> str:
    """Why loading was no limit of the runs before a step that is about it; "" if it was."""
    waited = min(s.shares["data"] for s in before)
    loader, start = common.probe(run).get("loader", {}), run.start
    together = (loader.get("num_workers") or 0) + start.get("threads", 1)
    share_cores = run.setup["device"] == "cpu" and together > start.get("cpu_count", 1)
    if not exercise.of_files or share_cores or waited > stats.DATA_BOUND:
        return ""
    return (
        f"the runs before waited for images for {waited:.0%} of a step, and no worker shared a core"
    )


def _recorded(exercise):
    """What the step gained on a GPU, for those who have none."""
    folder = course.course_root() / "reference"
    files = [folder / name for name in exercise.recorded or ()]
    if not files or not all(file.exists() for file in files):
        return ""
    before, after = (stats.summary(file) for file in files)
    ratio = after.images_per_s / before.images_per_s
    each = f" x {after.size} processes, of one" if after.size > 1 else ""
    return (
        f". Recorded on {after.device_name}: {ratio:.2g} times ({after.model}, batch "
        f"{after.batch_size}{each})"
    )


def _speed_text(found):
    if found.low is None:
        return f"{found.ratio:.2f} times as fast in {found.pairs} pair{'s' * (found.pairs > 1)}"
    return str(found)
