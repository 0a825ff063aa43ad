"""A throw-away Slurm on this machine, for a rehearsal without a cluster, with two nodes.

It is a real Slurm, whose nodes claim 8 cores and 2 GPUs each. `slurm/throwaway.sh` starts it, as
root, on Debian or Ubuntu with four packages; it ends with the process that started it, even if
that is killed.
"""

import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from dlojz.course import course_root
from dlojz.jobs import processes
from dlojz.launch import slurm

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "ip", "pgrep")
INSTALL = "apt-get install --no-install-recommends slurm-wlm munge iproute2 procps"
CPUS = 8  # claimed by a node: enough for three tasks of two cores, to show a wrong placement
START_S = 60
_folder: Path | None = None  # of the Slurm that this process has started


def missing() -> str:
    """Return the reason why no throw-away Slurm can be started; "" if one can."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    if absent := [name for name in PROGRAMS if not shutil.which(name, path=path)]:
        return f"no {', '.join(absent)} here: {INSTALL} (on Debian or Ubuntu, as root)"
    return "" if os.geteuid() == 0 else "Slurm starts jobs as their users, which takes root"


def runs() -> bool:
    """Return whether this process has started a throw-away Slurm."""
    return _folder is not None


def where() -> str:
    """Return the Slurm that takes a job: "cluster", "throw-away", or "" if there is none."""
    if runs():
        return "throw-away"
    if slurm.is_here():
        return "cluster"
    return "" if missing() else "throw-away"


def start():
    """Start one for this process. Raises SlurmError with its log."""
    global _folder
    if _folder:
        return
    if why := missing():
        raise slurm.SlurmError(f"no Slurm here, and none can be started: {why}")
    # A short path: a unix socket's is limited to 107 bytes.
    _folder = Path(tempfile.mkdtemp(prefix=f"dlojz-rehearsal-{os.getpid()}-", dir="/tmp"))
    out = subprocess.DEVNULL
    processes.start(_argv("until", str(os.getpid())), out, out, env=_variables())
    try:
        processes.ask(*_argv("start"), timeout_s=START_S, env=_variables())
    except processes.ProgramError as error:
        stop()
        raise slurm.SlurmError(f"the throw-away Slurm did not start: {error}") from None
    os.environ["SLURM_CONF"] = str(_folder / "slurm.conf")


def stop():
    """End the one that this process has started, with its jobs."""
    global _folder
    if not _folder:
        return
    with suppress(processes.ProgramError):
        processes.ask(*_argv("stop"), timeout_s=START_S, env=_variables())
    shutil.rmtree(_folder, ignore_errors=True)
    os.environ.pop("SLURM_CONF", None)
    _folder = None


def _argv(*words):
    return ["bash", str(course_root() / "slurm" / "throwaway.sh"), *words]


def _variables():
    return os.environ | {
        "SLURM_FIXTURE_DIR": str(_folder),
        "SLURM_FIXTURE_CPUS": str(CPUS),
        "SLURM_FIXTURE_BIND": str(int((os.cpu_count() or 1) >= CPUS)),
        # Ports of its own, below the ephemeral ones: another user may rehearse, too.
        "SLURM_FIXTURE_PORT": str(18_000 + 10 * (os.getpid() % 190)),
    }
