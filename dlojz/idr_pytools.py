"""The three functions that the slides of DLO-JZ use, on top of `dlojz.launch`."""

import re
from pathlib import Path

from dlojz import launch

FLAG = re.compile(r"(?<!\S)--[^\s=]+")  # values and file names keep their underscores


def gpu_jobs_submitter(
    command, n_gpu=1, module=None, *, name="dlojz", account=None, time_max="02:00:00"
) -> list[str]:
    """Submit one command or a list of them, and return the jobs' ids.

    command: with a bare file name and underscores in flags, as in the slides.
    module, account: to load and to charge on a cluster; a single machine ignores them.
    """
    commands = [command] if isinstance(command, str) else list(command)
    jobs = launch.submit(
        [FLAG.sub(lambda flag: flag[0].replace("_", "-"), c) for c in commands],
        n_gpu,
        name=name,
        time_max=time_max,
        module=module,
        account=account,
    )
    return [job.id for job in jobs]


def display_slurm_queue(name=None):
    """Show the jobs with this name, live where there are widgets, without waiting for them."""
    from dlojz import widgets

    widgets.queue(name)


def search_log(name=None, contains=None, with_err=False) -> list[Path]:
    """Return the stdout (or, `with_err`, stderr) files of jobs by name or id, newest first.

    contains: an id, or the list that `gpu_jobs_submitter` returned.
    """
    wanted = None if contains is None else [contains] if isinstance(contains, str) else contains
    file = "stderr.txt" if with_err else "stdout.txt"
    found = [
        job.directory / file
        for job in reversed(launch.jobs())
        if name in (None, job.name) and (wanted is None or job.id in wanted)
    ]
    return [path for path in found if path.exists()]
