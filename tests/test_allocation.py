"""The batch script that a trainee repairs, judged by what its tasks got on a real Slurm."""

import os
import shutil
import signal
import subprocess
import sys

import made
import psutil
import pytest
from programs import experiment_file
from waiting import until

from conftest import REPOSITORY, cancel_all
from dlojz import cli, course, launch
from dlojz.chapters.n00c_cluster import batch, exercise, seen, throwaway
from dlojz.check import check, judge
from dlojz.check import exercise as exercises
from dlojz.launch import SubmitError, asking, slurm

NAME = "00_cluster"
BROKEN = (experiment_file("allocation.sbatch")).read_text()
REPAIRED = (REPOSITORY / "solutions/allocation.sbatch").read_text()
CORES = '--cpus-per-task="$SLURM_CPUS_PER_TASK"'
LOOP = REPAIRED[REPAIRED.index("while kill") :]
RIGHT = {
    "the solution": {},
    "no list of what to export": {"#SBATCH --export=NONE\n": "", "--export=ALL ": ""},
    "the trap is out of the way": {
        "--export=ALL ": "",
        "\nsrun": "\nunset SLURM_EXPORT_ENV\n\nsrun",
    },
    "cores by a variable": {
        f"{CORES} ": "",
        "\nsrun": "\nexport SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK\n\nsrun",
    },
    "GPUs by another option": {"--gres=gpu:2": "--gpus-per-node=2"},
    "a GPU for each task": {"--gres=gpu:2": "--gpus-per-task=1"},
    "two waits": {LOOP: "wait $step\nwait $step\n"},
}
WRONG = {  # name: (what is replaced in the repaired file, the hint)
    "four tasks in all": ({"--ntasks-per-node=2": "--ntasks=4"}, "placement"),
    "one node": ({"--nodes=2": "--nodes=1", "per-node=2": "per-node=4"}, "placement"),
    "two tasks": ({"--ntasks-per-node=2": "--ntasks-per-node=1"}, "placement"),
    "a GPU for each node": ({"gpu:2": "gpu:1"}, "gpus"),
    "no GPU": ({"#SBATCH --gres=gpu:2\n": ""}, "gpus"),
    "variables stay behind": ({"--export=ALL ": ""}, "environment"),
    "a list of variables, and one is missing": (
        {"--export=ALL": "--export=PATH,OMP_NUM_THREADS"},
        "environment",
    ),
    "no cores are asked for": (
        {"#SBATCH --cpus-per-task=2\n": "", "=$SLURM_CPUS_PER_TASK": "=2", f"{CORES} ": ""},
        "cores",
    ),
    "one core for each task": ({CORES: "--cpus-per-task=1"}, "cores"),
    "in the foreground": ({'"$@" &': '"$@"', LOOP: ""}, "signal"),
    "no trap": ({"trap 'touch heard' USR1": "trap '' USR1"}, "signal"),
    "one wait": ({LOOP: "wait $step\n"}, "killed"),
    "no wait": ({LOOP: "sleep 2\n"}, "killed"),
    "an option that Slurm does not know": ({'"$@" &': '--no-such "$@" &'}, "failed"),
}


@pytest.fixture(scope="module")
def jobs(cluster, tmp_path_factory):
    """The folders of all scripts' jobs by name, side by side on nodes of their own."""
    folders, numbers = {}, {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(cluster.conf))
        top = tmp_path_factory.mktemp("scripts")
        scripts = RIGHT | {name: changes for name, (changes, _) in WRONG.items()}
        texts = {name: made.replaced(REPAIRED, changes) for name, changes in scripts.items()}
        for number, (name, text) in enumerate(({"as handed out": BROKEN} | texts).items()):
            run = folders[name] = top / f"{number:04d}"
            run.mkdir()
            (run / "script.sbatch").write_text(text)
            words = [sys.executable, *batch.command(run)[1:]]
            numbers[name] = slurm.send(run, run / "script.sbatch", ["--partition=scripts"], words)
    yield folders, numbers, cluster
    cancel_all(cluster, "scripts")


@pytest.fixture
def verdict(jobs, monkeypatch):
    """The verdict on the script of this name, once its job has ended."""
    folders, numbers, cluster = jobs
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))

    def call(name):
        over = ("COMPLETED", "FAILED", "CANCELLED")
        until(lambda: asking.show(numbers[name])["JobState"] in over, 120)
        return judge.repaired(exercises.find(NAME), folders[name], "")

    return call


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_script_passes(verdict, name):
    found = verdict(name)
    assert found.passed, found


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_script_gets_its_hint(verdict, name):
    found = verdict(name)
    assert found.hint_key == WRONG[name][1], found


