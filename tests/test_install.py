"""The package as a site installs it: not editable, read-only, shared by many clones."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dlojz import course
from dlojz.check import exercise
from dlojz.widgets.quiz import QUIZZES

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The package, installed into a folder of its own from a copy of the sources, as a wheel."""
    folder = tmp_path_factory.mktemp("site")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "idr_torch.py"):
        shutil.copy(REPOSITORY / name, source)
    shutil.copytree(REPOSITORY / "dlojz", source / "dlojz")
    packages = folder / "packages"
    install = [sys.executable, "-m", "pip", "--quiet", "install", "--target", packages, source]
    subprocess.run([*install, "--no-deps", "--no-index", "--no-build-isolation"], check=True)
    shutil.rmtree(source)
    return packages


def run_installed(site, code, folder=None):
    """Run Python code with the installed package: in a clone, or in `folder`, far from any."""
    environment = {**os.environ, "PYTHONPATH": str(site)}
    if folder:
        for name in ("DLOJZ_ROOT", "DLOJZ_DATA"):
            environment.pop(name, None)
        environment["DLOJZ_PROGRESS"] = str(folder / "progress.json")
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_quiz_and_a_hint_come_with_the_wheel(site, tmp_path):
    code = """
import dlojz, json
from dlojz import course
from dlojz.check import exercises
from dlojz.widgets.quiz import QUIZZES, quiz
quiz("gpu-timer")
hints = {step: list(exercises.find(step).hints.values()) for step in course.CHAIN[1:]}
nudges = {step: found[0].nudge for step, found in hints.items()}
print()
print(json.dumps([dlojz.__path__[0], list(QUIZZES), nudges]))
"""
    place, quizzes, nudges = json.loads(run_installed(site, code, tmp_path).splitlines()[-1])
    assert place == str(site / "dlojz")
    assert quizzes == list(QUIZZES)
    assert nudges == {
        step: next(iter(exercise.find(step).hints.values())).nudge for step in course.CHAIN[1:]
    }


def test_the_names_of_idris_come_with_the_wheel(site, tmp_path):
    code = "import idr_torch; print(idr_torch.__file__, idr_torch.world_size, idr_torch.master)"
    assert run_installed(site, code, tmp_path) == f"{site}/dlojz/idr_torch.py 1 True\n"
    assert sorted(path.name for path in site.glob("*.py")) == ["idr_torch.py"]


def commands(site, folder, *all_words):
    """Run commands of `dlojz` far from any clone, one after the other: (status, out, err) each."""
    code = f"""
import io, json
from contextlib import redirect_stderr, redirect_stdout
from dlojz import cli
found = []
for words in {all_words!r}:
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        status = cli.main(words)
    found.append([status, out.getvalue(), err.getvalue()])
print(json.dumps(found))
"""
    return json.loads(run_installed(site, code, folder).splitlines()[-1])


SMALL = "--test --data synthetic --model shufflenet_v2_x0_5 --image-size 32 -b 4 --test-nsteps 6"


def test_without_a_clone_jobs_run_and_are_kept_in_the_current_folder(site, tmp_path):
    (tmp_path / "mine.py").write_text("print('ran here')")
    ours, report, listed, dry, starter = commands(
        site,
        tmp_path,
        ["submit", "--name", "own", "mine.py"],
        ["report", str(REPOSITORY / "reference/h100/01-resnet50-fp32-b0032.jsonl")],
        ["queue", "own"],
        ["submit", "--dry-run", f"dlojz/dlojz.py {SMALL}"],
        ["submit", "--wait", f"dlojz/dlojz.py {SMALL}"],
    )
    assert [each[0] for each in (ours, report, listed, dry, starter)] == [0] * 5
    assert (tmp_path / "runs/0001/stdout.txt").read_text() == "ran here\n"
    assert "0001" in listed[1]
    assert "throughput" in report[1]
    assert str(site / "dlojz/dlojz.py") in dry[1], "the starter comes with the package"
    assert "throughput" in starter[1], "and its report is found in this folder"


