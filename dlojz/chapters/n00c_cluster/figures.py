"""Tables and figures of notebook 00c: a site, the queue, and the lines of a job script.

cluster.lines()      # recorded by tools/record_slurm.py, on a throw-away Slurm
cluster.tasks(job)   # the resources of a job's tasks
"""

import json
import re

import matplotlib.pyplot as plt

from dlojz.chapters.n00c_cluster import seen
from dlojz.course import course_root
from dlojz.figures import drawing
from dlojz.figures.look import PALETTE, SERIES, entitle, style
from dlojz.figures.report import summary
from dlojz.launch import sites as sites_of
from dlojz.runs.folder import path_of
from dlojz.table import Table

UNKNOWN = "?"  # not in the site's file


def recorded(name: str) -> dict:
    """Return a recording of reference/slurm: "lines", "masks", "time" or "queue"."""
    return json.loads((course_root() / "reference" / "slurm" / f"{name}.json").read_bytes())


# The site ----------------------------------------------------------------------------------------


def all_sites() -> list[sites_of.Site]:
    """Return the sites of slurm/sites, except the generic one."""
    files = sorted((course_root() / "slurm" / "sites").glob("*.toml"))
    return [sites_of.read(file) for file in files if file.stem != "generic"]


def nodes(*chosen: sites_of.Site) -> Table:
    """Return a table of the kinds of nodes of these sites, by default of all known ones."""
    head = ("site", "nodes", "GPUs of a node", "cores for each", "host memory for each")
    head = (*head, "memory of a GPU", "at most", "an hour of one costs")
    rows = [row for site in chosen or all_sites() for row in _node_rows(site)]
    return Table(head, rows, "<<>>>>><")


def _node_rows(site):
    for kind, gpus in site.gpus.items():
        memory = (gpus.host_memory_gb, gpus.memory_gb)
        costs = f"{gpus.hour_costs:g} {site.unit}" if gpus.hour_costs else UNKNOWN
        yield (
            *(site.name, kind, str(gpus.gpus_per_node), str(gpus.cpus_per_gpu)),
            *(f"{gb} GB" if gb else UNKNOWN for gb in memory),
            *(gpus.longest or UNKNOWN, costs),
        )


def storage(site: sites_of.Site) -> Table:
    """Return a table of a site's storage, with its quotas and its purges."""
    rows = [
        (
            *(name, place.path, place.holds, place.quota or UNKNOWN),
            f"{place.files:,}" if place.files else UNKNOWN,
            f"after {place.purged_days} days" if place.purged_days else UNKNOWN,
        )
        for name, place in site.storage.items()
    ]
    head = ("storage", "path", "what belongs there", "quota", "files", "purged")
    empty = f"the file of {site.name} names no storage: add [storage.*] to it (slurm/README.md)"
    return Table(head, rows, "<<<<><", empty)