def test_the_script_as_handed_out_has_five_faults(verdict):
    failing = {finding.hint for finding in verdict("as handed out").failing}
    assert failing == {"placement", "gpus", "environment", "cores", "signal"}


def test_each_hint_is_that_of_a_wrong_script():
    known = set(exercises.find(NAME).hints)
    assert known - {hint for _, hint in WRONG.values()} == {"shared"}, "where tasks are bound"


def bound(cores, shared=False):
    """Four tasks as a node of 64 cores binds them: each to its own, or all to those of the job."""
    env = {"SLURM_CPUS_ON_NODE": "4", "MASTER_ADDR": "a", "OMP_NUM_THREADS": "2"}
    env |= {"SLURM_JOB_CPUS_PER_NODE": "4(x2)", "SLURM_GPUS_ON_NODE": "2"}
    for number in range(4):
        local = number % 2
        own = range(4) if shared else range(local * cores, (local + 1) * cores)
        node = "ab"[number // 2]
        yield seen.Task(
            *(number, local, 4, node, list(own), 64, 8, "0", 0.0, env), heard_s=0.1, ended=True
        )


@pytest.mark.parametrize(
    ("tasks", "hint"),
    [(bound(2), None), (bound(1), "shared"), (bound(2, shared=True), "shared")],
    ids=["each its own", "too few", "all of them"],
)
def test_where_tasks_are_bound_each_must_have_its_own_cores(tasks, hint):
    failing = [f.hint for f in exercise.findings({"tasks": {"seen": list(tasks)}}) if f.fails]
    assert failing == ([hint] if hint else [])


def test_what_a_task_writes_is_read_back(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    seen.main([str(tmp_path)])
    [task] = seen.read(tmp_path)
    assert (task.task, task.ended, task.cores) == (3, True, sorted(os.sched_getaffinity(0)))
    with pytest.raises(SystemExit):
        seen.main([str(tmp_path / "nowhere")])


def test_slurms_short_form_is_written_out():
    expected = {"6,2": [6, 2], "4(x2)": [4, 4], "4(x2),1": [4, 4, 1], "": []}
    assert {text: exercise.allocated(text) for text in expected} == expected


# From the trainee's copy to the verdict ----------------------------------------------------------


@pytest.fixture
def prepared(course_folder):
    """A course folder with the prepared file."""
    shutil.copy(REPOSITORY / "solutions/allocation.sbatch", course_folder / "solutions")
    return course_folder


def test_a_job_is_judged_and_hinted_at(prepared, on_slurm):
    file = course.own(NAME)
    job = batch.sbatch(file)
    job.wait(120)
    found = check(NAME, job)
    assert not found.passed
    assert found.hint_key == "placement"
    assert cli.main(["check", NAME, job.id]) == 1
    for _ in range(3):
        advice = found.hint()
    assert "+#SBATCH --ntasks-per-node=2" in str(advice.diff)
    (prepared / file).write_text(REPAIRED)
    assert "allocation.sbatch has changed since" in repr(check(NAME, job))


def test_without_a_slurm_it_says_what_to_install(prepared, monkeypatch):
    monkeypatch.setattr(throwaway, "where", lambda: "")
    monkeypatch.setattr(throwaway, "PROGRAMS", ("no-such-program",))
    with pytest.raises(SubmitError, match="no no-such-program here: apt-get install"):
        batch.sbatch(course.own(NAME))
    with pytest.raises(SubmitError, match=r"no batch script 'x'.*course\.own"):
        batch.sbatch("x")
    assert launch.jobs() == []


def test_one_is_started_where_there_is_none_and_ends_after_its_process(prepared, cluster):
    """In a process that is killed, as a notebook's kernel may be."""
    (prepared / "slurm").symlink_to(REPOSITORY / "slurm")
    program = """
import os, signal
from dlojz.chapters.n00c_cluster import batch, throwaway
assert throwaway.where() == "throw-away"
job = batch.sbatch("solutions/allocation.sbatch")
job.wait(120)
print(job.info["throw_away"], job.state, len(list(job.directory.glob("seen-*.json"))))
print(throwaway._folder, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    said, folder = done.stdout.splitlines()
    assert said == "True COMPLETED 4"
    until(lambda: not os.path.exists(folder), 60)
    # What removed it may not have ended yet.
    every = ["cmdline"]
    until(lambda: not [p for p in psutil.process_iter(every) if folder in str(p.info["cmdline"])])
