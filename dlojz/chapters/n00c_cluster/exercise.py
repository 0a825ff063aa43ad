"""00_cluster: four tasks on two nodes, each with its resources, and a script that hears signals."""

import re
from collections import Counter
from pathlib import Path

from dlojz.chapters.n00c_cluster import seen
from dlojz.chapters.n00c_cluster.seen import Task
from dlojz.check.exercise import Finding, Prepared, State

GOT, HEARD = "what the tasks got", "what the script hears"
NODES, PER_NODE, CORES = 2, 2, 2  # the request in the script's first lines
TASKS = NODES * PER_NODE


def read(folder: Path) -> dict[str, dict]:
    """Return the resources of this job's tasks; {} if none began."""
    tasks = seen.read(folder)
    return {"tasks": {"seen": tasks}} if tasks else {}


def findings(cases: dict[str, dict]) -> list[Finding]:
    """Return findings on the resources written by `dlojz.chapters.n00c_cluster.seen`."""
    tasks = cases["tasks"]["seen"]
    return [*_placed(tasks), *_cores(tasks), _gpus(tasks), *_environment(tasks), *_hears(tasks)]


def _placed(tasks):
    """Yield findings on the number of tasks on each node, and the job's cores there."""
    on = Counter(task.node for task in tasks)
    text = ", ".join(f"{n} on {node}" for node, n in sorted(on.items()))
    ok = len(on) == NODES and set(on.values()) == {PER_NODE}
    asked = f"{PER_NODE} on each of {NODES} nodes"
    yield Finding(GOT, "tasks", "tasks", ok, text, asked, "placement")
    given = allocated(tasks[0].environment.get("SLURM_JOB_CPUS_PER_NODE", ""))
    text = " and ".join(map(str, given)) or "unknown"
    even = len(given) == NODES and len(set(given)) == 1
    asked = "equally many on each"
    yield Finding(GOT, "nodes", "cores of the nodes", even, text, asked, "placement")


def allocated(text: str) -> list[int]:
    """Return the cores of each node from Slurm's short form: "6,2", "4(x2)"."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(cores) for cores, times in found for _ in range(int(times or 1))]


def _cores(tasks):
    """Yield findings on the cores of the step, and on their sharing where tasks are bound."""
    shares = [seen.share(task) for task in tasks]
    text = " and ".join(f"{n:g}" for n in sorted(set(shares)))
    ok = min(shares) >= CORES
    yield Finding(GOT, "cores", "cores for each task", ok, text, f"at least {CORES}", "cores")
    own = [seen.own_cores(task, tasks) for task in tasks]
    if None in own:
        state, text = State.NOT_ASKED, "this Slurm does not bind tasks to cores"
    else:
        state, text = min(own) >= CORES, " and ".join(map(str, sorted(set(own))))
    yield Finding(GOT, "own", "cores of its own", state, text, f"at least {CORES}", "shared")


def _gpus(tasks):
    alone = sum(_of_its_own(node) for node in _by_node(tasks))
    shown = sorted({task.gpus or "none" for task in tasks})
    text = f"{alone} of {len(tasks)} tasks; they see {' and '.join(shown)}"
    ok = alone == len(tasks)
    return Finding(GOT, "gpus", "GPU of its own", ok, text, "each task", "gpus")


def _by_node(tasks):
    return [[t for t in tasks if t.node == node] for node in sorted({t.node for t in tasks})]


def _of_its_own(tasks: list[Task]) -> int:
    """Return the number of a node's tasks with a GPU of their own.

    Either each task sees all GPUs of the node, and takes the one of its number; or each sees a
    single one, perhaps called 0 in all tasks: then the node's number of GPUs decides.
    """
    shown = {gpu for task in tasks for gpu in task.gpu_list}
    fenced = all(len(task.gpu_list) == 1 for task in tasks)
    has = int(tasks[0].environment.get("SLURM_GPUS_ON_NODE") or 0) if fenced else 0
    return min(len(tasks), max(len(shown), has))


def _environment(tasks):
    wanted = min(tasks, key=lambda task: task.task).node
    met = [task.environment.get("MASTER_ADDR") for task in tasks]
    text = " and ".join(dict.fromkeys(name or "nothing" for name in met))
    ok = set(met) == {wanted}
    name, asked = "MASTER_ADDR", f"{wanted}, in each task"
    yield Finding(GOT, name, name, ok, text, asked, "environment")
    threads = [task.environment.get("OMP_NUM_THREADS") for task in tasks]
    text = " and ".join(dict.fromkeys(n or "nothing" for n in threads))
    ok = set(threads) == {str(CORES)}
    name, asked = "OMP_NUM_THREADS", f"{CORES}, in each task"
    yield Finding(GOT, name, name, ok, text, asked, "environment")


def _hears(tasks):
    heard = [task.heard_s for task in tasks if task.heard_s is not None]
    ended = sum(task.ended for task in tasks)
    # Tasks that were killed had no time to notice.
    late = not heard and ended == len(tasks)
    text = f"not in {seen.PATIENCE_S:g} s, while the tasks ran" if late else "while the tasks ran"
    yield Finding(HEARD, "signal", "the signal", not late, text, "while the tasks run", "signal")
    text, ok = f"{ended} of {len(tasks)}", ended == len(tasks)
    yield Finding(HEARD, "ended", "tasks that ended on their own", ok, text, "all", "killed")


EXERCISE = Prepared("00_cluster", (GOT, HEARD), findings, last="tasks", read=read)
