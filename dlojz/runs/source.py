"""A program's source, read to know what it is before it is run, and never run."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from dlojz.course import UserError

# What is called of a trainer of this course.
FUNCTIONS = (
    *("parse_args", "set_numerics", "set_device", "build_model", "build_loaders"),
    *("build_training", "train_step"),
)
GUARD = re.compile("__name__ == '__main__'|'__main__' == __name__")
TRAINS = {"train_step", "backward"}  # a call of one of these is a training
LOGGING = ("dlojz.training.chronometer", "dlojz.runs.log")  # with these a program writes a log


def must_be_trainer(file: Path):
    """Raise UserError for a file that is no trainer of this course, or trains when imported."""
    tree = _read(file)
    statements = [*_at_import(tree.body)]
    names = {name for node in statements for name in _defined(node)}
    if missing := [name for name in FUNCTIONS if name not in names]:
        raise UserError(
            f"{file} was not run, as it has no {', '.join(missing)}: expected the functions of the "
            "course's trainer, dlojz/dlojz.py. To try a model of your own, return it from "
            "build_model there"
        )
    functions = {node.name: node for node in statements if isinstance(node, ast.FunctionDef)}
    for node in statements:
        if not hasattr(node, "body") and TRAINS & _calls(node, functions):
            raise UserError(
                f"{file}, line {node.lineno}: was not run, as it would train when it is imported; "
                'expected this line under `if __name__ == "__main__":`'
            )


def writes_log(file: Path) -> bool:
    """Return whether a program imports the Chronometer or the log, so that it should write one."""
    try:
        nodes = [*ast.walk(_read(file))]
    except (OSError, UserError):  # it removed its own file, or is no Python
        return False
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            names += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return any(name.startswith(LOGGING) for name in names)


def _read(file):
    """Return the syntax tree of a file. Raises UserError, with the line of a mistake."""
    try:
        return ast.parse(Path(file).read_bytes())
    except SyntaxError as error:
        raise UserError(f"{file}, line {error.lineno}: {error.msg}: mend it first") from None
    except (ValueError, RecursionError, MemoryError) as error:  # zeros in it, nested too deeply
        raise UserError(f"{file} can't be read as Python: {error}") from None


def _at_import(body) -> Iterator[ast.stmt]:
    """Yield the statements that an import runs: also those within `if` and `try`."""
    for node in body:
        if isinstance(node, ast.If) and GUARD.search(ast.unparse(node.test)):
            yield from _at_import(node.orelse)
            continue
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for part in ("body", "handlers", "orelse", "finalbody"):
                yield from _at_import(getattr(node, part, ()))


def _defined(node):
    """Return the names that a statement defines."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [getattr(node, "name", None)]


def _calls(node, functions) -> set[str]:
    """Return the names of all functions and methods that a statement calls, also in functions."""
    names, todo = set(), [node]
    while todo:
        calls = [call for call in ast.walk(todo.pop()) if isinstance(call, ast.Call)]
        new = {getattr(c.func, "attr", getattr(c.func, "id", "")) for c in calls} - names
        names |= new
        todo += [functions[name] for name in new if name in functions]
    return names
