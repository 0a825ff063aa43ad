"""What a keeper does when things go wrong: kills, full disks, removed folders, hostile queues."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from waiting import SLEEPS, keeper, locked_by_another, text, until

from conftest import fill
from dlojz.jobs import processes, tickets
from dlojz.launch import Request, State, SubmitError, find, here, queue, series, submit
from dlojz.launch import job as job_module
from dlojz.runs import log

# A daemon as they are made: forked twice, in a session of its own, with no file left open.
DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 100)
        time.sleep(300)
    os._exit(0)
os.wait()
"""


def of_run(job):
    """The processes that carry the job's token in their environment."""
    return processes.leftovers(job.info["token"], None)


def is_gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


# Kills and stops ------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["keeper", "torchrun", "both"])
def test_whoever_is_killed_nothing_is_left_and_the_next_job_runs(script, who):
    # Each line in one call: print writes its end apart, and two processes write at once.
    says = "os.write(1, f'{os.getppid()}\\n'.encode())"
    script(f"import os\n{says}\n{DAEMON}\ntime.sleep(99)")
    script("print('next')", "next.py")
    job, following = submit("t.py", n_gpu=2), submit("next.py")
    until(lambda: len(text(job).split()) == 2)
    torchrun = int(text(job).split()[0])
    until(lambda: len(of_run(job)) >= 5, 10)  # torchrun, two ranks, their daemons
    for pid in {"keeper": [keeper(job)], "torchrun": [torchrun]}.get(who, [keeper(job), torchrun]):
        os.kill(pid, signal.SIGKILL)
    assert following.wait(60) == State.COMPLETED
    assert job.wait(30) == State.FAILED
    reason = "SIGKILL" if who == "torchrun" else "lost: its keeper was killed"
    assert reason in job.status["reason"]
    assert of_run(job) == set()


@pytest.mark.parametrize("kind", ["running", "ticket"])
def test_a_ticket_that_somebody_else_locks_hides_no_dead_keeper(script, kind):
    script("""
        import os, time
        if os.fork() == 0:  # with the device's lock
            os.setsid()
            time.sleep(300)
        print("x", flush=True)
        time.sleep(99)
        """)
    script("print('next')", "next.py")
    job = submit("t.py")
    until(lambda: text(job))
    waits, following = submit("next.py"), submit("next.py")
    for each in (waits, following):
        until(lambda j=each: j.status.get("reason"))
    ticket = min(tickets.queue_folder().glob(f"{kind}-*"))
    os.kill(keeper(job), signal.SIGKILL)
    os.kill(keeper(waits), signal.SIGKILL)
    with locked_by_another(ticket):
        assert following.wait(20) == State.COMPLETED
        assert of_run(job) == set()


@pytest.mark.parametrize(
    ("process", "waits"),
    [
        ({}, True),
        ({"pid": "../tmp", "started": 0}, True),
        ({"pid": 1}, False),
        ({"pid": 1, "started": []}, False),
    ],
)
def test_a_ticket_that_lies_about_its_keeper_stops_nobody(script, process, waits):
    script("print('ran')")
    ticket = tickets.queue_folder() / "ticket-00000000-aaaaaaaa"
    claim = {"run": "/x", "token": "x", "devices": ["cpu"]}
    ticket.write_text(json.dumps(claim | {"process": {"where": processes.here()} | process}))
    with locked_by_another(ticket):
        job = submit("t.py")
        until(lambda: "before it" in (job.status.get("reason") or "") if waits else job.state.final)
    assert job.wait(30) == State.COMPLETED


def test_an_orphan_that_hides_its_run_and_holds_the_device_is_ended(script):
    script("""
        import subprocess, time
        hides = ["env", "-i", "sleep", "300"]
        orphan = subprocess.Popen(hides, start_new_session=True, close_fds=False)
        print(orphan.pid, flush=True)
        time.sleep(99)
        """)
    script("print('next')", "next.py")
    job, following = submit("t.py"), submit("next.py")
    until(lambda: text(job))
    os.kill(keeper(job), signal.SIGKILL)
    assert following.wait(30) == State.COMPLETED
    assert is_gone(int(text(job)))


