"""Where the processes of a job stood that reached its time limit."""

import pytest
from waiting import text

from dlojz.jobs import stacks
from dlojz.launch import State, submit


def frame(name, file="/x/runs/0001/trainer.py", line=2):
    return {"name": name, "filename": file, "short_filename": file[-12:], "line": line}


FETCH = [frame("_Fetcher.fetch", "/lib/fetch.py"), frame("_worker_loop", "/lib/worker.py")]
C10D = "/lib/torch/distributed/distributed_c10d.py"
MAIN = frame("main")
CASES = {
    "a collective": (
        {0: [frame("all_reduce", C10D), frame("wrapper", C10D), MAIN], 1: [MAIN]},
        "process 0: line 2 `two()`, in all_reduce; process 1: line 2 `two()`",
    ),
    "all the same": (
        {i: [MAIN] for i in range(3)},
        "processes 0, 1, 2: line 2 `two()`",
    ),
    "an idle worker": (
        {0: [frame("get", C10D), *FETCH[1:], MAIN]},
        "",
    ),
    "a worker that loads": (
        {0: [frame("sleep", line=1), *FETCH]},
        "a loader's worker of process 0: line 1 `one()`",
    ),
    "no line of the trainer": (
        {0: [frame("wait", "/lib/a.py", 7)]},
        "process 0: in wait (/lib/a.py:7)",
    ),
    "a file that is gone": (
        {0: [frame("f", "/x/runs/0001/gone.py", 7)]},
        "process 0: line 7 of f",
    ),
    "torchrun": ({None: [frame("run", C10D)]}, ""),
}


@pytest.mark.parametrize("case", CASES)
def test_what_stands_where_is_one_line(case, tmp_path):
    found, said = CASES[case]
    (tmp_path / "trainer.py").write_text("one()\n  two()\n")
    threads = [
        {"pid": pid, "thread_name": name, "frames": [own(f, tmp_path) for f in frames]}
        for pid, frames in found.items()
        for name in ("MainThread", "QueueFeederThread")
    ]
    assert stacks.where(tmp_path, threads, {pid: pid for pid in found}) == said


def own(frame, folder):
    return frame | {"filename": frame["filename"].replace("/x/runs/0001", str(folder))}


def test_a_program_without_threads_has_a_main_thread(tmp_path):
    thread = {"pid": 7, "thread_name": None, "frames": [frame("wait", "/lib/a.py", 7)]}
    assert stacks.where(tmp_path, [thread], {7: 0}) == "process 0: in wait (/lib/a.py:7)"


HANGS = """
import multiprocessing, time
def fetch():
    time.sleep(60)  # the fault
def _worker_loop():
    fetch()
worker = multiprocessing.get_context("fork").Process(target=_worker_loop)
worker.start()
print("begun", flush=True)
worker.join()
"""


def test_a_job_at_its_time_limit_says_where_it_stood_and_keeps_all_stacks(script):
    script(HANGS)
    job = submit("t.py", time_max="00:00:02")
    assert job.wait(30) == State.TIMEOUT
    assert job.status["reason"] == (
        "ended at its time limit; process 0: line 10 `worker.join()`; a loader's worker of "
        "process 0: line 4 `time.sleep(60)  # the fault`"
    )
    assert "fetch (" in text(job, stacks.FILE)
    assert "fetch (" not in job.explain()


def test_without_py_spy_the_reason_says_what_to_type(tmp_path, monkeypatch):
    monkeypatch.setattr(stacks.shutil, "which", lambda *_, **__: None)
    assert "`pip install py-spy`" in stacks.keep(tmp_path, [])


@pytest.mark.parametrize("said", ["null", '["x"]', '[{"pid": 1}]', "{", ""])
def test_another_program_called_py_spy_fails_no_job(said, tmp_path, monkeypatch):
    program = tmp_path / "py-spy"
    program.write_text(f"#!/bin/sh\necho '{said}'\n")
    monkeypatch.setattr(stacks.shutil, "which", lambda *_, **__: str(program))
    for mode in (0o755, 0o644):
        program.chmod(mode)
        assert "where it stood is not known" in stacks.keep(tmp_path, [1])


def test_a_system_that_forbids_to_look_says_what_to_type(tmp_path, monkeypatch):
    program = tmp_path / "py-spy"
    program.write_text("#!/bin/sh\necho 'Error: Permission denied (os error 13)' >&2; exit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(stacks.shutil, "which", lambda *_, **__: str(program))
    assert "`sudo sysctl kernel.yama.ptrace_scope=0`" in stacks.keep(tmp_path, [1])
