"""Record the effect of each line of slurm/job.sbatch, and jobs that wait, on a throw-away Slurm.

    tools/record_slurm.py reference/slurm            # all of it: about 10 minutes
    tools/record_slurm.py reference/slurm --only lines

lines: the script runs unchanged, and without each line, with tasks that write their resources.
masks: the cores to which Slurm binds each task, on nodes made up of 8 cores, as the node's daemon
logs them. That this host may lack these cores only keeps the tasks from starting.
queue: squeue, sprio, sshare and scontrol of jobs that wait, each for another reason.
time: the wait of a job that asks for a minute, and for an hour.

It needs root and Debian's packages, see slurm/throwaway.sh; the queue needs those of its DBD, too.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from dlojz import course
from dlojz.chapters.n00c_cluster import seen
from dlojz.course import course_root, write_atomically

PORT = 15_200  # and the next dozen: below those of tests and rehearsals
SMALL = {"SLURM_FIXTURE_CPUS": "8", "SLURM_FIXTURE_GPUS": "2", "SLURM_FIXTURE_NODES": "2"}
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
FOUR = ("--nodes=2", "--ntasks-per-node=2", "--gres=gpu:2", "--cpus-per-task=2")
SRUN = """srun --export=ALL --nodes="$SLURM_JOB_NUM_NODES" \
--ntasks-per-node="$SLURM_NTASKS_PER_NODE" \\
  --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \\
"""


@contextmanager
def cluster(**settings):
    """Start a throw-away Slurm with these settings, for all programs until it is stopped."""
    with tempfile.TemporaryDirectory(prefix="dlojz-record-", dir="/tmp") as folder:
        env = {"SLURM_FIXTURE_DIR": folder, "SLURM_FIXTURE_PORT": str(PORT), **SMALL, **settings}
        os.environ |= env
        script = str(course_root() / "slurm" / "throwaway.sh")
        try:
            ask("bash", script, "start", seconds=120)
            os.environ["SLURM_CONF"] = f"{folder}/slurm.conf"
            yield Path(folder)
        finally:
            ask("bash", script, "stop", seconds=60)
            for name in (*env, "SLURM_CONF"):
                os.environ.pop(name, None)


def ask(*words, seconds=60, fails=False) -> str:
    """Return a program's output, with its errors if it may fail."""
    done = subprocess.run(
        [str(w) for w in words],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=not fails,
        stdin=subprocess.DEVNULL,
    )
    return done.stdout + (done.stderr if fails else "")


def show(number) -> dict[str, str]:
    """Return the fields of a job, as scontrol shows them."""
    found = {}
    for key, value in re.findall(r"(\S+?)=(\S*)", ask("scontrol", "-o", "show", "job", number)):
        found.setdefault(key, value)
    return found


def until(true, seconds=90):
    """Wait until `true()` holds; raise TimeoutError if it does not in time."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds} s: {ask('squeue', fails=True)}")
        time.sleep(0.1)


class Run:
    """A job of the course's script, with some of its text replaced."""

    def __init__(self, changes=(), options=FOUR, words=(), env=None):
        text = (course_root() / "slurm" / "job.sbatch").read_text()
        for old, new in changes:
            if text.count(old) != 1:
                raise ValueError(f"slurm/job.sbatch: {old!r} is there {text.count(old)} times")
            text = text.replace(old, new)
        self.folder = Path(tempfile.mkdtemp(dir=os.environ["SLURM_FIXTURE_DIR"]))
        script = self.folder / "job.sbatch"
        script.write_text(text)
        words = (*("-m", "dlojz.chapters.n00c_cluster.seen", self.folder), *words)
        known = {"DLOJZ_ROOT": course_root(), "DLOJZ_RUN": self.folder}
        known |= {"DLOJZ_PYTHON": sys.executable, **(env or {})}
        os.environ |= {name: str(value) for name, value in known.items()}
        place = (f"--chdir={self.folder}", f"--output={self.folder}/slurm.txt")
        self.submitted = time.time()
        self.number = ask("sbatch", "--parsable", *place, *options, script, *words).strip()
        for name in known:
            del os.environ[name]

    @property
    def state(self) -> str:
        return show(self.number)["JobState"]

    @property
    def tasks(self) -> list[seen.Task]:
        return seen.read(self.folder)

    def wait(self, seconds=120) -> "Run":
        """Wait for its end."""
        until(lambda: self.state in OVER, seconds)
        self.ended = time.time()
        return self

    def begun(self, tasks=4) -> "Run":
        """Wait until its tasks have written their resources."""
        until(lambda: len(self.tasks) == tasks)
        return self

    def text(self, name="slurm.txt") -> str:
        """Return a file of its folder."""
        file = self.folder / name
        return file.read_text() if file.exists() else ""


