"""The files beside a program: copies of those that it imports, and links to the rest.

The imports are found by reading the sources, where Python would look first when the program is run:
in its folder. Of a package all Python files are taken, because it may import some by a computed
name. Of a folder without `__init__.py` only the modules that are named: it may hold a million
images.

A trainer of the course lies in its job's folder as trainer.py. Any other program lies in program/
there, in a mirror of its project: what was copied is what runs, and what was not, such as data or a
module that it finds by a computed name, is reached in its place through links.
"""

import ast
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import invalidate_caches
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES, PathFinder
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

from dlojz import course
from dlojz.training.flags import is_ours

COPY = "trainer.py"  # what the trainer is called in the folder of its job
MIRROR = "program"  # the folder there of a program that is not the course's
MODULE = "_start_.py"  # there: starts a module by its name, as `python -m` does
WATCHED = "_watched_.py"  # there: starts the program under watch
OURS = (MODULE, WATCHED)
PROJECT = (".git", "pyproject.toml")  # one of them is in the top folder of a project
LARGE = 1 << 20  # bytes of a module that was not written by hand
MOST = 16 << 20  # bytes of a file that is copied into a mirror
MOST_LINKS = 1000  # files beside a program: a folder with more is one of data
TAKEN = "and a job has another file of that name: rename it"
CHANGES_PATH = re.compile(rb"\bsys\b[ .\w]*\bpath\b|addsitedir")
PACKAGE = Path(__file__).resolve().parent.parent  # which is installed, for all jobs


@dataclass(frozen=True)
class Program:
    """A program as it is now, laid out for the folder of its job. All paths are relative to it."""

    home: Path  # its own folder, which Python searches first
    sources: Mapping[str, bytes]  # the files that were read, by path in that folder
    start: str  # the file to run
    copies: Mapping[str, bytes]
    links: Mapping[str, str] = field(default_factory=dict)  # to files and folders in their places
    folder: str = ""  # the current folder of its processes; "": the course's


def program(trainer: Path, module: str = "", here: Path | None = None) -> Program:
    """Return the program of a file. Raises OSError.

    module: its name, if it is started as `python -m NAME`. here: from which folder; by default the
        current one.
    """
    trainer = trainer.resolve()  # Python, too, looks beside the file of a link
    here = here or Path.cwd()
    source = trainer.read_bytes()
    if not module and not _is_mirrored(trainer):
        found = modules(trainer, source)
        if COPY in found:
            raise ValueError(f"{trainer} imports {COPY}, {TAKEN}, such as my_{COPY}")
        own = {trainer.name: source} | found
        return Program(trainer.parent, own, COPY, {COPY: source} | found)
    home = here if module else trainer.parent
    found = {str(trainer.relative_to(home)): source}
    found |= modules(trainer, source, home, module, MOST)
    top = _top(home, here)
    inside = Path(MIRROR, home.relative_to(top))
    copies = {str(inside / path): content for path, content in found.items()}
    links = {COPY: next(iter(copies))} | _links(top, copies)
    start = links[COPY]
    if module:
        start = str(inside / MODULE)
        run = f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
        copies[start] = f"import runpy\n\n{run}\n".encode()
    return Program(home, found, start, copies, links, str(here))


def watched(program: Program) -> Program:
    """Return a program that lies in a mirror as one that `dlojz.watch.program` runs."""
    start = Path(program.start).with_name(WATCHED)
    run = f"program.run(Path(__file__).with_name({Path(program.start).name!r}))"
    lines = "from pathlib import Path", "", "from dlojz.watch import program", "", run, ""
    copies = {**program.copies, str(start): "\n".join(lines).encode()}
    return replace(program, start=str(start), copies=copies)


def _is_mirrored(trainer) -> bool:
    """Return whether a program is neither the course's nor a copy that a job has already."""
    if trainer.parent.name == course.OWN:
        return not is_ours(trainer)
    if (trainer.parent / "job.json").exists() or trainer.is_relative_to(PACKAGE):
        return False
    if course.in_a_clone():
        root = course.course_root()
        if any(trainer.is_relative_to(root / name) for name in ("dlojz", "solutions")):
            return False
        if trainer.parent == root and trainer.name in course.COPIED.values():
            return False
    return not is_ours(trainer)


def _top(folder, here) -> Path:
    """Return the folder that a mirror begins with: of the project, else the current one."""
    above = [f for f in (folder, *folder.parents) if f not in (Path.home(), Path("/"))]
    projects = (f for f in above if any((f / name).exists() for name in PROJECT))
    return next(projects, here if here in above else folder)