def test_a_job_whose_keeper_was_stopped_can_be_cancelled(script):
    script(SLEEPS)
    runs, waits = submit("t.py"), submit("t.py")
    until(lambda: text(runs) and waits.status.get("reason"))
    for job in (waits, runs):
        os.kill(keeper(job), signal.SIGSTOP)
        job.cancel()
        assert job.wait(10) == State.CANCELLED


def test_two_jobs_on_two_devices_end_their_own_daemons(script, monkeypatch):
    monkeypatch.setattr(tickets, "devices", lambda: ("GPU-a", "GPU-b"))
    script(f"{DAEMON}\nprint(os.environ['CUDA_VISIBLE_DEVICES'], flush=True)\ntime.sleep(99)")
    one, other = submit("t.py"), submit("t.py")
    until(lambda: text(one) and text(other))
    assert sorted([text(one), text(other)]) == ["GPU-a\n", "GPU-b\n"]
    until(lambda: len(of_run(one)) == len(of_run(other)) == 2)
    one.cancel()
    assert one.wait(30) == State.CANCELLED
    assert of_run(one) == set()
    assert len(of_run(other)) == 2, "the other's daemon is none of its business"
    other.cancel()
    assert other.wait(30) == State.CANCELLED
    assert of_run(other) == set()


def test_a_job_that_a_job_submitted_outlives_it(script):
    script("print('inner')", "inner.py")
    script("from dlojz.launch import submit; submit('inner.py')")
    job = submit("t.py")
    assert job.wait(60) == State.COMPLETED, job.explain()
    until(lambda: find(2).state.final)
    assert text(find(2)) == "inner\n"


def test_a_job_has_the_niceness_of_its_own_submission(script):
    script("import os; print(os.nice(0))")
    code = "from dlojz.launch import submit; submit('t.py').wait(60)"
    subprocess.run(["nice", "-n", "7", sys.executable, "-c", code], check=True)
    job = submit("t.py")
    job.wait(30)
    assert [text(find(1)), text(job)] == [f"{os.nice(0) + 7}\n", f"{os.nice(0)}\n"]


def test_a_keeper_that_waits_is_small(script):
    script(SLEEPS)
    first, waits = submit("t.py"), submit("t.py")
    until(lambda: "held by" in (waits.status.get("reason") or ""))
    assert psutil.Process(keeper(waits)).memory_full_info().uss < 30e6
    for job in (first, waits):
        job.cancel()


@pytest.mark.parametrize("user", [0, 65534])
@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user: needs root")
def test_a_process_that_holds_the_device_without_a_ticket_is_left_alone(script, user):
    """Which socket is whose is read from a list in which others can write."""
    script("print('ran')")
    address = tickets._address(tickets.queue_folder(), "cpu")
    code = f"import os, socket; held = socket.socket(socket.AF_UNIX); held.bind({address!r});"
    code += f"os.setuid({user}); print(1, flush=True); input()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        job = submit("t.py")
        until(lambda: "held by" in (job.status.get("reason") or ""))
        who = "another user's process" if user else f"process {holder.pid}"
        assert queue().rows[0][5] == f"waits for cpu, held by {who}"
        time.sleep(0.7)  # its waiter has looked twice
        assert holder.poll() is None
        holder.stdin.close()
    assert job.wait(30) == State.COMPLETED


def test_a_job_that_waits_says_whether_the_other_is_in_its_own_folder(
    script, tmp_path, monkeypatch
):
    script(SLEEPS)
    first = submit("t.py")
    shutil.copytree(tmp_path / "course", tmp_path / "clone", ignore=shutil.ignore_patterns("runs"))
    monkeypatch.setenv("DLOJZ_ROOT", str(tmp_path / "clone"))
    elsewhere = submit("t.py")
    until(lambda: "held by run" in (elsewhere.status.get("reason") or ""))
    assert elsewhere.status["reason"].endswith(", in another course folder")
    first.cancel()
    own = submit("t.py")
    until(lambda: "held by run" in (own.status.get("reason") or ""))
    assert "another" not in own.status["reason"]
    for job in (elsewhere, own):
        job.cancel()


