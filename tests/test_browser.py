"""Notebooks as a trainee has them: JupyterLab in Chromium."""

import difflib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from journey import LONG, REPOSITORY, Lab, jobs, show_all_cells

from dlojz.course import progress


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A JupyterLab on loopback, on a course folder of its own: its root, log and address."""
    home = tmp_path_factory.mktemp("home")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    # `jupyter lab` itself, with the kernel of this environment and no settings of the user's
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
    command += ["--ip=127.0.0.1", f"--port={port}", f"--IdentityProvider.token={token}"]
    # JupyterLab saves what it shows, and the trainer will be edited.
    root = home / "course"
    for name in ("notebooks", "solutions", "reference", "dlojz/chapters"):
        shutil.copytree(REPOSITORY / name, root / name)
    shutil.copy(REPOSITORY / "dlojz/dlojz.py", root / "dlojz")
    (root / ".course-root").touch()
    command += [f"--ServerApp.root_dir={root}"]
    environment = {**os.environ, "HOME": str(home), "JUPYTER_PLATFORM_DIRS": "0"}
    environment |= {"DLOJZ_ROOT": str(root), "DLOJZ_QUEUE": str(home / "queue")}
    show_all_cells(home)
    with (home / "lab.log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        for _ in range(300):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert server.poll() is None, (home / "lab.log").read_text()
            time.sleep(0.1)
        # Reset: a tab that an earlier test left open might be the one that runs.
        address = f"http://127.0.0.1:{port}/lab/tree/notebooks/{{}}?token={token}&reset"
        yield SimpleNamespace(root=root, log=home / "lab.log", address=address)
    finally:
        server.terminate()
        server.wait(20)


@pytest.fixture
def trainee(lab, page, tmp_path):
    """A trainee at this JupyterLab."""
    return Lab(page, lab.log, tmp_path / "kept")


def test_a_trainee_runs_the_first_notebook_and_answers_a_quiz(lab, page, trainee):
    with trainee:
        trainee.open("00_start.ipynb", lab.address.format("00_start.ipynb"))
        trainee.run_all()
        trainee.answer("start-epoch", "number of training images", says="10,010 steps")
        assert progress.last("quizzes", "start-epoch") == 1
        box = page.locator(".widget-vbox", has=page.get_by_text("What if", exact=True)).last
        box.scroll_into_view_if_needed()
        box.locator("textarea").fill("about 1 %")
        box.get_by_role("button", name="Show an answer").click()
        box.get_by_text("An answer:").wait_for()
        assert progress.last("answers", "00 what if") == "about 1 %"
        trainee.watch("monitor(job)", 1, moves=False)  # it ended while the cells below ran


def test_a_difference_in_a_text_has_its_colours(lab, page, trainee):
    trainee.open("11_fsdp.ipynb", lab.address.format("11_fsdp.ipynb"))
    line = page.locator(".jp-RenderedMarkdown pre div", has_text="+fully_shard(model)").first
    colour = line.evaluate("line => getComputedStyle(line).backgroundColor")
    assert colour == "rgba(0, 158, 115, 0.18)"


def edits(before, after):
    """Return the changes from one text to another, the last first: (first line, last line, new)."""
    old, new = before.splitlines(), after.splitlines()
    codes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    changes = [(i1, i2, new[j1:j2]) for kind, i1, i2, j1, j2 in codes if kind != "equal"]
    assert all(i1 < i2 for i1, i2, _ in changes), "only lines that there are can be typed over"
    return [(i1 + 1, i2, lines) for i1, i2, lines in reversed(changes)]


def test_a_trainee_does_the_second_notebook(lab, trainee):
    """Predict, edit, submit, cancel, check: not yet. Mend, restart the kernel, check: passed."""
    file = lab.root / "dlojz/dlojz.py"
    solved = (lab.root / "solutions/dlojz_01_gpu.py").read_text()

    def type_and_save(changes):
        trainee.tab("dlojz.py")
        for change in changes:
            trainee.type_over(*change)
        trainee.save("dlojz.py")
        trainee.tab("01_gpu.ipynb")

    with trainee:
        trainee.open("01_gpu.ipynb", lab.address.format("01_gpu.ipynb"))
        trainee.run("presets.choose()")
        trainee.run('quiz("gpu-where")')
        trainee.answer("gpu-where", "An error: the input", says="never moves a tensor")
        assert progress.last("quizzes", "gpu-where") == 2
        trainee.run('quiz("gpu-memory")')
        trainee.predict('predict("01 gpu"', 40, 1)
        trainee.open_file("/dlojz/dlojz.py")
        changes = edits(file.read_text(), solved)
        forgotten = next(c for c in changes if "copy the batch" in c[2][0])  # in `evaluate`
        type_and_save([c for c in changes if c is not forgotten])
        (forgotten,) = edits(file.read_text(), solved)
        trainee.run("monitor([before, after])")
        trainee.run('quiz("gpu-list")')
        trainee.watch("monitor([before, after])", 2)
        trainee.cancel_one("monitor([before, after])", LONG)
        assert trainee.check("01_gpu") == "not yet"

        type_and_save([forgotten])
        assert file.read_text() == solved
        trainee.run("monitor([before, after])")
        trainee.watch("monitor([before, after])", 2)
        known = jobs(lab.root).keys()
        trainee.begin('check("01_gpu"')
        number = trainee.running(lab.root, known)
        assert jobs(lab.root)[number]["name"] == "check-01_gpu"
        trainee.restart()
        trainee.run("presets.choose()")
        trainee.run('before, after = latest("before"), latest("after")')
        assert trainee.check("01_gpu") == "passed"
        assert jobs(lab.root).keys() - known == {number}, "the check goes on with the runs it has"
        trainee.run_from("verdict.hint()")
        assert trainee.page.locator(".jp-OutputArea-output td", has_text="COMPLETED").count() == 2
        assert [j["state"] for j in jobs(lab.root).values() if j["name"] == "long"] == ["CANCELLED"]