# The effect of each line -------------------------------------------------------------------------


def _placed(changes=(), options=FOUR):
    run = Run(changes, options).wait()
    nodes = [task.node for task in run.tasks]
    return {"tasks": [nodes.count(node) for node in sorted(set(nodes))]}


def _threads(changes=(), env=None):
    run = Run(changes, env=env).wait()
    return {
        "OMP_NUM_THREADS": sorted({t.environment.get("OMP_NUM_THREADS") or "" for t in run.tasks})
    }


def _cores(changes=(), options=FOUR):
    run = Run(changes, options).wait()
    said = (run.text() + run.text("stderr.txt")).splitlines()
    return {
        "state": run.state,
        "tasks": len(run.tasks),
        "says": next((line for line in said if "error" in line), ""),
    }


def _gpus(options):
    return {"gpus": sorted({t.gpus or "" for t in Run((), options).wait().tasks})}


def _heard(changes=()):
    run = Run(changes, words=("--hears", "asked")).wait()
    heard = [task.heard_s for task in run.tasks if task.heard_s is not None]
    return {"heard": len(heard), "ended": sum(task.ended for task in run.tasks)}


def _appended(changes=()):
    run = Run(changes, words=("--seconds", "12")).begun()
    ask("scontrol", "requeue", run.number)
    until(lambda: show(run.number)["Restarts"] == "1" and run.state == "RUNNING")
    run.wait()
    return {"told": "CANCELLED" in run.text(), "state": run.state}


def _requeued(options=FOUR):
    run = Run((), options, words=("--seconds", "4")).begun()
    said = ask("scontrol", "requeue", run.number, fails=True).strip()
    time.sleep(1)
    restarts = int(show(run.number)["Restarts"])
    ask("scancel", run.number)
    run.wait()
    return {"says": said, "restarts": restarts}


def _failed(changes=()):
    run = Run(changes, words=("--fails", "3", "--seconds", "15")).begun()
    began = max(task.began_s for task in run.tasks)
    run.wait()
    return {"seconds": round(run.ended - began), "state": run.state}


def _printed(changes=()):
    run = Run(changes, words=("--seconds", "60")).begun()
    time.sleep(2)
    ask("scancel", "--signal=KILL", run.number)
    run.wait()
    return {"lines": len(run.text("stdout.txt").splitlines())}


def _signalled(signal):
    # In the script: an option beside it would keep the script's `B:`.
    line = (("#SBATCH --signal=B:USR1@90", f"#SBATCH --signal={signal}"),)
    run = Run(line, (*FOUR, "--time=1"), words=("--seconds", "100")).begun()
    until(lambda: (run.folder / "asked").exists() or run.state in OVER, 150)
    told = (run.folder / "asked").exists()
    seconds = round(time.time() - max(t.began_s for t in run.tasks))
    alive = 4 * (run.state == "RUNNING")
    ask("scancel", run.number, fails=True)
    run.wait()
    return {"told": told, "seconds": seconds, "alive": alive}


def _without(name):
    return tuple(option for option in FOUR if not option.startswith(f"--{name}"))


