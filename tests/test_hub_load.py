"""What a class on a hub costs: which process is counted as what. The rest is in test_hub."""

import os
import socket
import subprocess
import sys

import hub_load
import pytest

SLEEP = (sys.executable, "-c", "import time; print(flush=True); time.sleep(60)")


def test_a_trainees_processes_are_counted_by_kind():
    theirs = os.environ | {"JUPYTERHUB_USER": "ann"}
    started = [
        subprocess.Popen([*SLEEP, word], env=env, stdout=subprocess.PIPE)
        for word, env in (("dlojz.jobs.waiter", theirs), ("a job", theirs), ("a job", os.environ))
    ]
    for process in started:
        process.stdout.readline()  # it has its own memory now
    found = hub_load.memory()
    for process in started:
        process.kill()
        process.wait()
    keeper, job, not_theirs = (process.pid for process in started)
    assert found["launcher"][keeper] > 2**20
    assert found["jobs"][job] > 2**20
    assert all(not_theirs not in kind for kind in found.values())


def test_of_each_kind_the_worst_moment_counts():
    gib = 2**30
    one, two = {1: gib}, {1: gib, 2: gib}
    seen = [{"servers": one}, {"servers": two, "jobs": {3: 3 * gib}}, {"jobs": two}]
    found = hub_load.largest(seen)
    assert found == {"servers": two, "jobs": {3: 3 * gib}}
    assert hub_load.said_of(found) == "servers 2: 2.00 GiB, jobs 1: 3.00 GiB"


def test_a_hub_that_is_not_there_is_said(capsys, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        words = ["hub_load.py", "secret", "--url", url, "--trainees", "2"]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit, match=f"no hub answers at {url}: start one with make hub"):
            hub_load.main()
