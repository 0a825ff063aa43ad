"""The submission of the trainer as a job, on this machine or on Slurm."""

import difflib
import json
import os
import re
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path

from dlojz import course
from dlojz.course import COPIED, base_folder, course_root, prepared
from dlojz.launch import beside, sites, slurm
from dlojz.launch.here import Here
from dlojz.launch.job import Job
from dlojz.launch.slurm import Slurm
from dlojz.runs.folder import new_run

LAUNCHERS = {launcher.name: launcher for launcher in (Here, Slurm)}
NOTHING = "nothing was submitted"

RESERVED = {
    *("..", "job.json", "state.json", "keeper.json", "cancel", ".reserve"),
    *("trainer.py", "stdout.txt", "stderr.txt", "keeper.txt", "slurm.txt", "job.sbatch"),
    *("exit_code", "asked", "checkpoint.txt", "sweep.json", "torchrun"),
}


class SubmitError(course.UserError):
    """A job that can't be submitted, with what to change.

    jobs: those of the same sweep that are submitted.
    """

    jobs: Sequence[Job] = ()


class UnclearError(SubmitError):
    """A job that Slurm may have, although it did not say so."""


class Script(str):
    """The script or command of a dry run; shown without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


@dataclass(frozen=True)
class Request:
    """All that is requested of a job. It is written as job.json, and passed on as a whole.

    A check that submits for a job reuses the job's own request, with another command. So it runs
    where the job ran: on the same kind of node, with the same module, charged to the same account.
    """

    command: tuple[str, ...] = ()  # the trainer and its flags
    n_gpu: int = 1
    name: str = "dlojz"
    time_max_s: int = 600
    account: str | None = None
    module: str | None = None
    watch: bool = False  # whether our log and a trace are written of a program of any make
    folder: str = ""  # the current one of its processes; "": that of the course
    files: Mapping[str, bytes] = field(default_factory=dict)  # by name, for the job's folder
    modules: Mapping[str, bytes] = field(default_factory=dict)  # of the program, by path
    links: Mapping[str, str] = field(default_factory=dict)  # to what is beside it, by path
    start: str = beside.COPY  # which of these Python runs

    @property
    def words(self) -> tuple[str, ...]:
        """Return the file to run, by its path in the job's folder, and the program's flags."""
        return self.start, *_split(self.command)[1]

    def to_dict(self) -> dict:
        """Return the content of job.json: the request, and when and where it was submitted."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        found |= {"command": list(self.command), "words": list(self.words)}
        found |= {name: sorted(found[name]) for name in ("files", "modules", "links")}
        return found | {"submitted": time.time(), "host": socket.gethostname()}


def request_of(job: Job) -> Request:
    """Return the request of a job, without its files and its program."""
    info = job.info
    known = {f.name for f in fields(Request)} - {"files", "modules", "links", "start"}
    found = {name: value for name, value in info.items() if name in known}
    return Request(**found | {"command": tuple(info["command"])})


def submit(
    command: str | Sequence,
    n_gpu: int = 1,
    name: str = "dlojz",
    time_max: str = "00:10:00",
    module: str | None = None,
    account: str | None = None,
    watch: bool = False,
    dry_run: bool = False,
) -> Job | list[Job] | Script:
    """Run a program with its flags as a job, when its turn comes: here, or on Slurm.

    What runs is a copy. A program that is not the course's has the current folder that it has when
    it is run by hand: the one in which it was submitted.

    command: "dlojz/dlojz.py --test -b 128", or "-m package.module --flag". A list of commands
        submits each, to run in order. A tuple is one command in words, for paths that a shell would
        trip over.
    n_gpu: GPUs, one process for each; on a machine without a GPU, processes. On a cluster a
        job that needs more than one node takes whole nodes.
    time_max: "HH:MM:SS", or another form that Slurm knows, after which the job is ended. On a
        cluster it is stopped earlier, requeued and resumed from its checkpoint, if it keeps one.
    module, account: a cluster loads this module, in place of its site's, and charges this account;
        "xyz@a100" asks for nodes with A100s.
    watch: write our log of any program's steps, and a trace of a few: see `dlojz.watch.observer`.
    dry_run: submit nothing, show the script or the command.
    """
    try:
        seconds = sites.seconds(time_max)
    except ValueError as error:
        raise SubmitError(f"time_max={error}") from None
    commands = command if isinstance(command, list) else [command]
    if not commands:
        raise SubmitError("an empty list of commands: expected at least one")
    options = n_gpu, name, seconds, account, module, watch
    requests = [Request(_words(c), *options) for c in commands]
    if dry_run:
        _check(requests[0])
        trainer, _ = _program(_split(requests[0].command)[0], watch)
        return Script(_or_refuse(lambda: launcher().script(requests[0], trainer)))
    jobs = send(requests)
    return jobs if isinstance(command, list) else jobs[0]


