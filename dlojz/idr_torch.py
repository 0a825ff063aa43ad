"""The rank of this process and more, whatever launched it: torchrun, srun, mpirun, or nothing.

    from dlojz import idr_torch
    torch.distributed.init_process_group("gloo", rank=idr_torch.rank, world_size=idr_torch.size)
    model = model.to(idr_torch.device())

The innermost launcher counts, because the variables of the outer ones are inherited:
  1. torchrun (RANK is set), also inside an srun step or in a notebook that Slurm started;
  2. mpirun or mpiexec of Open MPI, MVAPICH, MPICH or Intel MPI, when it started several processes,
     also in a Slurm job, where it has srun start one daemon on each node;
  3. srun, when its step has several tasks. Slurm sets SLURM_STEP_* for steps only, but a job
     submitted from a notebook inherits those of the notebook server's step, which has one task;
  4. another launcher that speaks PMI, such as PALS on HPE Cray;
  5. none: one process, rank 0 of 1. This includes `python` in the batch script itself, whatever
     SLURM_NTASKS and SLURM_PROCID say there: they announce tasks that only srun would start.

The first attribute that is read computes them all and, where the launcher did not, sets MASTER_ADDR
and MASTER_PORT in os.environ for init_process_group: the step's first node and a port made from its
job and step ids, or 127.0.0.1 and port 0 (any free one) for a single process. Under MPI the node is
127.0.0.1, or the first of the Slurm job, and else MASTER_ADDR must be given. The import alone does
nothing.

IDRIS's own names for the same are there, too: see ALIASES. `import idr_torch` is this module.
"""

import itertools
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache

