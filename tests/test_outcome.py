"""Why a job ended: told soon, in few words, and of the process that failed."""

import os
import time

import pytest

from dlojz.launch import State, submit
from dlojz.runs import outcome


def said(folder, text):
    (folder / "stderr.txt").write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


def table(*failed):
    """What torchrun writes at the end: (rank, exit code) of each process, the first cause last."""
    entries = [
        f"[{i}]:\n  time      : 2026-11-22_07:55:19\n  host      : localhost\n"
        f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: 11{rank})\n"
        "  error_file: <N/A>\n  traceback : <N/A>\n"
        for i, (rank, code) in enumerate(failed)
    ]
    return (
        "E1122 07:55:19.076000 11421 torch/distributed/elastic/multiprocessing/api.py:986] failed\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        f"===\nt.py FAILED\n---\nFailures:\n{''.join(entries[:-1])}---\n"
        f"Root Cause (first observed failure):\n{entries[-1]}===\n"
    )


GONE = (
    "[rank{0}]: Traceback (most recent call last):\n"
    "[rank{0}]: RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]\n"
)


@pytest.mark.parametrize("start", ["Root Cause\n", table((0, 1)), "usage: \n", "ChildFailedError"])
def test_megabytes_of_errors_are_searched_in_a_second(tmp_path, start):
    lines = "  rank  : 1 x\n\n usage: [rank0]: 1 \n" * 120_000  # 4 MB
    said(tmp_path, start + lines)
    begin = time.monotonic()
    assert outcome.from_exit(tmp_path, 1, memory_was_full=False)[0] == "FAILED"
    outcome.errors(tmp_path)
    assert time.monotonic() - begin < 1.5


def test_a_line_of_50_megabytes_is_cut(tmp_path):
    said(tmp_path, b"x" * 50_000_000 + b"\nValueError: mine\n")
    text = outcome.errors(tmp_path)
    assert len(text) < 1000
    assert text.endswith(" ...\nValueError: mine\n")


def test_a_terminal_obeys_nothing_that_a_job_said(tmp_path):
    said(
        tmp_path,
        "\x1b[31mred\x1b[0m \x1b]0;title\x07and\x1b[2J \x1bcplain\b\x9b\x07\tend\r\nmore\n",
    )
    assert outcome.errors(tmp_path) == "red and plain\tend\nmore\n"


def test_a_wrong_flag_is_told_without_the_list_of_all_flags(tmp_path):
    error = "trainer.py: error: unrecognized arguments: --qux\n"
    said(tmp_path, f"usage: trainer.py [-h]\n                  [--lr LR]\n{error}")
    assert outcome.errors(tmp_path) == error


def test_a_signal_without_a_name_is_told_by_its_number(tmp_path):
    assert outcome.from_exit(said(tmp_path, ""), -40, False) == ("FAILED", "ended by signal 40")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (table((0, -15), (1, -9)), "process 1: ended by signal SIGKILL"),
        # Both had ended when torchrun looked, and it took the one that missed the other.
        (GONE.format(0) + table((1, -9), (0, 1)), "process 1: ended by signal SIGKILL"),
        (GONE.format(0) + table((1, 7), (0, 1)), "process 1: exit code 7"),
        # The culprit is not in the table: for torchrun, it ended well.
        (GONE.format(0) + table((0, 1)), "process 1: exit code 0, before the others were done"),
        # Nothing tells who began: torchrun's word counts.
        (table((1, -15), (0, -15)), "process 0: ended by signal SIGTERM"),
    ],
)
def test_the_process_that_failed_is_named_and_not_the_one_that_missed_it(tmp_path, text, reason):
    (tmp_path / "job.json").write_text('{"n_gpu": 2}')
    state = outcome.from_exit(said(tmp_path, text), 1, memory_was_full=False)
    assert state == ("FAILED", reason)


OWN = "[rank1]: Traceback (most recent call last):\n[rank1]: ValueError: once\n"


@pytest.mark.parametrize(
    ("text", "waited"),
    [
        (GONE.format(0), True),
        (GONE.format(0) + table((1, -15), (0, 1)), True),
        (GONE.format(0) + OWN, False),
        ("[rank0]: CheckpointError: not written (Connection closed by peer [::1]:1)\n", True),
        ("[rank0]: CheckpointError: not written (Is the disk full?)\n", False),
        (GONE.format(0) + table((1, -9), (0, 1)), False),
        ("", False),
    ],
)
def test_whether_all_that_failed_had_waited_is_told(tmp_path, text, waited):
    assert outcome.only_waited(said(tmp_path, text)) == waited


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("os.kill(os.getpid(), 9)", "process 1: ended by signal SIGKILL"),
        ("os._exit(7)", "process 1: exit code 7"),
        ("os._exit(0)", "process 1: exit code 0, before the others were done"),
    ],
)
def test_a_process_that_leaves_the_others_waiting_is_named(script, end, reason):
    """As torchrun and gloo really write it."""
    script(
        f"""
        import argparse, os
        import torch.distributed
        from dlojz.runs import log
        run = log.open_run(argparse.Namespace())
        torch.distributed.init_process_group("gloo")
        torch.distributed.barrier()
        if os.environ["RANK"] == "1":
            {end}
        torch.distributed.barrier()
        """
    )
    job = submit("t.py", n_gpu=2)
    assert job.wait(60) == State.FAILED
    assert job.status["reason"] == reason