SUM = (*_without("ntasks-per-node"), "--ntasks=4")
COUNTS = (' --ntasks-per-node="$SLURM_NTASKS_PER_NODE"', "")
FOREGROUND = (
    ('2>>"$DLOJZ_RUN/stderr.txt" &\nstep=$!\nwait $step\n', '2>>"$DLOJZ_RUN/stderr.txt"\nstep=\n'),
)
LINES = {  # by name: (with the line, without it)
    "--ntasks-per-node": (
        _placed,
        lambda: _placed((("#SBATCH --ntasks-per-node=1\n", ""), COUNTS), SUM),
    ),
    "srun": (
        _placed,
        lambda: _placed(((SRUN, ""),)),
    ),
    "--cpus-per-task": (
        _cores,
        lambda: _cores((("#SBATCH --cpus-per-task=8\n", ""),), _without("cpus-per-task")),
    ),
    "--gres": (lambda: _gpus(FOUR), lambda: _gpus((*_without("gres"), "--gres=none"))),
    "--export=ALL": (
        lambda: _threads(env={"SLURM_EXPORT_ENV": "PATH"}),
        lambda: _threads((("srun --export=ALL ", "srun "),), {"SLURM_EXPORT_ENV": "PATH"}),
    ),
    "OMP_NUM_THREADS": (
        _threads,
        lambda: _threads(((" OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK", ""),)),
    ),
    "& wait": (_heard, lambda: _heard(FOREGROUND)),
    "--open-mode=append": (
        _appended,
        lambda: _appended((("#SBATCH --open-mode=append\n", "#SBATCH --open-mode=truncate\n"),)),
    ),
    "--requeue": (_requeued, lambda: _requeued((*FOUR, "--no-requeue"))),
    "--kill-on-bad-exit": (_failed, lambda: _failed(((" --kill-on-bad-exit=1", ""),))),
    "exit $code": (_failed, lambda: _failed((("\nexit $code\n", "\n"),))),
    "PYTHONUNBUFFERED": (_printed, lambda: _printed(((" PYTHONUNBUFFERED=1", ""),))),
    "--signal=B:": (lambda: _signalled("B:USR1@50"), lambda: _signalled("USR1@50")),
}


def lines() -> dict:
    """Return the effects of the script with and without each line."""
    found = {}
    with cluster():
        for name, (whole, cut) in LINES.items():
            found[name] = {"with": whole(), "without": cut()}
            print(name, found[name], flush=True)
        found["processes"] = processes()
        print(found["processes"], flush=True)
    return found


def processes() -> dict:
    """Return the seconds until four processes have begun, by srun and by torchrun."""
    agent = ("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2")
    meet = ("--rdzv-backend=c10d", "--rdzv-endpoint=node1:23456", "--rdzv-id=1", "--no-python")
    ways = {"srun": FOUR, "torchrun": (*_without("ntasks"), "--ntasks-per-node=1")}
    found = {}
    for name, options in ways.items():
        words = (
            '"$@" >>"$DLOJZ_RUN',
            f'{" ".join((*agent, *meet))} "$DLOJZ_PYTHON" -P "$@" >>"$DLOJZ_RUN',
        )
        run = Run((words,) if name == "torchrun" else (), options).wait()
        found[name] = round(max(t.began_s for t in run.tasks) - run.submitted, 1)
    return found


# The cores of tasks ------------------------------------------------------------------------------

HARDWARE = "pack:2 core:{cores} pu:{threads}"  # as hwloc describes a machine


def masks() -> dict:
    """Return the cores of two tasks on one node, as Slurm binds them."""
    found = {}
    for threads in (1, 2):
        made_up = HARDWARE.format(cores=4, threads=threads)
        settings = {"SLURM_FIXTURE_CPUS": str(8 * threads), "SLURM_FIXTURE_SOCKETS": "2"}
        settings |= {"SLURM_FIXTURE_BIND": "1", "SLURM_FIXTURE_THREADS": str(threads)}
        settings["SLURM_FIXTURE_EXTRA"] = "DebugFlags=CPU_Bind\nSlurmdDebug=debug2"
        with cluster(HWLOC_SYNTHETIC=made_up, **settings) as folder:
            for name, header, step in TRIED[threads]:
                found[name] = {"threads": threads, "cpus": _bound(folder, header, step)}
                print(name, found[name], flush=True)
    return found


TWO = "--nodes=1 --ntasks-per-node=2 --gres=gpu:2"
BLOCK = "--nodes=1 --ntasks-per-node=2 --distribution=block:block"  # and no GPU, so anywhere
TRIED = {  # by the threads of a core: name, options of the job, options of srun
    1: (
        ("as in job.sbatch", f"{TWO} --cpus-per-task=2", "--cpus-per-task=2"),
        ("without srun --cpus-per-task", f"{TWO} --cpus-per-task=2", ""),
        ("without --cpus-per-task", TWO, ""),
        ("block by block", f"{BLOCK} --cpus-per-task=2", "--cpus-per-task=2"),
    ),
    2: (
        ("nomultithread", f"{TWO} --cpus-per-task=2 --hint=nomultithread", "--cpus-per-task=2"),
        ("without --hint", f"{TWO} --cpus-per-task=2", "--cpus-per-task=2"),
    ),
}


