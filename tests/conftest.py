"""Fixtures: small images, a course folder for one test, the trainer run in this process."""

import gc
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import forking
import matplotlib as mpl
import psutil
import pytest
import stand_in
from programs import experiment_file, load_file, run_main

from dlojz import course

mpl.use("Agg")  # no windows
REPOSITORY = Path(__file__).parent.parent
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)


@pytest.fixture(scope="module", autouse=True)
def skip_what_stays():
    """The collector does not search what earlier files have imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def close_figures():
    """Each test's figures end with it: pyplot keeps them all."""
    yield
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        pyplot.close("all")


@pytest.fixture(autouse=True)
def same_libraries():
    """What a trainer that ran in this process has set for its libraries ends with its test."""
    before = stand_in.read_once(os.environ)
    yield
    for name in stand_in.read_once(os.environ):
        del os.environ[name]
    os.environ |= before


@pytest.fixture(autouse=True)
def quick_compiler():
    """As in jobs: Inductor tries the processor's instructions in forks, Dynamo times no guards."""
    if "torch._inductor.cpu_vec_isa" in sys.modules:
        forking.load_in_forks()
    if "torch._dynamo.guards" in sys.modules:
        forking.no_cache_flush()


@pytest.fixture(scope="session")
def images():
    """A folder of 4 classes with 16 training and 8 validation images each."""
    return Path(os.environ["DLOJZ_DATA"])


@pytest.fixture
def course_folder(tmp_path, monkeypatch):
    """A course folder of one's own, with the trainer, the solutions and a queue of its own."""
    return make_course_folder(tmp_path, monkeypatch)


def make_course_folder(tmp_path, monkeypatch):
    """Make a course folder in `tmp_path`, and work in it."""
    root = tmp_path / "course"
    prepared = [f"dlojz/chapters/*/experiments/{name}" for name in course.COPIED.values()]
    for pattern in ("dlojz/dlojz.py", "solutions/*.py", "solutions/own/*.py", *prepared):
        for file in REPOSITORY.glob(pattern):
            copy = root / file.relative_to(REPOSITORY)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)
    (root / ".course-root").touch()
    monkeypatch.chdir(root)
    monkeypatch.setenv("DLOJZ_ROOT", str(root))
    monkeypatch.setenv("DLOJZ_QUEUE", str(tmp_path / "queue"))
    monkeypatch.setenv("DLOJZ_PROGRESS", str(tmp_path / "progress.json"))
    return root


@pytest.fixture
def small_disk(course_folder):
    """runs/ on a disk of 1 MB."""
    runs = course_folder / "runs"
    runs.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", runs]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a disk needs root and its capabilities")
    yield runs
    subprocess.run(["umount", "-l", runs], check=True)


def fill(folder):
    """Write until the disk is full."""
    with (folder / "filler").open("wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            pass


@pytest.fixture
def script(course_folder):
    """Write a small trainer: script("code", name="t.py") -> its path."""

    def write(code, name="t.py"):
        path = course_folder / name
        path.write_text(textwrap.dedent(code))
        return path

    return write


@pytest.fixture
def ran(tmp_path):
    """Run an experiment in this process: ran(name, *flags) -> its folder."""
    return lambda name, *flags: run_main(experiment_file(f"{name}.py"), tmp_path / name, *flags)


@pytest.fixture
def train(monkeypatch):
    """Run a trainer's main in this process: train(file, run folder, *flags) -> its module."""
    from torchvision.models.shufflenetv2 import ShuffleNetV2

    from dlojz.training import data

    monkeypatch.setattr(data.Synthetic, "LENGTHS", forking.FEWER)  # as in jobs
    monkeypatch.setattr(ShuffleNetV2, "__init__", forking.shorter(ShuffleNetV2.__init__))

    def call(file, folder, *flags):
        trainer = load_file(file)
        monkeypatch.setattr(sys, "argv", [str(file), *map(str, flags)])
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)
        monkeypatch.setenv("DLOJZ_RUN", str(folder))
        trainer.main()
        return trainer

    return call


@pytest.fixture
def stop_at_first_save(monkeypatch):
    """The next checkpoint that is written is the last thing that the run does."""
    from dlojz.training import checkpoint

    save = checkpoint.save

    def save_and_stop(*args, **kwargs):
        save(*args, **kwargs)
        monkeypatch.setattr(checkpoint, "save", save)
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save", save_and_stop)


