"""Where tests and notebooks run: a course folder of their own, with small images, on one thread.

Each process of pytest-xdist has its own, so that their jobs do not wait for each other. Nothing is
written into the clone's runs/ or data/.
"""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import forking  # in tests/
import pytest
import stand_in
from ipykernel import kernelspec
from nbval import kernel

REPOSITORY = Path(__file__).parent
# Wrong answers in full, a hub, Slurm, browsers and installations are slow: `make quick` leaves out
# these files, tests with these fixtures, and those that take 5 s, which are marked.
SLOW_FILES = (
    *("test_wrong.py", "test_hub.py", "test_slurm.py", "test_browser.py"),
    *("test_museum.py", "test_install.py"),
)
SLOW_FIXTURES = {"cluster", "new_page", "all_steps", "in_pairs"}
# The files that take longest come first: at the end no process is left alone with one of them.
FIRST = (
    *(*SLOW_FILES, "test_trainer.py", "test_estimate.py", "test_repair.py", "test_check.py"),
    *("test_keeper.py", "test_launch.py", "test_fsdp.py", "test_allocation.py", "test_worth.py"),
    *("test_sharding.py", "test_compiling.py", "test_rehearse.py", "test_slow.py", "test_forks.py"),
)
SHARED_FOLDER = "DLOJZ_TESTS_SHARED"  # of all test processes of a session
SHARED = (".course-root", "dlojz", "notebooks", "reference", "slurm", "solutions", "tools")


def pytest_configure(config):
    folder = Path(tempfile.mkdtemp(prefix="dlojz-tests-"))
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    # What a shell runs in the background ignores it, and so would the jobs of the tests.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Test processes and their jobs share few cores: with more threads each they would wait for each
    # other, many times longer than they compute.
    os.environ["OMP_NUM_THREADS"] = "1"
    # Large pages: a third fewer page faults. A small training takes 0.29 s instead of 0.33.
    os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    # Inductor would try the processor's instructions in each process, in programs that import
    # torch: 20 s where nothing is cached.
    os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
    if not hasattr(config, "workerinput"):
        os.environ[SHARED_FOLDER] = str(folder)
        os.environ["DLOJZ_PYTHON"] = str(folder / "python")
        start_forking(folder, config)
        make_images(folder / "images")
        if getattr(config.option, "numprocesses", None):
            return  # this process only hands out the tests
    gc.disable()  # until all tests are imported: what is imported stays
    root = folder / "course"
    root.mkdir()
    for name in SHARED:
        (root / name).symlink_to(REPOSITORY / name)
    os.environ |= {
        "DLOJZ_ROOT": str(root),
        "DLOJZ_QUEUE": str(folder / "queue"),
        "DLOJZ_PROGRESS": str(folder / "progress.json"),
        "DLOJZ_DATA": str(folder / "data"),
        "DLOJZ_PRESET": "smoke",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    shutil.copytree(Path(os.environ[SHARED_FOLDER], "images"), folder / "data")
    fork_kernels(folder)
    forking.ask_torch_in_forks()


def make_images(folder):
    """Draw a small set, of half the usual width and height.

    A small training would spend half of its time on decoding larger ones.
    """
    from dlojz import images
    from dlojz.images import draw

    usual = draw._size
    draw._size = lambda rng: tuple(side // 2 for side in usual(rng))
    images.generate(folder, 4, 16, 8, workers=1, progress=False)
    draw._size = usual


def pytest_ignore_collect(collection_path):
    """Run a notebook once, if what is handed out is the solved one, cell for cell."""
    handed_out = REPOSITORY / "notebooks" / collection_path.name
    if collection_path.suffix != ".ipynb" or collection_path.parent != REPOSITORY / "solutions":
        return None  # as pytest decides
    same = handed_out.exists() and handed_out.read_bytes() == collection_path.read_bytes()
    return True if same else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Hold a solved notebook to its own check, which has all the runs of a trainee's."""
    from dlojz import course
    from dlojz.course import progress

    result = yield
    if item.path.suffix == ".ipynb" and item.path.parent.name == "solutions":
        for call, step in progress.CALL.findall(item.cell.source):
            if call == "check" and step in course.CHAIN:
                verdict = progress.last("verdicts", step)
                rows = [" ".join(map(str, f.values())) for f in verdict["findings"]]
                assert verdict["passed"], "\n".join(rows)
    return result


def start_forking(folder, config):
    """Have jobs of all test processes forked from one that has imported torch."""
    tests = REPOSITORY / "tests"
    python = folder / "python"
    python.write_text(
        f"#!{sys.executable} -IS\nimport sys\nsys.path.insert(0, {str(tests)!r})\n"
        f"import stand_in\nstand_in.client({sys.executable!r}, {str(folder)!r})\n"
    )
    python.chmod(0o755)
    server = subprocess.Popen(
        [sys.executable, str(tests / "forking.py"), stand_in.address(str(folder), os.environ)],
        stdin=subprocess.DEVNULL,
    )
    config.add_cleanup(server.kill)


def fork_kernels(folder):
    """Fork the kernels of notebooks as well: nbval's, a browser's and a rehearsal's."""
    argv = [os.environ["DLOJZ_PYTHON"], *stand_in.KERNEL, "-f", "{connection_file}"]
    own = {"argv": argv, "env": {stand_in.KEPT: os.environ[SHARED_FOLDER]}}
    usual = kernelspec.get_kernel_dict
    kernelspec.get_kernel_dict = lambda *more: usual(*more) | own  # nbval asks for it
    place = folder / "jupyter" / "kernels" / "python3"
    place.mkdir(parents=True)
    (place / "kernel.json").write_text(json.dumps(kernelspec.get_kernel_dict()))
    os.environ["JUPYTER_PATH"] = str(folder / "jupyter")
    manager = kernel.KernelManager

    def on_files(**more):
        """A port that was free may be another job's before the kernel has it. A file is its own."""
        return manager(transport="ipc", ip=tempfile.mkdtemp(dir=folder) + "/kernel", **more)

    kernel.KernelManager = on_files


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: _place(item.path))
    for item in items:
        if item.path.name in SLOW_FILES or SLOW_FIXTURES & {*getattr(item, "fixturenames", ())}:
            item.add_marker("slow")


def pytest_collection_finish():
    """Have the collector skip what was imported: each collection would search all of torch."""
    gc.freeze()
    gc.enable()


def _place(path):
    if path.name in FIRST:
        return FIRST.index(path.name)
    return len(FIRST) + (path.suffix != ".ipynb")
