"""The course's files and the chain of its steps. Imports neither torch nor the rest of dlojz."""

import difflib
import os
import re
from collections.abc import Collection
from datetime import datetime
from html import escape
from pathlib import Path

from dlojz.course import presets  # noqa: F401  as course.presets
from dlojz.course.files import (  # noqa: F401  as course.UserError, ...
    FULL,
    LARGE,
    MEND,
    SMALL,
    FileError,
    MissingError,
    NoRoomError,
    UserError,
    guard_compiled_code,
    locked,
    needs_room,
    no_room,
    open_regular,
    read_small,
    read_table,
    table_of,
    write_atomically,
)

MARKER = ".course-root"  # a file in the top folder of a clone

# The steps that edit the trainer. Each solution is its predecessor with the step's TODOs done; the
# first is the starter.
CHAIN = (
    *("00_start", "01_gpu", "02_amp", "03_channels_last", "04_profiler", "05_dataloader"),
    *("06_ddp", "07_augmentation", "08_large_batch", "09_compile", "10_kernels", "11_fsdp"),
)
# Exercises beside the trainer, each on the trainee's copy of a prepared file.
PREPARED = {
    "00_cluster": "allocation.sbatch",
    "04_segments": "segments.py",
    "04_slow": "slow.py",
    "09_repair": "repair.py",
    "12_parallel": "parallel.py",
    "13_search": "search.py",
}
# Those without a verdict: a figure shows whether it is right, or `dlojz pair` what has changed.
# Programs in the folder "own" know nothing of the course, and run as any other.
OWN = "own"
COPIED = {
    **PREPARED,
    "06_batchnorm": "batchnorm.py",
    "15_photos": f"{OWN}/photos.py",
    "15_letters": f"{OWN}/letters.py",
}
# Their chapters; a step's chapter has the step's name.
CHAPTERS = {
    "00_cluster": "n00c_cluster",
    "04_segments": "n04b_roofline",
    "04_slow": "n04c_slow",
    "06_batchnorm": "n06b_scaling",
    "09_repair": "n09_repair",
    "12_parallel": "n12_model_parallel",
    "13_search": "n13_search",
    "15_photos": "n15_your_own",
    "15_letters": "n15_your_own",
}
# A step's second file, which trainees write beside their trainer. It imports it by its path.
BESIDE = {"08_large_batch": "optimizers.py", "10_kernels": "kernels.py"}

STARTER = Path(__file__).parents[1] / "dlojz.py"  # in a clone this may be the trainee's file


def course_root(start=".") -> Path:
    """Return the course's top folder, $DLOJZ_ROOT or at or above `start`.

    Paths and runs/ are relative to it: a notebook's kernel starts in notebooks/ and a job anywhere.
    """
    if root := os.environ.get("DLOJZ_ROOT"):  # empty counts as unset
        return Path(root).resolve()
    here = Path(start).resolve()
    for folder in (here, *here.parents):
        if (folder / MARKER).exists():
            return folder
    raise MissingError(
        f"no course folder at or above {here}: expected a file {MARKER} in one of them; "
        "cd into your clone, or set DLOJZ_ROOT to it (the package alone has no notebooks and "
        "solutions: git clone the course's repository, whose address your instructor knows)"
    )


def in_a_clone() -> bool:
    """Return whether there is a course folder; the package runs jobs without one, too."""
    try:
        return course_root().is_dir()
    except FileNotFoundError:
        return False


def base_folder() -> Path:
    """Return the folder of runs/ and data/: the course's, or without one the current one."""
    return course_root() if in_a_clone() else Path.cwd()


def data_folder() -> Path:
    """Return the trainer's default folder of images: $DLOJZ_DATA, or data/."""
    return base_folder() / (os.environ.get("DLOJZ_DATA") or "data")


def trainer() -> Path:
    """Return the file that the trainee edits."""
    return course_root() / "dlojz" / "dlojz.py"


def step(name: str | int) -> str:
    """Return the step's full name: "01_gpu" for 1, "1", "01" and "01_gpu"."""
    text = str(name)
    for known in CHAIN:
        if text == known or (text.isdecimal() and int(text) == int(known[:2])):
            return known
    raise LookupError(
        f"no step {text!r} that edits the trainer: expected one of {', '.join(CHAIN)}"
    )


