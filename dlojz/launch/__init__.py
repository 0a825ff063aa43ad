"""The jobs of the trainer: submitted, watched and cancelled, on this machine or on Slurm.

    from dlojz.launch import submit, queue, latest
    job = submit("dlojz/dlojz.py --test -b 128")          # one job
    jobs = submit([f"dlojz/dlojz.py --test -b {b}" for b in (8, 16, 32)], name="sweep")
    job.wait(); job.state; job.directory; job.cancel()

The trainer is copied into the job's folder, and the copy is run: later edits do not matter. Jobs
outlive the process that submitted them; on one machine they run one after the other.
"""

from dlojz.launch.asking import SlurmError
from dlojz.launch.beside import sources
from dlojz.launch.follow import Now, follow, in_a_notebook
from dlojz.launch.job import QUEUE, Job, State, find, in_queue, jobs, latest, queue, queue_row
from dlojz.launch.request import (
    Request,
    SubmitError,
    find_trainer,
    launcher,
    request_of,
    send,
    submit,
    trainer_and_flags,
)
from dlojz.training.flags import Flag, flags_of, is_ours

__all__ = [
    "QUEUE",
    "Flag",
    "Job",
    "Now",
    "Request",
    "SlurmError",
    "State",
    "SubmitError",
    "find",
    "find_trainer",
    "flags_of",
    "follow",
    "in_a_notebook",
    "in_queue",
    "is_ours",
    "jobs",
    "latest",
    "launcher",
    "queue",
    "queue_row",
    "request_of",
    "send",
    "sources",
    "submit",
    "trainer_and_flags",
]
