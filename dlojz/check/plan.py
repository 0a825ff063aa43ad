"""The plan of a check: the runs that a verdict needs, their machine, and notes on them."""

import ast
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from dlojz import course, launch
from dlojz.check import audited, bars, judge
from dlojz.check.ending import Role
from dlojz.check.exercise import Exercise
from dlojz.check.verdict import CheckError
from dlojz.course import presets
from dlojz.launch import series
from dlojz.machine import facts
from dlojz.runs import derived, log, stats

# Flags of a job that its check leaves out, each with its number of words: the runs of a check begin
# at the first step, and write nothing.
LEFT_OUT = {"--resume": 1, "--checkpoint": 1, "--checkpoint-every": 1}

UPDATES = 12  # of an audited run, all of which are done again with the solution
ROOM = 0.3  # of a GPU's memory, which a job must leave for small runs beside it
# Images for one process, which has 6 batches of an epoch: the last is smaller, and large enough for
# batch normalization.
FEW = {"classes": 3, "images_per_class": 15, "val_images_per_class": 5}
# Two epochs of them in float32, whose updates are done again. Rounding is small there, and a small
# model takes a moment.
EPOCHS = (
    f"--data {{run}}/{series.IMAGES} --num-workers 0 --image-size 32 -b 8 --test-nsteps {UPDATES} "
    "-e 2 --deterministic"
)


@dataclass(frozen=True)
class Plan:
    """The runs of a check, and the machine that they need."""

    exercise: Exercise
    job: launch.Job
    log: log.Run  # of the job
    entries: tuple[series.Entry, ...]
    request: launch.Request  # the job's: its check runs where it ran
    hardware: tuple[str, str]  # where the job ran: its processor, and its GPU or ""
    seconds: float  # from the first line of the job's log to the last
    compile_s: float  # torch.compile's share of them. The runs find its results in the caches
    notes: tuple[str, ...] = ()  # for the trainee


def of(exercise: Exercise, job: launch.Job, pairs: int | None = None) -> Plan:
    """Return the plan of a job's check. Raises CheckError for a job that can't be checked."""
    if job.info["n_gpu"] < exercise.processes:
        raise CheckError(
            f"job {job.id} had {job.info['n_gpu']} process, and {exercise.step} is about several: "
            f'submit("{job.command}", n_gpu={exercise.processes})'
        )
    run = log_of(job)
    found = tuple(entries(exercise, job, pairs, run))
    notes = tuple(_audited_small(exercise, run))
    request, times = launch.request_of(job), (run.seconds, derived.compile_seconds(run))
    return Plan(exercise, job, run, found, request, hardware_of(run), *times, notes)


def _audited_small(exercise, run):
    if why := audited.too_large(run):
        yield (
            f"{why}: whole updates were kept and done again of a run with {exercise.small}; of "
            "your job's own model, every step was watched"
        )


def job_of(job) -> launch.Job:
    """Return the test run to check, from a job, a sweep or a number; by default the last one."""
    job = ended(job)
    is_test, ran_through = "--test" in flags_of(job), job.state == launch.State.COMPLETED
    if (ran_through or not is_test) and not launch.is_ours(job.directory / "trainer.py"):
        raise CheckError(
            f"job {job.id} ran {job.info['command'][0]}, which does not take the flags of the "
            "course's trainer: a check compares dlojz/dlojz.py with the solution of a step. Name "
            "the job of that trainer, as in `dlojz check 09 12`: `dlojz queue` lists all"
        )
    if not is_test:
        raise CheckError(
            f"job {job.id} is not a test run: submit it again with --test, as in "
            f'submit("{job.command} --test")'
        )
    return job


