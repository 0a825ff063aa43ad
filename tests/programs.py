"""Programs that tests import from their files."""

import importlib.util
import sys
from pathlib import Path

EXPERIMENTS = Path(__file__).parent.parent / "notebooks/experiments"


def load(name):
    """Import an experiment."""
    return load_file(EXPERIMENTS / f"{name}.py")


def load_file(path):
    """Import a program that belongs to no package, each time it is asked for."""
    spec = importlib.util.spec_from_file_location(f"loaded_{Path(path).stem}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
