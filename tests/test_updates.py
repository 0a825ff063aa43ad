"""An update of a trainee's clone, by nbgitpuller and git themselves."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dlojz import cli, course
from dlojz.course import updates

REPOSITORY = Path(__file__).parent.parent
INSTALL = (REPOSITORY / "jupyterhub" / "install.sh").read_text()
LINES = "".join(f"line {n}\n" for n in range(1, 30))


def git(folder, *words):
    who = ("-c", "user.name=t", "-c", "user.email=t@t")
    done = subprocess.run(["git", *who, *words], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def publish(upstream, files):
    """Commit these files in the course: {path: text, or None to delete it}."""
    for name, text in files.items():
        (upstream / name).parent.mkdir(parents=True, exist_ok=True)
        (upstream / name).unlink() if text is None else (upstream / name).write_text(text)
    git(upstream, "add", "-A")
    git(upstream, "commit", "-qm", "course")


def notebook(source, output=""):
    cell = {"cell_type": "code", "source": [source], "outputs": [output] * bool(output)}
    return json.dumps({"cells": [cell], "nbformat": 4, "metadata": {}}, indent=1)


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A clone as a hub's link makes it, with git configured as on a hub."""
    upstream = tmp_path / "upstream"
    upstream.mkdir()
    git(upstream, "init", "-q", "-b", "main")
    files = "dlojz/dlojz.py slurm/job.sbatch GLOSSARY.md slurm/old.toml slurm/own.toml"
    publish(upstream, dict.fromkeys(files.split(), LINES))
    ignored = (REPOSITORY / ".gitignore").read_text()
    books = {f"notebooks/{n}.ipynb": notebook(n) for n in ("01_gpu", "02_amp")}
    publish(upstream, {course.MARKER: "", ".gitignore": ignored, **books})
    attributes, settings = tmp_path / "gitattributes", tmp_path / "gitconfig"
    line = next(line for line in INSTALL.splitlines() if line.endswith('>"$folder/gitattributes"'))
    subprocess.run(["bash", "-c", line], env={"folder": str(tmp_path)}, check=True)
    settings.write_text(f"[core]\n\tattributesFile = {attributes}\n")
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", str(settings))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    root = tmp_path / "dlojz"
    command = [sys.executable, "-m", "nbgitpuller.pull", f"file://{upstream}", "main", str(root)]
    subprocess.run(command, check=True, capture_output=True)
    monkeypatch.setenv("DLOJZ_ROOT", str(root))
    monkeypatch.chdir(root)
    return root


def change(path, number, text):
    """Replace one of the lines of a file."""
    path.write_text(path.read_text().replace(f"line {number}\n", f"{text}\n"))


def test_what_the_trainee_changed_stays_theirs_and_the_report_says_what_happened(clone, capsys):
    upstream = clone.parent / "upstream"
    change(clone / "dlojz/dlojz.py", 3, "mine")
    change(clone / "GLOSSARY.md", 3, "mine")  # text of both: merged by lines
    change(clone / "slurm/own.toml", 3, "mine")  # the course will delete it
    (clone / "notebooks/01_gpu.ipynb").write_text(notebook("01_gpu", "an output"))
    (clone / "notebooks/02_amp.ipynb").unlink()
    (clone / "slurm/new.toml").write_text("mine")
    (clone / "runs/0001").mkdir(parents=True)
    (clone / "runs/0001/events.jsonl").write_text("mine")
    changed = {
        "dlojz/dlojz.py": LINES.replace("line 3\n", "theirs\n").replace("line 25\n", "theirs\n"),
        "GLOSSARY.md": LINES.replace("line 25\n", "theirs\n"),
        "slurm/job.sbatch": LINES.replace("line 3\n", "theirs\n"),
        "slurm/new.toml": "theirs",
        "slurm/old.toml": None,
        "slurm/own.toml": None,
        "notebooks/01_gpu.ipynb": notebook("01_gpu, mended"),
    }
    publish(upstream, changed)

    assert cli.main(["update"]) == 0
    found = updates.last()
    (renamed,) = found.renamed
    assert found.updated == ["slurm/job.sbatch"]
    assert found.added == ["slurm/new.toml"]
    assert found.removed == ["slurm/old.toml"]
    assert found.kept == ["dlojz/dlojz.py", "notebooks/01_gpu.ipynb", "slurm/own.toml"]
    assert found.merged == ["GLOSSARY.md"]
    assert str(found) in capsys.readouterr().out

    mine = (clone / "dlojz/dlojz.py").read_text()
    assert mine == LINES.replace("line 3\n", "mine\n"), "whole, no line of the course's in it"
    assert json.loads((clone / "notebooks/01_gpu.ipynb").read_text())["cells"][0]["outputs"]
    assert (clone / "notebooks/02_amp.ipynb").read_text() == notebook("02_amp"), "back again"
    assert "mine" in (clone / "slurm/own.toml").read_text()
    assert not (clone / "slurm/old.toml").exists()
    assert (clone / "slurm/new.toml").read_text() == "theirs"
    assert (clone / renamed).read_text() == "mine"
    assert (clone / "runs/0001/events.jsonl").read_text() == "mine"
    assert {"mine", "theirs"} <= set((clone / "GLOSSARY.md").read_text().splitlines())


