"""Where a chapter's files go, and that its notebook finds them."""

import json
import re
import tomllib
from importlib import import_module

import pytest
from programs import REPOSITORY

from dlojz import course
from dlojz.check import exercise

FOLDER = REPOSITORY / "dlojz/chapters"
FOLDERS = sorted(f.parent for f in FOLDER.glob("*/__init__.py"))
NOTEBOOKS = sorted(f.stem for f in REPOSITORY.glob("solutions/[0-9]*.ipynb"))
WHERE = "a new lesson is the folder dlojz/chapters/nNN_name: see CONTRIBUTING.md"


def code(notebook):
    cells = json.loads((REPOSITORY / f"solutions/{notebook}.ipynb").read_text())["cells"]
    return "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")


def test_each_notebook_has_a_chapter_of_its_name():
    named = {f"n{notebook}" for notebook in NOTEBOOKS} | {*course.CHAPTERS.values()}
    assert {f.name for f in FOLDERS} == named, WHERE


def test_each_exercise_lies_in_its_chapter_with_its_hints():
    for step in (*exercise.STEPS, *course.PREPARED):
        folder = FOLDER / course.chapter(step)
        missing = {"exercise.py", "hints.toml"} - {f.name for f in folder.iterdir()}
        assert not missing, f"{folder}: {WHERE}"
        assert exercise.find(step).step == step


def test_a_question_lies_in_the_chapter_of_the_notebook_that_asks_it():
    strayed = [
        f"{folder.name}: {key}"
        for folder in FOLDERS
        for name, call in (("quiz.toml", "quiz"), ("answers.toml", "answer"))
        if (folder / name).exists()
        for key in tomllib.loads((folder / name).read_text())
        if f'{call}("{key}"' not in code(folder.name[1:])
    ]
    assert strayed == []


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_a_notebook_finds_what_it_uses_on_the_chapters_face(notebook):
    source = code(notebook)
    for chapter, short in re.findall(r"from dlojz\.chapters import (\w+) as (\w+)", source):
        assert short == chapter.partition("_")[0]
        face = import_module(f"dlojz.chapters.{chapter}")
        used = set(re.findall(rf"\b{short}\.(\w+)", source))
        assert [name for name in used if not hasattr(face, name)] == []


def test_a_face_says_what_it_does_not_have():
    from dlojz.chapters import n03_channels_last

    with pytest.raises(AttributeError, match=r"no 'nothing': see dir\(n03_channels_last\)"):
        _ = n03_channels_last.nothing
    assert {"plot_memory", "addresses"} <= {*dir(n03_channels_last)}


def test_no_name_on_a_face_is_that_of_a_module_in_its_folder():
    """`from dlojz.chapters.n09_compile import graphs` would be the figure, or the module."""
    hidden = [
        f"{folder.name}: {file.stem}"
        for folder in FOLDERS
        if "face" in (folder / "__init__.py").read_text()
        for file in folder.glob("*.py")
        if file.stem in dir(import_module(f"dlojz.chapters.{folder.name}"))
    ]
    assert hidden == []


def test_each_experiment_has_a_name_of_its_own():
    names = [file.name for file in FOLDER.glob("*/experiments/*.*")]
    assert len(names) == len(set(names))
    assert all(course.experiment(name).exists() for name in names)


def test_what_chapters_share_is_four_modules():
    shared = {"session.py", "harness.py", "small.py", "resident.py"}
    assert {f.name for f in FOLDER.glob("*.py")} <= {"__init__.py"} | shared
