"""The main job, `make demo`: a gain, two runs, and the trainee's progress left alone."""

import os
import subprocess
from pathlib import Path

import demo
import pytest
from logs import write_log

from dlojz.course import progress


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
    assert not before.exists()
    assert progress.file() == course_folder / "runs" / "demo-progress.json"
    assert progress.last("quizzes", "01") == 3
    out = capsys.readouterr().out
    assert out.startswith("This takes about ")
    assert "job 0003: solutions/dlojz_01_gpu.py" in out
    assert out.count("has ended, after ") == 3
    assert "next: `make lab`" in out
    assert (course_folder / "runs" / "demo.png").exists()


def test_the_gain_of_the_repairs_is_labelled_before_and_after(tmp_path):
    """The median of each side, and the ratio of the pairs with its interval."""
    times = {"case": "times", "mine_s": [0.3, 0.4, 0.5], "clean_s": [0.1, 0.1, 0.1]}
    ax = demo.plot_gain(write_log(tmp_path / "0001.jsonl", case=times))
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert ["before" in labels[0], "after" in labels[1]] == [True, True]
    assert [bar.get_width() for bar in ax.patches] == pytest.approx([400, 100])
    assert "3.9 times as fast on this machine" in ax.get_title(loc="left")
    assert any("95 % interval 2.1 to 7.4" in text.get_text() for text in ax.texts)


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
