"""Submissions that fail in the middle: what is submitted all the same, and who knows it."""

import fcntl
import os
import shutil
import time
from pathlib import Path

import pytest

from dlojz import course
from dlojz.launch import QUEUE, SubmitError, asking, find, latest, queue, request, slurm, submit
from dlojz.launch import job as job_module

SLURM = Path(__file__).parent.parent / "slurm"
FOURTH = 'echo x >>"$COUNT"; if [ "$(wc -l <"$COUNT")" -lt 4 ]; then echo 77; exit; fi; '
SWEEP = [f"t.py {i}" for i in range(8)]


@pytest.fixture
def sbatch(course_folder, tmp_path, monkeypatch):
    """A cluster whose sbatch is these lines of a shell: sbatch("echo 77")."""
    shutil.copytree(SLURM, course_folder / "slurm")
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("DLOJZ_LAUNCHER", "slurm")
    monkeypatch.setenv("DLOJZ_SITE", "generic")
    monkeypatch.setenv("COUNT", str(tmp_path / "count"))

    def write(lines, name="sbatch"):
        (programs / name).write_text(f"#!/bin/sh\n{lines}\n")
        (programs / name).chmod(0o755)

    for name in ("squeue", "scontrol", "sacct", "scancel"):
        write("exit 1", name)
    return write


def interrupt_the_third(monkeypatch):
    usual, begun = request.new_run, []

    def new_run():
        begun.append(1)
        if len(begun) == 3:
            raise KeyboardInterrupt
        return usual()

    monkeypatch.setattr(request, "new_run", new_run)


def test_a_sweep_here_on_a_disk_that_gets_full_leaves_nothing(small_disk, script):
    script("")
    with pytest.raises(
        SubmitError, match=r"(?s)runs/0008.*the disk is full.*nothing was submitted"
    ):
        submit(SWEEP)
    assert list(small_disk.iterdir()) == []


