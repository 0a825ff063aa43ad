"""Modules loaded from a path instead of by name, which two programs may share."""

import importlib.util
import os
import re
import sys
import traceback
from functools import cache
from pathlib import Path
from types import ModuleType

from dlojz import course
from dlojz.course import UserError
from dlojz.runs import source


def from_file(file: str | Path, name: str) -> ModuleType:
    """Return a Python file as a new module of this name."""
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def beside(program: str, name: str) -> ModuleType:
    """Return the module `name`.py in a program's folder: imports.beside(__file__, "optimizers").

    Python's search would depend on the way the program is run: `python -m dlojz.dlojz` looks in the
    current folder. And a check imports the solution, whose module has the trainee's name.
    """
    return from_file(course.file_beside(Path(program), f"{name}.py"), name)


def trainer(file):
    """Return the trainer as a module. Refuse another program before it is run."""
    source.must_be_trainer(file)
    try:
        return from_file(file, "solution")
    except (Exception, SystemExit) as error:
        line = line_in(file, error) or getattr(error, "lineno", None)
        where = f", line {line}" if line else ""
        raise UserError(
            f"{file}{where} can't be imported: {type(error).__name__}: {first_line(error)}"
        ) from error


def line_in(file, error) -> int | None:
    """Return the number of the last line of this file on the way to an error."""
    places = traceback.extract_tb(error.__traceback__)
    return next((p.lineno for p in reversed(places) if Path(p.filename) == Path(file)), None)


def last_line(error) -> str:
    """Return an error in a line: the place in the reader's program, its class and message."""
    places = traceback.extract_tb(error.__traceback__)
    own = [
        p for p in places if not re.search(r"/(site-packages|importlib|dlojz)/|<frozen", p.filename)
    ]
    where = f"{os.path.relpath(own[-1].filename)}, line {own[-1].lineno}: " if own else ""
    return f"{where}{type(error).__name__}: {first_line(error)}"


def first_line(error):
    """Return the first line of an error's message."""
    return next(iter(str(error).splitlines()), "no message")
