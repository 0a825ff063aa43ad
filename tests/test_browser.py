"""A notebook as a trainee sees it: JupyterLab in Chromium."""

import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dlojz import progress

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A JupyterLab on loopback; its address with the token."""
    home = tmp_path_factory.mktemp("home")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    # `jupyter lab` itself, with the kernel of this environment and no settings of the user's
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
    command += ["--ip=127.0.0.1", f"--port={port}", f"--IdentityProvider.token={token}"]
    shutil.copytree(NOTEBOOKS, home / "notebooks")  # JupyterLab saves what it shows
    command += [f"--ServerApp.root_dir={home}"]
    environment = {**os.environ, "HOME": str(home), "JUPYTER_PLATFORM_DIRS": "0"}
    settings = home / ".jupyter/lab/user-settings/@jupyterlab/notebook-extension"
    settings.mkdir(parents=True)
    # All cells in the page, not only those in sight: the test looks at each.
    (settings / "tracker.jupyterlab-settings").write_text('{"windowingMode": "none"}')
    log = (home / "lab.log").open("w")
    server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        for _ in range(300):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert server.poll() is None, (home / "lab.log").read_text()
            time.sleep(0.1)
        # Reset: a tab that an earlier test left open might be the one that runs.
        yield f"http://127.0.0.1:{port}/lab/tree/{{}}?token={token}&reset"
    finally:
        server.terminate()
        server.wait(20)


def open_notebook(page, address):
    page.goto(address)
    page.locator(".jp-NotebookPanel:visible .jp-Cell:visible").first.wait_for()
    # The status bar: the notebook's own indicator says idle before the kernel is connected.
    page.locator("#jp-main-statusbar", has_text=re.compile(r"\| Idle")).wait_for()


def run_all(page, cells):
    """Run all cells of the notebook in sight, and wait until the last of them is done."""
    page.locator(".lm-MenuBar-itemLabel", has_text=re.compile("^Run$")).click()
    page.locator(".lm-Menu-itemLabel", has_text=re.compile("^Run All Cells$")).click()
    page.locator(".jp-InputPrompt", has_text=f"[{cells}]:").wait_for(timeout=240_000)
    errors = page.locator(".jp-OutputArea-output", has_text="Traceback (most recent call last)")
    assert errors.count() == 0, errors.first.inner_text()


def shows_figures(page, count):
    """Wait until the notebook shows this many: the last is drawn after its cell is done."""
    from playwright.sync_api import expect

    expect(page.locator(".jp-OutputArea-output img")).to_have_count(count, timeout=30_000)


def test_a_trainee_runs_the_first_notebook_and_answers_a_quiz(lab, page):
    open_notebook(page, lab.format("notebooks/00_start.ipynb"))
    run_all(page, 20)
    shows_figures(page, 5)
    answer = page.locator(".widget-radio-box label", has_text="number of training images").first
    answer.scroll_into_view_if_needed()
    answer.click()
    page.locator(".widget-html-content", has_text="10,010 steps").first.wait_for()
    assert progress.last("quizzes", "start-epoch") == 1
    box = page.locator(".widget-vbox", has=page.get_by_text("What if", exact=True)).last
    box.scroll_into_view_if_needed()
    box.locator("textarea").fill("about 1 %")
    box.get_by_role("button", name="Show an answer").click()
    box.get_by_text("An answer:").wait_for()
    assert progress.last("answers", "00 what if") == "about 1 %"
    page.locator(".widget-hbox", has_text=re.compile(r"COMPLETED \d+/\d+ steps")).first.wait_for()


def test_the_untouched_starter_runs_the_second_notebook(lab, page):
    open_notebook(page, lab.format("notebooks/01_gpu.ipynb"))
    run_all(page, 25)
    shows_figures(page, 10)
    assert page.locator(".jp-OutputArea-output td", has_text="COMPLETED").count() == 2