def test_a_sweep_here_that_is_interrupted_leaves_nothing(script, monkeypatch, course_folder):
    script("")
    interrupt_the_third(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        submit(SWEEP)
    assert list((course_folder / "runs").iterdir()) == []


def test_an_interrupted_sbatch_hands_back_what_is_submitted(script, sbatch, monkeypatch):
    script("")
    sbatch("echo 77")
    interrupt_the_third(monkeypatch)
    with pytest.raises(KeyboardInterrupt, match=r"^jobs 0001 to 0002 are submitted;.*interr") as e:
        submit(SWEEP)
    assert latest() == e.value.jobs == [find(1), find(2)]


def test_a_sweep_whose_first_job_fails_says_that_nothing_was_submitted(script, sbatch):
    script("")
    sbatch("echo refused >&2; exit 1")
    with pytest.raises(SubmitError, match=r"(?s)^Slurm refused the job: refused.*nothing was") as e:
        submit(SWEEP)
    assert e.value.jobs == []
    assert queue().rows == []


def test_a_fourth_job_that_slurm_refuses_leaves_three(script, sbatch):
    script("")
    sbatch(f"{FOURTH} echo QOSMaxSubmitJobPerUserLimit >&2; exit 1")
    with pytest.raises(SubmitError, match=r"0003 are submitted; job 4 of 8 is not: .*QOSMax") as e:
        submit(SWEEP)
    assert latest() == e.value.jobs
    assert [job.info["slurm"] for job in latest()] == ["77"] * 3
    assert len(queue().rows) == 3


UNCLEAR = {
    "prints nothing": ("", "sbatch printed nothing"),
    "prints rubbish": ("echo Welcome to cluster 5!", "sbatch printed 'Welcome to cluster 5!'"),
    "is killed": ("kill -9 $$", "sbatch: exit code -9"),
    "hangs": ("exec sleep 9", "sbatch did not answer in 0.2 s"),
    "times out": ("echo Socket timed out on send/recv operation >&2; exit 1", "Socket timed out"),
}


@pytest.mark.parametrize("case", UNCLEAR)
def test_a_job_that_slurm_may_have_keeps_its_folder(case, script, sbatch, monkeypatch):
    lines, why = UNCLEAR[case]
    script("")
    sbatch(lines)
    monkeypatch.setattr(asking.call, "__kwdefaults__", {"timeout": 0.2, "env": None})
    with pytest.raises(SubmitError) as error:
        submit("t.py", name="a 'job'")
    said = str(error.value)
    assert said.startswith(why)
    assert "`squeue --me --name=a__job_`" in said
    assert "nothing was submitted" not in said
    assert str(find(1).directory) in said
    assert find(1).state == "FAILED"
    assert "perhaps in Slurm" in find(1).status["reason"]
    assert why in find(1).explain()
    assert [row[:3] for row in queue().rows] == [("0001", "a 'job'", "FAILED")]


def test_a_sweep_may_end_with_a_job_that_slurm_may_have(script, sbatch):
    script("")
    sbatch(FOURTH)
    with pytest.raises(SubmitError, match="0003 are submitted; job 4 of 8 may not be: sbatch pri"):
        submit(SWEEP)
    assert [job.id for job in latest()] == ["0001", "0002", "0003", "0004"]


def test_an_interrupted_sbatch_keeps_the_folder(script, sbatch, monkeypatch):
    def interrupted(*words, **options):
        raise KeyboardInterrupt

    script("")
    monkeypatch.setattr(asking, "call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        submit("t.py")
    assert find(1).state == "QUEUED"
    monkeypatch.setattr(asking, "TIMEOUT_S", 0)
    assert "perhaps in Slurm" in find(1).status["reason"]
    with pytest.raises(slurm.SlurmError, match="perhaps in Slurm"):
        slurm.Slurm().cancel(find(1).directory, find(1).info)


@pytest.mark.parametrize("answer", ["77", "77;cluster", "a greeting\n77", "77;a b"])
def test_the_number_of_a_job_is_read_as_sbatch_prints_it(answer, script, sbatch):
    script("")
    sbatch(f"cat <<'END'\n{answer}\nEND")
    assert submit("t.py").info["slurm"] == "77"


def test_a_queue_waits_for_slurm_once_and_not_long(script, sbatch, monkeypatch):
    script("")
    sbatch("echo 77")
    jobs = submit(SWEEP)
    for program in ("squeue", "scontrol", "sacct"):
        sbatch("exec sleep 9", program)
    monkeypatch.setattr(job_module, "QUEUE_S", 0.3)
    begin = time.monotonic()
    rows = queue().rows
    assert time.monotonic() - begin < 2
    assert len(rows) == len(jobs)
    note = "Slurm does not answer: squeue did not answer in 0.5 s"
    assert {row[QUEUE.index("note")] for row in rows} == {note}


def test_a_stopped_process_that_holds_squeues_lock_stops_no_queue(script, sbatch, monkeypatch):
    script("")
    sbatch("echo 77")
    sbatch("exit 0", "squeue")
    submit("t.py")
    monkeypatch.setattr(job_module, "QUEUE_S", 0.1)
    with (find(1).directory.parent / ".squeue.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert len(queue().rows) == 1


def test_slurm_looks_for_modules_in_the_jobs_folder(script, sbatch, monkeypatch):
    script("import net")
    script("", "net.py")
    monkeypatch.setenv("PYTHONPATH", "/mine")
    sbatch('echo "$PYTHONPATH" >"$COUNT"; echo 77')
    job = submit("t.py")
    assert (job.directory / "program/net.py").exists()
    assert Path(os.environ["COUNT"]).read_text() == "/mine\n", "it is in the program's folder"
    mine = next(iter(course.COPIED.values()))
    script("import net", mine)
    job = submit(mine)
    assert Path(os.environ["COUNT"]).read_text() == f"{job.directory}:/mine\n"
    submit("dlojz/dlojz.py")
    assert Path(os.environ["COUNT"]).read_text() == "/mine\n"