def ended(job) -> launch.Job:
    """Return the job to check, which has ended. Raises CheckError if it has not."""
    job = job or launch.latest()
    job = job[-1] if isinstance(job, list) else job  # of a sweep, its last
    job = job if isinstance(job, launch.Job) else launch.find(job)
    if not job.directory.is_dir():
        raise CheckError(f"{job.directory} is gone: submit the trainer again, and check that job")
    if not job.info:
        raise CheckError(
            f"{job.directory} holds no job.json, so the trainer was run by hand: submit it, and "
            "check that job"
        )
    state = job.state
    if not state.final:
        raise CheckError(f"job {job.id} is {state}: wait until it has ended, with job.wait()")
    if state in (launch.State.CANCELLED, launch.State.NODE_FAIL, launch.State.PREEMPTED):
        why = job.status.get("reason") or "it did not end on its own"
        raise CheckError(f"job {job.id} is {state}: {why}. Submit it again, and check that job")
    return job


def log_of(job) -> log.Run:
    """Return the log of a job that has completed. Raises CheckError if it is damaged."""
    try:
        run = log.read(job.directory)
    except log.LogError as error:
        raise CheckError(f"job {job.id} completed, but {error}; submit it again") from None
    if not run.setup or "arguments" not in run.start:
        raise CheckError(
            f"job {job.id} completed, but its log does not say what it trained: does the trainer "
            "call log.start_run() and run.setup()? Then submit it again"
        )
    return run


def flags_of(job) -> list[str]:
    return job.info["command"][1:]


def entries(exercise: Exercise, job, pairs, run: log.Run) -> list[series.Entry]:
    """Return the series: the solution, the exercise's other runs, the pairs A B B A ...

    The trainee's trainer is audited in two runs: with the job's flags, where work and formats are
    judged, and with few images in float32, where the solution does all updates again. The runs of
    the pairs, if a gain is asked, are timed and nothing else. The trainee's begin as the job did:
    afresh, if the trainer does anything before it imports torch.

    run: the job's log.
    """
    mine, flags = job.directory / "trainer.py", without(flags_of(job), LEFT_OUT)
    solution, before = course.solution(exercise.step), course.before(exercise.step)
    known = [*without(flags, exercise.own_flags), *exercise.before_flags]
    hardware = hardware_here(run)
    if pairs is None:
        bar = bars.bar(exercise, hardware, run.start["arguments"])
        pairs = 0 if bar.at_least is None else stats.EARLY_PAIRS
    large, few = bool(audited.too_large(run)), _few(flags, run)
    # The trainee's comes early: it is the one whose mistakes show in most rows.
    wish = {"keep": 0, "watch": True} if large else {"keep": UPDATES}
    fresh = begins_otherwise(mine)
    yours = _entry(Role.YOURS, 0, mine, few, reference=Role.SOLUTION, fresh=fresh)
    yours = replayed(yours, wish | MIDDLE)
    entries = [_entry(Role.SOLUTION, 0, solution, few, audit=LEDGER), yours]
    for name, more in exercise.beside.items():
        entries.append(series.Entry(name, solution, [*few, *more], role=Role.BESIDE))
    small = exercise.small.split() if large else []
    images = few_images(job.info["n_gpu"])
    entries += two_epochs(exercise, mine, solution, [*flags, *small], images, fresh)
    for extra in exercise.extras(hardware.startswith("cuda")):
        entries += [short(extra, solution, of_solution=True), short(extra, mine)]
    aside = _has_room(run)
    entries = [replace(e, aside=aside and e.role in SMALL) for e in entries]
    for i in range(1, pairs + 1):
        both = [
            _entry(Role.BEFORE, i, before, known, audit=TIMED),
            _entry(Role.AFTER, i, mine, flags, audit=TIMED, fresh=fresh),
        ]
        entries += both if i % 2 else reversed(both)
    return entries


def _has_room(run) -> bool:
    """Return whether small runs may go on beside those with the job's flags. run: the job's log.

    On a processor they would only take the cores from each other.
    """
    memory = [rank.memory for rank in run.ranks if "device_total_bytes" in rank.memory]
    full = [m["device_reserved_bytes"] / m["device_total_bytes"] for m in memory]
    return bool(full) and max(full) <= 1 - ROOM


