"""Modules that are loaded from a path, never searched for: two programs may have one of a name."""

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from dlojz import course


def from_file(file: str | Path, name: str) -> ModuleType:
    """Return a Python file as a new module of this name."""
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def beside(program: str, name: str) -> ModuleType:
    """Return the module `name`.py in a program's folder: imports.beside(__file__, "optimizers").

    Python's own search would depend on how the program is run, as `python -m dlojz.dlojz` looks in
    the current folder; and a check imports the solution, whose module has the trainee's name.
    """
    return from_file(course.file_beside(Path(program), f"{name}.py"), name)
