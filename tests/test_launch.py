"""The launcher, with real processes: states, order, limits, hostile names."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest
from waiting import assert_hostile_names_are_only_names, text, until

from dlojz import launch
from dlojz.jobs import tickets
from dlojz.launch import State, SubmitError, find, latest, queue, request, submit
from dlojz.runs import outcome


def test_a_job_runs_with_its_flags_and_is_kept(script):
    script("import sys; print(sys.argv[1:])")
    job = submit("t.py --a 'b c' -d", name="first", account="xyz@a100", module="pytorch")
    assert job.wait(30) == State.COMPLETED
    assert (job.info["account"], job.info["module"]) == ("xyz@a100", "pytorch")
    assert text(job) == "['--a', 'b c', '-d']\n"
    assert job.command == "t.py --a 'b c' -d"
    assert job.directory.name == job.id == "0001"
    assert repr(job) == "<job 0001 'first': COMPLETED>"


def test_what_runs_is_what_was_submitted(script):
    path = script("print('before')")
    wait = submit((str(script("import time; time.sleep(1)", "wait.py")),))
    job = submit("t.py")
    path.write_text("print('after')")
    assert job.wait(30) == State.COMPLETED
    assert wait.state == State.COMPLETED
    assert text(job) == "before\n"
    assert (job.directory / "trainer.py").read_text() == "print('before')"


def test_jobs_run_one_after_the_other_in_the_order_of_submission(script, tmp_path):
    out = tmp_path / "order"
    script(f"""
        import sys, time
        with open({str(out)!r}, "a") as f:
            f.write("begin " + sys.argv[1] + "\\n"); f.flush()
            time.sleep(0.1)
            f.write("end " + sys.argv[1] + "\\n")
        """)
    jobs = submit([f"t.py {i}" for i in range(4)], name="sweep")
    assert [j.wait(60) for j in jobs] == [State.COMPLETED] * 4
    expected = [f"{what} {i}" for i in range(4) for what in ("begin", "end")]
    assert out.read_text().split("\n")[:-1] == expected


def test_a_failure_shows_the_end_of_stderr(script):
    script("raise ValueError('the reason')")
    job = submit("t.py")
    assert job.wait(30) == State.FAILED
    assert "exit code 1" in job.explain()
    assert "ValueError: the reason" in job.explain()
    assert str(job.directory) in job.explain()


def test_a_long_traceback_still_shows_the_trainees_own_line(script):
    script("""
        def forever(n): raise ValueError("\\n" * 30 + "the end")
        forever(1)  # the trainee's line
        """)
    job = submit("t.py")
    assert job.wait(30) == State.FAILED
    assert "/program/t.py" in job.explain()
    assert "the end" in job.explain()


def test_a_time_limit_ends_a_job_and_all_that_it_started(script):
    script("""
        import signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stubborn = "import signal as s, time; s.signal(s.SIGTERM, s.SIG_IGN); time.sleep(99)"
        child = subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True)
        print(child.pid, flush=True)
        time.sleep(99)
        """)
    job = submit("t.py", time_max="00:00:01")
    assert job.wait(60) == State.TIMEOUT
    assert not psutil.pid_exists(int(text(job)))


def test_a_waiting_job_and_a_running_job_can_be_cancelled(script):
    script("import time; print('runs', flush=True); time.sleep(99)")
    running, waiting = submit("t.py"), submit("t.py")
    until(lambda: running.state == State.RUNNING)
    waiting.cancel()
    assert waiting.wait(30) == State.CANCELLED
    assert running.state == State.RUNNING
    running.cancel()
    assert running.wait(30) == State.CANCELLED
    running.cancel()  # of one that has ended: nothing
    assert text(waiting) == "", "it never ran"


def test_out_of_memory_is_told_from_the_log(course_folder):
    job = submit(
        "dlojz.py --test --data synthetic --model resnet18 --image-size 100000 -b 64", name="big"
    )
    assert job.wait(60) == State.OUT_OF_MEMORY
    assert "can't allocate memory" in job.status["reason"]


def test_a_killed_trainer_is_a_failure(script):
    script("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    job = submit("t.py")
    assert job.wait(30) == State.FAILED
    assert "SIGKILL" in job.status["reason"]


def test_a_stubborn_trainer_ends_with_its_keeper(script):
    script("""
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(os.getpid(), flush=True); time.sleep(99)
        """)
    job, following = submit("t.py"), submit((str(script("print('next')", "next.py")),))
    until(lambda: text(job))
    trainer = psutil.Process(int(text(job)))
    trainer.parent().kill()
    until(lambda: job.state == State.FAILED)
    assert "lost" in job.status["reason"]
    assert following.wait(30) == State.COMPLETED
    assert not trainer.is_running() or trainer.status() == psutil.STATUS_ZOMBIE


def test_a_failure_beside_a_kernel_that_kills_others_is_a_failure(course_folder):
    (course_folder / "stderr.txt").write_text("ValueError: my bug")
    assert outcome.from_exit(course_folder, 1, memory_was_full=True)[0] == "FAILED"
    assert outcome.from_exit(course_folder, -9, memory_was_full=True)[0] == "OUT_OF_MEMORY"
    assert outcome.from_exit(course_folder, -9, memory_was_full=False)[0] == "FAILED"


def test_a_submission_that_was_cut_short_disturbs_nobody(script, course_folder):
    script("")
    job = submit("t.py")
    (course_folder / "runs" / "0002").mkdir()
    job.wait(30)
    assert [row[0] for row in queue().rows] == ["0001"]
    assert latest() == job


def test_a_job_that_cannot_be_started_says_why(script, monkeypatch):
    script("")
    monkeypatch.setenv("DLOJZ_PYTHON", "/nowhere/python")
    job = submit("t.py")
    assert job.wait(30) == State.FAILED
    assert "/nowhere/python" in job.explain()


def test_a_source_in_another_encoding_runs(script):
    path = script("")
    path.write_bytes("# coding: latin-1\nprint('é')".encode("latin-1"))
    job = submit("t.py")
    assert job.wait(30) == State.COMPLETED


def test_jobs_outlive_the_process_that_submitted_them(script, course_folder):
    script("import time; time.sleep(1); print('done')")
    code = (
        "import os; from dlojz.launch import submit; submit(['t.py'] * 2); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", code], cwd=course_folder)
    assert killed.returncode == -signal.SIGKILL
    assert find(1).wait(30) == find(2).wait(30) == State.COMPLETED


def test_two_submitters_lose_nothing(script, tmp_path):
    script("import time; time.sleep(0.01)")
    code = "from dlojz.launch import submit\nfor i in range(4): submit('t.py', name='both')"
    both = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [p.wait(60) for p in both] == [0, 0]
    jobs = launch.jobs()
    assert len(jobs) == 8
    assert {j.wait(120) for j in jobs} == {State.COMPLETED}
    spans = sorted((j.status["started"], j.status["ended"]) for j in jobs)
    assert all(a[1] <= b[0] + 0.2 for a, b in itertools.pairwise(spans))


def test_several_processes_know_each_other(script):
    script("""
        import os, torch, torch.distributed as dist
        from dlojz import idr_torch
        dist.init_process_group("gloo", rank=idr_torch.rank, world_size=idr_torch.size)
        x = torch.tensor([idr_torch.rank + 1.0]); dist.all_reduce(x)
        with open(f"{os.environ['DLOJZ_RUN']}/{idr_torch.rank}", "w") as file:
            print(idr_torch.size, x.item(), file=file)
        dist.destroy_process_group()
        """)
    job = submit("t.py", n_gpu=2)
    assert job.wait(120) == State.COMPLETED, job.explain()
    assert text(job, "0") == text(job, "1") == "2 3.0\n"


def test_what_is_told_of_a_failure_is_its_cause(tmp_path):
    """The last lines of a run on two GPUs that were one."""
    cause = "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 60"
    after = (
        "[W1121 15:58:22.960064703 ProcessGroupNCCL.cpp:1575] Warning: WARNING: "
        "destroy_process_group() was not called before program exit, which can leak resources. "
        "For more info, please see https://pytorch.org/docs (function operator())"
    )
    (tmp_path / "stderr.txt").write_text(f"Last error:\n{cause}\n{after}\n")
    assert outcome.errors(tmp_path).splitlines() == ["Last error:", cause]


def test_the_variables_of_other_launchers_stay_outside(script, monkeypatch):
    outer = ["SLURM_PROCID", "SLURM_STEP_ID", "RANK", "WORLD_SIZE", "MASTER_PORT", "PMI_RANK"]
    outer += ["OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "MPI_LOCALRANKID", "PALS_RANKID"]
    for name in outer:
        monkeypatch.setenv(name, "7")
    script(f"import os; print([k for k in os.environ if k in {outer}])")
    job = submit("t.py")
    job.wait(30)
    assert text(job) == "[]\n"


def test_hostile_names_are_only_names(course_folder):
    assert_hostile_names_are_only_names(course_folder)


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("t.py 'unclosed", {}, "can't read the command"),
        ("", {}, "an empty command"),
        ([], {}, "an empty list"),
        ("nowhere.py", {}, "no trainer 'nowhere.py'"),
        ("a'; echo foo", {}, "can't read the command"),
        ("t.py", {"n_gpu": 0}, "n_gpu=0: expected a whole number of at least 1"),
        ("t.py", {"n_gpu": 9999}, "this machine has no GPU, and CPUs for at most"),
        ("t.py", {"time_max": "soon"}, "expected HH:MM:SS"),
        ("t.py", {"time_max": "a-1:00"}, "expected HH:MM:SS"),
        ("t.py", {"time_max": "-1:00"}, "expected HH:MM:SS"),
        ("t.py", {"time_max": "00:00:00"}, "expected a time longer than 0"),
        (["t.py", "nowhere.py"], {}, "no trainer"),
    ],
)
def test_a_bad_submission_says_what_to_change_and_leaves_nothing(
    command, options, message, script, course_folder
):
    script("")
    with pytest.raises(SubmitError, match=message):
        submit(command, **options)
    assert not (course_folder / "runs").exists()


def test_a_misspelt_trainer_gets_a_guess(script, course_folder, monkeypatch):
    script("", "before.py")
    monkeypatch.chdir(course_folder)
    with pytest.raises(SubmitError, match=r"no trainer 'befor.py'.*; did you mean before.py\?"):
        submit("befor.py")


def test_a_syntax_error_is_told_at_once_with_its_line(script, course_folder):
    script("x = 1\nfor i in range(3)\n    pass\n")
    with pytest.raises(SubmitError, match=r"t.py, line 2: expected ':'\n    for i in range\(3\)"):
        submit("t.py")
    assert not (course_folder / "runs").exists()


@pytest.mark.parametrize(
    ("source", "message"),
    [("-" * 200_000, "can't be compiled"), ("(" * 300, "too many nested"), ("x\0y", "null bytes")],
    ids=["deep", "nested", "binary"],
)
def test_what_is_no_program_is_refused_in_a_sentence(script, source, message):
    script(source)
    with pytest.raises(SubmitError, match=message):
        submit("t.py")


def test_latest_finds_a_sweep_again(script, course_folder):
    script("")
    one = submit("t.py", name="one")
    sweep = submit(["t.py", "t.py 2"], name="sweep")
    assert latest() == sweep
    assert latest("one") == one
    assert find(1) == find("0001") == one
    with pytest.raises(LookupError, match="no job named 'three'"):
        latest("three")
    for bad in ("99", "a'; echo foo", "../..", ""):
        with pytest.raises(LookupError, match="no job"):
            find(bad)
    [job.wait(30) for job in [one, *sweep]]


def test_latest_finds_what_is_left_of_a_sweep(script):
    script("")
    sweep = submit(["t.py 1", "t.py 2", "t.py 3"])
    [job.wait(30) for job in sweep]
    shutil.rmtree(sweep[1].directory)
    assert latest() == [sweep[0], sweep[2]]
    for torn in ("", "5", '["nowhere", 5]', f'["{"x" * 300}", "../0001"]'):
        (sweep[2].directory / "sweep.json").write_text(torn)
        assert latest() == sweep[2]


def test_the_queue_shows_those_that_run_and_the_last_that_ended(script):
    script("")
    jobs = submit([f"t.py {i}" for i in range(4)], name="s")
    [j.wait(30) for j in jobs]
    assert [row[0] for row in queue("s", last=2).rows] == ["0003", "0004"]
    assert "COMPLETED" in repr(queue())
    assert ">t.py 3</td>" in queue()._repr_html_()
    assert repr(queue("other")) == "no jobs"


def test_a_run_by_hand_is_a_job_too(course_folder, train, tmp_path):
    folder = course_folder / "runs" / "0001"
    flags = "--test --test-nsteps 1 --data synthetic --model resnet18 --image-size 32 -b 2"
    train(course_folder / "dlojz" / "dlojz.py", folder, *flags.split())
    assert find(1).state == State.COMPLETED
    assert find(1).name == "by hand"


def test_all_users_may_queue(script):
    folder = tickets.queue_folder()
    assert folder.stat().st_mode & 0o7777 == 0o1777


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user: needs root")
def test_another_user_gets_no_device_that_is_held(script, tmp_path):
    script("import time; time.sleep(2)")
    before = os.umask(0o077)  # a careful user: the others must be able to wait all the same
    first = submit("t.py")
    until(lambda: first.state == State.RUNNING)
    behind = submit("t.py")
    os.umask(before)
    code = """
        import os
        from pathlib import Path
        from dlojz.jobs import tickets
        tickets.devices()  # the last import: the interpreter may lie in a private home
        os.setgid(65534)
        os.setuid(65534)
        ticket, fd = tickets.take([Path("/somewhere")], "a token", ["cpu"])
        before = len(list(tickets.ahead(ticket, ["cpu"])))
        print(os.getuid(), before, bool(tickets.grab(ticket.parent, ["cpu"], 1)))
        """
    for folder in (tmp_path, *tmp_path.parents):
        if folder.is_relative_to("/tmp/pytest-of-root"):
            folder.chmod(0o755)  # let the other user reach the queue
    command = [sys.executable, "-c", textwrap.dedent(code)]
    other = subprocess.run(command, capture_output=True, text=True)
    assert other.stdout == "65534 1 False\n", other.stderr
    behind.cancel()
    assert first.wait(30) == State.COMPLETED


def test_a_dry_run_shows_what_would_run_and_submits_nothing(script, course_folder):
    script("")
    shown = submit("t.py --a 1", n_gpu=2, dry_run=True)
    assert "torch.distributed.run" in repr(shown)
    assert repr(shown).endswith("t.py --a 1")
    assert launch.jobs() == []


def test_the_launcher_is_chosen_by_what_is_there(script, monkeypatch):
    script("")
    monkeypatch.delenv("DLOJZ_LAUNCHER", raising=False)
    monkeypatch.setattr(request, "_slurm_is_here", lambda: True)
    assert launch.launcher().name == "slurm"
    monkeypatch.setenv("DLOJZ_LAUNCHER", "local")
    assert launch.launcher().name == "local"
    monkeypatch.setenv("DLOJZ_LAUNCHER", "a'; echo foo")
    with pytest.raises(SubmitError, match="expected local or slurm"):
        submit("t.py")


@pytest.mark.parametrize(
    ("end", "reason", "said"),
    [
        ("raise ValueError('mine')", "process 1: exit code 1", "\n  | ValueError: mine\n  in "),
        ("os.kill(os.getpid(), 9)", "process 1: ended by signal SIGKILL", "(SIGKILL) received"),
    ],
)
def test_of_several_processes_the_first_that_failed_is_told(script, end, reason, said):
    script(
        f"""
        # forked
        import os, sys, time
        if os.environ["RANK"] == "1":
            {end}
        time.sleep(60)
        """
    )
    job = submit("t.py", n_gpu=2)
    assert job.wait(60) == State.FAILED
    assert job.status["reason"] == reason
    assert said in job.explain()
