"""Each process knows who it is, under every launcher: environments/ holds recorded ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dlojz import idr_torch
from dlojz.idr_torch import expand_nodelist, from_environment

ENVIRONMENTS = Path(__file__).with_name("environments")
CPUS = 8  # that each process may run on, here

LOCAL, NODE1, NODE2 = ((name, (name,)) for name in ("localhost", "node1", "node2"))
BOTH = ("node[1-2]", ("node1", "node2"))
TWO_BY_TWO = [(rank, rank % 2, 2, 4, ()) for rank in range(4)]
ALL_HERE = [(rank, rank, 4, 2, ()) for rank in range(4)]
# file: (size, num_nodes, (nodelist, hostnames), (master_addr, master_port), processes), of each
# process: rank, local_rank, local_size, cpus_per_task, gpu_ids
EXPECTED = {
    "alone": (1, 1, LOCAL, ("127.0.0.1", 0), [(0, 0, 1, 8, ())]),
    "torchrun": (2, 1, LOCAL, ("127.0.0.1", 29500), TWO_BY_TWO[:2]),
    "srun_2x2": (4, 2, BOTH, ("node1", 10005), [(r, r % 2, 2, 2, ()) for r in range(4)]),  # -c2
    "srun_3_1": (
        *(4, 2, BOTH, ("node1", 10006)),
        [(0, 0, 3, 2, ()), (1, 1, 3, 2, ()), (2, 2, 3, 2, ()), (3, 0, 1, 8, ())],
    ),
    "srun_gpus_per_task": (
        *(4, 2, BOTH, ("node1", 10007)),
        [(r, r % 2, 2, 4, (r % 2,)) for r in range(4)],
    ),
    "srun_torchrun": (4, 2, BOTH, ("node1", 37275), TWO_BY_TWO),
    "batch_script": (1, 1, NODE1, ("127.0.0.1", 0), [(0, 0, 1, 8, ())]),
    "batch_srun": (4, 2, BOTH, ("node1", 10010), TWO_BY_TWO),
    "interactive": (1, 1, NODE1, ("127.0.0.1", 0), [(0, 0, 1, 8, ())]),
    "notebook": (1, 1, NODE2, ("127.0.0.1", 0), [(0, 0, 1, 2, (0,))]),
    "notebook_torchrun": (
        *(2, 1, NODE2, ("127.0.0.1", 29500)),
        [(0, 0, 2, 4, (0,)), (1, 1, 2, 4, (0,))],
    ),
    # A job on node1 that was submitted from a notebook on node2 with a GPU; it has none itself.
    "notebook_batch": (1, 1, NODE1, ("127.0.0.1", 0), [(0, 0, 1, 1, ())]),
    "mpirun": (4, 1, LOCAL, ("127.0.0.1", 13248), ALL_HERE),
    "mpiexec": (4, 1, LOCAL, ("127.0.0.1", 10000), ALL_HERE),
    # The notebook's SLURM_DISTRIBUTION=cyclic was inherited too: ranks alternate between nodes.
    "notebook_batch_srun": (
        *(4, 2, BOTH, ("node1", 10017)),
        [(r, r // 2, 2, 1, ()) for r in range(4)],
    ),
}


def recorded(name: str) -> list[dict[str, str]]:
    return json.loads((ENVIRONMENTS / f"{name}.json").read_text())["processes"]


def clean_environment(**more: str) -> dict[str, str]:
    """This one without what a launcher sets: the tests may themselves run under Slurm."""
    launcher = ("SLURM", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "TORCHELASTIC_")
    launcher += ("OMPI_", "PMI", "MPI_", "MV2_", "PALS_")
    return {k: v for k, v in os.environ.items() if not k.startswith(launcher)} | more


def python(code: str, env: dict[str, str]) -> str:
    """What the code prints in a new process."""
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_recording_has_its_expected_values():
    assert {file.stem for file in ENVIRONMENTS.glob("*.json")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_processes_of_a_real_launcher_know_who_they_are(name):
    size, num_nodes, nodes, master, processes = EXPECTED[name]
    found = [from_environment(env, CPUS) for env in recorded(name)]
    assert [
        (r.rank, r.local_rank, r.local_size, r.cpus_per_task, r.gpu_ids) for r in found
    ] == processes
    assert {(r.size, r.num_nodes) for r in found} == {(size, num_nodes)}
    assert {(r.nodelist, r.hostnames) for r in found} == {nodes}
    assert {(r.master_addr, r.master_port) for r in found} == {master}
    assert [r.is_master for r in found] == [r.rank == 0 for r in found]


def test_recordings_do_not_name_the_machine():
    for file in ENVIRONMENTS.glob("*.json"):
        assert "/" not in "".join(v for env in recorded(file.stem) for v in env.values()), file


def test_compact_node_list_expands_in_order_and_keeps_zeros():
    expected = {
        "node1": "node1",
        "node[1-3,7]": "node1 node2 node3 node7",
        "a,b[08-10]": "a b08 b09 b10",
        "n[098-101]": "n098 n099 n100 n101",
        "n[8-11]-ib": "n8-ib n9-ib n10-ib n11-ib",
        "r1i[0-1]n[01-02]": "r1i0n01 r1i0n02 r1i1n01 r1i1n02",
        "gpu-a.cluster,x[1]": "gpu-a.cluster x1",
    }
    assert {short: " ".join(expand_nodelist(short)) for short in expected} == expected


@pytest.mark.parametrize("nodelist", ["", "a,", ",a", "a,,b", "n[1", "n1]", "n[]", "n[1-]", "n[x]"])
def test_malformed_node_list_is_refused_with_what_was_expected(nodelist):
    with pytest.raises(ValueError, match=r"is malformed; expected names such as node\[1-3,7\]"):
        expand_nodelist(nodelist)


def test_node_range_that_runs_backwards_is_refused():
    with pytest.raises(ValueError, match=r"'a,n\[3-1\]' is running backwards from 3 to 1"):
        expand_nodelist("a,n[3-1]")


MALFORMED = {
    "srun_2x2": "SLURM_PROCID=one SLURM_LOCALID=-1 SLURM_STEP_NUM_TASKS=0 MASTER_PORT=http "
    "SLURM_CPUS_PER_TASK=2(x2) SLURM_JOB_ID=5_1",
    "notebook": "SLURM_STEP_NUM_TASKS=?",
    "torchrun": "RANK= RANK=1.0 LOCAL_RANK=² WORLD_SIZE=0 LOCAL_WORLD_SIZE=0 MASTER_PORT=auto",
}


@pytest.mark.parametrize(
    ("name", "setting"),
    [(name, word) for name, words in MALFORMED.items() for word in words.split()],
)
def test_malformed_number_is_refused_by_its_name(name, setting):
    variable, _, value = setting.partition("=")
    with pytest.raises(ValueError, match=rf"^{variable} is "):
        from_environment(recorded(name)[0] | {variable: value})


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        ("srun_2x2", ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")),
        ("torchrun", ("LOCAL_RANK", "MASTER_ADDR")),
    ],
)
def test_missing_variable_is_named_with_its_launcher(name, variables):
    for variable in variables:
        env = {k: v for k, v in recorded(name)[0].items() if k != variable}
        launcher = name.partition("_")[0]
        with pytest.raises(ValueError, match=f"{variable} is not set.*start with {launcher}"):
            from_environment(env)


@pytest.mark.parametrize("tasks", ["2(x2", "two", "2", "2,"])
def test_tasks_per_node_without_this_node_are_refused(tasks):
    env = recorded("srun_2x2")[3] | {"SLURM_STEP_TASKS_PER_NODE": tasks}
    with pytest.raises(ValueError, match=r"SLURM_STEP_TASKS_PER_NODE is .*SLURM_NODEID=1"):
        from_environment(env)


def test_tasks_per_node_are_those_of_this_node():
    env = recorded("srun_2x2")[0] | {"SLURM_STEP_TASKS_PER_NODE": "2(x2),1,12(x3)"}
    sizes = [from_environment(env | {"SLURM_NODEID": str(k)}).local_size for k in range(6)]
    assert sizes == [2, 2, 1, 12, 12, 12]


@pytest.mark.parametrize(
    ("variables", "gpu_ids"),
    [
        ({}, ()),
        ({"CUDA_VISIBLE_DEVICES": "2, 3"}, (2, 3)),
        ({"CUDA_VISIBLE_DEVICES": "GPU-5a1c,MIG-77"}, ("GPU-5a1c", "MIG-77")),
        ({"CUDA_VISIBLE_DEVICES": ""}, ()),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, ()),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, ()),
        ({"SLURM_STEP_GPUS": "4,5", "SLURM_GPUS_ON_NODE": "2"}, (4, 5)),
        ({"SLURM_STEP_GPUS": "4,5"}, ()),
        ({"CUDA_VISIBLE_DEVICES": "0", "SLURM_STEP_GPUS": "4", "SLURM_GPUS_ON_NODE": "1"}, (0,)),
    ],
)
def test_gpu_ids_are_those_that_cuda_shows_else_those_of_the_step(variables, gpu_ids):
    assert from_environment(variables).gpu_ids == gpu_ids


def test_cpus_per_task_is_at_least_one():
    assert [from_environment(env, 1).cpus_per_task for env in recorded("torchrun")] == [1, 1]


def test_hostnames_are_unknown_when_torchrun_was_started_by_hand_on_two_nodes():
    ranks = from_environment(recorded("torchrun")[1] | {"GROUP_WORLD_SIZE": "2", "WORLD_SIZE": "4"})
    assert (ranks.num_nodes, ranks.nodelist, ranks.hostnames) == (2, "", ())


def test_master_of_the_job_script_is_kept():
    env = recorded("srun_2x2")[3] | {"MASTER_ADDR": "node9", "MASTER_PORT": "12345"}
    assert from_environment(env).master_addr == "node9"
    assert from_environment(env).master_port == 12345


def test_master_left_by_the_notebook_that_submitted_the_job_is_not_believed():
    env = recorded("srun_2x2")[3] | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    assert from_environment(env) == from_environment(recorded("srun_2x2")[3])


def test_master_port_differs_between_jobs_and_steps_and_is_free_for_users():
    env = recorded("srun_2x2")[0]
    jobs = [env | {"SLURM_JOB_ID": str(j)} for j in (1, 2, 18_999, 19_000, 4_000_000_000)]
    steps = [env | {"SLURM_STEP_ID": str(s)} for s in range(1, 5)]
    ports = [from_environment(e).master_port for e in (env, *jobs, *steps)]
    assert len(set(ports)) == len(ports)
    assert all(10_000 <= port < 29_000 for port in ports)


def test_import_is_light_and_changes_nothing():
    code = (
        "import os, sys; before = dict(os.environ); from dlojz import idr_torch; dir(idr_torch);"
        "print({'torch', 'socket', 'subprocess'} & set(sys.modules), before == dict(os.environ))"
    )
    assert python(code, clean_environment()) == "set() True"


@pytest.mark.parametrize("name", ["alone", "srun_2x2", "torchrun", "notebook"])
def test_first_attribute_sets_master_for_init_process_group(name):
    code = (
        "import os; from dlojz import idr_torch; idr_torch.size;"
        "print(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])"
    )
    env = clean_environment() | recorded(name)[-1]
    assert python(code, env) == "{} {}".format(*EXPECTED[name][3])


def test_attributes_are_listed_and_others_are_refused():
    assert {"rank", "hostnames", "is_master", "device", "world_size"} <= set(dir(idr_torch))
    with pytest.raises(AttributeError, match=r"no attribute 'ranks'; it has rank, local_rank"):
        idr_torch.ranks  # noqa: B018  reading it is the test


def test_the_names_of_idris_are_those_of_ours(monkeypatch):
    ranks = from_environment(recorded("srun_3_1")[1], CPUS)
    monkeypatch.setattr(idr_torch, "_this_process", lambda: ranks)
    names = "world_size nnodes master local_world_size ntasks host cpus".split()
    assert [getattr(idr_torch, name) for name in names] == [4, 2, False, 3, 4, "node1", 2]


def test_programs_for_jean_zay_import_it_by_its_name():
    code = "import idr_torch as a; from dlojz import idr_torch as b; print(a is b, a.world_size)"
    assert python(code, clean_environment()) == "True 1"


def mpi(prefix, rank, size, *local):
    """What a launcher of MPI sets: mpi("MV2_COMM_WORLD_", 1, 4, 1, 2)."""
    names = {"PMI": "PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS"}.get(
        prefix, " ".join(f"{prefix}{x}" for x in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    )
    return dict(zip(names.split(), map(str, (rank, size, *local)), strict=False))


@pytest.mark.parametrize("prefix", ["OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "PMI", "PMI_"])
@pytest.mark.parametrize("local", [(), (1, 4)])
def test_processes_of_mpi_are_not_each_the_first_of_one(prefix, local):
    found = from_environment(mpi(prefix, 1, 4, *local), CPUS)
    assert (found.rank, found.local_rank, found.size, found.local_size) == (1, 1, 4, 4)
    assert (found.num_nodes, found.cpus_per_task, found.master_addr) == (1, 2, "127.0.0.1")
    assert found.master_port == from_environment(mpi(prefix, 3, 4), CPUS).master_port > 0


@pytest.mark.parametrize("prefix", ["OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "PMI"])
def test_mpirun_in_a_slurm_job_counts_and_not_the_step_of_its_daemons(prefix):
    """srun started one daemon on each node, whose variables the processes inherit."""
    found = []
    for rank in range(4):
        daemon = recorded("srun_torchrun")[rank]
        daemon = {k: v for k, v in daemon.items() if k.startswith("SLURM")}
        found.append(from_environment(daemon | mpi(prefix, rank, 4, rank % 2, 2), CPUS))
    assert [(r.rank, r.local_rank, r.size, r.num_nodes) for r in found] == [
        (rank, rank % 2, 4, 2) for rank in range(4)
    ]
    assert {r.hostnames for r in found} == {("node1", "node2")}
    assert len({(r.master_addr, r.master_port) for r in found}) == 1
    assert found[0].master_addr == "node1"


@pytest.mark.parametrize("prefix", ["PMI", "PMI_"])
def test_what_srun_says_to_mpi_changes_nothing(prefix):
    """With --mpi=pmi2, or Cray's plugin."""
    for rank, env in enumerate(recorded("srun_2x2")):
        more = mpi(prefix, rank, 4, *([rank % 2, 2] if prefix == "PMI_" else []))
        assert from_environment(env | more | {"PMIX_RANK": str(rank)}) == from_environment(env)


