"""What waiting costs, what a waiter hears at once, and what an upgrade may not break."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from waiting import SLEEPS, keeper, locked_by_another, text, until

import dlojz
from dlojz.jobs import processes, tickets
from dlojz.launch import State, find, queue, submit

SOON_S = 3  # two busy cores; what is not heard at once takes until the next sign of life, 30 s


def waits(*jobs):
    """Wait until these jobs wait, each with its reason."""
    return [until(lambda j=job: j.status.get("reason")) for job in jobs]


def has_begun(job):
    """Whether the job's waiter has imported all, and hears signals."""
    (caught,) = re.findall(r"SigCgt:\s+(\w+)", Path(f"/proc/{keeper(job)}/status").read_text())
    return int(caught, 16) >> (signal.SIGCONT - 1) & 1


def wakes(pid):
    """How often a process has slept, and been woken."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary"))


@pytest.fixture
def busy(script):
    """The device, held by a job."""
    script("print('ran')", "next.py")
    script(SLEEPS)
    job = submit("t.py", name="holds")
    until(lambda: text(job))
    yield job
    job.cancel()


# What it costs ----------------------------------------------------------------------------------


def test_a_job_far_back_in_the_queue_sleeps_until_its_turn(busy):
    jobs = [submit("next.py") for _ in range(4)]
    waits(*jobs)
    until(lambda: all(map(has_begun, jobs)))
    time.sleep(0.2)  # until they sleep
    before = [wakes(keeper(job)) for job in jobs]
    time.sleep(1.5)
    first, second, *others = (wakes(keeper(j)) - b for j, b in zip(jobs, before, strict=True))
    assert others == [0, 0]
    assert first == 0, "the end of the job that runs wakes it"
    assert second <= 2, "it looks whether the first was stopped"
    busy.cancel()
    assert [job.wait(30) for job in jobs] == [State.COMPLETED] * 4


def test_a_sweep_is_one_process_while_it_waits(busy):
    jobs = submit(["next.py"] * 4)
    assert {keeper(job) for job in jobs} == {keeper(jobs[0])}
    assert waits(jobs[0], jobs[3]) == ["waits for cpu, held by run 0001 of root", before(3)]
    alone = submit("next.py")
    assert waits(alone) == [before(4)]
    busy.cancel()
    assert {job.wait(60) for job in (*jobs, alone)} == {State.COMPLETED}
    ended = [job.status["ended"] for job in (*jobs, alone)]
    assert ended == sorted(ended)


def before(count, of=""):
    return f"waits for {count} job{'s' * (count > 1)} before it{of}"


def test_jobs_of_a_sweep_share_several_devices(script, monkeypatch):
    monkeypatch.setattr(tickets, "devices", lambda: ("GPU-a", "GPU-b"))
    script("""
        import os, time
        print(os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
        while not os.path.exists("go"):
            time.sleep(0.02)
        """)
    jobs = submit(["t.py"] * 3)
    until(lambda: text(jobs[0]) and text(jobs[1]))
    assert sorted(map(text, jobs)) == ["", "GPU-a\n", "GPU-b\n"]
    Path("go").touch()
    assert {job.wait(30) for job in jobs} == {State.COMPLETED}


# What is heard at once ---------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1, 2], ids=["first", "middle", "last"])
def test_a_job_of_a_sweep_is_cancelled_at_once_and_the_others_run(busy, which):
    jobs = submit(["next.py"] * 3)
    waits(*jobs)
    jobs[which].cancel()
    assert jobs[which].wait(SOON_S) == State.CANCELLED
    assert jobs[which].status["reason"] == "cancelled while it waited"
    busy.cancel()
    others = [job for job in jobs if job is not jobs[which]]
    assert {job.wait(30) for job in others} == {State.COMPLETED}
    assert text(jobs[which]) == ""


def test_a_folder_that_is_removed_leaves_the_rest_of_its_sweep(busy):
    jobs = submit(["next.py"] * 4)
    for job in (jobs[0], jobs[3]):
        shutil.rmtree(job.directory)
    other = submit("next.py", name="other")
    assert other.directory == jobs[3].directory, "the number is used again"
    other.cancel()
    busy.cancel()
    assert [jobs[1].wait(30), jobs[2].wait(30)] == [State.COMPLETED] * 2
    assert other.wait(30) == State.CANCELLED


@pytest.mark.parametrize("at", [1, 2], ids=["first", "in the middle"])
def test_a_killed_waiter_is_passed_over_at_once(busy, at):
    jobs = [busy, *(submit("next.py") for _ in range(3))]
    waits(*jobs[1:])
    os.kill(keeper(jobs[at]), signal.SIGKILL)
    assert jobs[at].wait(SOON_S) == State.FAILED
    begin = time.monotonic()
    busy.cancel()
    rest = [job for job in jobs[1:] if job is not jobs[at]]
    assert {job.wait(30) for job in rest} == {State.COMPLETED}
    assert time.monotonic() < begin + 3 * SOON_S


def test_a_killed_waiter_takes_what_waits_of_its_sweep_along_and_no_job_that_runs(script):
    script(SLEEPS)
    jobs = submit(["t.py"] * 3)
    until(lambda: text(jobs[0]))
    os.kill(keeper(jobs[1]), signal.SIGKILL)
    assert [jobs[i].wait(SOON_S) for i in (1, 2)] == [State.FAILED] * 2
    assert "lost" in jobs[2].status["reason"]
    assert jobs[0].state == State.RUNNING
    script("print('ran')", "next.py")
    following = submit("next.py")
    jobs[0].cancel()
    assert following.wait(30) == State.COMPLETED
    assert [job.state for job in jobs[1:]] == [State.FAILED] * 2


def test_a_killed_keeper_frees_its_device_at_once(busy):
    job = submit("next.py")
    waits(job)
    os.kill(keeper(busy), signal.SIGKILL)
    assert job.wait(2 * SOON_S) == State.COMPLETED


def test_a_waiter_that_is_stopped_in_the_middle_leaves_no_device_idle(busy):
    jobs = [submit("next.py") for _ in range(3)]
    waits(*jobs)
    until(lambda: all(map(has_begun, jobs)))
    os.kill(keeper(jobs[1]), signal.SIGSTOP)
    busy.cancel()
    assert jobs[2].wait(2 * SOON_S) == State.COMPLETED
    os.kill(keeper(jobs[1]), signal.SIGCONT)
    assert jobs[1].wait(30) == State.COMPLETED


@pytest.mark.parametrize("content", ["[]", '{"token": 5}'])
def test_a_damaged_job_of_a_sweep_ends_no_other(busy, content):
    jobs = submit(["next.py"] * 3)
    (jobs[1].directory / "job.json").write_text(content)
    (jobs[1].directory / "state.json").write_text("[]")
    busy.cancel()
    assert [jobs[0].wait(30), jobs[2].wait(30)] == [State.COMPLETED] * 2


def test_a_keeper_that_has_nowhere_to_say_what_it_does_runs_its_job(busy):
    """As on a full disk. Otherwise its waiter would try again for ever, before all others."""
    jobs = submit(["next.py"] * 2)
    (jobs[1].directory / "keeper.txt").mkdir()
    busy.cancel()
    assert [job.wait(30) for job in jobs] == [State.COMPLETED] * 2


def test_jobs_of_a_sweep_that_are_cancelled_and_removed_at_once_end_no_other(busy):
    jobs = submit(["next.py"] * 5)
    waits(*jobs)
    for job in jobs[::2]:
        job.cancel()
        shutil.rmtree(job.directory, ignore_errors=True)
    busy.cancel()
    assert {job.wait(30) for job in jobs[1::2]} == {State.COMPLETED}


def test_a_long_sweep_leaves_no_zombies(script):
    script("import sys, time; time.sleep(float(sys.argv[1]))")
    jobs = submit([*["t.py 0"] * 3, "t.py 99", "t.py 0"])
    until(lambda: jobs[3].state == State.RUNNING)
    states = [child.status() for child in psutil.Process(keeper(jobs[4])).children()]
    assert states.count(psutil.STATUS_ZOMBIE) <= 1
    for job in jobs[::-1]:
        job.cancel()


# Submitters of all kinds --------------------------------------------------------------------------


@pytest.mark.parametrize("closed", ["<&-", "<&- >&- 2>&-"])
def test_a_submitter_without_standard_streams_loses_no_job(script, closed):
    script("print('ran')")
    code = "from dlojz.launch import submit; submit('t.py')"
    subprocess.run(["bash", "-c", f'{sys.executable} -c "{code}" {closed}'], check=True)
    assert find(1).wait(30) == State.COMPLETED
    assert text(find(1)) == "ran\n"


def test_a_process_that_is_forked_meanwhile_delays_no_job(script, monkeypatch):
    script("print('ran')")
    usual, forked = processes.start, []

    def start(*args, **more):
        process = usual(*args, **more)
        forked.append(os.fork())
        if not forked[-1]:  # it has all descriptors of the submitter's
            time.sleep(30)
            os._exit(0)
        return process

    monkeypatch.setattr(processes, "start", start)
    job = submit("t.py")
    assert job.wait(2 * SOON_S) == State.COMPLETED
    os.kill(forked[0], signal.SIGKILL)
    os.waitpid(forked[0], 0)


# Who is named, and who blocks nobody --------------------------------------------------------------


def test_a_waiter_that_is_stopped_before_it_begins_holds_nobody_up(script, monkeypatch):
    script("print('ran')")
    usual = processes.start

    def stopped(*args, **more):
        process = usual(*args, **more)
        os.kill(process.pid, signal.SIGSTOP)
        return process

    with monkeypatch.context() as patch:
        patch.setattr(processes, "start", stopped)
        first = submit("t.py")
    following = submit("t.py")
    assert following.wait(30) == State.COMPLETED
    assert first.state == State.QUEUED
    first.cancel()
    assert first.wait(30) == State.CANCELLED


@pytest.mark.skipif(os.getuid() != 0, reason="makes a file of another user: needs root")
def test_the_note_names_whose_job_is_waited_for(script):
    script("")
    ticket = tickets.queue_folder() / "ticket-00000001-aaaaaaaa"
    ticket.write_text(json.dumps({"run": "/x", "token": "x", "devices": ["cpu"]}))
    os.chown(ticket, 65534, 65534)
    with locked_by_another(ticket):
        job = submit("t.py")
        assert waits(job) == [before(1, f", of {tickets.user_name(65534)}")]
        assert before(1, ", of nobody") in repr(queue())
    assert job.wait(30) == State.COMPLETED


# The package is upgraded meanwhile ----------------------------------------------------------------


def test_an_upgrade_loses_no_job_that_waits_or_runs(course_folder, script, tmp_path):
    """As `git pull` does: each module of the package is gone while jobs wait and run."""
    script("""
        import os, sys, time
        while not os.path.exists("go"):
            time.sleep(0.02)
        sys.exit(int(sys.argv[1]))
        """)
    package = tmp_path / "installed" / "dlojz"
    shutil.copytree(Path(dlojz.__file__).parent, package)
    code = "from dlojz.launch import submit; submit(['t.py 0', 't.py 7', 't.py 0'], n_gpu=1)"
    code += "; submit('t.py 9')"
    environment = os.environ | {"PYTHONPATH": str(package.parent)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    until(lambda: find(1).state == State.RUNNING)
    until(lambda: has_begun(find(4)))
    package.rename(package.with_name("moved"))
    Path("go").touch()
    assert [find(i).wait(30) for i in (1, 2, 3, 4)] == [
        "COMPLETED",
        "FAILED",
        "COMPLETED",
        "FAILED",
    ]
    assert [find(i).status["exit_code"] for i in (2, 4)] == [7, 9]
    assert find(4).status["reason"] == "exit code 9"


def test_a_keeper_that_fails_says_so_and_where(script, monkeypatch, tmp_path):
    script(SLEEPS)
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif 'dlojz.jobs.waiter' in sys.argv or '-m' in sys.orig_argv:\n"
        "    from dlojz.jobs import keeper\n    keeper.environment = lambda *_: 1 / 0\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    job = submit("t.py")
    assert job.wait(30) == State.FAILED
    assert "its keeper failed: ZeroDivisionError: see" in job.status["reason"]
    assert "ZeroDivisionError: division by zero" in job.explain()
