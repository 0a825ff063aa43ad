"""The chain of the trainer's steps, its shape, and who imports whom."""

import ast
import graphlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import quick
import steps
from made import DAMAGED

from conftest import fill
from dlojz import course
from dlojz.classroom import rehearse
from dlojz.jobs import keeper
from dlojz.runs import log

REPOSITORY = Path(__file__).parent.parent


def test_each_solution_differs_from_its_predecessor_only_where_it_says():
    assert steps.check() == []


def test_an_edit_outside_a_marked_paragraph_is_found():
    before = course.solution(0).read_text()
    after = course.solution(1).read_text()
    assert steps.problems(before, after, "01") == []
    strayed = after.replace("training.model.train()", "training.model.eval()")
    assert any("training.model.eval()" in p for p in steps.problems(before, strayed, "01"))
    undone = after.replace("# 01: choose", "# TODO 01: choose")
    assert steps.problems(before, undone, "01") == ["left to do: # TODO 01: choose the device"]


def test_a_paragraph_ends_at_a_blank_line():
    source = "a\n# TODO 01: do\nb\n\nc\n# TODO 02: other\nd\n"
    expected = "a\n<paragraph of step 01>\n\nc\n# TODO 02: other\nd"
    assert steps.skeleton(source, "01") == expected.splitlines()


def test_a_paragraph_may_belong_to_several_steps():
    before = "# TODO 02, TODO 03: name it\nx\n\n# TODO 06c: do; TODO 11d: more\ny\n"
    after = before.replace("TODO 02", "02").replace("x", "x2")
    assert steps.problems(before, after, "02") == []
    assert steps.problems(before, before.replace("x", "x2"), "03")[-1].startswith("left to do")
    assert steps.problems(before, after, "06"), "it is not a paragraph of that step"
    assert steps.problems(before, before.replace("TODO 11d", "11d").replace("y", "z"), "11") == []


def test_an_edit_of_the_starter_is_carried_through(course_folder):
    starter = course.trainer()
    starter.write_text(starter.read_text().replace("train_set, shuffle=True", "train_set, False"))
    steps.carry()
    assert steps.check() == []
    assert "train_set, False" in course.solution(1).read_text()


def test_an_edit_that_meets_a_step_changes_nothing(course_folder):
    starter, before = course.trainer(), course.solution(1).read_text()
    starter.write_text(starter.read_text().replace('torch.device("cpu")', 'torch.device("xpu")'))
    with pytest.raises(SystemExit, match="edit it by hand"):
        steps.carry()
    assert course.solution(1).read_text() == before


@pytest.mark.parametrize("step", course.CHAIN)
def test_the_trainer_can_be_read_in_one_sitting(step):
    lines = course.solution(step).read_text().splitlines()
    # 07 brought a function of its own, and 24 lines of a solution; 08 a choice of optimizer and
    # schedule, 12 lines, and a mark for its finder of rates.
    assert len(lines) <= (260 if step == course.CHAIN[0] else 375)
    assert sum(bool(steps.MARK.match(line)) for line in lines) <= 31
    assert max(map(len, lines)) <= 100
    functions = [
        node for node in ast.walk(ast.parse("\n".join(lines))) if isinstance(node, ast.FunctionDef)
    ]
    long = [f.name for f in functions if f.end_lineno - f.lineno + 1 > 40]
    assert not long
    crowded = [f.name for f in functions if len(f.args.args) > 6]
    assert not crowded, "more parameters than a reader keeps in mind"


@pytest.mark.parametrize("step", course.CHAIN)
def test_no_name_in_the_trainer_only_saves_typing(step):
    """`sampler = torch.utils.data.DistributedSampler`: a second name for what has one."""
    tree = ast.parse(course.solution(step).read_text())
    imported = {
        alias.asname or alias.name.split(".")[0]
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    aliases = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Attribute)
        for value in getattr(node.value, "elts", [node.value])
        if _is_a_name_of(value, imported)
    ]
    # Which process this is, which 06b has to say.
    assert [a for a in aliases if a != "processes, rank = (idr_torch.size, idr_torch.rank)"] == []


def _is_a_name_of(node, imported):
    """True for `torch.utils.data.DataLoader` or `parser.add_argument_group(...).add_argument`."""
    if not isinstance(node, ast.Attribute):
        return False
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Call) or (isinstance(node, ast.Name) and node.id in imported)


def test_a_step_has_several_names():
    assert {course.step(name) for name in ("1", 1, "01", "01_gpu")} == {"01_gpu"}