def test_without_a_clone_memory_is_estimated_and_data_made(site, tmp_path):
    estimate, data = commands(
        site,
        tmp_path,
        ["estimate", "--model", "resnet18", "--image-size", "64", "-b", "2", "--json"],
        "data data --classes 2 --images-per-class 2 --val-images-per-class 1 --workers 1".split(),
    )
    assert json.loads(estimate[1])["parameters"] == 11_689_512
    assert "train on them with --data" in data[1]
    assert (tmp_path / "data" / "val").is_dir()


def test_what_needs_the_course_says_how_to_get_it(site, tmp_path):
    words = (
        *(["check", "01"], ["solution", "01"], ["diff", "01"], ["catch-up", "01"], ["restore"]),
        *(["progress"], ["rehearse", "01"], ["syllabus"]),
    )
    (tmp_path / "mine.py").write_text("")
    _, *found = commands(site, tmp_path, ["submit", "mine.py"], *words)
    for word, (status, out, err) in zip(words, found, strict=True):
        assert (status, out) == (2, ""), word
        assert "cd into your clone, or set DLOJZ_ROOT" in err, word
        assert "git clone" in err, word
    assert not (tmp_path / "saved").exists()


def test_without_a_clone_a_program_that_is_not_there_is_named(site, tmp_path):
    worth, submit, report = commands(
        site, tmp_path, ["worth", "compile", "no.py"], ["submit", "no.py"], ["report"]
    )
    for status, _, err in (worth, submit):
        assert status == 2
        assert f"no trainer 'no.py' in {tmp_path}" in err
    assert f"no job in {tmp_path / 'runs'}: submit one first" in report[2]


def test_every_toml_file_comes_with_the_wheel(site):
    def names(root):
        return {path.relative_to(root) for path in (root / "dlojz").rglob("*.toml")}

    assert names(site) == names(REPOSITORY) != set()


@pytest.fixture
def clone(course_folder):
    """Another clone, without the package's code."""
    shutil.rmtree(course_folder / "dlojz")
    (course_folder / "dlojz").mkdir()
    return course_folder


def test_another_clone_submits_its_own_trainer_with_the_installed_package(site, clone):
    course.trainer().write_text("import dlojz.runs.log; print(dlojz.runs.log.__file__)")
    code = (
        "import dlojz.launch as l; print(l.__file__); j = l.submit('dlojz/dlojz.py'); j.wait(30); "
        "print((j.directory / 'stdout.txt').read_text(), j.directory)"
    )
    launch, log, *_, directory = run_installed(site, code).split()
    assert launch == str(site / "dlojz" / "launch" / "__init__.py")
    assert log == str(site / "dlojz" / "runs" / "log.py")
    assert directory == str(clone / "runs" / "0001")


def test_another_clone_checks_its_trainer_with_the_installed_package(site, clone):
    """The code that measures is the package's, and not what the clone happens to hold.

    The clone holds the trainee's own files, the trainer and the one beside it.
    """
    usual, own = "torch.optim.SGD(", 'imports.beside(__file__, "optimizers").SGD('
    text = course.solution("01").read_text().replace(usual, own)
    text = text.replace("import checkpoint, ", "import checkpoint, imports, ")
    for file in (course.trainer(), course.solution("01")):
        file.write_text(text)
        file.with_name("optimizers.py").write_text("from torch.optim import SGD\nprint(__file__)")
    flags = "--test --data synthetic --model shufflenet_v2_x0_5 --image-size 32 -b 4"
    code = f"""
import dlojz.course, dlojz.launch as l, dlojz.check as c
dlojz.course.BESIDE["01_gpu"] = "optimizers.py"
job = l.submit("dlojz/dlojz.py {flags} --test-nsteps 8")
job.wait()
print((job.directory / "stdout.txt").read_text().split()[0])
found = c.check("01", job)
print(c.__file__, found, sep="\\n")
"""
    imported, place, head, *_ = run_installed(site, code).splitlines()
    assert imported == str(clone / "runs" / "0001" / "optimizers.py")
    assert place == str(site / "dlojz" / "check" / "__init__.py")
    assert head == "01_gpu: passed (job 0001)"


def test_the_console_script_is_there(site):
    assert (site / "bin" / "dlojz").exists()
