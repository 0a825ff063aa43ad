"""The modules beside a trainer that it imports, itself or through others: a job gets copies of all.

They are found by reading the sources, where Python would look first when the trainer is run: in its
folder. Of a package all Python files are taken, because it may import some by a computed name. Of a
folder without `__init__.py` only the modules that are named: it may hold a million images.
"""

import ast
import os
import re
import sys
from collections.abc import Iterator
from importlib import invalidate_caches
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES, PathFinder
from importlib.util import find_spec
from pathlib import Path

from dlojz import course

COPY = "trainer.py"  # what the trainer is called in the folder of its job
LARGE = 1 << 20  # bytes of a module that was not written by hand
CHANGES_PATH = re.compile(rb"\bsys\b[ .\w]*\bpath\b|addsitedir")
PACKAGE = Path(__file__).resolve().parent.parent  # which is installed, for all jobs


def modules(trainer: Path, source: bytes) -> dict[str, bytes]:
    """Return the content of the modules beside a trainer that it imports, by path in its folder."""
    invalidate_caches()  # it may have been written just now
    trainer = trainer.resolve()  # Python, too, looks beside the file behind a link
    find = _trainees if _is_the_courses(trainer) else _files
    found, unread = {}, [(trainer.name, source)]
    while unread:
        importer, text = unread.pop()
        package = Path(importer).parent.parts
        names = (name for node in ast.walk(_tree(text)) for name in _names(node, package))
        for file in (file for name in names for file in find(trainer, name)):
            path = str(file.relative_to(trainer.parent))
            if path not in found and (file != trainer or path != COPY):
                found[path] = file.read_bytes()
                unread.append((path, found[path]))
    return found


def sources(trainer: Path) -> dict[str, bytes]:
    """Return the content of a trainer and of its modules, by the paths of a job's copies."""
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


def _files(trainer, name: str) -> Iterator[Path]:
    """Yield the files in a trainer's folder of which this import needs one."""
    folder = trainer.parent
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