def _links(top, copies) -> dict[str, str]:
    """Return links to all that is beside these copies, and beside the folders that they are in."""
    folders = {str(above) for path in copies for above in Path(path).parents} - {"."}
    runs, links = course.base_folder() / "runs", {}
    for name in folders:
        real = top / Path(name).relative_to(MIRROR)
        with os.scandir(real) as entries:
            beside = [*islice(entries, MOST_LINKS + 1)]
        for entry in beside if len(beside) <= MOST_LINKS else ():
            path = f"{name}/{entry.name}"
            ours = entry.name in ("__pycache__", PACKAGE.name) or real / entry.name == runs
            if not ours and path not in copies and path not in folders:
                links[path] = str(real / entry.name)
    return links


def modules(
    trainer: Path, source: bytes, folder: Path | None = None, name: str = "", most: float = 1 << 60
) -> dict[str, bytes]:
    """Return the content of the modules beside a trainer that it imports, by path in its folder.

    folder: where they are, if not in the trainer's. name: a module whose packages are imported
    before it. most: the bytes of the largest file to take.
    """
    invalidate_caches()  # it may have been written just now
    trainer = trainer.resolve()
    folder = folder or trainer.parent
    trainees = _is_the_courses(trainer)
    unread, found = [(str(trainer.relative_to(folder)), source)], {}
    more = [*_files(folder, name)] if name else []
    while unread:
        importer, text = unread.pop()
        package = Path(importer).parent.parts
        for node in ast.walk(_tree(text)):
            for imported in _names(node, package):
                more += _trainees(trainer, imported) if trainees else _files(folder, imported)
        for file in more:
            path = str(file.relative_to(folder))
            taken = path in found or (file == trainer and path == COPY)
            if not taken and file.stat().st_size <= most:
                found[path] = file.read_bytes()
                unread.append((path, found[path]))
        more = []
    return found


def sources(trainer: Path) -> dict[str, bytes]:
    """Return the content of a trainer and of its modules, by their paths beside it."""
    source = trainer.read_bytes()
    return {COPY: source} | modules(trainer, source)


def missing(trainer: Path, sources: dict[str, bytes]) -> tuple[str, int, str] | None:
    """Return (file, line, name) of an import that is bound to fail in this Python, if there is one.

    sources: those of the trainer and of the modules beside it, by path. A name that is imported
    inside `try`, `if` or a function may be optional, and what changes Python's path is trusted.
    """
    if _is_the_courses(trainer) or any(map(CHANGES_PATH.search, sources.values())):
        return None
    for path, source in sources.items():
        for node in _tree(source).body if "/" not in path else ():
            for name in _names(node, ()):
                top = name.partition(".")[0]
                if not _is_found(trainer.parent, top):
                    return path, node.lineno, top
    return None


def _is_the_courses(trainer):
    mine = (course.course_root() / "dlojz",) if course.in_a_clone() else ()
    return trainer.parent in mine or trainer.is_relative_to(PACKAGE)


def _tree(source) -> ast.Module:
    """Return the syntax tree of a module; an empty one for data, which takes seconds to parse."""
    try:
        return ast.parse(source if len(source) < LARGE else b"")
    except (MemoryError, RecursionError, SyntaxError, ValueError):  # Python will say so
        return ast.Module([], [])


def _names(node, package) -> Iterator[str]:
    """Yield the full names that a statement or a call imports; nothing for others."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = package[: len(package) + 1 - node.level] if node.level else ()
        module = ".".join((*base, *filter(None, [node.module])))
        yield from (f"{module}.{alias.name}".lstrip(".") for alias in node.names)
    elif isinstance(node, ast.Call):
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if called in ("import_module", "__import__", "beside"):  # our own takes __file__ first
            yield from (str(arg.value) for arg in node.args if isinstance(arg, ast.Constant))


def _trainees(trainer, name: str) -> Iterator[Path]:
    """Yield the file that this import needs, of those that a trainee writes among the course's."""
    if (file := f"{name}.py") in course.BESIDE.values():
        yield course.file_beside(trainer, file)


def _files(folder, name: str) -> Iterator[Path]:
    """Yield the files in a trainer's folder of which this import needs one."""
    for part in name.split("."):
        spec = PathFinder.find_spec(part, [str(folder)])
        if spec is None or part == PACKAGE.name:
            return
        if not spec.submodule_search_locations:
            yield Path(spec.origin)
            return
        folder /= part
        if spec.origin:  # else it has no __init__.py
            yield from _package(folder)


def _package(folder) -> Iterator[Path]:
    for entry in os.scandir(folder):
        if entry.is_file() and entry.name.endswith((*SOURCE_SUFFIXES, *EXTENSION_SUFFIXES)):
            yield Path(entry.path)
        elif entry.is_dir(follow_symlinks=False) and os.path.isfile(f"{entry.path}/__init__.py"):
            yield from _package(entry.path)


def _is_found(folder, name) -> bool:
    if name in sys.stdlib_module_names or PathFinder.find_spec(name, [str(folder)]):
        return True
    try:
        return find_spec(name) is not None
    except ValueError:  # __main__
        return True