@pytest.mark.parametrize("name", ["99", "gpu", "a'; echo foo", "", "²"])
def test_an_unknown_step_names_those_that_exist(name):
    with pytest.raises(LookupError, match="expected one of 00_start, 01_gpu, 02_amp"):
        course.step(name)


def test_catching_up_saves_the_trainees_file(course_folder):
    course.trainer().write_text("mine")
    saved = course.catch_up(1)
    assert saved.read_text() == "mine"
    assert course.trainer().read_text() == course.solution(0).read_text()
    assert course.catch_up(1) is None, "an unchanged step needs no saving"


def test_a_saved_file_comes_back_and_the_present_one_is_saved_first(course_folder):
    for text in ("first", "second"):
        course.trainer().write_text(text)
        course.catch_up(2)
    first, second = course.saved()
    assert course.restore() == (second, None), "a step of the course needs no saving"
    assert course.trainer().read_text() == "second"
    assert course.restore(first.name) == (first, second), "it is saved already"
    course.trainer().write_text("third")
    restored, kept = course.restore(f"saved/{first.name}")
    assert (restored.read_text(), kept.read_text()) == ("first", "third")
    assert course.trainer().read_text() == "first"
    assert course.restore()[0] == kept, "what was there before: restore undoes itself"


def test_a_file_that_was_never_saved_is_not_restored(course_folder):
    with pytest.raises(LookupError, match=r"nothing to restore: .*saved holds no file"):
        course.restore()
    with pytest.raises(LookupError, match=r"no saved file .x\.py.: .*saved holds nothing yet"):
        course.restore("x.py")


def test_on_a_full_disk_catching_up_saves_nothing_and_keeps_the_trainer(small_disk, course_folder):
    (course_folder / "saved").symlink_to(small_disk)
    fill(small_disk)
    course.trainer().write_text("mine")
    with pytest.raises(course.NoRoomError, match=r"saved/dlojz-.*could not .*disk is full"):
        course.catch_up(1)
    assert course.trainer().read_text() == "mine"
    assert course.saved() == []


def test_an_empty_saved_file_is_never_made_the_trainer(course_folder):
    course.trainer().write_text("mine")
    course.catch_up(1)
    empty = course.saved()[0].with_name("dlojz-99990101-000000-000000.py")
    empty.touch()
    with pytest.raises(course.FileError, match=rf"{empty} is empty: nothing was restored"):
        course.restore(empty.name)
    course.restore()
    assert course.trainer().read_text() == "mine"


@pytest.mark.parametrize("call", [course.catch_up, course.restore])
def test_a_pipe_in_place_of_the_trainer_is_named(call, course_folder):
    course.trainer().unlink()
    os.mkfifo(course.trainer())
    with pytest.raises(course.FileError, match=r"dlojz\.py can't be read: it is not a regular"):
        call("01")
    with pytest.raises(course.FileError, match=r"dlojz\.py can't be read: it is not a regular"):
        course.diff(course.trainer(), "01")


def test_a_trainer_that_is_not_utf_8_is_compared_all_the_same(course_folder):
    course.trainer().write_bytes(b"# caf\xe9\n")
    assert "-# caf\N{REPLACEMENT CHARACTER}" in course.diff(course.trainer(), "00")


def test_a_lock_names_who_holds_it_and_is_not_waited_for_longer_than_that(tmp_path, monkeypatch):
    monkeypatch.setattr("dlojz.course.files.LOCK_S", 0.05)
    lock = tmp_path / "share.lock"
    with course.locked(lock) as holder:
        assert holder == ""
        with course.locked(lock) as holder:
            assert holder == str(os.getpid())
    with course.locked(lock) as holder:
        assert holder == ""


def test_an_empty_root_is_as_if_unset(monkeypatch, tmp_path):
    (tmp_path / course.MARKER).touch()
    (tmp_path / "notebooks").mkdir()
    monkeypatch.setenv("DLOJZ_ROOT", "")
    assert course.course_root(tmp_path / "notebooks") == tmp_path


@pytest.mark.parametrize(("code", "what"), course.FULL.items())
def test_what_is_full_is_told_apart(code, what, tmp_path):
    message = f"x could not be written: {what}.*rm -r runs/NUMBER"
    with pytest.raises(OSError, match=message) as told, course.needs_room(tmp_path / "x"):
        raise OSError(code, "as the system says")
    assert told.value.errno == code
    assert str(told.value) == told.value._render_traceback_()[0].partition(": ")[2]


