"""environment.yml, pyproject.toml and constraints.txt: three files for one set of packages."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

REPOSITORY = Path(__file__).parent.parent
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
CONDA = yaml.safe_load((REPOSITORY / "environment.yml").read_text())
EXTRAS = PROJECT["optional-dependencies"]


def pinned(text):
    """Return the version of each package that a file of constraints pins."""
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    found = [Requirement(line) for line in lines if line]
    assert all(re.fullmatch(r"==[^*,]+", str(each.specifier)) for each in found)
    return {canonicalize_name(each.name): Version(str(each.specifier)[2:]) for each in found}


PINNED = pinned((REPOSITORY / "constraints.txt").read_text())


def required():
    """Return what the package and its extras require, but itself."""
    lines = [*PROJECT["dependencies"], *(line for extra in EXTRAS.values() for line in extra)]
    return [each for each in map(Requirement, lines) if each.name != PROJECT["name"]]


@pytest.mark.parametrize("requirement", required(), ids=lambda each: each.name)
def test_what_is_required_is_pinned_to_a_version_that_is_admitted(requirement):
    version = PINNED[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(version)


def test_conda_gets_a_python_that_the_package_admits():
    (python,) = [each for each in CONDA["dependencies"] if str(each).startswith("python=")]
    version = python.removeprefix("python=")
    assert SpecifierSet(PROJECT["requires-python"]).contains(Version(version))


def test_conda_has_pip_install_the_package_with_the_constraints():
    """All else comes from pip, so that a package is not there twice, in two versions."""
    assert CONDA["channels"] == ["conda-forge"], "no channel that needs a licence"
    others = [each for each in CONDA["dependencies"] if isinstance(each, str)]
    assert sorted(each.partition("=")[0] for each in others) == ["pip", "python"]
    (by_pip,) = [each["pip"] for each in CONDA["dependencies"] if isinstance(each, dict)]
    assert by_pip == ["-c constraints.txt", "-e .[dev]"]
    (extras,) = re.findall(r"\[(.*)\]", by_pip[1])
    assert set(extras.split(",")) <= set(EXTRAS)
    assert (REPOSITORY / "constraints.txt").exists()


def test_the_environment_has_the_name_that_its_first_line_activates():
    first = (REPOSITORY / "environment.yml").read_text().splitlines()[0]
    assert f"conda activate {CONDA['name']}" in first
