"""The cluster's half of `dlojz.launch`: jobs are submitted to Slurm, observed and cancelled.

The script is `slurm/job.sbatch` with the lines of a site. User input (names, paths, flags) never
appears in it: it travels as arguments and environment, where no shell reads it.

While jobs run, one `squeue` for all the user's jobs serves all processes; for a job that has ended,
`scontrol -o` is asked once and, if it ended long ago, `sacct`. Their text has not changed from
Slurm 22.05 to the present, unlike that of `--json`.
"""

import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from functools import cache
from pathlib import Path

from dlojz import course, sites
from dlojz.course import FileError, course_root, read_small, read_table
from dlojz.jobs import processes, stacks
from dlojz.jobs.keeper import LAUNCHER_VARIABLES
from dlojz.runs import outcome

BEGIN, END = "# >>> site\n", "# <<< site\n"
TIMEOUT_S = 20  # for Slurm to answer: a busy controller is slow
SCRIPT, JOB = "job.sbatch", "job.json"
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


def is_here() -> bool:
    """Return whether a Slurm controller answers on this machine."""
    if not shutil.which("sbatch"):
        return False
    try:
        return "UP" in _call("scontrol", "ping", timeout=5)
    except SlurmError:
        return False


def _call(*command, timeout=TIMEOUT_S, env=None) -> str:
    try:
        return processes.ask(*command, timeout_s=timeout, env=env)
    except processes.ProgramError as error:
        kind = UnclearError if error.cut_short or "timed out" in str(error) else SlurmError
        raise kind(
            f"{error}: is this a login node?" if "no command" in str(error) else str(error)
        ) from None


@cache
def _cluster() -> str:
    try:
        found = re.search(r"^ClusterName\s*=\s*(\S+)", _call("scontrol", "show", "config"), re.M)
    except SlurmError:
        return ""
    return found[1] if found else ""


# Submitting ------------------------------------------------------------------------------------


def site(name: str | None = None) -> sites.Site:
    """Return the site of this cluster. Raises SiteError."""
    return sites.read(sites.find(name, _cluster()))


def shape(n_gpu: int, gpus: sites.Gpus) -> tuple[int, int]:
    """Return (nodes, GPUs on each) for this many GPUs. Raises SlurmError if it does not divide."""
    if n_gpu <= gpus.gpus_per_node:
        return 1, n_gpu
    nodes, rest = divmod(n_gpu, gpus.gpus_per_node)
    if rest:
        near = f"{nodes * gpus.gpus_per_node} or {(nodes + 1) * gpus.gpus_per_node}"
        raise SlurmError(
            f"n_gpu={n_gpu}: the nodes have {gpus.gpus_per_node} GPUs each, and a job takes "
            f"whole nodes: ask for {near}"
        )
    return nodes, gpus.gpus_per_node


def kind_of(site: sites.Site, account: str | None) -> tuple[sites.Gpus, str]:
    """Return the nodes to ask for and the account to charge: "xyz@a100" means the kind a100."""
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
    """Return the whole script; `template` is slurm/job.sbatch. Asks and writes nothing."""
    gpus, charged = _charged(site, account, time_max_s)
    nodes, per_node = shape(n_gpu, gpus)
    options = {
        "job-name": job_name(name),  # the original is in job.json
        **charged,
        "nodes": nodes,
        "ntasks-per-node": per_node,
        "gres": site.gres.replace("{n}", str(per_node)),
        "cpus-per-task": gpus.cpus_per_gpu,
        "hint": site.hint,
        "time": _slurm_time(time_max_s),
        "signal": f"B:USR1@{site.signal_s}",
    }
    lines = [f"#SBATCH --{option}={value}" for option, value in options.items() if value != ""]
    for option in site.options:  # Slurm counts --gpus for the job, and all others for a node
        count = n_gpu if option.startswith("--gpus=") else per_node
        lines.append(f"#SBATCH {option.replace('{n}', str(count))}")
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


def job_name(name: str) -> str:
    """Return a job's name as Slurm gets it."""
    return re.sub(r"[^\w.-]", "_", name)[:64] or "dlojz"


def _charged(site, account, time_max_s):
    """Return the kind of nodes, and the options that say which ones and who pays for them."""
    gpus, account = kind_of(site, account)
    if gpus.longest and time_max_s > sites.limit(gpus.longest):
        raise SlurmError(f"time_max: the longest that {site.name} allows is {gpus.longest}")
    options = {"account": account, "partition": gpus.partition}
    return gpus, options | {"constraint": gpus.constraint, "qos": gpus.qos_for(time_max_s)}