def test_other_errors_of_a_file_are_left_alone(tmp_path):
    refused = PermissionError(13, "as the system says")
    with pytest.raises(PermissionError) as told, course.needs_room(tmp_path / "x"):
        raise refused
    assert told.value is refused


@pytest.mark.parametrize("fault", DAMAGED)
def test_a_damaged_small_file_is_named_at_once(fault, tmp_path):
    make, why = DAMAGED[fault]
    make(tmp_path / "kept.json")
    with pytest.raises(course.FileError, match=rf"{tmp_path}/kept\.json can't be read: .*{why}"):
        course.read_table(tmp_path / "kept.json")


def test_a_small_file_is_read_as_it_was_written(tmp_path):
    assert course.read_table(tmp_path / "kept.json") == {}
    kept = {"a": [1, -2, 10**20, 0.5, -1e-300, None, True], "b": {"é": "☃"}}
    (tmp_path / "kept.json").write_text(json.dumps(kept, ensure_ascii=False), encoding="utf-8")
    (tmp_path / "link.json").symlink_to("kept.json")
    found = course.read_table(tmp_path / "link.json")
    assert found == kept
    assert [type(value) for value in found["a"]] == [type(value) for value in kept["a"]]


def test_outside_the_course_one_is_told_where_to_go(tmp_path, monkeypatch):
    monkeypatch.delenv("DLOJZ_ROOT", raising=False)
    with pytest.raises(FileNotFoundError, match="cd into your clone, or set DLOJZ_ROOT"):
        course.course_root(tmp_path)


# Which room may import which: the whole architecture in one table. A room is a folder of dlojz/, or
# a module beside them.
MAY_IMPORT = {
    "__init__": set(),
    "idr_torch": set(),
    "machine": set(),
    "table": set(),
    "course": {"machine", "table"},
    "images": {"machine"},
    "runs": {"course", "idr_torch", "machine"},
    "traces": {"course", "runs"},
    "training": {"course", "idr_torch", "images", "runs"},
    "watch": {"course", "idr_torch", "machine", "runs", "traces", "training"},
    "dlojz": {"idr_torch", "runs", "training", "watch"},
    "estimate": {"course", "idr_torch", "runs", "training"},
    "jobs": {"course", "idr_torch", "machine", "runs"},
    "launch": {"course", "jobs", "runs", "table", "training"},
    "figures": {"course", "runs", "table", "traces"},
    "check": {"course", "images", "launch", "machine", "runs", "table"},
    "classroom": {"course", "figures", "launch", "machine", "runs", "table"},
    "pairing": {"course", "figures", "launch", "runs", "table", "traces"},
    "widgets": {"classroom", "course", "figures", "launch", "runs", "table"},
    "race": {
        "course",
        "figures",
        "images",
        "jobs",
        "launch",
        "machine",
        "runs",
        "table",
        "training",
    },
}
OF_A_CHAPTER = ("exercise", "figures", "job")
MAY_IMPORT["chapters"] = {*MAY_IMPORT} - {"__init__", "classroom", "dlojz"}
MAY_IMPORT["cli"] = {*MAY_IMPORT} - {"__init__", "dlojz"}
MAY_IMPORT["idr_pytools"] = {"launch", "widgets"}


def modules():
    """Return our files; a trainee's second file may lie beside the trainer."""
    theirs = {REPOSITORY / "dlojz" / name for name in course.BESIDE.values()}
    return sorted({*(REPOSITORY / "dlojz").rglob("*.py")} - theirs)


def room(path):
    return path.relative_to(REPOSITORY / "dlojz").with_suffix("").parts[0]


