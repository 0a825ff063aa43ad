"""Questions to Slurm: in which state this user's jobs are, and why.

While jobs run, one `squeue` for all the user's jobs serves all processes; for a job that has ended,
`scontrol -o` is asked once and, if it ended long ago, `sacct`. Their text has not changed from
Slurm 22.05 to the present, unlike that of `--json`.
"""

import json
import os
import re
import time
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path

from dlojz import course
from dlojz.course import FileError, course_root, read_small, read_table
from dlojz.jobs import keeper, processes, stacks
from dlojz.runs import outcome

TIMEOUT_S = 20  # for Slurm to answer: a busy controller is slow
FRESH_S = 2.0  # how long one answer of squeue is reused

# The columns asked of squeue, by scontrol's name: squeue's own name, and a width.
COLUMNS = {
    "JobId": ("JobID", 16),
    "JobState": ("State", 24),
    "StartTime": ("StartTime", 24),
    "Restarts": ("RestartCnt", 12),
    "Reason": ("Reason", 64),
}

# Slurm's states as ours, and the reason to show. Unknown ones count as RUNNING.
STATES = {
    "PENDING": ("QUEUED", None),
    "CONFIGURING": ("QUEUED", "its nodes are being prepared"),
    "REQUEUED": ("QUEUED", "back in the queue"),
    "REQUEUE_HOLD": ("QUEUED", "held: `scontrol release` lets it go on"),
    "SPECIAL_EXIT": ("QUEUED", "held: `scontrol release` lets it go on"),
    "RUNNING": ("RUNNING", None),
    "RESIZING": ("RUNNING", None),
    "SIGNALING": ("RUNNING", None),
    "STAGE_OUT": ("RUNNING", None),
    "SUSPENDED": ("RUNNING", "suspended for another job; it continues automatically"),
    "STOPPED": ("RUNNING", "stopped by a signal"),
    "COMPLETING": ("RUNNING", "its processes are ending"),
    "COMPLETED": ("COMPLETED", None),
    "FAILED": ("FAILED", None),
    "BOOT_FAIL": ("FAILED", "a node did not start: submit it again"),
    "DEADLINE": ("FAILED", "its deadline passed before it could end"),
    "REVOKED": ("FAILED", "taken over by another cluster"),
    "CANCELLED": ("CANCELLED", "cancelled"),
    "TIMEOUT": ("TIMEOUT", "ended at its time limit, without a checkpoint: give it more time_max"),
    "OUT_OF_MEMORY": ("OUT_OF_MEMORY", "killed: more memory than its nodes gave it"),
    "NODE_FAIL": ("NODE_FAIL", "one of its nodes failed, not the job's fault: submit it again"),
    "PREEMPTED": (
        "PREEMPTED",
        "a job with a higher priority took its nodes: submit it again, or pay for a higher QoS",
    ),
}
# Slurm's reasons for a wait, in plain words; others are shown as they are.
WAITS = {
    "None": "",
    "Resources": "waits for free nodes",
    "Priority": "waits: other jobs come first",
    "BeginTime": "back in the queue; starts again in a moment",
    "QOSMaxJobsPerUserLimit": "waits: you have as many jobs as the QoS allows",
    "AssocGrpGRES": "waits: your project uses all the GPUs that it may",
    "ReqNodeNotAvail": "waits: the nodes are down or reserved",
    "PartitionNodeLimit": "will not start: it asks for more nodes than the partition gives",
    "PartitionConfig": "will not start: it asks for more nodes than the partition gives",
    "PartitionDown": "waits: the partition is down",
    "PartitionTimeLimit": "will not start: it asks for more time than the partition gives",
    "AssocGrpGRESMinutes": "waits: your project's hours are used up, or too few are left",
    "JobHeldUser": "held: `scontrol release` lets it go on",
    "Dependency": "waits for the end of another job",
    "DependencyNeverSatisfied": "will never start: what it depends on failed; cancel it",
}


class SlurmError(Exception):
    """An error of Slurm, and what to do about it."""


class UnclearError(SlurmError):
    """An sbatch that gave no number: Slurm may have the job, or not."""


def call(*command, timeout=TIMEOUT_S, env=None) -> str:
    """Return the output of a program of Slurm. Raises SlurmError."""
    try:
        return processes.ask(*command, timeout_s=timeout, env=env)
    except processes.ProgramError as error:
        kind = UnclearError if error.cut_short or "timed out" in str(error) else SlurmError
        raise kind(f"{error}: is this a login node?" if error.missing else str(error)) from None


def listing() -> tuple[dict[str, dict], float]:
    """Return all jobs of this user by Slurm's number, and when Slurm was asked.

    It is asked at most every two seconds, by all processes together: the answer, or the failure, is
    cached in a file beside the runs. Raises SlurmError.
    """
    file = course_root() / "runs" / ".squeue.json"
    with ExitStack() as one_at_a_time:
        with suppress(OSError):  # a full disk, or one without locks: Slurm is asked more often
            one_at_a_time.enter_context(course.locked(file.with_suffix(".lock"), _left_s()))
        kept = _kept(file)
        if not 0 <= time.time() - kept["answered"] < FRESH_S:
            kept = {"jobs": {}, "asked": time.time(), "error": None}
            try:
                kept["jobs"] = _squeue()
            except SlurmError as error:
                kept["error"] = str(error)
            kept["answered"] = time.time()  # it may have taken long
            with suppress(OSError):
                course.write_atomically(file, json.dumps(kept))
    if kept["error"]:
        raise SlurmError(kept["error"])
    return kept["jobs"], kept["asked"]


