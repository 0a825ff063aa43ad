"""Trainers of several files: what runs is what was submitted; what is missing is named before."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import wrong

from dlojz import cli, course
from dlojz.check import check, plan
from dlojz.check import exercise as exercises
from dlojz.course import progress
from dlojz.launch import SubmitError, beside, jobs, latest, series, submit
from dlojz.training import imports

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
    assert json.loads((first.directory / "job.json").read_text())["modules"] == [
        *(f"program/{name}" for name in sorted([*NEEDED, "train.py"])),
    ]


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
def test_a_module_with_the_name_of_a_jobs_file_is_refused(files, told, course_folder):
    """Among the files of a job lie the course's own programs; others have a folder there."""
    name = next(iter(files)).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    mine = next(iter(course.COPIED.values()))
    write(course_folder, files | {mine: f"import {name}"})
    with pytest.raises(SubmitError, match=told):
        submit(mine)
    assert jobs() == []


# What is beside a program ------------------------------------------------------------------------

AROUND = {
    "project/.git/HEAD": "",
    "project/config.json": "around",
    "project/src/train.py": """
        import importlib, json, os, sys
        from pathlib import Path
        import trainer
        here = Path(__file__).parent
        print(trainer.name, (here / "words.txt").read_text(), (here / "../config.json").read_text())
        print(importlib.import_module("found" + "_late").__name__, open("note.txt").read())
        print(os.getcwd(), Path(sys.argv[0]).name, sys.path[0] == str(here))
        """,
    "project/src/trainer.py": "name = 'beside'",
    "project/src/found_late.py": "",
    "project/src/words.txt": "words",
    "project/note.txt": "by hand",
    "project/src/note.txt": "from its folder",
}

PACKAGE = {
    "pack/__init__.py": "print('init')",
    "pack/train.py": "import sys\nfrom .parts import name\nprint(name, __name__, sys.argv[1:])",
    "pack/parts.py": "name = 'parts'",
}


@pytest.fixture
def around(course_folder, monkeypatch):
    """A program in a folder of a project, with files beside it and around it."""
    write(course_folder.parent, {name: textwrap.dedent(text) for name, text in AROUND.items()})
    monkeypatch.chdir(course_folder.parent / "project")
    return course_folder.parent / "project"


@pytest.mark.parametrize("folder", ["", "src"])
def test_a_job_finds_what_the_program_finds_by_hand(folder, around, monkeypatch):
    monkeypatch.chdir(around / folder)
    file = "train.py" if folder else "src/train.py"
    by_hand = subprocess.run([sys.executable, file], capture_output=True, text=True).stdout
    note = (around / folder / "note.txt").read_text()
    expected = f"beside words around\nfound_late {note}\n{around / folder} train.py True\n"
    assert by_hand == expected
    job = submit(file)
    (around / "src/trainer.py").write_text("raise ValueError('edited later')")
    assert job.wait(30) == "COMPLETED", job.explain()
    assert (job.directory / "stdout.txt").read_text() == by_hand
    links = job.info["links"]
    assert {"program/config.json", "program/src/words.txt", "program/src/found_late.py"} <= {*links}
    assert not {name for name in links if "runs" in name or name.endswith("/dlojz")}


def test_a_program_of_the_courses_folder_runs_there(course_folder, monkeypatch):
    """Wherever a notebook is that names it so."""
    write(course_folder, {"mine.py": "import os; print(os.getcwd())", "notebooks/note.txt": ""})
    monkeypatch.chdir(course_folder / "notebooks")
    job = submit("mine.py")
    assert job.wait(30) == "COMPLETED"
    assert (job.directory / "stdout.txt").read_text() == f"{course_folder}\n"


def test_a_module_runs_by_its_name_and_as_a_copy(around):
    write(around, PACKAGE)
    job = submit("-m pack.train --lr 1")
    (around / "pack/parts.py").write_text("raise ValueError('edited later')")
    assert job.wait(30) == "COMPLETED", job.explain()
    said = (job.directory / "stdout.txt").read_text()
    assert said == "init\nparts __main__ ['--lr', '1']\n"
    assert job.command == "-m pack.train --lr 1"


def test_a_file_that_is_not_in_the_current_folder_is_found_for_the_user(around):
    (around / "src/opens.py").write_text("open('words.txt')")
    job = submit("src/opens.py")
    job.wait(30)
    assert f"words.txt is in {around}/src, and not in the current folder" in job.status["reason"]


def test_a_large_file_and_a_folder_of_data_stay_where_they_are(around, monkeypatch):
    monkeypatch.setattr(beside, "MOST", 10)
    monkeypatch.setattr(beside, "MOST_LINKS", 5)
    write(around / "src", {f"images/{i}.txt": "" for i in range(9)})
    found = beside.program(around / "src/train.py")
    assert [*found.copies] == ["program/src/train.py"]
    assert not any("src" in path for path in found.links if path != "trainer.py"), "it has 6"
    monkeypatch.setattr(beside, "MOST_LINKS", 99)
    links = beside.program(around / "src/train.py").links
    assert links["program/src/images"] == str(around / "src/images")
    assert links["program/src/trainer.py"] == str(around / "src/trainer.py"), "too large to copy"


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("python src/train.py", r"begins with 'python': expected the file to run, or -m MODULE"),
        ("torchrun src/train.py", "without it; -n gives the number of processes"),
        ("-m pack.absent", r"no module 'pack.absent' in .*: expected -m PACKAGE.MODULE"),
        ("-m", "no module '-m'"),
    ],
)
def test_a_command_without_a_program_says_how_it_begins(command, told, around):
    with pytest.raises(SubmitError, match=told):
        submit(command)
    assert jobs() == []


