"""Jobs to wait for, and what is waited for."""

import json
import subprocess
import time
from contextlib import contextmanager

from dlojz.launch import State, latest, submit

SLEEPS = "import os, time; print(os.getpid(), flush=True); time.sleep(99)"


def until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)
    return found


def text(job, file="stdout.txt"):
    return (job.directory / file).read_text()


def keeper(job):
    """The keeper's process number, once it has begun."""
    file = job.directory / "keeper.json"
    return until(lambda: file.exists() and json.loads(file.read_text()))["pid"]


@contextmanager
def locked_by_another(file):
    with subprocess.Popen(["flock", "-F", file, "sleep", "60"]) as other:
        try:
            yield
        finally:
            other.kill()


def assert_hostile_names_are_only_names(course):
    """Submit trainers with such names, for all of them before the first has ended."""
    jobs = {}
    for name in ("a'; echo foo", 'q"uote', "sp ace", "$(touch pwned)", "-rf", "é…"):
        path = course / f"in {name}" / f"{name}.py"
        path.parent.mkdir()
        path.write_text("import sys; print(sys.argv[1:])")
        jobs[name] = submit((str(path), name, "%j", "JobState=FAILED"), name=name)
    for name, job in jobs.items():
        assert job.wait(120) == State.COMPLETED, job.explain()
        assert text(job) == f"{[name, '%j', 'JobState=FAILED']}\n"
        assert (job.name, latest(name)) == (name, job)
    assert not (course / "pwned").exists()