def test_an_innocent_session_with_the_number_of_a_dead_one_is_spared(script):
    """After a reboot, or in a container that begins again, numbers are given again."""
    script("print('next')", "next.py")
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as innocent:
        for where, started in (("another boot", None), (processes.here(), 1)):
            leader = processes.identity(innocent.pid) | {"where": where}
            leader |= {"started": started} if started else {}
            about = {"run": "/gone", "token": "x", "devices": ["cpu"], "leader": leader}
            ticket = tickets.queue_folder() / "running-00000001-aaaaaaaa"
            ticket.write_text(json.dumps(about))
            assert submit("next.py").wait(30) == State.COMPLETED
            assert not ticket.exists()
            assert innocent.poll() is None
        innocent.kill()


def test_a_submitter_that_ignores_children_and_blocks_signals_changes_no_outcome(script):
    script("import sys; sys.exit(7)")
    script(SLEEPS, "sleeps.py")
    code = """
        import signal
        from dlojz.launch import submit
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        submit("t.py"), submit("sleeps.py")
        """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
    assert find(1).wait(30) == State.FAILED
    assert find(1).status["exit_code"] == 7
    until(lambda: text(find(2)))
    find(2).cancel()
    assert find(2).wait(4) == State.CANCELLED


@pytest.mark.parametrize("wish", ["a folder", "no text"])
def test_a_wish_to_cancel_that_cannot_be_read_is_one(script, wish):
    script(f"{DAEMON}\nprint('x', flush=True)\ntime.sleep(99)")
    job = submit("t.py")
    until(lambda: text(job))
    cancel = job.directory / "cancel"
    cancel.mkdir() if wish == "a folder" else cancel.write_bytes(b"\xff")
    assert job.wait(30) == State.CANCELLED
    assert of_run(job) == set()


def test_what_a_training_of_a_series_leaves_behind_ends_with_it(script, tmp_path):
    daemon = tmp_path / "daemon"
    first = script(
        f"""
        import os, time
        if os.fork() == 0:
            os.setsid()
            open({str(daemon)!r}, "w").write(str(os.getpid()))
            time.sleep(300)
        while not os.path.exists({str(daemon)!r}):
            time.sleep(0.01)
        """,
        "first.py",
    )
    second = script(f"print(open('/proc/' + open({str(daemon)!r}).read() + '/stat'))", "second.py")
    entries = [series.Entry("first", first, []), series.Entry("second", second, [])]
    job = series.submit(entries, Request(name="two"))
    assert job.wait(60) == State.COMPLETED, job.explain()
    assert "FileNotFoundError" in text(job, "second/stderr.txt")


# Folders and disks ----------------------------------------------------------------------------


def test_a_run_folder_that_is_removed_takes_its_job_along(script):
    script(SLEEPS)
    script("print('new')", "new.py")
    running, waiting = submit("t.py"), submit("t.py")
    until(lambda: text(running))
    trainer, keepers = int(text(running)), [keeper(running), keeper(waiting)]
    shutil.rmtree(running.directory.parent)
    job = submit("new.py")
    assert job.id == "0001", "the number is used again"
    assert job.wait(30) == State.COMPLETED
    assert text(job) == "new\n", "it ran once"
    until(lambda: all(map(is_gone, [trainer, *keepers])))
    assert job.state == State.COMPLETED


def test_a_run_folder_that_is_renamed_keeps_its_job(script):
    script("import time; print('x', flush=True); time.sleep(1)")
    job = submit("t.py")
    until(lambda: text(job))
    moved = job.directory.rename(job.directory.with_name("0077"))
    assert until(lambda: find(77).state.final)
    assert find(77).state == State.COMPLETED
    assert moved.exists()


def test_a_waiting_job_whose_folder_is_renamed_runs_its_own_trainer(script):
    script(SLEEPS)
    script("import os; print('mine', os.environ['DLOJZ_RUN'])", "mine.py")
    script("print('other')", "other.py")
    first, waiting = submit("t.py"), submit("mine.py")
    until(lambda: text(first))
    moved = waiting.directory.rename(waiting.directory.with_name("kept"))
    other = submit("other.py")
    assert other.directory == waiting.directory, "the number is used again"
    first.cancel()
    assert other.wait(30) == State.COMPLETED
    assert text(other) == "other\n"
    assert (moved / "stdout.txt").read_text() == f"mine {moved}\n"


