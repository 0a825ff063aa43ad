"""A program's source, read to know what it is before it is run, and never run."""

import ast
import difflib
import os
import re
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from dlojz.course import UserError

# What is called of a trainer of this course.
FUNCTIONS = (
    *("parse_args", "set_numerics", "set_device", "build_model", "build_loaders"),
    *("build_training", "train_step"),
)
LIBRARIES = {"timm": "timm", "hf": "transformers"}  # of models, by the word before a colon
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
            "course's trainer, dlojz/dlojz.py. For a model of your own give `dlojz worth compile` "
            "or `dlojz estimate --model` a function that returns it, as mymodels:build"
        )
    _must_not_train(file, statements)


def _must_not_train(file, statements):
    functions = {node.name: node for node in statements if isinstance(node, ast.FunctionDef)}
    for node in statements:
        if not hasattr(node, "body") and TRAINS & _calls(node, functions):
            raise UserError(
                f"{file}, line {node.lineno}: was not run, as it would train when it is imported; "
                'expected this line under `if __name__ == "__main__":`'
            )


def names_model(word: str) -> bool:
    """Return whether a word names a model that is not the course's, such as timm:resnet50."""
    return ":" in word and not Path(word).exists()


def must_name_model(word: str):
    """Raise UserError for a model that can't be had, as far as its source says; run nothing."""
    module, _, name = word.partition(":")
    if not name or not all(part.isidentifier() for part in module.split(".")):
        raise UserError(f"{word}: expected module:function, timm:NAME or hf:NAME")
    if module.endswith(".py"):
        raise UserError(f"{word}: expected {module.removesuffix('.py')}:{name}, without .py")
    library = LIBRARIES.get(module)
    spec = _spec(library or module)
    if library and spec is None:
        raise UserError(f"{word} needs {library}, which is not installed: pip install {library}")
    if spec is None:
        raise UserError(
            f"{word}: no module {module!r} in this folder or among the installed ones; expected "
            f"{module.replace('.', '/')}.py here, as for `python -m {module}`"
        )
    if library or not (spec.origin or "").endswith(".py"):
        return
    file = Path(os.path.relpath(spec.origin))
    statements = [*_at_import(_read(file).body)]
    names = {each for node in statements for each in _defined(node) if each}
    if name not in names and not names & {"*", "__getattr__"}:
        near = difflib.get_close_matches(name, names, 3, 0.6)
        guess = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UserError(f"{file} has no function {name!r}{guess}")
    _must_not_train(file, statements)


def _spec(module):
    """Return the spec of a module, in this folder or installed, without importing its packages."""
    first, *inner = module.split(".")
    spec = PathFinder.find_spec(first, [os.getcwd()]) or PathFinder.find_spec(first)
    for name in inner:
        path = spec and spec.submodule_search_locations
        spec = path and PathFinder.find_spec(name, path)
    return spec or None


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
