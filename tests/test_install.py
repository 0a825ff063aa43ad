"""The package as a site installs it: not editable, read-only, shared by many clones."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The package in a folder of its own, copied as pip would."""
    folder = tmp_path_factory.mktemp("site")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    shutil.copytree(REPOSITORY / "dlojz", source / "dlojz")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--target", str(folder / "packages"), str(source)]
    subprocess.run(command, check=True)
    shutil.rmtree(source)
    return folder / "packages"


def test_another_clone_submits_its_own_trainer_with_the_installed_package(site, course_folder):
    shutil.rmtree(course_folder / "dlojz")
    (course_folder / "dlojz").mkdir()
    (course_folder / "dlojz" / "dlojz.py").write_text(
        "import dlojz.runs.log; print(dlojz.runs.log.__file__)"
    )
    code = (
        "import dlojz.launch as l; print(l.__file__); j = l.submit('dlojz/dlojz.py'); j.wait(30); "
        "print((j.directory / 'stdout.txt').read_text(), j.directory)"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    launch, log, *_, directory = done.stdout.split()
    assert launch == str(site / "dlojz" / "launch" / "__init__.py")
    assert log == str(site / "dlojz" / "runs" / "log.py")
    assert directory == str(course_folder / "runs" / "0001")


def test_the_console_script_is_there(site):
    assert (site / "bin" / "dlojz").exists()