def _kept(file):
    with suppress(FileError):
        kept = read_table(file)
        times = (kept.get("asked"), kept.get("answered"))
        if all(isinstance(t, float) for t in times) and isinstance(kept.get("jobs"), dict):
            return {"error": None} | kept
    return {"jobs": {}, "asked": 0.0, "answered": 0.0, "error": None}


_deadline = None  # by when those who ask must have an answer


@contextmanager
def within(seconds: float):
    """Ask Slurm for the states of jobs with this many seconds in all, as for a table."""
    global _deadline
    before, _deadline = _deadline, time.monotonic() + seconds
    try:
        yield
    finally:
        _deadline = before


def _left_s() -> float:
    """Return the seconds that Slurm may take to answer."""
    return TIMEOUT_S if _deadline is None else max(0.5, round(_deadline - time.monotonic(), 1))


def _squeue():
    form = ",".join(f"{name}:{width}" for name, width in COLUMNS.values())
    words = ("--noheader", f"--user={os.getuid()}", "--states=all", f"--Format={form}")
    found = {}
    for line in call("squeue", *words, timeout=_left_s()).splitlines():
        fields, begin = {}, 0
        for key, (_, width) in COLUMNS.items():
            fields[key], begin = line[begin : begin + width].strip(), begin + width
        found[fields.pop("JobId")] = fields
    return found


def is_final(fields: dict[str, str]) -> bool:
    """Return whether a job has ended."""
    state, _ = STATES.get(fields["JobState"], ("RUNNING", ""))
    return state not in ("QUEUED", "RUNNING")


def show(number: str) -> dict[str, str]:
    """Return the fields of `scontrol -o show job`; {} if Slurm does not know the job (any more)."""
    try:
        text = call("scontrol", "-o", "show", "job", number, timeout=_left_s())
    except SlurmError as error:
        if "Invalid job id" in str(error):
            return {}
        raise
    fields = {}
    for key, value in re.findall(r"(\S+?)=(\S*)", text):
        fields.setdefault(key, value)  # the first: a later path may look like a field
    return fields


def status(run: Path, fields: dict[str, str]) -> dict:
    """Return the status of the job in a folder from Slurm's fields."""
    slurm = fields["JobState"].split(",")[0]
    state, reason = STATES.get(slurm, ("RUNNING", f"Slurm says {slurm}"))
    found = {"state": state, "slurm": slurm}
    if (started := _when(fields.get("StartTime"))) and state != "QUEUED":
        found["started"] = started
    restarts = int(fields.get("Restarts") or 0)
    if state == "QUEUED":
        why = fields.get("Reason", "")
        reason = reason or WAITS.get(why.split(",")[0], why)
    if restarts and state in ("QUEUED", "RUNNING"):
        reason = f"{reason + '; ' if reason else ''}begun {restarts + 1} times"
    if state not in ("QUEUED", "RUNNING"):
        code = int(fields.get("ExitCode", "0:0").split(":")[0])
        if slurm in ("COMPLETED", "FAILED"):
            own = 0 if slurm == "COMPLETED" else code or 1
            state, reason = outcome.from_exit(run, own, memory_was_full=False)
        elif state == "TIMEOUT" and (stood := outcome.tail(run / stacks.STOOD).split("\n")[:-1]):
            reason += f" (shortly before, {'; '.join(stood)})"
        elif state == "NODE_FAIL":
            reason += f" (nodes {fields.get('NodeList', '?')})"
        elif state == "CANCELLED" and (wish := keeper.wish(run)):
            reason, found["cause"] = wish.get("reason") or reason, wish.get("cause")
        found |= {"state": state, "exit_code": code, "ended": _when(fields.get("EndTime"))}
        found["final"] = True
    return found | {"reason": reason or None}


def forgotten(run: Path, number: str) -> dict:
    """Return the status of a job that the controller has forgotten, from sacct or its files."""
    try:
        asked = ("-nPX", "-j", number, "-o", "State,ExitCode,Start,End,NodeList")
        rows = call("sacct", *asked, timeout=_left_s())
    except SlurmError:  # no accounting here
        rows = ""
    if rows.strip():
        values = rows.strip().splitlines()[-1].split("|")
        names = ("JobState", "ExitCode", "StartTime", "EndTime", "NodeList")
        fields = dict(zip(names, values, strict=False))
        fields["JobState"] = fields["JobState"].split()[0]  # "CANCELLED by 1000"
        return status(run, fields)
    file = run / "exit_code"
    if file.exists():
        code = int(read_small(file))
        state, reason = outcome.from_exit(run, code, memory_was_full=False)
        ended = file.stat().st_mtime
        return {"state": state, "reason": reason, "exit_code": code, "ended": ended, "final": True}
    reason = "lost: Slurm no longer knows it, and it left no exit code: was it cancelled?"
    return {"state": "FAILED", "reason": reason, "final": True}


def _when(text):
    try:
        return datetime.fromisoformat(text or "").timestamp()
    except ValueError:  # Unknown, N/A
        return None