def rooms_imported(path):
    """The rooms that a module of ours imports from, whether as it is loaded or later."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "dlojz":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dlojz."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("dlojz.")}
    return found - {room(path)}


def test_imports_go_one_way():
    too_many = {str(path): rooms_imported(path) - MAY_IMPORT[room(path)] for path in modules()}
    assert {path: rooms for path, rooms in too_many.items() if rooms} == {}


def test_the_table_of_imports_has_no_circle():
    graphlib.TopologicalSorter(MAY_IMPORT).prepare()  # raises CycleError


def test_each_room_is_a_package_that_says_what_it_holds():
    """Else a wheel leaves it out. Experiments are run from a clone, by path."""
    folders = {file.parent for file in (REPOSITORY / "dlojz").rglob("*.py")}
    rooms = [folder for folder in folders if "experiments" not in folder.parts]
    assert [str(room) for room in rooms if not (room / "__init__.py").exists()] == []


def test_no_name_of_a_module_stands_in_two_rooms():
    """But those that each chapter has."""
    stems = Counter(
        file.stem
        for file in modules()
        if "experiments" not in file.parts and file.stem not in ("__init__", *OF_A_CHAPTER)
    )
    assert [stem for stem, times in stems.items() if times > 1] == []


def test_no_file_is_named_like_a_package_that_it_would_hide():
    names = [p.name for p in REPOSITORY.rglob("dlojz.py") if not {".venv", "runs"} & {*p.parts}]
    assert names == ["dlojz.py"]
    assert not list(REPOSITORY.glob("**/dl.py"))


def test_a_chapter_imports_no_other_but_its_first_part():
    """Notebook 09b may show what 09 draws: n09b_modes and n09_repair import n09_compile."""
    folders = [f for f in (REPOSITORY / "dlojz/chapters").iterdir() if f.is_dir()]
    names = {f.name for f in folders}
    strayed = [
        f"{file}: {word}"
        for folder in folders
        for file in folder.rglob("*.py")
        for word in re.findall(r"\bn\d\d[a-z]?_\w+", file.read_text())
        if word in names - {folder.name} and word[1:3] != folder.name[1:3]
    ]
    assert strayed == []


WITH_TORCH = ("dlojz.dlojz", "dlojz.training", "dlojz.watch", "dlojz.estimate")


def needs_torch(name):
    """Whether a module belongs to a job: the trainer, what it imports, a chapter's programs."""
    programs = r"job|blocks|dynamo|measuring|operations|transformers|trainings|counting|timing"
    programs += r"|in_pytorch|in_triton|bits|vit|spread|choosing|eight|checked|curves"
    programs += r"|experiments\.[\w.]+"
    job = re.fullmatch(rf"dlojz\.chapters\.(session|harness|resident|\w+\.({programs}))", name)
    return job or name == "dlojz.race.judging" or name.startswith(WITH_TORCH)


def test_only_what_a_job_runs_imports_torch_as_it_is_loaded():
    """So the command line, a notebook's widgets and a login node do not wait for it."""
    names = [".".join(f.relative_to(REPOSITORY).with_suffix("").parts) for f in modules()]
    without = [n for n in names if not needs_torch(n)]
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules: sys.exit(f'{name} imports torch')"
    )
    done = subprocess.run([sys.executable, "-c", code, *without], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_text_is_read_and_written_in_utf_8_whatever_the_locale():
    """Each call that opens a text file, or reads what a program says, names its encoding."""
    found = []
    for path in sorted((REPOSITORY / "dlojz").rglob("*.py")):
        calls = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call))
        found += [f"{path}:{call.lineno}" for call in calls if depends_on_the_locale(call)]
    assert found == []


def depends_on_the_locale(call):
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    owner = getattr(getattr(call.func, "value", None), "id", "")
    given = {word.arg: getattr(word.value, "value", "") for word in call.keywords}
    if "encoding" in given or (owner, name) in (("os", "open"), ("Image", "open")):
        return False
    if name in ("open", "fdopen"):
        first = 0 if isinstance(call.func, ast.Attribute) and owner not in ("os", "gzip") else 1
        modes = [getattr(arg, "value", "") for arg in call.args[first:]]
        words = "".join(map(str, [*modes, given.get("mode", "")]))
        return "t" in words if owner == "gzip" else "b" not in words
    return (name, len(call.args)) in (("read_text", 0), ("write_text", 1)) or "text" in given


def test_a_call_that_depends_on_the_locale_is_found():
    calls = {
        "path.read_text()": True,
        "path.read_text('utf-8')": False,
        "(a / b).write_text(x)": True,
        "open(x)": True,
        "open(x, 'rb')": False,
        "open('b', 'w')": True,
        "path.open()": True,
        "path.open('ab')": False,
        "os.fdopen(x, 'w')": True,
        "os.open(x, flags)": False,
        "gzip.open(x)": False,
        "gzip.open(x, 'rt')": True,
        "subprocess.run(x, text=True)": True,
        "subprocess.run(x, text=True, encoding='utf-8')": False,
    }
    trees = {source: ast.parse(source, mode="eval").body for source in calls}
    assert {source: bool(depends_on_the_locale(t)) for source, t in trees.items()} == calls


def test_no_test_imports_another_tests_file():
    """What several tests share is in a module without tests, such as logs.py."""
    for file in (REPOSITORY / "tests").rglob("*.py"):
        imported = quick.imported(file.read_text())
        assert [name for name in imported if name.startswith("test_")] == [], file