def _bound(folder, header, step) -> list[list[int]]:
    """Return the CPUs of both tasks, from the masks that a node's daemon logs as it binds them."""
    words = ("sbatch", "--parsable", "--output=/dev/null", *header.split())
    number = ask(*words, "--wrap", f"srun {step} true").strip()
    until(lambda: show(number)["JobState"] in OVER)
    logs = "".join(file.read_text() for file in (folder / "log").glob("slurmd.node*.log"))
    [*_, found] = re.findall(r"after lllp distribution .*\(((?:0x[0-9A-Fa-f]+,?)+)\)", logs)
    masks = [int(mask, 16) for mask in found.split(",")]
    masks *= 2 // len(masks)  # one for all: each task gets it
    return [[b for b in range(64) if mask >> b & 1] for mask in masks]


# The time limit ----------------------------------------------------------------------------------


def asked() -> dict:
    """Return the wait of a job behind a larger one, by its time limit."""
    found = {}
    with cluster():
        for minutes in (1, 60):
            first = _sleeps("first", 40, "--nodes=1", "--exclusive", "--time=2")
            until(lambda number=first: show(number)["JobState"] == "RUNNING")
            large = _sleeps("large", 1, "--nodes=2", "--exclusive", "--time=10")
            until(lambda number=large: show(number)["Reason"] in ("Resources", "Priority"))
            small = _sleeps("small", 5, "--nodes=1", "--exclusive", f"--time={minutes}")
            began = time.monotonic()
            until(lambda number=small: show(number)["JobState"] in ("RUNNING", *OVER), 120)
            found[str(minutes)] = round(time.monotonic() - began)
            until(lambda number=large: show(number)["JobState"] in OVER, 120)
            until(lambda number=small: show(number)["JobState"] in OVER, 120)
            print(minutes, found, flush=True)
    return found


def _sleeps(name, seconds, *options):
    return ask(
        *("sbatch", "--parsable", f"--job-name={name}", "--output=/dev/null", *options),
        *("--wrap", f"sleep {seconds}"),
    ).strip()


# Reasons to wait ---------------------------------------------------------------------------------

ACCOUNTING = """AccountingStorageEnforce=limits,qos
PriorityType=priority/multifactor
PriorityWeightFairshare=10000
PriorityWeightAge=1000
PriorityWeightJobSize=1000
PriorityWeightQOS=2000
PriorityMaxAge=7-0
PriorityCalcPeriod=00:01:00
PartitionName=short Nodes=node[1-2] MaxTime=00:30:00 MaxNodes=1 PreemptMode=OFF PriorityTier=5"""
WHOLE = ("--exclusive", "--gres=gpu:2")
SHARES = "Account,User,RawShares,NormShares,RawUsage,EffectvUsage,FairShare"
COLUMNS = "%.6i %.9j %.8a %.7q %.9P %.8T %.8M %.10l %.5D %R"


def queue() -> dict:
    """Return squeue, sprio, sshare and scontrol of a queue in which each job waits for a reason."""
    with cluster(SLURM_FIXTURE_DBD="1", SLURM_FIXTURE_EXTRA=ACCOUNTING):
        _accounts()
        heavy = _sleeps("used", 20, "--nodes=2", *WHOLE, "--account=physics", "--time=5")
        until(lambda: show(heavy)["JobState"] in OVER, 60)
        broken = _sleeps("broken", 0, "--account=physics", "--time=1", "--dependency=singleton")
        until(lambda: show(broken)["JobState"] in OVER)
        failed = ask(
            *("sbatch", "--parsable", "--account=physics", "--output=/dev/null", "--time=1"),
            *("--wrap", "exit 3"),
        ).strip()
        until(lambda: show(failed)["JobState"] == "FAILED")
        jobs = _waiting(failed)
        time.sleep(80)  # for the fair share to be computed, and each reason to be found
        found = {
            "squeue": ask("squeue", "--sort=i", "-o", COLUMNS),
            "sprio": ask("sprio", "-o", "%.6i %.9r %.10Y %.8A %.10F %.9J %.8Q", fails=True),
            "sshare": ask("sshare", "-a", "-o", SHARES, fails=True),
            "jobs": {name: _text_of(number) for name, number in jobs.items()},
        }
        ask("scancel", "--user=root", fails=True)
    print(found["squeue"], found["sprio"], found["sshare"], sep="\n", flush=True)
    return found