def _few(flags, run) -> list[str]:
    """Return the flags for as many updates as an audited run has, or fewer. run: the job's log."""
    arguments = run.start["arguments"]
    most = UPDATES * arguments.get("accumulate", 1)
    return [*flags, "--test-nsteps", str(most)] if arguments["test_nsteps"] > most else flags


def _entry(role: Role, number: int, trainer, flags, **more) -> series.Entry:
    return series.Entry(role.named(number), trainer, flags, role=role, number=number, **more)


def short(extra, trainer, of_solution: bool = False) -> series.Entry:
    """Return an extra run, of the trainee's trainer or of the solution."""
    own, usual = extra.name, f"{extra.name}-solution"
    if of_solution:
        own, usual = usual, own
    role = Role.EXTRA_SOLUTION if of_solution else Role.EXTRA
    run = series.Entry(own, trainer, extra.flags, extra.rehearse)
    return replace(run, role=role, reference=usual)


def two_epochs(exercise, mine, solution, flags, images: Path, fresh=False) -> list[series.Entry]:
    """Return the runs of two epochs of few images: the solution's, and the trainee's.

    The files change after their first epoch, so that images from a cache are others.
    """
    own = [*flags, *EPOCHS.split(), *exercise.epochs.split()]
    usual = _entry(Role.EPOCHS_SOLUTION, 0, solution, own, reference=Role.EPOCHS)
    run = _entry(Role.EPOCHS, 0, mine, own, reference=usual.name, fresh=fresh)
    usual = replace(usual, audit=LEDGER | REWRITTEN, images=str(images))
    return [usual, replayed(run, {"keep": UPDATES} | REWRITTEN, str(images))]


def few_images(processes: int = 1) -> Path:
    """Return a folder with few images beside the runs, visible to all nodes; make it once.

    The files have the same size. Two processes can't share the images evenly: one of them is dealt
    an image twice, unless the sampler drops it.
    """
    from dlojz import images  # only here: with PIL and NumPy

    wanted = {name: number * (processes if "images" in name else 1) for name, number in FEW.items()}
    wanted["images_per_class"] -= processes > 1
    folder = course.base_folder() / "runs" / f".few-{processes}"
    made = images.generate(folder, **wanted, workers=1, progress=False)
    images.make_equal(made)
    return made


SMALL = (Role.EPOCHS, Role.EPOCHS_SOLUTION, Role.EXTRA, Role.EXTRA_SOLUTION)
LEDGER = {"keep": 0}  # for the solution's auditor: keep every step, but no update
MIDDLE = {"middle": True}  # profile one more step
REWRITTEN = {"rewritten": True}  # change the image files after their first epoch
TIMED = {"timed": True}


def replayed(run: series.Entry, wish: dict, images: str = "") -> series.Entry:
    """Return a run of the trainee's trainer whose reference replays the updates that it keeps.

    images: a folder for both; without one the model's links are not replayed, as in 16 bits their
    noise would hide mistakes.
    """
    program = Path(find_spec("dlojz.watch.replay").origin)
    own = ["{run}/..", *without(run.flags, LEFT_OUT)]
    again = {"replays": "all" if images else "exact"} | (REWRITTEN if images else {})
    replay = series.Entry(series.REPLAY, program, own, audit=again, images=images)
    return replace(run, audit=wish, replay=replay, images=images)


def begins_otherwise(trainer: Path) -> bool:
    """Return whether a trainer does anything before it imports torch, or the course's modules.

    It may set environment variables that torch reads as it is imported: a fork would ignore them.
    """
    for statement in ast.parse(trainer.read_bytes()).body:
        names = [alias.name for alias in getattr(statement, "names", ())]
        names = [statement.module or ""] if isinstance(statement, ast.ImportFrom) else names
        roots = {name.partition(".")[0] for name in names}
        if roots & {"torch", "torchvision", "dlojz"}:
            return False
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not is_text and not (roots and roots <= sys.stdlib_module_names):
            return True
    return False