def plot_files(images: int = 1_281_167, per_shard: int = 1000, ax=None):
    """Draw the number of files that each storage admits, beside a data set as files and shards."""
    places = [
        (f"{site.name} {name}", place.files)
        for site in all_sites()
        for name, place in site.storage.items()
        if place.files
    ]
    places.sort(key=lambda place: place[1])
    names, files = zip(*places, strict=True)
    shards = -(-images // per_shard)
    with drawing.axes(ax, (7, 0.3 * len(places) + 1), "x") as ax:
        colours = [PALETTE["speed"] if n >= images else PALETTE["limit"] for n in files]
        ax.barh(names, files, color=colours)
        label = f"ImageNet's training files: {images:,}"
        ax.axvline(images, color=PALETTE["failure"], label=label)
        label = f"in shards of {per_shard:,}: {shards:,}"
        ax.axvline(shards, color=PALETTE["update"], label=label)
        ax.set(xscale="log", xlabel="files and folders that a quota admits, by default")
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
        fit = sum(n >= images for n in files)
        packed = sum(n >= shards for n in files)
        title = f"{fit} of {len(places)} storages admit ImageNet as files, {packed} as shards"
        entitle(ax, title, "blue: as files; by the quotas in slurm/sites")
    return ax


# The queue ---------------------------------------------------------------------------------------

# Slurm's reasons for which a job waits: the meaning, and the remedy.
REASONS = {
    "Resources": ("it is the next one, and waits for free nodes", "wait, or ask for less"),
    "Priority": ("others come first", "wait; a shorter job may fit in before them"),
    "Dependency": ("another job must end first", "nothing"),
    "DependencyNeverSatisfied": (
        "the job that it depends on failed",
        "cancel it: it will never start",
    ),
    "BeginTime": ("it may start later only, or was just requeued", "nothing"),
    "JobHeldUser": ("you hold it back", "scontrol release JOB"),
    "QOSMaxJobsPerUserLimit": (
        "you have as many jobs as this QoS allows",
        "wait for them, or take another QoS",
    ),
    "AssocGrpGRES": ("your project uses all the GPUs that it may", "wait, or ask for fewer GPUs"),
    "AssocGrpGRESMinutes": (
        "what is left of your project's hours is less than it asks for",
        "ask for less time, or charge another account",
    ),
    "PartitionTimeLimit": (
        "it asks for more time than its partition gives",
        "scontrol update JobId=JOB TimeLimit=..., and checkpoints",
    ),
    "PartitionNodeLimit": (
        "it asks for more nodes than its partition gives",
        "cancel it, and ask for fewer nodes or another partition",
    ),
    "ReqNodeNotAvail": (
        "a node that it asks for is down, or reserved for maintenance",
        "don't name nodes; end before the maintenance",
    ),
}
ALSO = {"Nodes required for job are DOWN, DRAINED": "ReqNodeNotAvail"}  # squeue's longer text


def squeue() -> str:
    """Return the recorded queue, as squeue shows it."""
    return _Text(recorded("queue")["queue"]["squeue"])


def sprio() -> str:
    """Return the priorities of the waiting jobs, as sprio shows them."""
    return _Text(recorded("queue")["queue"]["sprio"])


def sshare() -> str:
    """Return a table of each project's use and its fair share, as sshare shows them."""
    return _Text(recorded("queue")["queue"]["sshare"])


def job(name: str) -> str:
    """Return scontrol's text of a job of the recorded queue."""
    known = recorded("queue")["queue"]["jobs"]
    if name not in known:
        raise LookupError(f"no job {name!r} was recorded: expected one of {', '.join(known)}")
    return _Text(known[name])


class _Text(str):
    """The output of a program; shown without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def waiting() -> list[tuple[str, str]]:
    """Return the name of each recorded job that waits, and Slurm's reason."""
    found = []
    for name, text in recorded("queue")["queue"]["jobs"].items():
        state, reason = re.search(r"JobState=(\S+) Reason=(\S+)", text).groups()
        if state == "PENDING":
            long = next((known for said, known in ALSO.items() if said[:12] in reason), reason)
            found.append((name, long.split(",")[0]))
    return found


def reasons() -> Table:
    """Return a table of the reasons for which recorded jobs wait, with the remedies."""
    rows = [(reason, *REASONS.get(reason, (UNKNOWN, UNKNOWN)), name) for name, reason in waiting()]
    return Table(("reason", "it means", "what to do", "job"), rows, "<<<<")


def plot_waits(ax=None):
    """Draw the wait of a job behind a larger one, by the requested time limit."""
    waits = recorded("time")["time"]
    names = [f"asks for {minutes} min" for minutes in waits]
    with drawing.axes(ax, (7, 2.1), "x") as ax:
        bars = ax.barh(names, list(waits.values()), color=PALETTE["data"])
        ax.bar_label(bars, [f" {seconds} s" for seconds in waits.values()])
        ax.set(xlabel="in the queue, for the same job of 5 s (s)")
        short, long = min(waits, key=int), max(waits, key=int)
        told = f"Asking for {short} min instead of {long} min"
        title = f"{told}, the same job waits {waits[short]} s instead of {waits[long]} s"
        entitle(ax, title, "behind a larger job, on a throw-away Slurm")
        ax.margins(x=0.15)
    return ax


# The script, line by line ------------------------------------------------------------------------

LINES = {  # by the name of a line: the recorded effect, in words
    "--ntasks-per-node": (lambda r: f"tasks on the nodes: {_and(r['tasks'])}"),
    "--cpus-per-task": (lambda r: f"{r['tasks']} tasks, {r['state']} {r['says']}".strip()),
    "--gres": (lambda r: f"a task sees GPUs {r['gpus'][0] or 'none'}"),
    "--requeue": (lambda r: f"restarts: {r['restarts']}. {r['says']}".removesuffix(". ")),
    "--open-mode=append": (
        lambda r: f"after a restart, its first message is {'there' if r['told'] else 'gone'}"
    ),
    "--signal=B:": (
        lambda r: (
            f"the script {'was told' if r['told'] else 'was not told'} after {r['seconds']} s; "
            f"tasks alive: {r['alive']}"
        )
    ),
    "OMP_NUM_THREADS": (lambda r: f"a task sees {_and(r['OMP_NUM_THREADS']) or 'nothing'}"),
    "PYTHONUNBUFFERED": (lambda r: f"{r['lines']} lines printed before it was killed"),
    "srun": (lambda r: f"tasks on the nodes: {_and(r['tasks'])}"),
    "--export=ALL": (lambda r: f"OMP_NUM_THREADS in a task: {_and(r['OMP_NUM_THREADS']) or '-'}"),
    "--kill-on-bad-exit": (lambda r: f"{r['state']} {r['seconds']} s after one task had failed"),
    "& wait": (lambda r: f"{r['heard']} of 4 tasks saw the script react while they ran"),
    "exit $code": (lambda r: f"a failed training is {r['state']}"),
}
WHERE = {  # the line in slurm/job.sbatch
    "--export=ALL": "srun --export=ALL",
    "--kill-on-bad-exit": "srun --kill-on-bad-exit=1",
    "& wait": "srun ... & ... wait $step",
    "--signal=B:": "--signal=B:USR1@90",
    "PYTHONUNBUFFERED": "PYTHONUNBUFFERED=1",
}


def _and(values):
    return " and ".join(str(value) for value in values)


def lines() -> Table:
    """Return a table of runs of slurm/job.sbatch: unchanged, and without each of its lines."""
    known = recorded("lines")["lines"]
    rows = [
        (WHERE.get(name, name), text(known[name]["with"]), text(known[name]["without"]))
        for name, text in LINES.items()
    ]
    return Table(("line", "with it", "without it"), rows, "<<<")


def processes() -> Table:
    """Return a table of the seconds until four processes had begun on two nodes."""
    known = recorded("lines")["lines"]["processes"]
    rows = [(name, f"{seconds:.1f} s") for name, seconds in known.items()]
    return Table(("started by", "all four had begun after"), rows, "<>")


def plot_masks():
    """Draw the cores to which Slurm binds two tasks of a node, by request."""
    known = recorded("masks")["masks"]
    with style():
        _, axes = plt.subplots(len(known), 1, figsize=(7, 0.75 * len(known)), layout="constrained")
        for ax, (name, found) in zip(axes, known.items(), strict=True):
            _draw_mask(ax, found["threads"], found["cpus"])
            ax.set_title(name, loc="left", fontsize=9)
        alone = [n for n, f in known.items() if not set(f["cpus"][0]) & set(f["cpus"][1])]
        title = f"{len(alone)} of {len(known)} requests give each task cores of its own"
        entitle(axes, title, "a node of 2 x 4 cores: blue and orange are two tasks' cores")
    return axes


def _draw_mask(ax, threads, tasks):
    """Draw a row of cores, divided into threads, coloured by the task that may use them."""
    for cpu in range(8 * threads):
        who = [task for task, cpus in enumerate(tasks) if cpu in cpus]
        left = cpu / threads + 0.08 * (cpu % threads == 0)
        for at, task in enumerate(who or [None]):
            height = 1 / len(who or [None])
            colour = "none" if task is None else SERIES[task]
            size = (1 / threads - 0.08, height)
            ax.add_patch(plt.Rectangle((left, at * height), *size, fc=colour, ec=PALETTE["limit"]))
    ax.axvline(4.04, color=PALETTE["model"], ls=":")
    ax.set(xlim=(0, 8.1), ylim=(-0.04, 1.04), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)


# The resources of tasks --------------------------------------------------------------------------


def tasks(run=None) -> Table:
    """Return a table of the resources of a job's tasks, by default of the recorded job."""
    if run is None:
        found = [seen.Task(**task) for task in recorded("allocation")["allocation"]]
    else:
        found = seen.read(path_of(run))
    rows = [
        (
            *(str(task.task), task.node, f"{seen.share(task):g}"),
            *(task.gpus or "none", task.environment.get("MASTER_ADDR", "none")),
            task.environment.get("OMP_NUM_THREADS", "none"),
            "in time" if task.heard_s is not None else "no" if task.ended else "killed",
        )
        for task in found
    ]
    first = "task" if run is not None else "task (recorded)"
    head = (first, "node", "cores", "sees GPUs", "MASTER_ADDR", "OMP_NUM_THREADS", "heard")
    return Table(head, rows, "><><<><", "no task began")


def cost(runs, images: int, epochs: int = 90) -> Table:
    """Return a table of the GPU hours and the energy of `epochs` epochs, from these runs."""
    rows = []
    for run in map(summary, runs):
        seconds = images * epochs / run.images_per_s
        hours = seconds * run.size / 3600
        energy = f"{run.energy_per_image_j * images * epochs / 3.6e6:.1f} kWh"
        rows.append((run.name, f"{run.images_per_s:,.0f}", f"{hours:.1f}", energy))
    return Table(("run", "images/s", "GPU hours", "energy of the GPUs"), rows, "<>>>")