def test_a_second_pull_says_nothing_new_and_no_copies_pile_up(clone, capsys):
    upstream = clone.parent / "upstream"
    (clone / "new.txt").write_text("mine")
    publish(upstream, {"new.txt": "theirs"})
    updates.update()
    files = sorted(os.listdir(clone))
    first = updates.last()
    for _ in range(2):
        (clone / "new.txt").write_text("mine again")
        assert cli.main(["update"]) == 0
        assert "nothing new since the last update" in capsys.readouterr().out
    assert sorted(os.listdir(clone)) == files
    assert updates.last() == first
    publish(upstream, {"new.txt": "theirs again"})
    assert cli.main(["update"]) == 0
    found = updates.last()
    assert (found.kept, found.merged, found.renamed) == (["new.txt"], [], [])


def test_the_courses_version_of_a_kept_file_can_be_taken(clone, capsys):
    change(clone / "dlojz/dlojz.py", 3, "mine")
    publish(clone.parent / "upstream", {"dlojz/dlojz.py": LINES.replace("line 3\n", "theirs\n")})
    updates.update()
    assert "dlojz update --take dlojz/dlojz.py" in str(updates.last())
    assert cli.main(["update", "--take", "dlojz/dlojz.py"]) == 0
    assert (clone / "dlojz/dlojz.py").read_text() == LINES.replace("line 3\n", "theirs\n")
    (saved,) = course.saved()  # so `dlojz restore` finds it
    assert "mine" in saved.read_text()
    assert cli.main(["update", "--take", "none.py"]) == 2
    assert "the course has no file none.py" in capsys.readouterr().err


def test_a_notebook_shows_an_update_once(clone, capsys):
    code = "import dlojz.widgets"
    many = {f"slurm/{n:02}.toml": "new" for n in range(updates.MOST + 3)}
    publish(clone.parent / "upstream", {"slurm/job.sbatch": "theirs", **many})

    assert updates.unseen() is None, "none yet"
    updates.update()
    first_cell = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert first_cell.returncode == 0, first_cell.stderr
    assert "updated:\n    slurm/job.sbatch\n" in first_cell.stdout
    assert "slurm/09.toml\n    and 3 more: dlojz update --last\n" in first_cell.stdout
    assert updates.unseen() is None
    assert cli.main(["update", "--last"]) == 0
    assert "slurm/12.toml\n" in capsys.readouterr().out


def test_before_any_update_and_outside_a_clone(clone, tmp_path, monkeypatch, capsys):
    assert cli.main(["update", "--last"]) == 0
    assert "no update yet" in capsys.readouterr().out
    (tmp_path / "apart").mkdir()
    monkeypatch.setenv("DLOJZ_ROOT", str(tmp_path / "apart"))
    assert cli.main(["update", "--last"]) == 2
    assert "is not a clone: expected a folder .git in it" in capsys.readouterr().err
    assert updates.unseen() is None


def test_a_course_that_is_gone_is_named(clone, capsys):
    (clone.parent / "upstream").rename(clone.parent / "away")
    assert cli.main(["update"]) == 2
    said = capsys.readouterr().err
    assert f"file://{clone.parent}/upstream could not be pulled" in said


def test_an_update_that_was_not_finished_is_said_to_be(clone):
    publish(clone.parent / "upstream", {"slurm/job.sbatch": "theirs"})
    git(clone, "fetch")
    assert "was not finished: dlojz update" in str(updates.last())
    assert updates.unseen() is None