# A single process has no peers, so port 0 lets the system pick a free one, and two runs on one
# machine cannot collide. It is also a marker, which a job submitted from here inherits (_master).
ALONE = ("127.0.0.1", 0)
# Free for users on Linux: below the ephemeral ports (32768 and up) and torchrun's 29500.
FIRST_PORT, PORTS = 10_000, 19_000
# MPI's launchers: their variables for rank, size, and both on this node.
MPIRUN = (
    tuple(f"OMPI_COMM_WORLD_{x}" for x in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    tuple(f"MV2_COMM_WORLD_{x}" for x in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
)
PALS = ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")
MPI_RANKS = ("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "PALS_RANKID")
# What all processes of one run share, and those of the next do not, if the launcher sets it.
RUN_IDS = ("PMIX_NAMESPACE", "PALS_APID", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
ALIASES = {
    "world_size": "size",
    "ntasks": "size",
    "local_world_size": "local_size",
    "ntasks_per_node": "local_size",
    "nnodes": "num_nodes",
    "cpus": "cpus_per_task",
    "hostname": "master_addr",
    "host": "master_addr",
    "master": "is_master",
}


@dataclass(frozen=True)
class Ranks:
    """The place of one process among those of its run."""

    rank: int  # 0 to size - 1
    local_rank: int  # 0 to local_size - 1, on this node
    size: int  # processes, on all nodes
    local_size: int  # processes on this node
    num_nodes: int
    cpus_per_task: int  # CPUs for this process, at least 1
    gpu_ids: tuple[int | str, ...]  # 0, or "GPU-5a1c..." and "MIG-..."; empty: none or unknown
    nodelist: str  # compact, as Slurm writes it: node[1-3,7]
    hostnames: tuple[str, ...]  # the same, expanded; empty where the launcher does not set it
    master_addr: str
    master_port: int  # 0: any free port, for a single process

    @property
    def is_master(self) -> bool:
        """Return True in one process of the run: for prints and checkpoints."""
        return self.rank == 0


def from_environment(env: Mapping[str, str], cpus: int = 1) -> Ranks:
    """Return the ranks of the process with this environment, which may run on `cpus` CPUs."""
    if "RANK" in env:
        return _from_torchrun(env, cpus)
    if names := _started_several(env, [names for names in MPIRUN if names[2] in env]):
        return _from_mpi(env, cpus, names)
    if "SLURM_STEP_ID" in env:
        if _number(env, "SLURM_STEP_NUM_TASKS", 1) > 1:
            return _from_srun(env, cpus)
        cpus = _cpus_of_task(env, cpus)  # a step of one task, perhaps a notebook server
    if names := _started_several(env, (PALS, *MPIRUN)):
        return _from_mpi(env, cpus, names)
    if name := next((name for name in MPI_RANKS if env.get(name, "0") != "0"), None):
        raise ValueError(
            f"{name} is {env[name]!r}, but no variable says of how many processes: start with "
            f"torchrun, srun or mpirun, or `unset {name}` for a single process"
        )
    node = _this_node(env)
    return Ranks(0, 0, 1, 1, 1, cpus, _gpu_ids(env), node, (node,), *_master(env, *ALONE))


def _from_torchrun(env: Mapping[str, str], cpus: int) -> Ranks:
    size, local_size = _number(env, "WORLD_SIZE", 1), _number(env, "LOCAL_WORLD_SIZE", 1)
    nodes = _number(env, "GROUP_WORLD_SIZE", 1) if "GROUP_WORLD_SIZE" in env else size // local_size
    place = _number(env, "RANK"), _number(env, "LOCAL_RANK"), size, local_size, nodes
    hosts = _hosts(env, nodes, "SLURM_STEP_NODELIST")
    master = _text(env, "MASTER_ADDR"), _number(env, "MASTER_PORT")
    return Ranks(*place, max(1, cpus // local_size), _gpu_ids(env), *hosts, *master)


def _from_srun(env: Mapping[str, str], cpus: int) -> Ranks:
    nodelist = _text(env, "SLURM_STEP_NODELIST")
    hostnames, local_size = expand_nodelist(nodelist), _tasks_of_node(env)
    names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")
    place = *(_number(env, name) for name in names), local_size, len(hostnames)
    cpus = _cpus_of_task(env, max(1, cpus // local_size))
    master = _master(env, hostnames[0], _step_port(env))
    return Ranks(*place, cpus, _gpu_ids(env), nodelist, hostnames, *master)


def _started_several(env: Mapping[str, str], launchers) -> tuple[str, ...] | None:
    """Return the variables of the first of these launchers that started several processes."""
    return next((names for names in launchers if _number(env, names[1], 1, default=1) > 1), None)


def _from_mpi(env: Mapping[str, str], cpus: int, names: tuple[str, ...]) -> Ranks:
    rank, size = _number(env, names[0]), _number(env, names[1])
    local_rank, local_size = rank, size  # a launcher that is silent about nodes has one
    if names[2] in env:
        local_rank, local_size = _number(env, names[2]), _number(env, names[3], 1)
    nodes = -(-size // local_size)
    hosts = _hosts(env, nodes, "SLURM_JOB_NODELIST")
    run = next((env[name] for name in RUN_IDS if env.get(name)), "")
    first = ALONE[0] if nodes == 1 else next(iter(hosts[1]), "")
    master = _master(env, first, FIRST_PORT + zlib.crc32(run.encode()) % PORTS)
    if not master[0]:
        raise ValueError(
            f"MASTER_ADDR is not set, and {size} processes on {nodes} nodes must agree where to "
            "meet: on the first node, `export MASTER_ADDR=$(hostname)`, and have the others get "
            "it, as with mpirun -x MASTER_ADDR, or mpiexec -genvlist MASTER_ADDR"
        )
    place = rank, local_rank, size, local_size, nodes
    cpus = _cpus_of_task(env, max(1, cpus // local_size))
    return Ranks(*place, cpus, _gpu_ids(env), *hosts, *master)


def _hosts(env: Mapping[str, str], nodes: int, name: str) -> tuple[str, tuple[str, ...]]:
    """Return this run's nodes, compact and expanded; empty if the variable is not of this run."""
    nodelist = _this_node(env) if nodes == 1 else env.get(name, "")
    hostnames = expand_nodelist(nodelist) if nodelist else ()
    return (nodelist, hostnames) if len(hostnames) == nodes else ("", ())


def _cpus_of_task(env: Mapping[str, str], default: int) -> int:
    name = "SLURM_CPUS_PER_TASK"  # set where --cpus-per-task was given
    return _number(env, name, 1) if name in env else default


def _master(env: Mapping[str, str], addr: str, port: int) -> tuple[str, int]:
    """Return MASTER_ADDR and MASTER_PORT of the launcher or the job script, else those given."""
    if env.get("MASTER_PORT") == str(ALONE[1]):
        return addr, port  # inherited from a single process: the notebook that submitted this job
    return (
        env.get("MASTER_ADDR") or addr,
        _number(env, "MASTER_PORT") if env.get("MASTER_PORT") else port,
    )


def _step_port(env: Mapping[str, str]) -> int:
    """Return a port that all ranks share, and that the next job or step on these nodes does not."""
    return FIRST_PORT + (_number(env, "SLURM_JOB_ID") + 997 * _number(env, "SLURM_STEP_ID")) % PORTS


def _tasks_of_node(env: Mapping[str, str]) -> int:
    """Return this node's number of tasks, from a list such as `2(x2),1`: 2, 2 and 1."""
    name, node = "SLURM_STEP_TASKS_PER_NODE", _number(env, "SLURM_NODEID")
    group = r"(\d+)(?:\(x(\d+)\))?"
    tasks = []
    if re.fullmatch(f"{group}(,{group})*", _text(env, name)):
        for count, nodes in re.findall(group, env[name]):
            tasks += [int(count)] * int(nodes or 1)
    if node >= len(tasks):
        raise ValueError(
            f"{name} is {env[name]!r}; expected numbers of tasks such as 2(x2),1, one of them "
            f"for SLURM_NODEID={node}; start with srun"
        )
    return tasks[node]


def expand_nodelist(nodelist: str) -> tuple[str, ...]:
    """Return all names of a compact list: r1n08, r1n09, r1n10 and login for `r1n[08-10],login`."""
    numbers = r"\d+(?:-\d+)?"
    name = rf"(?:[^][,\s]|\[{numbers}(?:,{numbers})*\])+"
    hosts = []
    try:
        if not re.fullmatch(rf"{name}(?:,{name})*", nodelist):
            raise ValueError("malformed")
        for compact in re.findall(name, nodelist):
            parts = re.split(r"\[(.*?)\]", compact)  # text, numbers, text, numbers, ... text
            choices = [_numbers(p) if i % 2 else [p] for i, p in enumerate(parts)]
            hosts += ["".join(choice) for choice in itertools.product(*choices)]
    except ValueError as error:
        raise ValueError(
            f"the node list {nodelist!r} is {error}; expected names such as node[1-3,7],"
            "r1i[0-2]n[01-03]; `scontrol show hostnames` shows those of Slurm"
        ) from None
    return tuple(hosts)


def _numbers(ranges: str) -> list[str]:
    """Return 08, 09, 10, 12 for `08-10,12`: a range keeps the width of its first number."""
    found = []
    for first, _, last in (part.partition("-") for part in ranges.split(",")):
        if int(last or first) < int(first):
            raise ValueError(f"running backwards from {first} to {last}")
        found += [f"{i:0{len(first)}d}" for i in range(int(first), int(last or first) + 1)]
    return found


def _gpu_ids(env: Mapping[str, str]) -> tuple[int | str, ...]:
    """Return the GPUs that CUDA shows to this process, else those of the step."""
    # Without SLURM_GPUS_ON_NODE the job has no GPU, and SLURM_STEP_GPUS is that of a notebook.
    step = env.get("SLURM_STEP_GPUS", "") if "SLURM_GPUS_ON_NODE" in env else ""
    names = env.get("CUDA_VISIBLE_DEVICES", step).split(",")
    hidden = ("", "-1", "NoDevFiles")  # CUDA's and Slurm's values for no GPU
    return tuple(int(n) if n.isdigit() else n for n in map(str.strip, names) if n not in hidden)


def _this_node(env: Mapping[str, str]) -> str:
    return env.get("SLURMD_NODENAME", "localhost")


def _text(env: Mapping[str, str], name: str) -> str:
    if not env.get(name):
        mpi = name.startswith(("OMPI_", "MV2_", "PMI_", "MPI_"))
        launcher = "srun" if name.startswith("SLURM_") else "mpirun" if mpi else "torchrun"
        raise ValueError(
            f"{name} is not set, but other variables of {launcher} are; start with {launcher}, "
            f"or unset the others: `env | grep -E 'SLURM_STEP|RANK|PMI'` shows them"
        )
    return env[name]


def _number(env: Mapping[str, str], name: str, least: int = 0, default: int | None = None) -> int:
    if default is not None and name not in env:
        return default
    text = _text(env, name)
    if not re.fullmatch(r"[0-9]+", text) or int(text) < least:
        raise ValueError(f"{name} is {text!r}; expected a number, {least} or more: `unset {name}`?")
    return int(text)


@cache
def _this_process() -> Ranks:
    """Return the ranks of this process, computed when the first attribute is read."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = from_environment(os.environ, cpus)
    os.environ["MASTER_ADDR"] = ranks.master_addr
    os.environ["MASTER_PORT"] = str(ranks.master_port)
    return ranks


_NAMES = (*(field.name for field in fields(Ranks)), "is_master", *ALIASES)


def __getattr__(name: str):
    if name in _NAMES:
        return getattr(_this_process(), ALIASES.get(name, name))
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_NAMES)}"
    )


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES])


def device():
    """Return this process's GPU, or the CPU; $DLOJZ_DEVICE, such as `meta`, forces another."""
    import torch  # here, because a program that only needs its rank should not wait for it

    if forced := os.environ.get("DLOJZ_DEVICE"):
        return torch.device(forced)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # Modulo: with --gpus-per-task=1 each task sees one GPU, numbered 0.
    return torch.device("cuda", _this_process().local_rank % torch.cuda.device_count())
