"""Jobs that are forked from a process that has imported torch are as good as any."""

import os
import re
import socket
import time
import uuid
from pathlib import Path

import psutil
import pytest

from dlojz.jobs import warm
from dlojz.launch import State, submit

ENDINGS = {
    "well": "print('done')",
    "a code": "import sys; sys.exit(3)",
    "a code below 0": "import sys; sys.exit(-2)",
    "words": "import sys; sys.exit('why')",
    "an error": "def f():\n    raise ValueError('mine')\nf()",
    "an error in another file": "import json; json.loads('{')",
    "a signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "an interrupt": "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('not here')",
    "at exit": "import atexit; atexit.register(print, 'bye'); print('first')",
    "its own class at exit": (
        "import atexit, pickle\nclass C: pass\natexit.register(lambda: print(pickle.dumps(C())))"
    ),
    "a file left open": (
        "import os\n"
        "def add(text): left.write(text)\n"
        "left = open(os.environ['DLOJZ_RUN'] + '/left.txt', 'w')\n"
        "add('more')"
    ),
    "a thread": "import threading, time\nthreading.Timer(0.3, print, ['late']).start()",
    "a process": (
        "import multiprocessing as m\n"
        "if __name__ == '__main__':\n"
        "    p = m.get_context('spawn').Process(target=print, args=('spawned',))\n"
        "    p.start(); p.join(); print(p.exitcode)"
    ),
    "who": (
        "import sys, os; print(__name__, __file__, sys.argv, sys.path[0], os.getcwd(),"
        " 'DLOJZ_RUN' in os.environ, sys.modules['__main__'].__dict__ is globals(),"
        " os.getpgid(0) == os.getpid(), sys.stdin.read())\n"
        "import tempfile; print(tempfile.gettempdir())"
    ),
}


def told(job):
    """What is seen of a job; its folder's name is not the point."""
    files = {f.name: f.read_text() for f in job.directory.glob("*.txt")}
    files.pop("supervisor.txt", None)
    state = {k: v for k, v in job.status.items() if k not in ("started", "ended")}
    return {k: str(v).replace(str(job.directory), "RUN") for k, v in (files | state).items()}


def of(socket):
    """The process that listens there, and its forks."""
    found = psutil.process_iter(["cmdline"])
    return [p for p in found if str(socket) in (p.info["cmdline"] or ())]


@pytest.fixture
def own(monkeypatch):
    """A process of this test's own to be forked, and no other's."""
    monkeypatch.setenv("TORCH_OF_A_TEST", uuid.uuid4().hex)  # libraries read what begins so
    yield warm._folder() / warm._key(os.environ)
    for process in of(warm._folder() / warm._key(os.environ)):
        process.kill()


def test_a_job_is_forked_with_torch_imported(script):
    script("import os, sys, time; print(os.getpid(), 'torch' in sys.modules); time.sleep(1)")
    job = submit("t.py")
    while not (said := (job.directory / "stdout.txt").read_text()):
        assert job.state in (State.QUEUED, State.RUNNING), job.explain()
    pid, has_torch = said.split()
    assert has_torch == "True"
    assert "dlojz.jobs.warm" in psutil.Process(int(pid)).parent().cmdline()
    assert job.wait(30) == State.COMPLETED


@pytest.mark.parametrize("code", ENDINGS.values(), ids=ENDINGS)
def test_a_forked_job_ends_as_any_other(code, script, monkeypatch):
    path = script("")
    path.write_text(code)
    monkeypatch.setenv("TMPDIR", str(path.parent))
    forked = submit("t.py --flag 'a b'")
    monkeypatch.setenv("DLOJZ_WARM_S", "0")
    other = submit("t.py --flag 'a b'")
    assert forked.wait(60) == other.wait(60), forked.explain()
    assert told(forked) == told(other)


