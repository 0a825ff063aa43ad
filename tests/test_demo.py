"""The main job, `make demo`: it shows two runs, and leaves the trainee's progress alone."""

import os
import subprocess
from pathlib import Path

import demo
import pytest
from test_stats import write_log

from dlojz import progress


def test_the_demo_keeps_its_verdict_out_of_the_trainees_progress(
    course_folder, images, monkeypatch, capsys
):
    (course_folder / "data").symlink_to(images)
    before = progress.file()
    monkeypatch.setattr(demo.images, "generate", lambda folder, **sizes: folder)
    monkeypatch.setattr(
        demo, "check", lambda step, job: progress.keep("quizzes", step, int(job.id))
    )
    demo.main()
    out = capsys.readouterr().out
    assert "job 0002: solutions/dlojz_01_gpu.py" in out
    assert "next: `make lab`" in out
    assert not before.exists()
    assert progress.file() == course_folder / "runs" / "demo-progress.json"
    assert progress.last("quizzes", "01") == 2
    assert (course_folder / "runs" / "demo.png").exists()


@pytest.mark.parametrize(("others", "notes"), [(0.1, 0), (0.9, 1)])
def test_a_run_that_others_disturbed_is_named(tmp_path, others, notes):
    start = {"schema": 2, "time": "2026-01-02T03:04:05", "rank": 0, "size": 1, "arguments": {}}
    start |= {"cpu_count": 2, "versions": {}}
    window = {"first_step": 3, "steps": 7, "wall_s": 0.7, "others_cpu": others}
    run = write_log(tmp_path / "0002.jsonl", start=start, window=window)
    found = demo.disturbed([run])
    assert len(found) == notes
    assert all("kept 0.9 of this machine's 2 CPUs busy while job 0002 ran" in n for n in found)


@pytest.mark.parametrize(("user", "allowed"), [(0, True), (1000, False)])
def test_make_lab_opens_for_root_too(user, allowed, tmp_path, monkeypatch):
    """As in a container. JupyterLab refuses root unless it is allowed."""
    (tmp_path / "id").write_text(f"#!/bin/sh\necho {user}\n")
    (tmp_path / "id").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    words = ["make", "-n", "-C", Path(__file__).parent.parent, "lab"]
    shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert ("--allow-root" in shown) == allowed


OPTIMIZED = (
    "import ensurepip, sys; sys.exit(sys.base_prefix != '/usr' or sys.version_info < (3, 11))"
)


@pytest.mark.parametrize("quick", [True, False])
def test_make_prefers_a_python_that_was_compiled_with_optimizations(quick, tmp_path, monkeypatch):
    (tmp_path / "python3").write_text(f"#!/bin/sh\nexit {1 - quick}\n")
    (tmp_path / "python3").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("PYTHON", raising=False)
    words = ["make", "-n", "-B", "-C", Path(__file__).parent.parent, "setup"]
    shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    others = subprocess.run(["/usr/bin/python3", "-c", OPTIMIZED]).returncode == 0
    chosen = "python3" if quick or not others else "/usr/bin/python3"
    assert f"|| {chosen} -m venv" in shown