def charged(site: sites.Site, account: str | None, time_max_s: int = 600) -> list[str]:
    """Return these options as words, for a script that brings all others along."""
    _, options = _charged(site, account, time_max_s)
    return [f"--{option}={value}" for option, value in options.items() if value != ""]


def _slurm_time(seconds):
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


class Slurm:
    """The launcher of a cluster; it has the same members as `here.Here`."""

    name = "slurm"
    whole_sweeps = False  # a sweep is submitted job by job, and may fail in the middle
    poll_s = 1.0  # between looks at a job in `wait`

    def check(self, request):
        """Accept every request: Slurm itself refuses what can't succeed."""

    def script(self, request, trainer: Path) -> str:
        """Return the script that would be submitted."""
        return _script(request, site())

    def submit(self, runs: Sequence[Path], requests: Sequence):
        """Submit the jobs in these folders, which already hold their trainers."""
        for run, request in zip(runs, requests, strict=True):
            self._submit(run, request)

    def _submit(self, run, request):
        here = site()
        (run / SCRIPT).write_text(_script(request, here), encoding="utf-8")
        with numbered(run, lambda: request.to_dict() | {"site": here.name}) as number:
            try:
                number(_sbatch(run, here, request))
            except UnclearError:
                raise
            except SlurmError as error:
                raise SlurmError(
                    f"Slurm refused the job: {error}\nthe site is {here.name} (slurm/sites, "
                    "DLOJZ_SITE); submit(..., dry_run=True) shows the script"
                ) from None

    def status(self, run: Path, info: dict) -> dict:
        """Return the status, from the shared list of the user's jobs.

        A final one is kept in the folder: Slurm forgets a job minutes after its end.
        """
        known = read_table(run / "state.json") or {"state": "QUEUED"}
        if known.get("final"):
            return known
        number = info["slurm"]
        if not number:  # sbatch was interrupted, or has yet to answer
            waits = time.time() < info["submitted"] + TIMEOUT_S
            return known if waits else {"state": "FAILED", "reason": _unclear(info["name"])}
        try:
            listed, asked = listing()
            if number not in listed and info["submitted"] > asked:
                return known  # submitted after the listing
            fields = listed.get(number)
            if fields is None or _is_final(fields):
                fields = show(number)  # once: how it ended
        except SlurmError as error:
            return known | {"reason": f"Slurm does not answer: {error}"}
        found = _status(run, fields) if fields else _forgotten(run, number)
        if found != known:
            with suppress(OSError):  # a full disk: then the next look asks Slurm again
                course.write_atomically(run / "state.json", json.dumps(found))
        return found

    def cancel(self, run: Path, info: dict, reason: str = ""):
        """End the job, or take it from the queue. Raises SlurmError."""
        course.write_atomically(run / "cancel", reason)
        if not info["slurm"]:
            raise SlurmError(_unclear(info["name"]))
        _call("scancel", info["slurm"])


@contextmanager
def numbered(run: Path, about: Callable[[], dict]):
    """Write job.json, without a number before sbatch is asked and with the one that it gives.

    So a job that Slurm may have keeps its folder, whatever ends its submission.
    """

    def write(number):
        course.write_atomically(run / JOB, json.dumps(about() | {"slurm": number}, indent=1))

    course.write_atomically(run / "state.json", json.dumps({"state": "QUEUED"}))
    write("")
    try:
        yield write
    except (UnclearError, OSError) as error:  # OSError: the number could not be written
        where = _unclear(about()["name"])
        state = {"state": "FAILED", "final": True, "reason": f"{where}; {error}"}
        with suppress(OSError):
            course.write_atomically(run / "state.json", json.dumps(state))
        raise UnclearError(f"{error}\njob {run.name} is {where}; {run} is kept") from None
    except SlurmError:
        (run / JOB).unlink()  # it was refused
        raise


def may_exist(run: Path) -> bool:
    """Return whether Slurm may have a job of which it gave no number."""
    return read_table(run / JOB).get("slurm") == ""


def _unclear(name) -> str:
    return (
        f"perhaps in Slurm: `squeue --me --name={job_name(name)}` shows it, and `scancel NUMBER` "
        "ends it"
    )


def _script(request, here) -> str:
    template = (course_root() / "slurm" / SCRIPT).read_text(encoding="utf-8")
    r = request
    return render(template, here, r.n_gpu, r.time_max_s, r.name, r.account, r.module)


