"""Submits to Slurm, asks how a job is, cancels it: the cluster's half of `dlojz.launch`.

The script is `slurm/job.sbatch` with the lines of a site. What a user gives (names, paths, flags)
never stands in it: it travels as arguments and environment, where no shell reads it.

Asked are `scontrol -o` and, where a job is long over, `sacct`: their text is the same from Slurm
22.05 to the present, which `--json` is not.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from datetime import datetime
from functools import cache
from pathlib import Path

from dlojz import course, sites
from dlojz.course import course_root
from dlojz.jobs import supervisor
from dlojz.runs import outcome

BEGIN, END = "# >>> site\n", "# <<< site\n"
TIMEOUT_S = 20  # for an answer of Slurm: a busy controller takes its time
SCRIPT = "job.sbatch"

# Slurm's states as ours, and what is said with them. Others keep their name.
STATES = {
    "PENDING": ("QUEUED", None),
    "CONFIGURING": ("QUEUED", "its nodes are being prepared"),
    "REQUEUED": ("QUEUED", "back in the queue"),
    "REQUEUE_HOLD": ("QUEUED", "held: `scontrol release` lets it go on"),
    "SPECIAL_EXIT": ("QUEUED", "held: `scontrol release` lets it go on"),
    "RESIZING": ("RUNNING", None),
    "SIGNALING": ("RUNNING", None),
    "STAGE_OUT": ("RUNNING", None),
    "SUSPENDED": ("RUNNING", "suspended for another job; it goes on by itself"),
    "STOPPED": ("RUNNING", "stopped by a signal"),
    "COMPLETING": ("RUNNING", "its processes are ending"),
    "COMPLETED": ("COMPLETED", None),
    "FAILED": ("FAILED", None),
    "BOOT_FAIL": ("FAILED", "a node did not start: submit it again"),
    "DEADLINE": ("FAILED", "its deadline passed before it could end"),
    "REVOKED": ("FAILED", "taken over by another cluster"),
    "CANCELLED": ("CANCELLED", "cancelled"),
    "TIMEOUT": (
        "TIMEOUT",
        "ended at its time limit, without a checkpoint to go on from: give it more time_max",
    ),
    "OUT_OF_MEMORY": ("OUT_OF_MEMORY", "killed: more memory than its nodes gave it"),
    "NODE_FAIL": (
        "NODE_FAIL",
        "one of its nodes failed, which is not the job's fault: submit it again",
    ),
    "PREEMPTED": (
        "PREEMPTED",
        "a job with a higher priority took its nodes: submit it again, or pay for a higher QoS",
    ),
}
# Slurm's words for why a job waits, in plain ones; others are shown as they are.
WAITS = {
    "None": "",
    "Resources": "waits for free nodes",
    "Priority": "waits: others come first",
    "BeginTime": "back in the queue; starts again in a moment",
    "QOSMaxJobsPerUserLimit": "waits: you have as many jobs as the QoS allows",
    "AssocGrpGRES": "waits: your project uses all the GPUs that it may",
    "ReqNodeNotAvail": "waits: the nodes are down or reserved",
    "PartitionNodeLimit": "will not start: it asks for more nodes than the partition gives",
    "PartitionConfig": "will not start: it asks for more nodes than the partition gives",
    "PartitionDown": "waits: the partition is down",
    "DependencyNeverSatisfied": "will never start: what it depends on failed; cancel it",
}


class SlurmError(Exception):
    """What Slurm said, and what to do."""


def is_here() -> bool:
    """Does a Slurm controller answer on this machine?"""
    if not shutil.which("sbatch"):
        return False
    try:
        return "UP" in _call("scontrol", "ping", timeout=5)
    except SlurmError:
        return False


def _call(*command, timeout=TIMEOUT_S, env=None) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=env,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        raise SlurmError(f"no command {command[0]} here: is this a login node?") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]} did not answer in {timeout} s") from None
    if done.returncode:
        raise SlurmError(done.stderr.strip() or f"{command[0]}: exit code {done.returncode}")
    return done.stdout


@cache
def _cluster() -> str:
    try:
        found = re.search(r"^ClusterName\s*=\s*(\S+)", _call("scontrol", "show", "config"), re.M)
    except SlurmError:
        return ""
    return found[1] if found else ""


# Submitting ------------------------------------------------------------------------------------


def site(name: str | None = None) -> sites.Site:
    """The site of this cluster. Raises SiteError."""
    return sites.read(sites.find(name, _cluster()))


def shape(n_gpu: int, gpus: sites.Gpus) -> tuple[int, int]:
    """(nodes, GPUs on each) for this many GPUs. Raises SlurmError where it does not divide."""
    if n_gpu <= gpus.gpus_per_node:
        return 1, n_gpu
    nodes, rest = divmod(n_gpu, gpus.gpus_per_node)
    if rest:
        near = f"{nodes * gpus.gpus_per_node} or {(nodes + 1) * gpus.gpus_per_node}"
        raise SlurmError(
            f"n_gpu={n_gpu}: the nodes have {gpus.gpus_per_node} GPUs each, and a training takes "
            f"whole nodes: ask for {near}"
        )
    return nodes, gpus.gpus_per_node


def kind_of(site: sites.Site, account: str | None) -> tuple[sites.Gpus, str]:
    """The nodes to ask for and the account to charge: "xyz@a100" asks for the kind a100."""
    name, _, kind = (account or site.account).partition("@")
    kind = kind or site.default
    if kind not in site.gpus:
        raise SlurmError(
            f"account {account!r}: the site {site.name} has no nodes {kind!r}: expected "
            f"one of {', '.join(f'{name}@{k}' for k in site.gpus)}"
        )
    gpus = site.gpus[kind]
    if "{account}" in gpus.account and not name:
        raise SlurmError(
            f"no account: {site.name} charges the hours of a project: give one, as in "
            f'submit(..., account="xyz@{kind}"), or write account = "xyz" into its site file'
        )
    if not re.fullmatch(r"[\w.-]*", name):
        raise SlurmError(f"account {account!r}: expected a project's name, such as xyz@{kind}")
    return gpus, gpus.account.replace("{account}", name) or name


def render(
    template: str,
    site: sites.Site,
    n_gpu: int,
    time_max_s: int,
    name: str = "dlojz",
    account: str | None = None,
    module: str | None = None,
) -> str:
    """The whole script: `template` is slurm/job.sbatch. Computes only."""
    gpus, account = kind_of(site, account)
    nodes, per_node = shape(n_gpu, gpus)
    qos = next((q for limit, q in gpus.qos if time_max_s <= sites.seconds(limit)), "")
    if gpus.qos and not qos:
        raise SlurmError(f"time_max: the longest that {site.name} allows is {gpus.qos[-1][0]}")
    options = {
        "job-name": re.sub(r"[^\w.-]", "_", name)[:64] or "dlojz",  # the true one is in job.json
        "account": account,
        "partition": gpus.partition,
        "constraint": gpus.constraint,
        "qos": qos,
        "nodes": nodes,
        "ntasks-per-node": per_node,
        "gres": site.gres.replace("{n}", str(per_node)),
        "cpus-per-task": gpus.cpus_per_gpu,
        "hint": site.hint,
        "time": _slurm_time(time_max_s),
        "signal": f"B:USR1@{site.signal_s}",
    }
    lines = [f"#SBATCH --{option}={value}" for option, value in options.items() if value != ""]
    lines += [f"#SBATCH {option}" for option in site.options]
    modules = [*gpus.modules_first, *([module] if module else site.modules)]
    if modules:
        lines += ["", "module purge", *(f"module load {shlex.quote(m)}" for m in modules)]
    if site.activate:
        lines += ["", f'source "{site.activate}"']
    if site.environment:
        lines += ["", *(f'export {k}="{v}"' for k, v in site.environment.items())]
    head, found_begin, rest = template.partition(BEGIN)
    _, found_end, tail = rest.partition(END)
    if not (found_begin and found_end):
        raise SlurmError(f"slurm/{SCRIPT}: no lines {BEGIN.strip()!r} and {END.strip()!r} in it")
    return head + BEGIN + "".join(f"{line}\n" for line in lines) + END + tail


def _slurm_time(seconds):
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


def script(n_gpu, time_max_s, name, account, module) -> tuple[str, sites.Site]:
    """The script for a job here, and the site that it is for. Raises SlurmError, SiteError."""
    template = (course_root() / "slurm" / SCRIPT).read_text()
    here = site()
    return render(template, here, n_gpu, time_max_s, name, account, module), here


def sbatch(run: Path, script: str, here: sites.Site, words: list[str]) -> str:
    """Submit `script` for the job in the folder `run`; returns Slurm's number. Raises SlurmError.

    words: the trainer and its flags.
    """
    file = run / SCRIPT
    file.write_text(script)
    # What belongs to the job that we are in, such as a notebook's, must not reach the new one.
    mine = (supervisor.LAUNCHER_VARIABLES.match, lambda name: name.startswith("SBATCH_"))
    env = {k: v for k, v in os.environ.items() if k == "SLURM_CONF" or not any(m(k) for m in mine)}
    env |= {"DLOJZ_RUN": str(run), "DLOJZ_ROOT": str(course_root())}
    if not here.modules and not here.activate:  # else the site's own Python
        env["DLOJZ_PYTHON"] = sys.executable
    output = str(run / "slurm.txt").replace("%", "%%")  # %j would be the job's number
    options = ["--parsable", "--export=ALL", f"--chdir={run}", f"--output={output}"]
    command = ["sbatch", *options, str(file), *words]
    answer = _call(*command, env=env)
    return answer.strip().splitlines()[-1].split(";")[0]


# Asking ----------------------------------------------------------------------------------------


def status(run: Path, number: str) -> dict:
    """The state of the job in the folder `run`, as `launch.Job.status` has it.

    What is final is kept in the folder: Slurm forgets a job minutes after its end.
    """
    known = json.loads((run / "state.json").read_text())
    if known.get("final"):
        return known
    try:
        fields = show(number)
    except SlurmError as error:
        return known | {"reason": f"Slurm does not answer: {error}"}
    found = _status(run, fields) if fields else _forgotten(run, number)
    if found != known:
        course.write_atomically(run / "state.json", json.dumps(found))
    return found


def show(number: str) -> dict[str, str]:
    """What `scontrol -o show job` tells; {} if Slurm does not know the job (any more)."""
    try:
        text = _call("scontrol", "-o", "show", "job", number)
    except SlurmError as error:
        if "Invalid job id" in str(error):
            return {}
        raise
    fields = {}
    for key, value in re.findall(r"(\S+?)=(\S*)", text):
        fields.setdefault(key, value)  # the first: a path further on may look like another field
    return fields


def _status(run, fields):
    slurm = fields["JobState"].split(",")[0]
    state, reason = STATES.get(slurm, ("RUNNING", f"Slurm says {slurm}"))
    found = {"state": state, "slurm": slurm}
    if (started := _when(fields.get("StartTime"))) and state != "QUEUED":
        found["started"] = started
    restarts = int(fields.get("Restarts", 0))
    if state == "QUEUED":
        why = fields.get("Reason", "")
        reason = reason or WAITS.get(why.split(",")[0], why)
    if restarts and state in ("QUEUED", "RUNNING"):
        reason = f"{reason + '; ' if reason else ''}begun {restarts + 1} times"
    if state not in ("QUEUED", "RUNNING"):
        code = int(fields.get("ExitCode", "0:0").split(":")[0])
        if state == "FAILED" and slurm == "FAILED":
            state, reason = outcome.from_exit(run, code or 1, memory_was_full=False)
        elif state == "NODE_FAIL":
            reason += f" (nodes {fields.get('NodeList', '?')})"
        found |= {"state": state, "exit_code": code, "ended": _when(fields.get("EndTime"))}
        found["final"] = True
    return found | {"reason": reason or None}


def _forgotten(run, number):
    """Slurm's controller knows the job no more: its records, or what it left behind."""
    try:
        rows = _call("sacct", "-nPX", "-j", number, "-o", "State,ExitCode,Start,End,NodeList")
    except SlurmError:  # no accounting here
        rows = ""
    if rows.strip():
        values = rows.strip().splitlines()[-1].split("|")
        names = ("JobState", "ExitCode", "StartTime", "EndTime", "NodeList")
        fields = dict(zip(names, values, strict=False))
        fields["JobState"] = fields["JobState"].split()[0]  # "CANCELLED by 1000"
        return _status(run, fields)
    file = run / "exit_code"
    if file.exists():
        code = int(file.read_text())
        state, reason = outcome.from_exit(run, code, memory_was_full=False)
        ended = file.stat().st_mtime
        return {"state": state, "reason": reason, "exit_code": code, "ended": ended, "final": True}
    reason = "lost: Slurm knows it no more, and it left no exit code: was it cancelled?"
    return {"state": "FAILED", "reason": reason, "final": True}


def _when(text):
    try:
        return datetime.fromisoformat(text or "").timestamp()
    except ValueError:  # Unknown, N/A
        return None


def cancel(number: str):
    """End the job, or take it from the queue. Raises SlurmError."""
    _call("scancel", number)
