"""Programs that tests import from their files."""

import importlib.util
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent


def experiment_file(name) -> Path:
    """Return the experiment of this name, of whichever chapter."""
    (file,) = REPOSITORY.glob(f"dlojz/chapters/*/experiments/{name}")
    return file


def load(name):
    """Import an experiment."""
    return load_file(experiment_file(f"{name}.py"))


def run_main(file, folder, *flags) -> Path:
    """Run a program's main in this process; return the folder of its log."""
    module = load_file(file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(file), *map(str, flags)])
        patch.setattr(sys, "excepthook", sys.excepthook)
        patch.setenv("DLOJZ_RUN", str(folder))
        module.main()
    return folder


def load_file(path):
    """Import a program that belongs to no package, each time it is asked for."""
    spec = importlib.util.spec_from_file_location(f"loaded_{Path(path).stem}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
