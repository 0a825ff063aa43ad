"""Modules loaded from a path instead of by name, which two programs may share."""

import importlib.util
import sys
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
        where = traceback_line(error, file)
        raise UserError(
            f"{file}{where} can't be imported: {type(error).__name__}: {first_line(error)}"
        ) from error


def traceback_line(error, file) -> str:
    """Return ", line 12" if an error arose in this file, else ""."""
    line, place = getattr(error, "lineno", None), error.__traceback__
    while place:
        if Path(place.tb_frame.f_code.co_filename) == Path(file):
            line = place.tb_lineno
        place = place.tb_next
    return f", line {line}" if line else ""


def first_line(error):
    """Return the first line of an error's message."""
    return next(iter(str(error).splitlines()), "no message")
