"""Fixtures: small images, a course folder for one test, the trainer run in this process."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def images():
    """A folder of 4 classes with 16 training and 8 validation images each."""
    return Path(os.environ["DLOJZ_DATA"])


@pytest.fixture
def course_folder(tmp_path, monkeypatch):
    """A course folder of one's own, with the trainer, the solutions and a queue of its own."""
    root = tmp_path / "course"
    for folder in ("dlojz", "solutions"):
        (root / folder).mkdir(parents=True)
        for file in (REPOSITORY / folder).glob("*.py"):
            shutil.copy(file, root / folder)
    (root / ".course-root").touch()
    monkeypatch.chdir(root)
    monkeypatch.setenv("DLOJZ_ROOT", str(root))
    monkeypatch.setenv("DLOJZ_QUEUE", str(tmp_path / "queue"))
    monkeypatch.setenv("DLOJZ_PROGRESS", str(tmp_path / "progress.json"))
    return root


@pytest.fixture
def train(monkeypatch):
    """Run a trainer's main in this process: train(file, run folder, *flags) -> its module."""

    def call(file, folder, *flags):
        spec = importlib.util.spec_from_file_location("trainer_under_test", file)
        trainer = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(trainer)
        monkeypatch.setattr(sys, "argv", [str(file), *map(str, flags)])
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)
        monkeypatch.setenv("DLOJZ_RUN", str(folder))
        trainer.main()
        return trainer

    return call


@pytest.fixture
def stop_at_first_save(monkeypatch):
    """The next checkpoint that is written is the last thing that the run does."""
    from dlojz import checkpoint

    save = checkpoint.save

    def save_and_stop(*args, **kwargs):
        save(*args, **kwargs)
        monkeypatch.setattr(checkpoint, "save", save)
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save", save_and_stop)
