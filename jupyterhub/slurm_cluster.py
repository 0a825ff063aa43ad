"""A hub over Slurm: each trainee's server is a job of theirs, with a profile that they choose.

The profiles are in profiles.toml, or in the file that HUB_PROFILES names. HUB_ADDRESS is where the
nodes reach this machine. The folder of install.sh and the homes are on a file system of all nodes.
"""

import asyncio
import os
import shlex
import shutil
import sys
import tomllib
from html import escape
from pathlib import Path

import batchspawner  # its import registers where servers report their port
from batchspawner.batchspawner import JobStatus
from jupyterhub.utils import wait_for_server

c = get_config()  # noqa: F821
# Not JupyterHub's load_subconfig: it passes over a file that it can't find, and a hub with nothing
# but defaults would listen on all addresses.
exec(Path(__file__).with_name("common.py").read_text())

KEYS = ("label", "partition", "account", "qos", "nprocs", "memory", "gres", "runtime", "options")
if os.geteuid() != 0:
    sys.exit("a hub over Slurm needs root, to submit each job with its trainee's account")
for program in ("sbatch", "squeue", "scancel", "runuser"):
    if not shutil.which(program):
        sys.exit(f"no {program} in PATH={os.environ['PATH']}: install Slurm's commands here")
file = Path(os.environ.get("HUB_PROFILES") or Path(__file__).with_name("profiles.toml"))
try:
    profiles = tomllib.loads(file.read_text())
except (OSError, tomllib.TOMLDecodeError) as error:
    sys.exit(f"HUB_PROFILES: {file}: can't be read as TOML: {error}")
for name, profile in profiles.items():
    for key in profile:
        if key not in KEYS:
            sys.exit(f"{file}: unknown key {key} in [{name}]: expected one of {', '.join(KEYS)}")
if not profiles:
    sys.exit(f"{file} has no profile: expected at least one, such as [cpu]")


class Server(batchspawner.SlurmSpawner):
    """A trainee's server, in a job of theirs."""

    async def start(self):
        """Start it, and give up as soon as its job has ended.

        Batchspawner and the hub would wait for it until they time out, ten minutes later.
        """
        starting = asyncio.ensure_future(self.answer())
        try:
            while not (await asyncio.wait([starting], timeout=2))[0]:
                if self.job_id and await self.query_job_status() == JobStatus.NOTFOUND:
                    said = await self.last_words()
                    raise RuntimeError(f"job {self.job_id} ended before it was a server: {said}")
            return await starting
        finally:
            starting.cancel()

    async def answer(self):
        """Return where the server is, once it listens: it reports its port before."""
        where = await super().start()
        await wait_for_server(*where, timeout=self.http_timeout)
        return where

    async def last_words(self):
        """Return the end of the job's log; root may not read it on a file system of all nodes."""
        name, home = self.user.name, self.user_env({})["HOME"]
        command = f"runuser -u {name} -- tail -n 3 {shlex.quote(home)}/.jupyter-server.log"
        nothing = f"its log is empty; `scontrol show job {self.job_id}` may say more"
        try:
            return await self.run_command(command) or nothing
        except RuntimeError as error:
            return error


c.JupyterHub.spawner_class = Server
# The nodes talk to the hub, and the proxy to the servers on the nodes, by the cluster's network:
# in clear text, so it must be one that only the cluster's machines can listen to.
hub_port = c.JupyterHub.hub_bind_url.rpartition(":")[2]
c.JupyterHub.hub_bind_url = f"http://{os.environ.get('HUB_ADDRESS', '127.0.0.1')}:{hub_port}"
c.Spawner.ip = "0.0.0.0"  # the proxy finds the server by its node's name
c.Spawner.start_timeout = 600  # the queue may be long; the page says "Pending in queue"
c.Spawner.http_timeout = 120  # a node that reads the environment for the first time is slow
c.Spawner.poll_interval = 10  # how soon a job that ended is noticed; the default is 30 s
if "SLURM_CONF" in os.environ:
    c.Spawner.environment["SLURM_CONF"] = os.environ["SLURM_CONF"]

# The default is sudo, which a bare machine lacks.
c.BatchSpawnerBase.exec_prefix = "runuser -u {username} --"
wrapper = Path(c.Spawner.cmd[0]).with_name("batchspawner-singleuser")
c.BatchSpawnerBase.batchspawner_singleuser_cmd = str(wrapper)
# Not as a step of srun: it would hold the job's processors, and a trainee's own `srun` in a
# terminal would wait for ever. One log, which the next start replaces; by default each start leaves
# one. --export only names variables: their values, a token among them, travel where root and the
# trainee alone can read them.
c.SlurmSpawner.req_srun = ""
c.SlurmSpawner.batch_script = """#!/bin/bash
#SBATCH --job-name=jupyter
#SBATCH --output={{homedir}}/.jupyter-server.log
#SBATCH --open-mode=truncate
#SBATCH --chdir={{homedir}}
#SBATCH --export={{keepvars}}
#SBATCH --no-requeue
{% if partition %}#SBATCH --partition={{partition}}
{% endif %}{% if account %}#SBATCH --account={{account}}
{% endif %}{% if qos %}#SBATCH --qos={{qos}}
{% endif %}{% if runtime %}#SBATCH --time={{runtime}}
{% endif %}{% if memory %}#SBATCH --mem={{memory}}
{% endif %}{% if gres %}#SBATCH --gres={{gres}}
{% endif %}{% if nprocs %}#SBATCH --cpus-per-task={{nprocs}}
{% endif %}{% if options %}#SBATCH {{options}}
{% endif %}
umask 077
exec {{cmd}}
"""

# Profiles -------------------------------------------------------------------------------------

c.Spawner.options_form = "".join(
    f'<div class="radio"><label><input type="radio" name="profile" value="{escape(name)}"'
    f"{' checked' if i == 0 else ''}> {escape(profile.get('label', name))}</label></div>"
    for i, (name, profile) in enumerate(profiles.items())
)
c.Spawner.options_from_form = lambda form: {"profile": form["profile"][0]}


def apply_profile(spawner, chosen):
    """Ask Slurm for what the chosen profile says.

    Batchspawner puts every user option into the job's script. The hub's API accepts any, so all but
    the profile's name are dropped.
    """
    name = chosen.get("profile") or next(iter(profiles))
    if name not in profiles:
        raise ValueError(f"no profile {name!r}: expected one of {', '.join(profiles)}")
    spawner.user_options = {"profile": name}
    for key in KEYS[1:]:
        setattr(spawner, f"req_{key}", str(profiles[name].get(key, "")))


c.Spawner.apply_user_options = apply_profile
