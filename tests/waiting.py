"""Jobs to wait for, and what is waited for."""

import json
import subprocess
import time
from contextlib import contextmanager

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
