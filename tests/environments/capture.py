"""Records the environments of this folder from a real Slurm and a real torchrun:

    python tests/environments/capture.py FOLDER [NAME ...]

FOLDER is an empty one that all nodes see. The cluster is one of two idle nodes, node1 and node2,
with 4 CPUs and 2 GPUs each (fake ones will do), LaunchParameters=use_interactive_step and
SLURM_CONF in the environment. `python` and `torchrun` must be on PATH. What tells of the machine
and not of the launcher is left out. New recordings have other job ids, so other master ports:
correct the table in test_idr_torch.py.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

KEPT = re.compile(
    r"SLURM_|(SLURMD_NODENAME|CUDA_VISIBLE_DEVICES)$|MASTER_|TORCHELASTIC_"
    r"|((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|LOCAL_WORLD_SIZE)$"
)
OF_THE_MACHINE = re.compile(
    r"SLURM_(CONF|CLUSTER_NAME|FIXTURE_.*|JOB_(UID|GID|USER)|SUBMIT_.*|SRUN_COMM_.*|TASK_PID|PTY_.*"
    r"|UMASK|LAUNCH_NODE_IPADDR|STEP_LAUNCHER_PORT|WORKING_CLUSTER)$|TORCHELASTIC_ERROR_FILE$"
)
MEET = "--rdzv-backend=c10d --rdzv-endpoint=node1:29611 --rdzv-id=1"
# As batchspawner starts a notebook server: the job exports a list (SLURM_EXPORT_ENV then goes on
# to all that is started there), and the server is the one task of one step.
NOTEBOOK = "sbatch --wait -n1 -c2 -w node2 --gres=gpu:1 --export=PATH,SLURM_CONF --wrap"

# name: how many processes, and the command that starts them; env.py stands for the trainer
CASES = {
    "alone": (1, "python env.py"),
    "torchrun": (2, "torchrun --nproc-per-node=2 env.py"),
    "srun_2x2": (4, "srun -N2 --ntasks-per-node=2 -c2 python env.py"),
    "srun_3_1": (4, "srun -N2 -n4 python env.py"),
    "srun_gpus_per_task": (
        4,
        "srun -N2 --ntasks-per-node=2 --gpus-per-node=2 --gpus-per-task=1 python env.py",
    ),
    "srun_torchrun": (
        4,
        f"srun -N2 --ntasks-per-node=1 -c4 torchrun --nnodes=2 --nproc-per-node=2 {MEET} env.py",
    ),
    "batch_script": (1, "sbatch --wait --ntasks=4 --wrap 'python env.py'"),
    "batch_srun": (4, "sbatch --wait -N2 --ntasks-per-node=2 --wrap 'srun python env.py'"),
    "interactive": (1, "script -qc 'salloc -N2 -n4' /dev/null <<< 'python env.py; exit'"),
    "notebook": (1, f"{NOTEBOOK} 'srun python env.py'"),
    "notebook_torchrun": (2, f"{NOTEBOOK} 'srun torchrun --nproc-per-node=2 env.py'"),
    "notebook_batch": (1, f"{NOTEBOOK} 'srun sbatch --wait -N2 -n4 --wrap \"python env.py\"'"),
    "notebook_batch_srun": (
        4,
        f"{NOTEBOOK} 'srun sbatch --wait -N2 --ntasks-per-node=2"
        ' --wrap "srun --export=ALL python env.py"\'',
    ),
}

ENV_PY = """
import json, os
part = f"{os.uname().nodename}-{os.getpid()}"
with open(part, "w") as file:
    json.dump(dict(os.environ), file)
os.rename(part, part + ".json")  # whole, or not there
"""


def record(folder: Path, count: int, command: str) -> list[dict[str, str]]:
    """What the `count` processes of the command had in their environments, by rank."""
    folder.mkdir()
    (folder / "env.py").write_text(ENV_PY)
    subprocess.run(["bash", "-c", command], cwd=folder, check=True, timeout=120)
    end = time.monotonic() + 10  # the files may take a while to show up here
    while len(files := list(folder.glob("*.json"))) < count and time.monotonic() < end:
        time.sleep(0.1)
    if len(files) != count:
        raise SystemExit(f"{command!r} left {len(files)} environments, expected {count}: {folder}")
    found = [json.loads(file.read_text()) for file in files]
    found.sort(key=lambda env: int(env.get("RANK") or env.get("SLURM_PROCID") or 0))
    return [{k: env[k] for k in sorted(env) if kept(k)} for env in found]


def kept(name: str) -> bool:
    return bool(KEPT.match(name)) and not OF_THE_MACHINE.match(name)


def main(folder: str, *names: str) -> None:
    version = subprocess.run(["sinfo", "--version"], capture_output=True, text=True, check=True)
    for name in names or CASES:
        count, command = CASES[name]
        text = {
            "made by": command,
            "slurm": version.stdout.split()[-1],
            "processes": record(Path(folder) / name, count, command),
        }
        file = Path(__file__).with_name(f"{name}.json")
        file.write_text(json.dumps(text, indent=1) + os.linesep)
        print(file)


if __name__ == "__main__":
    main(*sys.argv[1:])