def chapter(name: str) -> str:
    """Return the chapter of a step or of a prepared exercise: a folder of dlojz/chapters/."""
    return CHAPTERS[name] if name in CHAPTERS else f"n{step(name)}"


def experiment(name: str) -> Path:
    """Return a chapter's program, such as "latency.py"."""
    found = list(course_root().glob(f"dlojz/chapters/*/experiments/{name}"))
    if not found:
        raise LookupError(f"no chapter has an experiment {name!r}")
    return found[0]


def prepared(name: str) -> Path:
    """Return the original of an exercise's file."""
    folder = course_root() / "dlojz" / "chapters" / chapter(name) / "experiments"
    return folder / (COPIED | BESIDE)[name]


def own(name: str) -> str:
    """Return the path of the trainee's copy in the course's folder; make it if it is missing.

    An existing copy stays unchanged. To begin again, rename it.
    """
    copy = trainer().with_name(BESIDE[name]) if name in BESIDE else course_root() / COPIED[name]
    if not copy.exists():
        with needs_room(copy):
            copy.parent.mkdir(exist_ok=True)
        write_atomically(copy, read_small(prepared(name)))
    return str(copy.relative_to(course_root()))


def files_beside(name: str | int) -> list[str]:
    """Return the names of the files that the trainer imports after this step."""
    place = CHAIN.index(step(name))
    return [file for other, file in BESIDE.items() if CHAIN.index(other) <= place]


def file_beside(program: Path, name: str) -> Path:
    """Return the path of a file that a trainee writes beside a program. Raises FileError."""
    file = program.resolve().with_name(name)
    if file.exists():
        return file
    copies = [f'course.own("{other}")' for other, known in BESIDE.items() if known == name]
    how = f"{copies[0]} makes your copy, in {trainer().parent}" if copies else "put it there"
    raise FileError(f"{program} imports {name}, and there is no {file}: {how}")


def solution(name: str | int) -> Path:
    """Return the trainer after this step, or a prepared file without its faults."""
    if name in COPIED:
        return course_root() / "solutions" / COPIED[name]
    return course_root() / "solutions" / f"dlojz_{step(name)}.py"


def before(name: str | int) -> Path:
    """Return the trainer before this step: its starting point."""
    place = CHAIN.index(step(name))
    return solution(CHAIN[max(0, place - 1)])


def catch_up(name: str | int) -> Path | None:
    """Replace the trainee's trainer by the starting point of a step; return its saved copy.

    The files beside it that it imports, and the one that the step edits, are replaced and saved,
    too. None if all were unchanged files of the course.
    """
    start = {trainer().name: read_small(before(name))}
    for file in files_beside(name):
        handed_out = BESIDE.get(step(name)) == file
        start[file] = read_small(prepared(step(name)) if handed_out else _solved(file))
    saved = _save()
    _put_back(start)
    return saved


def restore(name: str | None = None) -> tuple[Path, Path | None]:
    """Make a saved file the trainer again; return it, and the saved copy of the present one.

    name: one of saved(); by default the newest that differs from the trainer and is not empty.
    The files that were saved with it are restored, too.
    """
    known, mine = {file.name: file for file in saved()}, _present()
    if name is None:
        others = [f for f in known.values() if not _saved_with(f).items() <= mine.items()]
        chosen = next((file for file in reversed(others) if read_small(file)), None)
        why = f"nothing to restore: {_saved_folder()} holds no file that differs from your trainer"
    else:
        chosen, there = known.get(Path(name).name), ", ".join(known) or "nothing yet"
        why = f"no saved file {name!r}: {_saved_folder()} holds {there}"
    if chosen is None:
        raise LookupError(why)
    if not read_small(chosen):
        raise FileError(
            f"{chosen} is empty: nothing was restored; `dlojz restore --list` shows all"
        )
    content = _saved_with(chosen)
    kept = _save()
    _put_back(content)
    return chosen, kept


def saved() -> list[Path]:
    """Return the saved trainers, oldest first."""
    return sorted(_saved_folder().glob("dlojz-*.py"))


def _saved_folder():
    return course_root() / "saved"