def _accounts():
    add = ("sacctmgr", "-i", "add")
    ask(*add, "account", "physics", "fairshare=50")
    ask(*add, "account", "biology", "fairshare=50")
    ask(*add, "account", "spent", "fairshare=1", "GrpTRESMins=gres/gpu=0")
    ask(*add, "account", "small", "fairshare=1", "GrpTRES=gres/gpu=1")
    for name in ("physics", "biology", "spent", "small"):
        ask(*add, "user", "root", f"account={name}", fails=True)
    ask(*add, "qos", "dev", "MaxJobsPerUser=1", "MaxWall=02:00:00", "Priority=100")
    ask("sacctmgr", "-i", "modify", "user", "root", "set", "qos+=dev,normal", fails=True)
    time.sleep(2)


def _waiting(failed) -> dict[str, str]:
    physics = ("--account=physics", "--time=20")
    found = {}
    ask("scontrol", "update", "NodeName=node2", "State=DRAIN", "Reason=maintenance")
    found["needs"] = _sleeps("needs", 1, *physics, "--nodelist=node2")
    found["fills"] = _sleeps(
        "fills", 300, "--nodes=1", *WHOLE, "--account=physics", "--qos=dev", "--time=20"
    )
    until(lambda: show(found["fills"])["JobState"] == "RUNNING")
    tries = {
        "wide": ("--nodes=1", *WHOLE, "--account=biology", "--time=20"),
        "next": ("--nodes=1", *WHOLE, *physics),
        "second": ("--nodes=1", "--account=physics", "--qos=dev", "--time=20"),
        "after": (*physics, f"--dependency=afterok:{found['fills']}"),
        "never": (*physics, f"--dependency=afterok:{failed}"),
        "later": (*physics, "--begin=now+1hour"),
        "held": (*physics, "--hold"),
        "spent": ("--account=spent", "--gres=gpu:1", "--time=20"),
        "small": ("--account=small", "--gres=gpu:2", "--time=20"),
        "long": ("--account=physics", "--partition=short", "--time=60"),
        "many": (*physics, "--partition=short", "--nodes=2"),
    }
    for name, options in tries.items():
        with suppress(subprocess.CalledProcessError):
            found[name] = _sleeps(name, 1, *options)
    return found


def _text_of(number) -> str:
    """Return scontrol's text of a job, without this machine's paths."""
    text = re.sub(r" AllocNode:Sid=\S+", "", ask("scontrol", "show", "job", number))
    own = ("Command=", "WorkDir=", "StdErr=", "StdIn=", "StdOut=", "Power=")
    return "\n".join(x for x in text.rstrip().splitlines() if not x.strip().startswith(own))


# The exercise ------------------------------------------------------------------------------------


def allocation() -> list[dict]:
    """Return the resources of the tasks of the exercise's script, before any repair."""
    script = course.experiment("allocation.sbatch")
    with cluster(), tempfile.TemporaryDirectory() as folder:
        words = (*("-P", "-m", "dlojz.chapters.n00c_cluster.seen", folder), *("--hears", "heard"))
        place = (f"--chdir={folder}", f"--output={folder}/slurm.txt")
        number = ask("sbatch", "--parsable", *place, script, sys.executable, *words).strip()
        until(lambda: show(number)["JobState"] in OVER)
        found = [vars(task) for task in seen.read(folder)]
    print(found, flush=True)
    return found


PARTS = {"allocation": allocation, "lines": lines, "masks": masks, "time": asked, "queue": queue}


def main():
    """Record all parts, or the named ones."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("into", type=Path, help="a folder, such as reference/slurm")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part; may be repeated")
    args = parser.parse_args()
    if os.geteuid():
        parser.error("needs root: slurm/throwaway.sh starts a Slurm")
    args.into.mkdir(parents=True, exist_ok=True)
    os.environ.pop("PYTHONUNBUFFERED", None)  # the script decides
    for name in args.only or PARTS:
        version = ask("slurmctld", "-V").split()[-1]
        found = {"slurm": version, "command": f"tools/record_slurm.py {args.into} --only {name}"}
        found[name] = PARTS[name]()
        write_atomically(args.into / f"{name}.json", json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