OF_TWO = {
    "who": (
        "import os, sys, torch\n"
        "known = sorted({*os.environ} - {'COLUMNS', 'LINES'})\n"  # pytest's readline sets them
        "said = (__name__, sys.argv, sys.path[0], os.getcwd(), torch.get_num_threads(), known,"
        " os.getpgid(0) == os.getpid(), sys.stdin.read(), sys.stdout.write_through)\n"
        "os.write(1, f'{said}\\n'.encode())"
    ),
    "an error in one": (
        "import os, time\nif os.environ['RANK'] == '1': raise ValueError('mine')\ntime.sleep(60)"
    ),
    "a signal to one": (
        "import os, signal, time\n"
        "if os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(60)"
    ),
}


def told_of_two(job):
    """The same of a job of two processes, as far as it is the same in each."""
    seen = told(job)
    seen["stdout.txt"] = sorted(seen["stdout.txt"].splitlines())
    errors = re.sub(r".*frozen runpy.*\n", "", seen["stderr.txt"])  # of `python -m`
    seen["stderr.txt"] = re.sub(r"\d{2,}", "N", errors).splitlines()  # times, processes
    return seen


@pytest.mark.parametrize("code", OF_TWO.values(), ids=OF_TWO)
def test_a_forked_job_of_two_processes_ends_as_any_other(code, script, monkeypatch):
    path = script("")
    path.write_text(code)
    monkeypatch.delenv("OMP_NUM_THREADS")  # the processes share the cores then
    monkeypatch.setenv("PET_REDIRECTS", "3")  # another torchrun's, which we may run under
    forked = submit("t.py --flag 'a b'", n_gpu=2)
    monkeypatch.setenv("DLOJZ_WARM_S", "0")
    other = submit("t.py --flag 'a b'", n_gpu=2)
    assert forked.wait(60) == other.wait(60), forked.explain()
    assert told_of_two(forked) == told_of_two(other)


def test_a_job_of_two_processes_is_forked_and_cancelled(script):
    script(
        """
        import os, sys, time
        os.write(1, f"{os.getpid()} {os.getppid()} {'torch' in sys.modules}\\n".encode())
        time.sleep(60)
        """
    )
    job = submit("t.py", n_gpu=2)
    while len(said := (job.directory / "stdout.txt").read_text().split()) < 6:
        assert job.state in (State.QUEUED, State.RUNNING), job.explain()
    assert said[2] == said[5] == "True"
    torchrun = psutil.Process(int(said[1]))
    assert "dlojz.jobs.warm" in torchrun.cmdline()
    assert {p.pid for p in torchrun.children()} == {int(said[0]), int(said[3])}
    job.cancel()
    assert job.wait(30) == State.CANCELLED
    assert not any(psutil.pid_exists(int(pid)) for pid in (said[0], said[1], said[3]))


def test_forked_jobs_draw_different_numbers(script):
    script("import numpy, random; print(numpy.random.rand(), random.random())")
    jobs = [submit("t.py") for _ in range(2)]
    assert [job.wait(60) for job in jobs] == [State.COMPLETED] * 2
    one, other = ((job.directory / "stdout.txt").read_text().split() for job in jobs)
    assert not {*one} & {*other}


def test_a_job_has_the_folder_for_temporary_files_of_its_submission(script, monkeypatch, tmp_path):
    script("import tempfile; print(tempfile.gettempdir())")
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv("TMPDIR", str(tmp_path / name))
        job = submit("t.py")
        assert job.wait(60) == State.COMPLETED
        assert (job.directory / "stdout.txt").read_text() == f"{tmp_path / name}\n"


def test_a_job_has_the_environment_of_its_submission(script, monkeypatch):
    script("import os; print(os.environ.get('MINE'), os.getenv('MINE'))")
    jobs = []
    for value in ("1", "2"):
        monkeypatch.setenv("MINE", value)
        jobs.append(submit("t.py"))
    monkeypatch.delenv("MINE")
    jobs.append(submit("t.py"))
    assert [job.wait(60) for job in jobs] == [State.COMPLETED] * 3
    said = [(job.directory / "stdout.txt").read_text().split()[0] for job in jobs]
    assert said == ["1", "2", "None"]