def send(requests: Sequence[Request]) -> list[Job]:
    """Submit each of these; all are checked before any is submitted.

    Raises SubmitError, or what interrupts it, with the `jobs` that are submitted all the same.
    """
    for request in requests:
        _check(request)
    names = [(_split(request.command)[0], request.watch) for request in requests]
    found = {name: _program(*name) for name in dict.fromkeys(names)}
    requests = [_with(*found[n], request) for n, request in zip(names, requests, strict=True)]
    jobs, sweep = [], [] if len(requests) > 1 else None
    size = len(requests) if launcher().whole_sweeps else 1
    for i in range(0, len(requests), size):
        try:
            jobs += made(_fill, requests[i : i + size], sweep, count=size)
        except BaseException as error:
            error.jobs = jobs
            if jobs:
                error.args = (_in_the_middle(jobs, len(requests), error),)
            raise
    return jobs


def _in_the_middle(jobs, total, error) -> str:
    """Return the error for a sweep that ended before all its jobs were submitted."""
    ids = [job.id for job in jobs]
    in_a_row = int(ids[-1]) - int(ids[0]) == len(ids) - 1 > 0
    which = f"{ids[0]} to {ids[-1]}" if in_a_row else ", ".join(ids)
    is_not = "is not" if type(error) is SubmitError else "may not be"
    why = str(error).removesuffix(f"\n{NOTHING}") or "interrupted"
    return (
        f"job{'s'[: len(ids) > 1]} {which} {'are' if len(ids) > 1 else 'is'} submitted; "
        f"job {len(ids) + 1} of {total} {is_not}: {why}\n`dlojz queue` shows what is, "
        f"`dlojz cancel {' '.join(ids)}` ends it"
    )


def made(fill, *args, count: int = 1) -> list[Job]:
    """Return the jobs in new folders, which `fill` has filled and submitted."""
    runs = []
    try:
        for _ in range(count):
            runs.append(_or_refuse(new_run))
        _or_refuse(fill, runs, *args)
    except BaseException:
        for run in runs:
            if not slurm.may_exist(run):
                shutil.rmtree(run, ignore_errors=True)  # it was never a job
        raise
    return [Job(run) for run in runs]


def _fill(runs, requests, sweep):
    for run, request in zip(runs, requests, strict=True):
        with _writing(run):
            for name, content in {**request.modules, **request.files}.items():
                (run / name).parent.mkdir(parents=True, exist_ok=True)
                (run / name).write_bytes(content)
            for name, target in request.links.items():
                (run / name).symlink_to(target)
            for name in ("stdout.txt", "stderr.txt"):
                (run / name).touch()
            if sweep is not None:  # at once: the next may not be submitted
                sweep.append(run.name)
                (run / "sweep.json").write_text(json.dumps(sweep), encoding="utf-8")
    with _writing(runs[-1]):
        launcher().submit(runs, requests)


@contextmanager
def _writing(run):
    """Add the run's folder to an error of the system, and the remedy to that of a full disk."""
    try:
        with course.needs_room(run):
            yield
    except course.NoRoomError:
        raise
    except OSError as error:
        raise OSError(f"{error} ({run})" if error.errno else str(error)) from None


def _or_refuse(call, *args):
    """Return the result of `call`; turn its errors into a SubmitError."""
    try:
        return call(*args)
    except slurm.UnclearError as error:
        raise UnclearError(str(error)) from None
    except (slurm.SlurmError, sites.SiteError, OSError, ValueError) as error:
        raise SubmitError(f"{error}\n{NOTHING}") from None


def _words(command) -> tuple[str, ...]:
    try:
        words = shlex.split(command) if isinstance(command, str) else [str(w) for w in command]
    except ValueError as error:
        raise SubmitError(
            f"can't read the command {command!r} ({error}): quote it as in a shell, or give a "
            "tuple of words"
        ) from None
    if not words:
        raise SubmitError('an empty command: expected one like "dlojz/dlojz.py --test -b 32"')
    return tuple(words)


def _check(request):
    """Raise SubmitError for what would fail later."""
    if not isinstance(request.n_gpu, int) or request.n_gpu < 1:
        raise SubmitError(f"n_gpu={request.n_gpu!r}: expected a whole number of at least 1")
    if request.time_max_s < 1:
        raise SubmitError("time_max is 0: expected HH:MM:SS, such as 00:10:00")
    _or_refuse(launcher().check, request)


def _program(name, watch=False) -> tuple[Path, beside.Program]:
    """Return the file that these words of a command name, and its program as it is now.

    watch: as one that is watched.

    Raises SubmitError if it can't run. Its imports are looked for only where the job has our own
    Python.
    """
    trainer, module = _find(name), name[1] if len(name) > 1 else ""
    _compile(trainer, trainer.read_bytes())
    by_hand = module or Path(name[0]).resolve() == trainer  # else it was found in the course's
    here = Path.cwd() if by_hand else base_folder()
    found = _or_refuse(beside.program, trainer, module, here)
    if _has_our_python() and (lost := beside.missing(found.home / trainer.name, found.sources)):
        file, line, absent = lost
        raise SubmitError(
            f"{found.home / file}, line {line}: imports {absent}, which is neither installed "
            f"nor beside {trainer.name}. A job has copies of the trainer and of the modules beside "
            f"it: put {absent} there, install it, or `export PYTHONPATH=FOLDER` with the folder "
            f"that it is in\n{NOTHING}"
        )
    if watch and found.start == beside.COPY:
        raise SubmitError(
            f"{trainer} is a trainer of the course, or a part of it, which writes its own log: "
            f"submit it without --watch\n{NOTHING}"
        )
    return trainer, beside.watched(found) if watch else found


