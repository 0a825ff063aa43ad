"""The exercise 00_cluster: the trainee's own batch script, submitted unchanged.

    job = sbatch(course.own("00_cluster"))     # on this cluster, or on a throw-away Slurm here

Its tasks run `seen` of this folder, which the script gets as its arguments, as `slurm/job.sbatch`
gets the trainer.
"""

import sys
from pathlib import Path

from dlojz.chapters.n00c_cluster import throwaway
from dlojz.launch import request, slurm
from dlojz.launch.job import Job

EXERCISE = "00_cluster"
HEARD = "heard"  # the file that the script makes upon a signal


def sbatch(script: str, account: str | None = None) -> Job:
    """Submit a batch script, and return its job; its tasks write their resources to its folder.

    Without a Slurm, a throw-away one is started on this machine, if possible.
    """
    file = request.find_trainer(script)
    if not file:
        raise request.SubmitError(
            f"no batch script {script!r}: course.own({EXERCISE!r}) makes your copy of it"
        )
    if not throwaway.where():
        raise request.SubmitError(
            f"no Slurm here: run this on a cluster, or rehearse on a throw-away one. That needs "
            f"root, and packages: {throwaway.missing()}"
        )
    (job,) = request.made(_submit, file, account)
    return job


def command(run: Path) -> list[str]:
    """Return the tasks' command: write their resources, and wait for the script's answer."""
    return [
        sys.executable,
        "-P",
        "-m",
        "dlojz.chapters.n00c_cluster.seen",
        str(run),
        "--hears",
        HEARD,
    ]


def _submit(runs, file, account):
    (run,) = runs
    if throwaway.where() == "throw-away":
        throwaway.start()
        options = []
    else:
        options = slurm.charged(slurm.site(), account)
    # Checks and hints know the file of a job by this name.
    (run / "trainer.py").write_bytes(file.read_bytes())
    asked = request.Request((file.name,), n_gpu=4, name=file.stem, account=account)
    with slurm.numbered(run, lambda: asked.to_dict() | {"throw_away": throwaway.runs()}) as number:
        number(slurm.send(run, run / "trainer.py", options, command(run)))