def test_nothing_edits_the_path_of_imports():
    for path in [*(REPOSITORY / "dlojz").rglob("*.py"), *(REPOSITORY / "solutions").glob("*.py")]:
        if path.name != "forks.py":  # a script's own folder comes first, as from Python itself
            assert "sys.path" not in path.read_text(), path


def test_the_readme_names_each_room_and_folder_in_20_lines():
    readme = (REPOSITORY / "README.md").read_text()
    what = readme.split("## What is where")[1].split("```")[1]
    rooms = {room(path) for path in modules()} - {"__init__", "dlojz"}
    folders = ("notebooks", "solutions", "slurm", "jupyterhub", "reference", "tools", "tests")
    assert [name for name in (*rooms, *folders) if not re.search(rf"\b{name}\b", what)] == []
    assert len(what.strip().splitlines()) <= 20
    rows = [line for line in readme.splitlines() if line.startswith("| `")]  # of notebooks
    assert len(readme.splitlines()) - len(rows) <= 90


def test_the_readme_has_each_notebook_with_the_minutes_of_its_card():
    rows = re.findall(r"^\| `(\w+)` .*\| (\d+) \|", (REPOSITORY / "README.md").read_text(), re.M)
    solved = REPOSITORY.glob("solutions/[0-9]*.ipynb")
    cards = {path.stem: rehearse.card_minutes(path) for path in solved}
    assert {name: int(minutes) for name, minutes in rows} == cards


def test_contributing_prints_the_table_of_imports():
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    printed = {}
    for rooms, may in re.findall(r"^\| ([a-z_, ]+) \| ([a-z_, ]+) \|$", text, re.M):
        if rooms != "room":
            named = set() if may == "nothing of ours" else set(may.split(", "))
            printed |= dict.fromkeys(rooms.split(", "), named)
    assert printed == {room: may for room, may in MAY_IMPORT.items() if room != "__init__"}


def mode(bits):
    return lambda folder: [folder.mkdir(), folder.chmod(bits)]


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """A temporary folder like /tmp, beside a home."""
    folder = tmp_path / "tmp"
    mode(0o1777)(folder)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return folder


@pytest.mark.parametrize(
    ("before", "owner", "is_kept"),
    [
        (lambda _: None, os.getuid(), True),
        (mode(0o755), os.getuid(), True),
        (mode(0o775), os.getuid(), False),
        (mode(0o777), os.getuid(), False),
        (mode(0o755), os.getuid() + 1, False),
        (lambda folder: folder.symlink_to("."), os.getuid(), False),
        (Path.touch, os.getuid(), False),
    ],
)
def test_compiled_code_lies_where_nobody_else_can_write(
    before, owner, is_kept, shared, monkeypatch
):
    from torch._inductor.runtime import cache_dir_utils  # here, because it imports torch

    before(Path(cache_dir_utils.default_cache_dir()))
    monkeypatch.setattr(os, "getuid", lambda: owner)
    course.guard_compiled_code()
    code = Path(cache_dir_utils.default_cache_dir())
    assert os.environ["TMPDIR"] == str(code.parent)
    assert is_kept == (code.parent == shared)
    assert not (code if is_kept else code.parent).stat().st_mode & 0o022


def test_a_user_without_a_name_has_compiled_code_too(shared, monkeypatch):
    monkeypatch.setattr("getpass.getuser", lambda: {}["uid not found"])
    course.guard_compiled_code()
    assert [folder.name for folder in shared.iterdir()] == [f"torchinductor_uid_{os.getuid()}"]


def test_nothing_is_made_in_a_temporary_folder_of_ones_own(shared):
    shared.chmod(0o700)
    course.guard_compiled_code()
    assert os.environ["TMPDIR"] == str(shared)
    assert list(shared.iterdir()) == []


def test_jobs_and_logs_keep_away_from_code_of_others(shared, tmp_path, monkeypatch):
    monkeypatch.setenv("DLOJZ_RUN", str(tmp_path))
    job = {"root": str(tmp_path), "token": "", "n_gpu": 1}
    course.guard_compiled_code()
    (code,) = shared.iterdir()
    code.chmod(0o777)
    assert keeper.environment(job, ["cpu"], tmp_path)["TMPDIR"] != str(shared)
    monkeypatch.setenv("TMPDIR", str(shared))
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    log.open_run(SimpleNamespace())
    assert os.environ["TMPDIR"] == str(tmp_path / "home/.cache/dlojz-tmp")