@pytest.fixture
def new_page(tmp_path):
    """Open pages of Chromium, each as another person's; their last state is kept as pictures."""
    from playwright.sync_api import sync_playwright

    if CHROMIUM is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("needs Chromium: tools/system.sh")
    pages = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())

        def open_page():
            page = browser.new_page(viewport={"width": 1300, "height": 1400})
            page.set_default_timeout(60_000)
            pages.append(page)
            return page

        yield open_page
        for i, page in enumerate(pages):
            page.screenshot(path=tmp_path / f"last-{i}.png")
        browser.close()


@pytest.fixture
def page(new_page):
    """A page of Chromium."""
    return new_page()


class Slurm:
    """A throw-away cluster of two nodes with two fake GPUs each; see slurm/throwaway.sh.

    Eleven more nodes are for jobs that wait while other tests run.
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        # Ports of its own: another session may have a cluster too. Below the ephemeral ones.
        port = 20_000 + 20 * (os.getpid() % 600)
        self.env = {
            **os.environ,
            "SLURM_FIXTURE_DIR": str(folder),
            "SLURM_FIXTURE_PORT": str(port),
            "SLURM_FIXTURE_APART": "11",
            "SLURM_FIXTURE_CPUS": "8",
            "SLURM_FIXTURE_EXTRA": "PartitionName=short Nodes=node3 PreemptMode=OFF\n"
            "PartitionName=fails Nodes=node[4-5] PreemptMode=OFF\n"
            "PartitionName=scripts Nodes=node[6-13] PreemptMode=OFF",
        }
        self.conf = self.folder / "slurm.conf"

    def script(self, command):
        script = REPOSITORY / "slurm" / "throwaway.sh"
        done = subprocess.run(
            [script, command],
            env=self.env,
            timeout=90,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, done.stdout

    def call(self, *command, timeout=30):
        env = {**os.environ, "SLURM_CONF": str(self.conf)}
        done = subprocess.run(
            [str(c) for c in command], env=env, timeout=timeout, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def nodes(self):
        """{node: state}."""
        return dict(line.split() for line in self.call("sinfo", "-hN", "-o", "%N %T").splitlines())


@pytest.fixture(scope="session")
def cluster():
    """The cluster, up; it ends with the session, and all that it runs with it."""
    if os.geteuid() or not all(map(shutil.which, ("slurmctld", "slurmd", "munged", "sbatch"))):
        refuse = pytest.fail if os.environ.get("CI") else pytest.skip
        refuse("needs root, and tools/system.sh: apt-get install slurm-wlm munge iproute2")
    for left in Path("/tmp").glob("dlojz-slurm-*"):  # by a session that was killed
        if not psutil.pid_exists(int(left.name.split("-")[2])):
            Slurm(left).script("stop")
            shutil.rmtree(left)
    # A short path: a unix socket's is limited to 107 bytes.
    prefix = f"dlojz-slurm-{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir="/tmp") as folder:
        slurm = Slurm(folder)
        slurm.script("start")
        try:
            yield slurm
        finally:
            slurm.script("stop")


@pytest.fixture
def on_slurm(cluster, course_folder, monkeypatch):
    """A course folder whose jobs go to the cluster."""
    use_cluster(cluster, course_folder, monkeypatch)
    yield cluster
    cancel_all(cluster, "main,low,high")


def use_cluster(cluster, course_folder, monkeypatch):
    """Have jobs of this course folder go to the cluster."""
    from dlojz.launch import asking, slurm

    shutil.copytree(REPOSITORY / "slurm", course_folder / "slurm")
    site = (REPOSITORY / "tests" / "slurm" / "fixture.toml").read_text()
    python = f'[environment]\nDLOJZ_PYTHON = "{os.environ["DLOJZ_PYTHON"]}"\n\n'
    site = site.replace("[gpus.fake]", f"{python}[gpus.fake]")
    (course_folder / "slurm" / "sites" / "fixture.toml").write_text(site)
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    monkeypatch.setenv("DLOJZ_LAUNCHER", "slurm")
    # A cluster of one's own may be asked more often.
    monkeypatch.setattr(asking, "FRESH_S", 0.2)
    monkeypatch.setattr(slurm.Slurm, "poll_s", 0.1)


def cancel_all(cluster, partitions):
    """End all jobs in these partitions."""
    cluster.call("bash", "-c", f"squeue -h -p {partitions} -o %A | sort -u | xargs -r scancel")


@pytest.fixture
def one_thread():
    """Let torch compute with one thread, so that sums have one order."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
