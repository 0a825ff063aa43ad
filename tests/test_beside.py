"""Trainers of several files: what runs is what was submitted; what is missing is named before."""

import json
import os
import sys

import pytest

from dlojz import course
from dlojz.launch import SubmitError, beside, find, jobs, submit

FILES = {
    "train.py": "import os, net\nfrom models.blocks import block\nprint(net.name, block)",
    "net.py": "from layers import deep as name",
    "layers/__init__.py": "from .wide import deep",
    "layers/wide.py": "from . import far\ndeep = f'deep {far.away}'",
    "layers/far.py": "away = 'away'",
    "layers/by_name.py": "",
    "layers/more/__init__.py": "",
    "layers/data/notes.txt": "",
    "layers/data/script.py": "",
    "models/blocks.py": "from .parts import block",
    "models/parts.py": "block = 'block'",
    "models/unused.py": "import nothing_of_the_kind",
    "unused.py": "",
    "os.txt": "",
}
NEEDED = [
    *("layers/__init__.py", "layers/by_name.py", "layers/far.py", "layers/more/__init__.py"),
    *("layers/wide.py", "models/blocks.py", "models/parts.py", "net.py"),
]


@pytest.fixture
def project(course_folder, monkeypatch):
    """A trainer with modules and a package, in a folder of its own, which is the current one."""
    folder = course_folder.parent / "project"
    write(folder, FILES)
    monkeypatch.chdir(folder)
    return folder


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def needs(folder, name="train.py"):
    trainer = folder / name
    return sorted(beside.modules(trainer, trainer.read_bytes()))


def test_the_modules_that_a_trainer_imports_are_found(project):
    assert needs(project) == NEEDED


def test_what_runs_is_what_was_submitted_with_its_modules(project):
    first = submit("train.py")
    for name in NEEDED:
        (project / name).write_text("raise ValueError('edited later')")
    assert first.wait(30) == "COMPLETED", first.explain()
    assert (first.directory / "stdout.txt").read_text() == "deep away block\n"
    assert json.loads((first.directory / "job.json").read_text())["modules"] == NEEDED


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import net as n", ["net.py"]),
        ("if True:\n  def f():\n    import net", ["net.py"]),
        ("try:\n  import net\nexcept ImportError: pass", ["net.py"]),
        ("import importlib; importlib.import_module('net')", ["net.py"]),
        ("__import__('net')", ["net.py"]),
        ("from pack.sub import x", ["pack/sub.py"]),
        ("import pack.sub.x", ["pack/sub.py"]),
        ("import pack", []),
        ("from pack import sub, other", ["pack/sub.py"]),
        ("import dlojz, os, torch", []),
        ("from dlojz import net", []),
        ("import absent", []),
        ("from . import net", ["net.py"]),
        ("import back", ["back.py", "train.py"]),  # which imports the trainer by its name
        ("import broken", ["broken.py"]),
        ("import native", ["native.so"]),
        ("import pipe, folder", []),
        ("import loop", ["loop/__init__.py"]),
    ],
)
def test_only_what_is_beside_it_is_taken(source, found, tmp_path):
    write(
        tmp_path,
        {"net.py": "", "pack/sub.py": "", "dlojz/net.py": "", "dlojz/__init__.py": ""}
        | {"back.py": "import train", "train.py": source, "broken.py": "def (", "native.so": ""}
        | {"loop/__init__.py": "import loop"},
    )
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "loop" / "again").symlink_to(tmp_path / "loop")
    assert needs(tmp_path) == found


def test_a_module_may_import_a_trainer_that_is_called_trainer(tmp_path):
    write(tmp_path, {"trainer.py": "import back", "back.py": "import trainer"})
    assert needs(tmp_path, "trainer.py") == ["back.py"]


def test_the_courses_own_trainer_takes_nothing_along(course_folder):
    (course_folder / "dlojz" / "torch.py").write_text("")
    assert needs(course_folder, "dlojz/dlojz.py") == []
    assert beside.missing(course.trainer(), {"dlojz.py": b"import absent"}) is None


@pytest.mark.parametrize("python", ["", sys.executable])
def test_an_import_that_cannot_be_found_is_told_before_it_is_queued(project, python, monkeypatch):
    monkeypatch.setenv("DLOJZ_PYTHON", python)
    write(project, {"net.py": "import os\nimport absent_module.x\nname = 1"})
    with pytest.raises(SubmitError) as error:
        submit("train.py")
    said = str(error.value)
    assert said.startswith(f"{project}/net.py, line 2: imports absent_module, which is neither")
    assert "`export PYTHONPATH=FOLDER`" in said
    assert said.endswith("nothing was submitted")
    assert jobs() == []


@pytest.mark.parametrize(
    "source",
    [
        "try:\n  import absent\nexcept ImportError: pass",
        "if False: import absent",
        "def f(): import absent",
        "import sys\nsys.path.append('/somewhere')\nimport absent",
        "import __main__, sys, zipimport, _thread",
        "import torch, dlojz.launch, numpy as np",
        "from __future__ import annotations",
    ],
)
def test_an_import_that_may_be_right_is_not_refused(source, tmp_path):
    assert beside.missing(tmp_path / "train.py", {"train.py": source.encode()}) is None


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"trainer.py": ""}, r"imports trainer\.py, and a job has another file of that name"),
        (
            {"cancel/__init__.py": ""},
            r"imports cancel/__init__\.py, .*: rename it, such as my_canc",
        ),
        ({"torchrun/a.py": ""}, r"imports torchrun/a\.py, and a job has another"),
    ],
)
def test_a_module_with_the_name_of_a_jobs_file_is_refused(files, told, project):
    name = next(iter(files)).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    write(project, files | {"train.py": f"import {name}"})
    with pytest.raises(SubmitError, match=told):
        submit("train.py")
    assert jobs() == []


def test_several_processes_find_the_modules_too(project):
    write(project, {"train.py": f"# forked\n{FILES['train.py']}"})
    job = submit("train.py", n_gpu=2)
    assert job.wait(120) == "COMPLETED", job.explain()


def test_a_dry_run_copies_nothing(project):
    assert repr(submit("train.py", dry_run=True)).endswith("train.py")
    with pytest.raises(LookupError):
        find(1)


def test_a_module_in_a_folder_of_a_package_is_found(project):
    """Of a folder without __init__.py, and of a linked package, Python imports what is named."""
    write(project, {"layers/plain/one.py": "", "elsewhere/__init__.py": "", "elsewhere/two.py": ""})
    (project / "layers/linked").symlink_to(project / "elsewhere")
    write(project, {"train.py": "import layers.plain.one\nfrom layers.linked import two"})
    assert {"layers/plain/one.py", "layers/linked/two.py"} <= set(needs(project))


def test_a_module_that_cannot_be_read_is_named(project, monkeypatch):
    def refuse(*_):  # root may read all
        raise PermissionError(13, "Permission denied", "net.py")

    monkeypatch.setattr(beside, "modules", refuse)
    with pytest.raises(
        SubmitError, match=r"(?s)Permission denied: 'net.py'.*nothing was submitted"
    ):
        submit("train.py")


def test_a_module_of_data_is_copied_and_not_parsed(project):
    write(project, {"train.py": "import table", "table.py": f"{'#' * (1 << 20)}\nimport net"})
    assert needs(project) == ["table.py"]