def placed(run: series.Entry, elsewhere: Mapping[str, Path]) -> series.Entry:
    """Return a run whose replay knows its reference's folder, in the same job or `elsewhere`."""
    if not run.replay:
        return run
    place = str(elsewhere.get(run.reference, f"{{job}}/{run.reference}"))
    return replace(run, replay=replace(run.replay, flags=[place, *run.replay.flags]))


def without(flags: Sequence[str], unwanted: Mapping[str, int]) -> list[str]:
    """Return the flags without `unwanted` and the words that follow them."""
    kept, skip = [], 0
    for word in flags:
        name, assigned, _ = word.partition("=")
        meant = _meant(name, unwanted)
        if skip:
            skip -= 1
        elif meant:
            skip = 0 if assigned else unwanted[meant]
        else:
            kept.append(word)
    return kept


def _meant(name: str, flags: Mapping[str, int]) -> str | None:
    """Return the flag that a word names: argparse takes its beginning, such as --resu."""
    if name in flags or not re.match("--.", name):
        return name if name in flags else None
    return next((flag for flag in flags if flag.startswith(name)), None)


def hardware_here(run) -> str:
    """Return the hardware that the solution will use: this machine's GPU, if it has one."""
    if presets.gpus() and not run.setup["device"].startswith("cuda"):
        return f"cuda: {facts.gpus()['cards'][0]['name']}"
    return bars.hardware(run.setup)


def hardware_of(run) -> tuple[str, str]:
    """Return a run's processor, and its GPU or ""."""
    on_gpu = run.setup.get("device", "").startswith("cuda")
    return run.start.get("cpu", ""), run.setup["device_name"] if on_gpu else ""


# For the judge and the trainee -------------------------------------------------------------------


def standards(exercise: Exercise, job=None, run: log.Run | None = None) -> judge.Standards:
    """Return the judge's standards for this exercise. run: the log of the job."""
    name = Path(job.info["command"][0]).name if job else course.trainer().name
    return judge.Standards(_recorded(exercise), name, run)


def _recorded(exercise):
    """Return the step's recorded gain on a GPU, for trainees who have none."""
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


def notes(exercise: Exercise, job) -> list[str]:
    """Return notes for the trainee on the job that was judged, besides the findings."""
    return [*_left_out(job), *_edited_since(job), *_still_to_do(exercise, job)]


def _left_out(job):
    flags = {_meant(word.partition("=")[0], LEFT_OUT) for word in flags_of(job)}
    if found := [name for name in LEFT_OUT if name in flags]:
        yield f"checked without {', '.join(found)}: a check's runs begin at the first step"


def _edited_since(job):
    for file, text in _texts(job).items():
        if file.exists() and file.read_bytes() != text:
            yield (
                f"{file.name} has changed since job {job.id}: submit it, and check that job, for a "
                "verdict on the new text"
            )


def _still_to_do(exercise, job):
    mark = re.compile(rf"#.* TODO {exercise.step[:2]}")
    for file, text in _texts(job).items():
        lines = text.decode(errors="replace").splitlines()
        if found := [str(i) for i, line in enumerate(lines, 1) if mark.search(line)]:
            yield (
                f"`TODO {exercise.step[:2]}` is still in line{'s' * (len(found) > 1)} "
                f"{', '.join(found)} of {file.name}"
            )


def _texts(job) -> dict[Path, bytes]:
    trainer, *modules = launch.sources(job.directory / "trainer.py").items()
    name = job.info["command"][0]
    file = launch.find_trainer(name) or course.course_root() / name
    return {file: trainer[1]} | {file.parent / path: text for path, text in modules}