def test_what_libraries_read_once_needs_another_process(monkeypatch):
    keys = {warm._key(os.environ)}
    for name, value in (("OMP_NUM_THREADS", "7"), ("LD_PRELOAD", "x"), ("PYTHONHASHSEED", "1")):
        monkeypatch.setenv(name, value)
        keys.add(warm._key(os.environ))
    before = os.umask(0o077)
    keys.add(warm._key(os.environ))
    os.umask(before)
    assert len(keys) == 5
    monkeypatch.setenv("MINE", "1")
    assert warm._key(os.environ) in keys


def test_it_ends_when_it_is_not_asked_and_the_next_job_starts_another(script, own, monkeypatch):
    monkeypatch.setenv("DLOJZ_WARM_S", "1")
    script("import os; print(os.getppid())")
    for _ in range(2):
        begin = time.monotonic()
        job = submit("t.py")
        assert time.monotonic() - begin < warm.START_S, "waited for one that was ending"
        assert job.wait(60) == State.COMPLETED
        assert own.exists()
        while own.exists():
            time.sleep(0.001)
    psutil.wait_procs(of(own), timeout=30)
    assert not of(own)


def test_one_that_asks_for_nothing_does_not_keep_others_waiting(script, own):
    script("print('done')")
    assert submit("t.py").wait(60) == State.COMPLETED
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as idle:
        idle.connect(str(own))
        assert submit("t.py").wait(60) == State.COMPLETED


def test_a_library_that_cannot_be_imported_is_the_jobs_to_tell(script, own, monkeypatch, tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torchvision.py").write_text("raise RuntimeError('mismatch')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"), prepend=os.pathsep)
    script("print('done')")
    assert submit("t.py").wait(60) == State.COMPLETED
    script("import torchvision")
    job = submit("t.py")
    assert job.wait(60) == State.FAILED
    assert "RuntimeError: mismatch" in job.explain()


def test_one_that_was_killed_takes_no_job_with_it(script, own):
    script("import time; time.sleep(1); print('done')")
    running, waiting = submit("t.py"), submit("t.py")
    while running.state != State.RUNNING:
        assert not running.state.final, running.explain()
    (server,) = [p for p in of(own) if str(own) not in p.parent().cmdline()]
    server.kill()
    assert running.wait(30) == waiting.wait(30) == State.COMPLETED  # both had been forked
    assert submit("t.py").wait(60) == State.COMPLETED


@pytest.mark.parametrize("kind", ["a link", "open to others", "a file"])
def test_a_folder_that_others_may_enter_is_not_used(kind, script, tmp_path, monkeypatch):
    folder = tmp_path / "warm"
    monkeypatch.setattr(warm, "FOLDER", str(folder))
    if kind == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    elif kind == "a file":
        folder.touch()
    else:
        folder.mkdir()
        folder.chmod(0o777)
    script("import sys; print('torch' in sys.modules)")
    job = submit("t.py")
    assert job.wait(60) == State.COMPLETED
    assert (job.directory / "stdout.txt").read_text() == "False\n"


def test_a_process_that_cannot_start_is_done_without(script, monkeypatch, tmp_path):
    monkeypatch.setattr(warm, "FOLDER", str(tmp_path / ("long" * 40)))  # for a socket's name
    script("import sys; print('torch' in sys.modules)")
    job = submit("t.py")
    assert job.wait(60) == State.COMPLETED
    assert (job.directory / "stdout.txt").read_text() == "False\n"


def test_the_key_follows_the_courses_own_modules(monkeypatch, tmp_path):
    package = tmp_path / "dlojz"
    package.mkdir()
    (package / "dlojz.py").touch()
    (package / "log.py").touch()
    monkeypatch.setattr(warm, "__file__", str(package / "jobs" / "warm.py"))
    key = warm._key(os.environ)
    (package / "dlojz.py").write_text("# the trainee's")
    assert warm._key(os.environ) == key
    (package / "log.py").write_text("# ours")
    assert warm._key(os.environ) != key
    assert Path(warm.__file__).parent.parent == package