def test_several_processes_find_the_modules_too(project):
    write(project, {"train.py": f"# forked\n{FILES['train.py']}"})
    job = submit("train.py", n_gpu=2)
    assert job.wait(120) == "COMPLETED", job.explain()


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


# The second file of a step, which a trainee writes beside the trainer ----------------------------

FILE = "optimizers.py"
SOLVED = """import torch

print("imported", __file__)


def sgd(weights, args, **more):
    return torch.optim.SGD(weights, args.lr, args.mom, weight_decay=args.wd, **more)
"""
WRONG = SOLVED.replace("args.wd", "0")
HANDED_OUT = WRONG.replace("    return", "    # TODO 01: weight decay\n    return")
SMALL = "--test --data synthetic --model shufflenet_v2_x0_5 --image-size 32 -b 4 --test-nsteps 8"


def importing(text):
    """A trainer that has its optimizer from the file beside it."""
    return text.replace("torch.optim.SGD(", 'imports.beside(__file__, "optimizers").sgd(').replace(
        "args.lr, args.mom, weight_decay=args.wd", "args"
    )


@pytest.fixture
def with_file(course_folder, monkeypatch):
    """A course folder in which step 01 has a second file, and the trainee is at step 02."""
    monkeypatch.setattr(course, "BESIDE", {"01_gpu": FILE})
    handed_out = course.prepared("01_gpu")
    handed_out.parent.mkdir(parents=True)
    handed_out.write_text(HANDED_OUT)
    (course_folder / "solutions" / FILE).write_text(SOLVED)
    for step in course.CHAIN[1:]:
        solution = course.solution(step)
        solution.write_text(importing(solution.read_text()))
    shutil.copy(course.solution("02"), course.trainer())
    return course_folder


def mine():
    return course.trainer().with_name(FILE)


def texts():
    return course.trainer().read_text(), mine().read_text()


def imported_by(folder):
    return re.findall("imported (.*)", (folder / "stdout.txt").read_text())


def checked(text, **more):
    """Submit the trainer with this file beside it; return the job and its verdict for step 02."""
    mine().write_text(text)
    job = submit(f"dlojz/dlojz.py {SMALL}")
    mine().write_text(more.get("edited", text))
    assert job.wait(60) == "COMPLETED", job.explain()
    return job, check("02", job, pairs=1)


def test_only_the_trainees_runs_have_the_trainees_file(with_file, capsys):
    job, found = checked(WRONG, edited="edited later")
    assert {"settings", "update"} <= {finding.hint for finding in found.failing}, found
    assert f"{FILE} has changed since job {job.id}" in repr(found)
    folders = series.folders(latest("check-02_amp"))
    made = {name: f for name, f in folders.items() if (f / "exit_code").exists()}
    assert {"solution", "yours"} <= made.keys(), "what is wrong shows before the pairs"
    for name, folder in made.items():
        solved = name.startswith("before-") or name.endswith("solution")
        assert (folder / FILE).read_text() == (SOLVED if solved else WRONG), name
        assert imported_by(folder) == [f"{folder / FILE}"], name
    assert imported_by(made["yours"] / "replay") == [f"{made['solution'] / FILE}"]
    # An edit of the file is another text: what it said is no answer, the solution's runs are.
    _, found = checked(SOLVED)
    assert not {"settings", "update"} & {finding.hint for finding in found.failing}, found
    ran = re.findall(r"(\d+) runs, about", capsys.readouterr().err)
    assert int(ran[1]) < int(ran[0])


def test_an_error_in_the_file_is_named_by_its_line(with_file):
    mine().write_text("import torch\n\n\ndef sgd(*_, **__):\n    planted\n")
    job = submit(f"dlojz/dlojz.py {SMALL}")
    job.wait(60)
    assert f"'planted' is not defined, at {FILE}:5: planted" in repr(check("01", job))


def test_what_is_left_to_do_in_the_file_is_told(with_file):
    assert course.own("01_gpu") == f"dlojz/{FILE}"
    notes = plan.notes(exercises.find("01_gpu"), submit("dlojz/dlojz.py --help"))
    assert notes == [f"`TODO 01` is still in line 7 of {FILE}"]


def test_a_job_without_the_file_is_refused(with_file):
    with pytest.raises(SubmitError, match=r'course\.own\("01_gpu"\) makes your copy, in .*/dlojz'):
        submit(f"dlojz/dlojz.py {SMALL}")
    assert jobs() == []