def _sbatch(run: Path, here: sites.Site, request) -> str:
    """Submit the script in `run`; returns Slurm's number."""
    words = [str(run / "trainer.py"), *request.command[1:]]
    env = _own_variables() | {"DLOJZ_RUN": str(run), "DLOJZ_ROOT": str(course_root())}
    if not here.modules and not here.activate:  # otherwise the site's own Python
        env["DLOJZ_PYTHON"] = sys.executable
    if request.modules:  # the script's `python -P` does not look beside the trainer
        env["PYTHONPATH"] = ":".join(filter(None, [str(run), env.get("PYTHONPATH")]))
    return send(run, run / SCRIPT, ["--export=ALL"], words, env)


def _own_variables() -> dict[str, str]:
    """Return the environment without the variables of the job that we run in, such as a notebook's.

    They must not reach a new job.
    """
    mine = (LAUNCHER_VARIABLES.match, lambda name: name.startswith("SBATCH_"))
    env = os.environ.items()
    return {k: v for k, v in env if k == "SLURM_CONF" or not any(m(k) for m in mine)}


def send(run: Path, script: Path, options: list[str], words: list[str], env=None) -> str:
    """Submit a batch script with these arguments, to run in `run`; return Slurm's number."""
    output = str(run / "slurm.txt").replace("%", "%%")  # Slurm would expand %j
    options = ["--parsable", f"--chdir={run}", f"--output={output}", *options]
    env = _own_variables() if env is None else env
    answer = _call("sbatch", *options, str(script), *words, env=env)
    if not (numbers := re.findall(r"^(\d+)(?:;.*)?$", answer, re.M)):  # NUMBER or NUMBER;CLUSTER
        printed = repr(answer.strip()[:60]) if answer.strip() else "nothing"
        raise UnclearError(f"sbatch printed {printed}, expected the job's number")
    return numbers[-1]


# Asking ----------------------------------------------------------------------------------------


def listing() -> tuple[dict[str, dict], float]:
    """Return all jobs of this user by Slurm's number, and when Slurm was asked.

    It is asked at most every two seconds, by all processes together: the answer, or the failure, is
    cached in a file beside the runs. Raises SlurmError.
    """
    file = course_root() / "runs" / ".squeue.json"
    with _one_at_a_time(file.with_suffix(".lock")):
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


@contextmanager
def _one_at_a_time(file):
    with ExitStack() as stack:
        with suppress(OSError):  # a full disk, or one without locks: Slurm is asked more often
            stack.enter_context(course.locked(file, _left_s()))
        yield


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
    """Return how long Slurm may take to answer."""
    return TIMEOUT_S if _deadline is None else max(0.5, round(_deadline - time.monotonic(), 1))


def _squeue():
    form = ",".join(f"{name}:{width}" for name, width in COLUMNS.values())
    words = ("--noheader", f"--user={os.getuid()}", "--states=all", f"--Format={form}")
    found = {}
    for line in _call("squeue", *words, timeout=_left_s()).splitlines():
        fields, begin = {}, 0
        for key, (_, width) in COLUMNS.items():
            fields[key], begin = line[begin : begin + width].strip(), begin + width
        found[fields.pop("JobId")] = fields
    return found


def _is_final(fields):
    state, _ = STATES.get(fields["JobState"], ("RUNNING", ""))
    return state not in ("QUEUED", "RUNNING")


def show(number: str) -> dict[str, str]:
    """Return the fields of `scontrol -o show job`; {} if Slurm does not know the job (any more)."""
    try:
        text = _call("scontrol", "-o", "show", "job", number, timeout=_left_s())
    except SlurmError as error:
        if "Invalid job id" in str(error):
            return {}
        raise
    fields = {}
    for key, value in re.findall(r"(\S+?)=(\S*)", text):
        fields.setdefault(key, value)  # the first: a later path may look like a field
    return fields


def _status(run, fields):
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
        elif state == "CANCELLED" and (run / "cancel").exists():
            reason = read_small(run / "cancel").decode(errors="replace") or reason
        found |= {"state": state, "exit_code": code, "ended": _when(fields.get("EndTime"))}
        found["final"] = True
    return found | {"reason": reason or None}


def _forgotten(run, number):
    """Return the status of a job that the controller has forgotten, from sacct or its files."""
    try:
        asked = ("-nPX", "-j", number, "-o", "State,ExitCode,Start,End,NodeList")
        rows = _call("sacct", *asked, timeout=_left_s())
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