def _solved(file):
    return course_root() / "solutions" / file


def _files() -> list[Path]:
    return [trainer(), *map(trainer().with_name, BESIDE.values())]


def _present() -> dict[str, bytes]:
    return {file.name: read_small(file) for file in _files() if file.exists()}


def _put_back(contents):
    for name, content in contents.items():
        write_atomically(trainer().with_name(name), content)


def _saved_with(copy) -> dict[str, bytes]:
    """Return the content of a saved trainer and of the files saved with it, by name."""
    when = copy.stem.removeprefix(trainer().stem)
    copies = {file.name: copy.with_stem(f"{file.stem}{when}") for file in _files()}
    return {name: read_small(file) for name, file in copies.items() if file.exists()}


def _save() -> Path | None:
    """Save the trainer and its files; return the copy. None if all are the course's."""
    mine = _present()
    known = {trainer().name: [solution(s) for s in CHAIN]}
    known |= {file: [prepared(other), _solved(file)] for other, file in BESIDE.items()}
    if all(content in map(read_small, known[name]) for name, content in mine.items()):
        return None
    for file in saved():
        if _saved_with(file) == mine:
            return file
    return save_copy(*(trainer().with_name(name) for name in mine))


def save_copy(*files: Path) -> Path:
    """Save copies of a trainee's files in saved/; return the first. Names sort by time."""
    now = f"{datetime.now():%Y%m%d-%H%M%S-%f}"
    copies = [_saved_folder() / f"{file.stem}-{now}{file.suffix}" for file in files]
    for file, copy in zip(files, copies, strict=True):
        with needs_room(copy):
            copy.parent.mkdir(exist_ok=True)
        write_atomically(copy, read_small(file, LARGE))
    return copies[0]


class Diff(str):
    """A unified diff, coloured in a notebook."""

    def _repr_html_(self):
        colours = {"+": "0,158,115,.18", "-": "213,94,0,.18", "@": "0,114,178,.14"}
        lines = "".join(
            f'<div style="background:rgba({colours.get(line[:1], "0,0,0,0")})">'
            f"{escape(line) or ' '}</div>"
            for line in self.splitlines()
        )
        return f'<pre style="line-height:1.35">{lines or "no difference"}</pre>'

    def __repr__(self):
        return str(self) or "no difference"


def diff(mine, step: str | int, parts: Collection[str] = ()) -> Diff:
    """Return the differences between a job's trainer (or a file) and the solution of a step.

    The differences of files that the solution imports follow. parts: show those sections only
    whose headings name one of them, if the file has such headings.
    """
    path = Path(getattr(mine, "directory", mine))
    path = path / "trainer.py" if path.is_dir() else path
    found = _differences(path, solution(step), parts)
    for file in [] if step in COPIED else files_beside(step):
        found += _differences(path.with_name(file), _solved(file))
    return Diff("\n".join(found))


def _differences(mine, theirs, parts=()) -> list[str]:
    """Return the lines of a unified diff; `mine` may not exist yet."""
    lines = [
        read_small(file).decode(errors="replace").splitlines()
        if file.exists() or file.name not in BESIDE.values()
        else []
        for file in (mine, theirs)
    ]
    names = _relative(mine), _relative(theirs)
    lines[1] = _with_my_others(*lines, parts)
    return [*difflib.unified_diff(*lines, *names, n=2, lineterm="")]


def _with_my_others(mine, theirs, parts) -> list[str]:
    """Return their lines, but mine in all sections whose headings name none of the parts."""
    own, solved = map(_sections, (mine, theirs))
    named = [heading for heading in own if any(part in heading for part in parts)]
    if not named or own.keys() != solved.keys():
        return theirs
    return [line for at in own for line in (solved if at in named else own)[at]]


def _sections(lines) -> dict[str, list[str]]:
    """Return the lines of each section, by its heading, "# 12a, by hand ---"."""
    found, heading = {}, ""
    for line in lines:
        heading = line if re.fullmatch(r"# .*---", line) else heading
        found.setdefault(heading, []).append(line)
    return found


def _relative(path):
    root = course_root()
    return str(path.relative_to(root) if path.is_relative_to(root) else path)
