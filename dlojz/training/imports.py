"""Modules that are loaded from a path, never searched for: two programs may have one of a name."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def from_file(file: str | Path, name: str) -> ModuleType:
    """Return a Python file as a new module of this name."""
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