@pytest.mark.parametrize(
    "command",
    [
        "-m dlojz.dlojz",
        "-P solutions/dlojz_02_amp.py",
        "-m torch.distributed.run --standalone -m dlojz.dlojz",
    ],
)
def test_each_program_imports_the_file_beside_itself(command, with_file, monkeypatch):
    """However it is run, and whatever else Python would find under that name."""
    shutil.copytree(Path(course.__file__).parents[1], with_file / "dlojz", dirs_exist_ok=True)
    program = "from dlojz.training import imports\nimports.beside(__file__, 'optimizers')"
    for file in (course.trainer(), course.solution("02")):
        file.write_text(program)
        file.with_name(FILE).write_text("print(__file__)")
    for other in (with_file, with_file / "elsewhere"):
        other.mkdir(exist_ok=True)
        (other / FILE).write_text("raise ValueError('not this one')")
    monkeypatch.setenv("PYTHONPATH", f"{with_file / 'elsewhere'}:{with_file}")
    words = [sys.executable, *command.split()]
    done = subprocess.run(words, capture_output=True, text=True, cwd=with_file)
    where = "solutions" if "solutions" in command else "dlojz"
    assert done.stdout == f"{with_file / where / FILE}\n", done.stderr


def test_a_program_without_its_file_says_how_to_get_it(with_file):
    with pytest.raises(course.FileError, match=rf'there is no {mine()}: course\.own\("01_gpu"'):
        imports.beside(str(course.trainer()), "optimizers")
    (with_file / "other.py").write_text("")
    with pytest.raises(course.FileError, match=rf"there is no {with_file}/net\.py: put it there"):
        imports.beside(str(with_file / "other.py"), "net")


def test_catching_up_replaces_the_file_and_saves_it_with_the_trainer(with_file, capsys):
    course.trainer().write_text("my trainer")
    mine().write_text("my file")
    assert cli.main(["catch-up", "01"]) == 0
    assert f"and so is {mine()}\n" in capsys.readouterr().out
    assert texts() == (course.before("01").read_text(), HANDED_OUT)
    assert course.catch_up("03") is None, "all of it is the course's"
    assert texts() == (course.before("03").read_text(), SOLVED)
    chosen, _ = course.restore()
    assert texts() == ("my trainer", "my file")
    mine().write_text("edited")
    assert course.catch_up("03") != chosen
    assert course.restore()[0] != chosen
    assert texts() == ("my trainer", "edited")


def test_before_its_step_the_file_is_left_alone(with_file):
    mine().write_text("for later")
    assert course.catch_up("00").name.startswith("dlojz-")
    assert mine().read_text() == "for later"


def test_a_difference_shows_the_file_too(with_file, capsys):
    assert "+def sgd(weights" in course.diff(course.trainer(), "02"), "there is none yet"
    mine().write_text(WRONG)
    found = course.diff(course.trainer(), "02").splitlines()
    assert found[:2] == [f"--- dlojz/{FILE}", f"+++ solutions/{FILE}"]
    assert [line[0] for line in found if "weight_decay" in line] == ["-", "+"]
    assert FILE not in course.diff(course.trainer(), "00")
    assert cli.main(["solution", "02"]) == 0
    assert capsys.readouterr().err == f"it imports {with_file}/solutions/{FILE}, beside it\n"


def test_progress_names_the_file_of_a_step(with_file):
    cell = {"cell_type": "code", "source": ["check('01_gpu')"]}
    (with_file / "notebooks").mkdir()
    (with_file / "notebooks" / "01_gpu.ipynb").write_text(json.dumps({"cells": [cell]}))
    assert f"verdict with {FILE}" in repr(progress.overview())


@pytest.mark.parametrize("folder", ["01_gpu", wrong.RIGHT])
def test_a_wrong_answer_may_differ_in_the_file_alone(folder, with_file, tmp_path):
    usual, expected = wrong.solved("01_gpu"), course.solution("01").read_text()
    assert [*usual] == [course.solution("01").name, FILE]
    answer = wrong.Wrong(tmp_path / folder / "no-decay.diff", "settings", "no weight decay")
    wrong.write(answer, usual, usual | {FILE: WRONG})
    assert wrong.read(answer.path).step == "01_gpu"
    trainer = wrong.put(answer, tmp_path)
    assert trainer.read_text() == expected
    assert trainer.with_name(FILE).read_text() == WRONG


def test_an_answer_is_carried_over_an_edit_of_the_file(with_file, tmp_path, monkeypatch):
    usual = wrong.solved("01_gpu")
    answer = wrong.Wrong(tmp_path / "01_gpu" / "no-decay.diff", "settings", "no weight decay")
    wrong.write(answer, usual, usual | {FILE: WRONG})
    said = {"log": "a commit", "show": None}
    monkeypatch.setattr(
        wrong, "_git", lambda *words: said[words[0]] or usual[words[1].rpartition("/")[2]]
    )
    edited = SOLVED.replace("import torch\n", "import math\n\nimport torch\n")
    (with_file / "solutions" / FILE).write_text(edited)
    wrong.rebase(answer)
    assert wrong.sources(answer)[FILE] == edited.replace("args.wd", "0")