def test_a_submission_that_fails_late_leaves_no_ticket(script, monkeypatch):
    script("")
    monkeypatch.setattr(here, "_start_waiter", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        submit("t.py")
    assert list(tickets.queue_folder().iterdir()) == []


def test_what_a_killed_submitter_left_in_the_queues_folder_is_removed_later(script):
    script("")
    left, young = (tickets.queue_folder() / f".new-{i}" for i in "ab")
    left.touch()
    young.touch()
    os.utime(left, (1, 1))
    submit("t.py").wait(30)
    until(lambda: [f.name for f in tickets.queue_folder().iterdir()] == [young.name])


def test_a_removed_queue_folder_lets_no_two_jobs_run_at_once(script):
    script("import time; print(time.time(), flush=True); time.sleep(0.8); print(time.time())")
    first = submit("t.py")
    until(lambda: text(first))
    shutil.rmtree(tickets.queue_folder())
    second = submit("t.py")
    assert [first.wait(30), second.wait(30)] == [State.COMPLETED] * 2
    assert float(text(second).split()[0]) > float(text(first).split()[1])


def test_a_job_that_ends_well_on_a_full_disk_has_ended_well(script, small_disk):
    script("import time; print('x', flush=True); time.sleep(1)")
    job = submit("t.py")
    until(lambda: text(job))
    fill(small_disk)
    assert job.wait(30) == State.COMPLETED


def test_a_job_that_fails_for_a_full_disk_says_so(script, small_disk):
    script("""
        import os
        with open(os.environ["DLOJZ_RUN"] + "/big", "wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        """)
    job = submit("t.py")
    assert job.wait(60) == State.FAILED
    assert "exit code 1; the disk is full: `du -sh runs/*` shows" in job.status["reason"]


def test_a_log_on_a_full_disk_has_whole_lines_only(script, small_disk):
    script("""
        import os
        from pathlib import Path
        from types import SimpleNamespace
        from dlojz.runs import log
        run = log.RunLog(Path(os.environ["DLOJZ_RUN"]), SimpleNamespace())
        for i in range(1000):
            run.case(str(i), text="x" * 10_000)
        run.end()
        """)
    job = submit("t.py")
    assert job.wait(60) == State.FAILED
    assert "the disk is full" in job.status["reason"]
    file = job.directory / "events.jsonl"
    assert file.read_bytes().endswith(b"}\n")
    read = log.read(job)
    assert list(read.cases) == [str(i) for i in range(len(read.cases))] != []
    assert read.end.get("outcome", "failed") == "failed"


def test_a_submission_on_a_full_disk_says_where_and_leaves_nothing(script, small_disk):
    script("")
    fill(small_disk)
    with pytest.raises(SubmitError, match=r"runs/0001.* could not be written: the disk is full"):
        submit("t.py")
    assert [p.name for p in small_disk.iterdir()] == ["filler"]


# Other machines, and files that are no good -----------------------------------------------------


def test_a_host_name_that_changed_changes_nothing(script, monkeypatch):
    script(SLEEPS)
    job = submit("t.py")
    until(lambda: text(job))
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    assert job.state == State.RUNNING
    os.kill(keeper(job), signal.SIGKILL)
    until(lambda: job.state == State.FAILED)


@pytest.mark.parametrize(("silent_s", "state"), [(5, "RUNNING"), (120, "FAILED")])
def test_a_job_of_another_boot_or_container_lives_while_it_shows_itself(
    script, silent_s, state, monkeypatch
):
    script(SLEEPS)
    job = submit("t.py")
    until(lambda: job.state == State.RUNNING)
    os.kill(keeper(job), signal.SIGSTOP)
    seen = time.time() - silent_s
    os.utime(job.directory / "state.json", (seen, seen))
    monkeypatch.setattr(processes, "here", lambda: "elsewhere")
    assert job.state == state
    monkeypatch.undo()
    os.kill(keeper(job), signal.SIGKILL)


def test_many_runs_are_listed_and_only_those_that_are_shown_are_read(course_folder, monkeypatch):
    runs = course_folder / "runs"
    start = {"event": "start", "hostname": "h", "pid": 1, "time": "2026-01-01T00:00:00+00:00"}
    end = {"event": "end", "outcome": "completed", "time": "2026-01-01T00:01:00+00:00"}
    for i in range(1, 1001):
        run = runs / f"{i:04d}"
        run.mkdir(parents=True)
        if i % 4:
            (run / "job.json").write_text(json.dumps({"command": ["t.py"], "name": "x"}))
            (run / "state.json").write_text(json.dumps({"state": "COMPLETED", "ended": 2.0}))
        else:
            (run / "events.jsonl").write_text(f"{json.dumps(start)}\n{json.dumps(end)}\n")
    assert [row[0] for row in queue().rows] == ["0996", "0997", "0998", "0999", "1000"]
    seconds = []
    for _ in range(5):
        begin = time.process_time()  # others use this machine
        queue()
        seconds.append(time.process_time() - begin)
    assert min(seconds) < 0.02
    read, usual = [], job_module.read_table
    with monkeypatch.context() as patch:
        patch.setattr(job_module, "read_table", lambda file: read.append(file) or usual(file))
        assert len(job_module.in_queue()) == 5
    assert {file.parent.name for file in read} == {"runs", *(f"{i:04d}" for i in range(996, 1001))}
    again = runs / "0501"
    (again / "state.json").unlink()
    (again / "state.json").write_text(json.dumps({"state": "QUEUED"}))
    about = {"command": ["t.py"], "name": "x", "submitted": time.time()}
    (again / "job.json").write_text(json.dumps(about))
    assert "0501" in [row[0] for row in queue().rows], "what changes is read again"


# A queue folder that others write to -------------------------------------------------------------


CLAIM = {"run": "/x/\x1b]0;", "token": "x", "devices": ["cpu"], "locked": ["cpu"]}
NOBODY = {"where": processes.here(), "pid": 10**30, "started": 1}
PLANTED = {  # by name: not opened, or not to be read, or not held, or not what it seems
    "ticket-x": Path.touch,
    "ticket-00000000-aaaaaaaa": lambda file: file.touch(0),
    "ticket-00000001-aaaaaaaa": os.mkfifo,
    "ticket-00000002-aaaaaaaa": lambda file: file.symlink_to("/nonexistent"),
    "ticket-00000003-aaaaaaaa": Path.mkdir,
    "ticket-00000004-aaaaaaaa": lambda file: file.write_text("[" * 70_000),
    "ticket-999999999999999-aaaaaaaa": Path.touch,
    **{f"{kind}-0000000{i}-aaaaaaaa": lambda file, text=text: file.write_text(text)
       for i, text in enumerate(("[]", "null", "5"), 5) for kind in ("ticket", "running")},
}  # fmt: skip
HELD = {
    "running-00000000-aaaaaaaa": CLAIM | {"process": NOBODY},
    "running-00000001-aaaaaaaa": CLAIM | {"locked": 5},
    "ticket-999999999999998-aaaaaaaa": {"devices": ["cpu"]},  # after all others
}


def test_what_others_put_into_the_queues_folder_stops_nobody(script):
    script("print('ran')")
    folder = tickets.queue_folder()
    for name, plant in PLANTED.items():
        plant(folder / name)
    with ExitStack() as stack:
        for name, about in HELD.items():
            (folder / name).write_text(json.dumps(about))
            stack.enter_context(locked_by_another(folder / name))
        jobs = [submit("t.py") for _ in range(2)]
        assert [job.wait(30) for job in jobs] == [State.COMPLETED] * 2
        ended = [job.status["ended"] for job in jobs]
        assert ended == sorted(ended)


@pytest.mark.parametrize("kind", ["a file", "a link", "not ours"])
def test_a_queue_folder_that_can_not_be_used_says_what_to_do(script, tmp_path, monkeypatch, kind):
    script("")
    folder = tmp_path / "q"
    monkeypatch.setenv("DLOJZ_QUEUE", str(folder))
    if kind == "a file":
        folder.touch()
    elif kind == "a link":
        folder.symlink_to("/proc")
    else:
        folder.mkdir()
        monkeypatch.setattr(tickets.os, "access", lambda *_: False)
    with pytest.raises(SubmitError, match="DLOJZ_QUEUE"):
        submit("t.py")
    assert list((tmp_path / "course" / "runs").iterdir()) == []


def test_nothing_is_left_in_the_temporary_folder(script, tmp_path, monkeypatch):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    script("import os; print(os.environ['RANK'])")
    assert submit("t.py", n_gpu=2).wait(60) == State.COMPLETED
    assert list(temporary.iterdir()) == []