def _has_our_python() -> bool:
    if launcher().name == "slurm":
        here = _or_refuse(slurm.site)
        return not (here.modules or here.activate or "DLOJZ_PYTHON" in here.environment)
    return os.environ.get("DLOJZ_PYTHON") in (None, "", sys.executable)


def _with(trainer, program, request) -> Request:
    """Return the request with its program. Raises SubmitError."""
    if not program.links:  # else it has a folder of its own
        for path in program.copies.keys() - {beside.COPY}:
            if Path(path).parts[0] in RESERVED | set(request.files):
                raise SubmitError(
                    f"{trainer} imports {path}, {beside.TAKEN}, such as my_{path}\n{NOTHING}"
                )
    own = {"modules": program.copies, "links": program.links, "start": program.start}
    return replace(request, folder=request.folder or program.folder, **own)


def _compile(trainer, source):
    try:
        compile(source, str(trainer), "exec")
    except SyntaxError as error:
        line = (error.text or "").rstrip()
        raise SubmitError(
            f"{trainer}, line {error.lineno or 1}: {error.msg}\n    {line}\n"
            f"    {' ' * ((error.offset or 1) - 1)}^\n{NOTHING}"
        ) from None
    except (MemoryError, RecursionError, ValueError) as error:
        raise SubmitError(
            f"{trainer} can't be compiled as Python ({type(error).__name__} {error}): is it "
            f"a program? {NOTHING}"
        ) from None


def find_trainer(name: str) -> Path | None:
    """Return the file that a command's first word names; None if there is none.

    The name of a prepared file is that of the trainee's copy, never of its solution.
    """
    root = base_folder()
    folders = [Path.cwd(), root, root / "dlojz", root / "solutions"]
    if name in COPIED.values():
        folders.pop()
    candidates = [folder / name for folder in folders]
    if name == "dlojz/dlojz.py" and not course.in_a_clone():
        candidates.append(course.STARTER)  # of the installed package
    return next((path.resolve() for path in candidates if path.is_file()), None)


def _split(words) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the words that name a program, ("train.py",) or ("-m", "a.module"), and the rest."""
    at = 2 if words[0] == "-m" else 1
    return tuple(words[:at]), tuple(words[at:])


def _find(words) -> Path:
    """Return the file that these words of a command name. Raises SubmitError."""
    name = words[-1]
    if words[0] == "-m":
        return _find_module(name)
    if found := find_trainer(name):
        return found
    if step := next((step for step, file in COPIED.items() if file == name), None):
        raise SubmitError(
            f'no {name} yet: course.own("{step}") makes your copy, and so does '
            f"`cp {prepared(step)} {course_root()}`"
        )
    if re.fullmatch(r"python[\d.]*|torchrun", name):
        raise SubmitError(
            f"the command begins with {name!r}: expected the file to run, or -m MODULE, without "
            "it; -n gives the number of processes"
        )
    looked = " or ".join(dict.fromkeys([str(Path.cwd()), str(base_folder())]))
    near = difflib.get_close_matches(name, [file.name for file in Path.cwd().glob("*.py")], 1)
    guess = f"; did you mean {near[0]}?" if near else ""
    raise SubmitError(
        f"no trainer {name!r} in {looked}: the command begins with the file to run, "
        f'as in "dlojz/dlojz.py --test"{guess}'
    )


def _find_module(name) -> Path:
    place = Path(*name.split("."))
    for file in (place.with_suffix(".py"), place / "__main__.py"):
        if name != "-m" and file.is_file():
            return file.resolve()
    raise SubmitError(
        f"no module {name!r} in {Path.cwd()}: expected -m PACKAGE.MODULE, with the package in the "
        "current folder"
    )


def trainer_and_flags(command) -> tuple[Path, list[str]]:
    """Return the file that a command runs, and the words after it. Raises SubmitError."""
    name, flags = _split(_words(command))
    return _find(name), list(flags)


def launcher() -> Here | Slurm:
    """Return Slurm if a controller answers, else Here; $DLOJZ_LAUNCHER overrides that."""
    chosen = os.environ.get("DLOJZ_LAUNCHER")
    if chosen is None:
        chosen = "slurm" if _slurm_is_here() else "local"
    if chosen not in LAUNCHERS:
        raise SubmitError(f"DLOJZ_LAUNCHER={chosen!r}: expected local or slurm, or nothing")
    return LAUNCHERS[chosen]()


_slurm_is_here = cache(slurm.is_here)
