"""A study: a search of hyper-parameters in the folder runs/studies/NAME.

    study = n13.search(course.own("13_search"), "first", trials=6, workers=2)
    study.trials; study.optuna        # a table; Optuna's own study, for its plots
    n13.again(course.own("13_search"), study)

The folder holds `journal.log`, which is Optuna's, `trainer.py`, the objective that is run, and what
each worker said. The same call again goes on with the study.
"""

import ast
import re
import secrets
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path

from dlojz import course, images, launch
from dlojz.course import UserError
from dlojz.jobs import processes
from dlojz.runs import log, outcome, stats
from dlojz.table import Table
from dlojz.training import imports

STEP = "13_search"
NAME = re.compile(r"[A-Za-z][\w.-]{0,40}")
SIZES = {  # of a trial, by preset
    "smoke": "--model shufflenet_v2_x0_5 --image-size 32 -b 64 -e 3",
    "cpu": "--model resnet18 --image-size 32 -b 32 -e 4",
    "gpu": "--model resnet18 --image-size 64 -b 128 -e 9",
}
SIZES["cluster"] = SIZES["gpu"]
LOOK_S = 0.25  # between looks at the workers
END_S = 30  # for a worker to cancel its job and end


class SearchError(UserError):
    """A search that can't begin or go on, and what to do."""


@dataclass(frozen=True)
class Study:
    """A search: only its folder, so that any process can go on with it."""

    directory: Path

    kind = "study"

    @property
    def id(self) -> str:
        return self.directory.name

    @property
    def info(self) -> dict:
        """Return the command, as a job does."""
        return {"command": [course.PREPARED[STEP]]}

    @property
    def state(self) -> launch.State:
        """Return RUNNING while it has a worker, else COMPLETED: it can always go on."""
        from dlojz.chapters.n13_search import worker

        busy = any(worker.is_busy(self.id, trial) for trial in self.found)
        return launch.State.RUNNING if busy else launch.State.COMPLETED

    @property
    def journal(self) -> Path:
        return self.directory / "journal.log"

    @cached_property
    def optuna(self):
        """Return Optuna's study, to read. Raise SearchError if the journal has none."""
        optuna, journal = _optuna()
        if self.journal.exists():
            with suppress(KeyError):
                return optuna.load_study(study_name=self.id, storage=journal.storage(self.journal))
        raise SearchError(
            f"no study {self.id!r} in {self.journal}: n13.search begins one, if its open_study "
            "uses the storage that it is given"
        )

    @property
    def found(self) -> list:
        """Return Optuna's trials so far; [] if the journal has no study."""
        try:
            return self.optuna.get_trials(deepcopy=False)
        except SearchError:
            return []

    @property
    def finished(self) -> int:
        """Return the number of trials that were completed or pruned."""
        return sum(trial.state.name in ("COMPLETE", "PRUNED") for trial in self.found)

    @property
    def trials(self) -> Table:
        """Return a table of the trials: accuracies after each epoch, and seconds in training.

        The parameters of an interrupted trial are those of a later one, too.
        """
        again = {trial.user_attrs.get("instead_of") for trial in self.found}
        head = ("trial", "state", "parameters", "accuracy, %", "seconds", "job")
        rows = [
            (
                str(trial.number),
                "interrupted" if trial.number in again else trial.state.name.lower(),
                ", ".join(f"{name} {_short(value)}" for name, value in trial.params.items()),
                " ".join(f"{100 * v:.1f}" for _, v in sorted(trial.intermediate_values.items())),
                _seconds(self.id, trial),
                str(trial.user_attrs.get("job", "")),
            )
            for trial in self.found
        ]
        return Table(head, rows, "><<<>>", "no trial in its journal")

    def __repr__(self):
        return f"study {self.id}\n{self.trials}"

    def _repr_html_(self):
        return self.trials._repr_html_()


def _seconds(study, trial):
    from dlojz.chapters.n13_search import worker

    job = worker.job_of(study, trial)
    seconds = stats.summary(job).seconds if job else None
    return "" if seconds is None else f"{seconds:.1f}"


def _short(value):
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _optuna():
    """Return Optuna and our module of its journal. Raise SearchError if it isn't installed."""
    try:
        import optuna

        from dlojz.chapters.n13_search import journal
    except ModuleNotFoundError as error:
        raise SearchError(f"{error}: `pip install optuna`, in the course's environment") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna, journal


def studies() -> list[Study]:
    """Return the studies of this course folder, oldest first."""
    found = (course.base_folder() / "runs" / "studies").glob("*/trainer.py")
    return [Study(file.parent) for file in sorted(found, key=lambda f: f.parent.stat().st_ctime)]


def find(study=None) -> Study:
    """Return a study, from itself, its name, or a job of it; by default the newest.

    Raise LookupError if there is none.
    """
    if isinstance(study, Study):
        return study
    known = {each.id: each for each in studies()}
    if isinstance(study, launch.Job):
        name = re.sub(r"-(\d+|again)$", "", study.name)
        study = name if name in known else None
    if study is None and known:
        return list(known.values())[-1]
    if study in known:
        return known[study]
    there = ", ".join(known) or "none yet"
    raise LookupError(f"no study {study or ''!r} in runs/studies: expected one of {there}")


# A search -----------------------------------------------------------------------------------------