@pytest.mark.parametrize("name", ["notebook", "batch_script", "interactive", "alone"])
def test_one_process_of_mpi_is_alone_also_in_a_notebook_of_slurm(name):
    env = recorded(name)[0]
    one = mpi("PMI", 0, 1, 0, 1) | mpi("OMPI_COMM_WORLD_", 0, 1, 0, 1) | {"PMIX_RANK": "0"}
    assert from_environment(env | one, CPUS) == from_environment(env, CPUS)


@pytest.mark.parametrize("name", ["PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "PALS_RANKID"])
def test_a_rank_without_a_size_is_refused(name):
    with pytest.raises(ValueError, match=rf"^{name} is '2', but no variable says of how many"):
        from_environment({name: "2"})


def test_mpi_on_two_nodes_must_be_given_where_to_meet():
    env = mpi("OMPI_COMM_WORLD_", 3, 4, 1, 2)
    with pytest.raises(ValueError, match=r"^MASTER_ADDR is not set, and 4 .* 2 nodes .*mpirun -x"):
        from_environment(env)
    found = from_environment(env | {"MASTER_ADDR": "node1"})
    assert (found.master_addr, found.num_nodes, found.hostnames) == ("node1", 2, ())


def test_runs_of_mpi_beside_each_other_have_ports_of_their_own():
    env = recorded("mpirun")[0]
    ports = {from_environment(env | {"PMIX_NAMESPACE": str(n)}).master_port for n in range(9)}
    assert len(ports) == 9


@pytest.mark.parametrize(
    ("local_rank", "visible", "device"),
    [("1", 0, "cpu"), ("1", 4, "cuda:1"), ("3", 1, "cuda:0"), ("3", 2, "cuda:1")],
)
def test_device_is_one_of_the_visible_gpus(local_rank, visible, device, monkeypatch):
    import torch

    ranks = from_environment(recorded("srun_2x2")[0] | {"SLURM_LOCALID": local_rank})
    monkeypatch.setattr(idr_torch, "_this_process", lambda: ranks)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: visible > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    assert str(idr_torch.device()) == device


TRAINER = """
import torch
from dlojz import idr_torch
torch.distributed.init_process_group("gloo", rank=idr_torch.rank, world_size=idr_torch.size)
total = torch.tensor([idr_torch.rank + 1])
torch.distributed.all_reduce(total)
line = f"{idr_torch.rank} of {idr_torch.size}: {total.item()}"
with open(f"{__file__}.{idr_torch.rank}", "w") as file:
    file.write(line)
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("launcher", "lines"),
    [
        ([], ["0 of 1: 1"]),
        (
            ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
            ["0 of 2: 3", "1 of 2: 3"],
        ),
    ],
)
def test_trainer_needs_nothing_else_to_meet_its_peers(launcher, lines, tmp_path):
    trainer = tmp_path / "trainer.py"
    trainer.write_text(TRAINER)
    done = subprocess.run(
        [os.environ["DLOJZ_PYTHON"], *launcher, str(trainer)],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert [f.read_text() for f in sorted(tmp_path.glob("trainer.py.*"))] == lines