@pytest.mark.parametrize("job", ["", "[]"])
def test_a_job_that_lost_its_number_of_processes_names_one_that_failed(tmp_path, job):
    (tmp_path / "job.json").write_text(job)
    state = outcome.from_exit(said(tmp_path, GONE.format(0) + table((0, 1))), 1, False)
    assert state == ("FAILED", "process 0: exit code 1")


TRACEBACK = "Traceback (most recent call last):\n  x = big()\n"
OUT_OF_MEMORY = {
    "Python": f"{TRACEBACK}MemoryError\n",
    "numpy": f"{TRACEBACK}numpy._core._exceptions._ArrayMemoryError: Unable to allocate 9 GiB\n",
    "torch": f"{TRACEBACK}RuntimeError: [enforce fail at alloc_cpu.cpp:1] can't allocate memory\n",
    "a GPU": f"{TRACEBACK}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n",
    "C++": "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::\n",
    "one of several": f"[rank1]: {TRACEBACK}[rank1]: MemoryError\n{GONE.format(0)}",
    "with a line behind it": f"{TRACEBACK}MemoryError\nleaked semaphore objects\n",
}


@pytest.mark.parametrize("text", OUT_OF_MEMORY.values(), ids=OUT_OF_MEMORY)
def test_a_program_without_a_log_can_be_out_of_memory(tmp_path, text):
    state, reason = outcome.from_exit(said(tmp_path, text), 1, memory_was_full=False)
    assert state == "OUT_OF_MEMORY"
    assert outcome.OUT_OF_MEMORY.search(reason)


@pytest.mark.parametrize(
    "text",
    [
        f"{TRACEBACK}MemoryError\n{TRACEBACK}ValueError: could not be mended\n",
        "caught a MemoryError, went on\n" + TRACEBACK + "KeyError: 'x'\n",
    ],
)
def test_an_error_of_memory_that_was_not_the_last_one_is_not_why_it_ended(tmp_path, text):
    assert outcome.from_exit(said(tmp_path, text), 1, False) == ("FAILED", "exit code 1")


def test_a_limit_of_memory_ends_a_program_without_a_log(script):
    """As `ulimit -v` does."""
    script("import resource as r; r.setrlimit(r.RLIMIT_AS, (2**28, 2**28)); x = bytes(2**29)")
    job = submit("t.py")
    assert (job.wait(60), job.status["reason"]) == (State.OUT_OF_MEMORY, "MemoryError")


@pytest.mark.parametrize("code", ["import os; os._exit(0)", "run._file.close()", "run.end()"])
def test_a_run_that_ends_before_its_log_says_so(script, code):
    script(f"""
        from types import SimpleNamespace
        from dlojz.runs import log
        run = log.open_run(SimpleNamespace(test=True))
        {code}
        """)
    job = submit("t.py")
    assert job.wait(60) == State.COMPLETED
    reason = job.status["reason"]
    assert reason is None if code == "run.end()" else "its log has no end" in reason


def test_a_run_that_completed_without_a_log_says_so_unless_it_is_a_series(tmp_path):
    trainer = tmp_path / "trainer.py"
    for code, reason in (
        ("from dlojz.runs import log", "it wrote no log: did it end before it trained?"),
        ("print('epoch 0 loss 2.3')", "no Chronometer in it"),
    ):
        trainer.write_text(code)
        assert outcome.from_exit(tmp_path, 0, memory_was_full=False) == ("COMPLETED", reason)
    (tmp_path / "plan.json").touch()
    assert outcome.from_exit(tmp_path, 0, memory_was_full=False) == ("COMPLETED", None)


def test_a_launcher_that_we_ended_is_not_the_error(tmp_path):
    """Its traceback of our SIGTERM would hide what the trainer said, or stand for it."""
    launcher = (
        "W1126 14:12:42.672 14478 lib/torch/distributed/elastic/agent/server/api.py:739] Received\n"
        "Traceback (most recent call last):\n  File x, line 994, in <module>\n"
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got signal: 15\n"
    )
    (tmp_path / "stderr.txt").write_text(launcher)
    assert outcome.errors(tmp_path) == ""
    (tmp_path / "stderr.txt").write_text(f"a warning\n{launcher}")
    assert outcome.errors(tmp_path) == "a warning\n"


@pytest.mark.parametrize("code", [0, 1])
def test_a_pipe_in_the_place_of_the_log_loses_no_job(tmp_path, code):
    os.mkfifo(tmp_path / "events.jsonl")
    (tmp_path / "stderr.txt").touch()
    state, reason = outcome.from_exit(tmp_path, code, False)
    assert state == ("FAILED" if code else "COMPLETED")
    assert "not a regular file" in reason or reason == "exit code 1"
