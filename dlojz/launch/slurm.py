"""The cluster's half of `dlojz.launch`: jobs are submitted to Slurm, observed and cancelled.

The script is `slurm/job.sbatch` with the lines of a site. User input (names, paths, flags) never
appears in it: it travels as arguments and environment, where no shell reads it.
"""

import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from dlojz import course
from dlojz.course import course_root, read_table
from dlojz.jobs import keeper
from dlojz.launch import asking, sites
from dlojz.launch.asking import SlurmError, UnclearError

BEGIN, END = "# >>> site\n", "# <<< site\n"
SCRIPT, JOB = "job.sbatch", "job.json"


def is_here() -> bool:
    """Return whether a Slurm controller answers on this machine."""
    if not shutil.which("sbatch"):
        return False
    try:
        return "UP" in asking.call("scontrol", "ping", timeout=5)
    except SlurmError:
        return False


@cache
def _cluster() -> str:
    try:
        config = asking.call("scontrol", "show", "config")
    except SlurmError:
        return ""
    found = re.search(r"^ClusterName\s*=\s*(\S+)", config, re.M)
    return found[1] if found else ""


# Submitting ------------------------------------------------------------------------------------


def site() -> sites.Site:
    """Return the site of this cluster. Raises SiteError."""
    return sites.read(sites.find(cluster=_cluster()))


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


def render(template: str, site: sites.Site, request) -> str:
    """Return the whole script; `template` is slurm/job.sbatch. Asks and writes nothing."""
    gpus, charged = _charged(site, request.account, request.time_max_s)
    nodes, per_node = shape(request.n_gpu, gpus)
    options = {
        "job-name": job_name(request.name),  # the original is in job.json
        **charged,
        "nodes": nodes,
        "ntasks-per-node": per_node,
        "gres": site.gres.replace("{n}", str(per_node)),
        "cpus-per-task": gpus.cpus_per_gpu,
        "hint": site.hint,
        "time": _slurm_time(request.time_max_s),
        "signal": f"B:USR1@{site.signal_s}",
    }
    lines = [f"#SBATCH {word}" for word in _words(options)]
    for option in site.options:  # Slurm counts --gpus for the job, and all others for a node
        count = request.n_gpu if option.startswith("--gpus=") else per_node
        lines.append(f"#SBATCH {option.replace('{n}', str(count))}")
    modules = [*gpus.modules_first, *([request.module] if request.module else site.modules)]
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


def charged(site: sites.Site, account: str | None) -> list[str]:
    """Return these options of a job of 10 minutes, for a script that brings all others along."""
    return _words(_charged(site, account, 600)[1])


def _words(options) -> list[str]:
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
        """Submit the job in this folder, which already holds its trainer."""
        (run,), (request,), here = runs, requests, site()
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
            waits = time.time() < info["submitted"] + asking.TIMEOUT_S
            return known if waits else {"state": "FAILED", "reason": _unclear(info["name"])}
        try:
            listed, asked = asking.listing()
            if number not in listed and info["submitted"] > asked:
                return known  # submitted after the listing
            fields = listed.get(number)
            if fields is None or asking.is_final(fields):
                fields = asking.show(number)  # once: how it ended
        except SlurmError as error:
            return known | {"reason": f"Slurm does not answer: {error}"}
        found = asking.status(run, fields) if fields else asking.forgotten(run, number)
        if found != known:
            with suppress(OSError):  # a full disk: then the next look asks Slurm again
                course.write_atomically(run / "state.json", json.dumps(found))
        return found

    def cancel(self, run: Path, info: dict):
        """End the job, or take it from the queue. Raises SlurmError."""
        if not info["slurm"]:
            raise SlurmError(_unclear(info["name"]))
        asking.call("scancel", info["slurm"])


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
    return render(template, here, request)


def _sbatch(run: Path, here: sites.Site, request) -> str:
    """Submit the script in `run`; returns Slurm's number."""
    start, *flags = request.words
    env = _own_variables() | {"DLOJZ_RUN": str(run), "DLOJZ_ROOT": str(course_root())}
    if not here.modules and not here.activate:  # otherwise the site's own Python
        env["DLOJZ_PYTHON"] = sys.executable
    env["DLOJZ_FOLDER"] = request.folder
    if not request.folder and len(request.modules) > 1:  # `python -P` does not look beside it
        env["PYTHONPATH"] = ":".join(filter(None, [str(run), env.get("PYTHONPATH")]))
    return send(run, run / SCRIPT, ["--export=ALL"], [str(run / start), *flags], env)


def _own_variables() -> dict[str, str]:
    """Return the environment without the variables of the job that we run in, such as a notebook's.

    They must not reach a new job.
    """
    mine = (keeper.LAUNCHER_VARIABLES.match, lambda name: name.startswith("SBATCH_"))
    env = os.environ.items()
    return {k: v for k, v in env if k == "SLURM_CONF" or not any(m(k) for m in mine)}


def send(run: Path, script: Path, options: list[str], words: list[str], env=None) -> str:
    """Submit a batch script with these arguments, to run in `run`; return Slurm's number."""
    output = str(run / "slurm.txt").replace("%", "%%")  # Slurm would expand %j
    options = ["--parsable", f"--chdir={run}", f"--output={output}", *options]
    env = _own_variables() if env is None else env
    answer = asking.call("sbatch", *options, str(script), *words, env=env)
    if not (numbers := re.findall(r"^(\d+)(?:;.*)?$", answer, re.M)):  # NUMBER or NUMBER;CLUSTER
        printed = repr(answer.strip()[:60]) if answer.strip() else "nothing"
        raise UnclearError(f"sbatch printed {printed}, expected the job's number")
    return numbers[-1]