def search(file, name: str, trials: int = 12, workers: int = 2, command: str = "") -> Study:
    """Go on with the study of this name, or begin one, until this many trials have ended.

    file: the program with the objective. trials: completed or pruned, of all calls together.
    workers: processes here that ask for trials; other calls may add some, here or on another node.
    command: the trainer, and the flags that all trials share.

    Show a progress bar. If it is interrupted, the workers end, and cancel their jobs: the same call
    goes on. Raise SearchError if a worker fails.
    """
    if not NAME.fullmatch(name):
        raise SearchError(
            f"a study named {name!r}: expected a letter, then up to 40 letters, digits or _.-"
        )
    if trials < 1 or workers < 1:
        raise SearchError(f"trials={trials}, workers={workers}: expected at least 1 of each")
    _optuna()
    study = Study(course.base_folder() / "runs" / "studies" / name)
    if study.finished >= trials:
        return study
    _keep_program(study, course.course_root() / file)
    words = ["--study", name, "--trials", str(trials), "--command", command]
    with _started(study, words, workers) as started:
        _watch(study, started, trials)
    if study.finished < trials and (failed := [one for one in started if one.process.poll()]):
        raise SearchError(
            f"study {name}: {study.finished} of {trials} trials have ended. The last words of a "
            f"worker:\n{outcome.tail(failed[-1].said)[-2000:]}\nThe same call again goes on"
        )
    return study


def _keep_program(study, file):
    """Copy the objective into the study's folder: later edits do not change a search that runs."""
    text, copy = course.read_small(file), study.directory / "trainer.py"
    if copy.exists() and study.finished and _essence(course.read_small(copy)) != _essence(text):
        raise SearchError(
            f"{file} has changed since {study.finished} trials of study {study.id} ended, and they "
            f"would not be comparable: give the study another name, or put {copy} back"
        )
    with course.needs_room(study.directory):
        study.directory.mkdir(parents=True, exist_ok=True)
    course.write_atomically(copy, text)


def _essence(text: bytes) -> str:
    """Return a program without comments, and without `again`, which is written later."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return text.decode(errors="replace")
    return ast.dump(ast.Module([n for n in tree.body if getattr(n, "name", "") != "again"], []))


@dataclass
class _Worker:
    process: subprocess.Popen
    said: Path


@contextmanager
def _started(study, words, number):
    """Start workers; if we are interrupted, end them. If we are killed, the kernel does."""
    started = []
    try:
        for _ in range(number):
            started.append(_start(study, words))
        yield started
    finally:
        for one in started:
            if one.process.poll() is None:
                one.process.terminate()
        for one in started:
            try:
                one.process.wait(END_S)
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait()


def _start(study, words):
    for number in count():
        said = study.directory / f"worker-{number}.txt"
        with suppress(FileExistsError), course.needs_room(said), said.open("xb") as out:
            program = study.directory / "trainer.py"
            argv = [sys.executable, str(program), *words, "--worker", str(number)]
            places = {"cwd": course.base_folder(), "end_with_parent": signal.SIGTERM}
            return _Worker(processes.start(argv, out, out, **places), said)


def _watch(study, started, trials):
    """Wait for the workers, with a progress bar."""
    from tqdm.auto import tqdm

    seen = launch.in_a_notebook() or sys.stderr.isatty()
    with tqdm(total=trials, desc=f"study {study.id}", unit="trial", disable=not seen) as bar:
        going = len(started)
        while going:
            if going > (going := sum(one.process.poll() is None for one in started)):
                _give_up_lost(study)  # one of them may have been killed
            bar.n = study.finished
            bar.set_postfix_str(_going(study.found))
            time.sleep(LOOK_S)


def _going(trials) -> str:
    """Return the progress of the running trials, in words."""
    running = (trial for trial in trials if trial.state.name == "RUNNING")
    return ", ".join(f"trial {t.number}: {t.last_step or 0} epochs" for t in running)


def _give_up_lost(study):
    """Cancel the jobs of workers that were killed."""
    from dlojz.chapters.n13_search import journal, worker

    with suppress(SearchError), journal.one_at_a_time(study.directory):
        worker.give_up_lost(study.optuna)


# The best trial, again ----------------------------------------------------------------------------


def again(file, study, data=None) -> list[launch.Job]:
    """Train the best trial of a study again, as `again` in this program says, and wait.

    data: a folder of images whose validation images no trial has seen; by default such images are
    drawn, by a seed that nobody knew.
    """
    study, file = find(study), course.course_root() / file
    if not any(trial.state.name == "COMPLETE" for trial in study.found):
        raise SearchError(f"no trial of study {study.id} is complete: n13.search goes on with it")
    best = study.optuna.best_trial
    flags = imports.from_file(file, "again").again(best, str(data or _unseen(study, best)))
    command = study.optuna.user_attrs["command"]
    jobs = launch.submit([f"{command} {each}" for each in flags], name=f"{study.id}-again")
    course.write_atomically(study.directory / "trainer.py", course.read_small(file))
    for job in jobs:
        job.wait()
    return jobs


def _unseen(study, best) -> Path:
    """Return a folder of the training images, and of new validation images; draw them once."""
    from dlojz.chapters.n13_search import worker

    used = log.read(worker.job_of(study.id, best)).start["arguments"]["data"]
    folder, data = study.directory / "unseen", course.base_folder() / used
    if not (folder / "val").exists():
        known = course.read_table(data / images.dataset.MARKER)
        if "seed" not in known:
            raise SearchError(
                f"{data} was not made by `dlojz data`, so others of its kind can't be drawn: "
                "n13.again(..., data=FOLDER), with the same train/ and a val/ that no trial saw"
            )
        seed = secrets.randbits(32)
        sizes = known["classes"], 0, known["val_images_per_class"], known["seed"]
        drawn = images.generate(study.directory / f"drawn-{seed}", *sizes, judge=seed)
        folder.mkdir(exist_ok=True)
        for split, of in (("train", data), ("val", drawn)):
            (folder / split).unlink(missing_ok=True)
            (folder / split).symlink_to((of / split).resolve())
    return folder
