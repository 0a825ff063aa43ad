"""A training in a fork, of a series or of the tests' own server, is as good as any."""

import os
import re
import subprocess
import sys

import pytest
from endings import ENDINGS
from jupyter_client.kernelspec import KernelSpecManager
from nbval.kernel import CURRENT_ENV_KERNEL_NAME, NbvalKernelspecManager

from conftest import make_course_folder
from dlojz.launch import State, submit


def told(job):
    """What is seen of a job; its folder's name is not the point."""
    files = {f.name: f.read_text() for f in job.directory.glob("*.txt")}
    own = ("started", "ended", "cpu_s", "peak_memory_bytes")
    state = {k: v for k, v in job.status.items() if k not in own}
    return {k: str(v).replace(str(job.directory), "RUN") for k, v in (files | state).items()}


@pytest.fixture(scope="module")
def endings(tmp_path_factory):
    """What is seen of each ending, of a fork and of a process of its own."""
    with pytest.MonkeyPatch.context() as patch:
        folder = make_course_folder(tmp_path_factory.mktemp("endings"), patch)
        for name, code in ENDINGS.items():
            (folder / f"{name}.py").write_text(f"# forked\n{code}")
        commands = [f"'{name}.py' --flag 'a b'" for name in ENDINGS]
        patch.setenv("TMPDIR", str(folder))
        forked = submit(commands)
        patch.delenv("DLOJZ_PYTHON")
        others = submit(commands)
        for job in (*forked, *others):
            job.wait(60)
        pairs = zip(forked, others, strict=True)
        return {name: tuple(map(told, pair)) for name, pair in zip(ENDINGS, pairs, strict=True)}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_forked_job_ends_as_any_other(ending, endings):
    forked, other = endings[ending]
    assert forked == other


OF_TWO = {
    "who": (
        "import os, sys, torch\n"
        # two that pytest's readline sets, and the one that makes the difference
        "known = sorted({*os.environ} - {'COLUMNS', 'LINES', 'DLOJZ_PYTHON'})\n"
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
    path.write_text(f"# forked\n{code}")
    monkeypatch.setenv("PET_REDIRECTS", "3")  # another torchrun's, which we may run under
    forked = submit("t.py --flag 'a b'", n_gpu=2)
    monkeypatch.delenv("DLOJZ_PYTHON")
    other = submit("t.py --flag 'a b'", n_gpu=2)
    assert forked.wait(60) == other.wait(60), forked.explain()
    assert told_of_two(forked) == told_of_two(other)


def test_a_forked_job_has_imported_torch(script):
    script("# forked\nimport sys; print('torch' in sys.modules)")
    job = submit("t.py")
    assert job.wait(60) == State.COMPLETED
    assert (job.directory / "stdout.txt").read_text() == "True\n"


def test_a_fork_clears_up_nothing_of_its_parents(script):
    script("", "empty.py")
    script("""
        # forked
        import os, sys, tempfile
        from dlojz.jobs import forks

        tempfile.kept = tempfile.TemporaryDirectory()  # in a module, as torch's are
        if (child := os.fork()) == 0:
            forks.run_script("empty.py", [])
            sys.exit()
        print(os.waitpid(child, 0)[1], os.path.isdir(tempfile.kept.name))
    """)
    job = submit("t.py")
    assert job.wait(60) == State.COMPLETED, job.explain()
    assert (job.directory / "stdout.txt").read_text() == "0 True\n"


def test_forked_jobs_draw_different_numbers(script):
    script("# forked\nimport numpy, random; print(numpy.random.rand(), random.random())")
    jobs = [submit("t.py") for _ in range(2)]
    assert [job.wait(60) for job in jobs] == [State.COMPLETED] * 2
    one, other = ((job.directory / "stdout.txt").read_text().split() for job in jobs)
    assert not {*one} & {*other}


@pytest.mark.parametrize(
    ("manager", "kernel"),
    [(NbvalKernelspecManager, CURRENT_ENV_KERNEL_NAME), (KernelSpecManager, "python3")],
)
def test_the_kernels_of_notebooks_are_forked(manager, kernel):
    """Else they only take longer: each imports torch, and all that draws."""
    assert manager().get_kernel_spec(kernel).argv[0] == os.environ["DLOJZ_PYTHON"]


def test_what_is_imported_before_a_fork_asks_for_no_gpu():
    """A fork can't use a GPU for which its parent has asked."""
    code = (
        "import torch\n"
        "def asked(): raise SystemExit('asked')\n"
        "torch._C._cuda_getDeviceCount = asked\n"
        "from dlojz.jobs import forks\n"
        "forks.prepare()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
