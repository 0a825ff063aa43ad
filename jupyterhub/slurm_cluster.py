"""A hub over Slurm: each trainee's server is a job of theirs, with a profile that they choose.

The profiles are in profiles.toml, or in the file that HUB_PROFILES names. HUB_ADDRESS is where the
nodes reach this machine. The folder of install.sh and the homes are on a file system of all nodes.
"""

import asyncio
import os
import resource
import shlex
import shutil
import ssl
import sys
import tomllib
from contextlib import closing, suppress
from html import escape
from pathlib import Path

from batchspawner.api import BatchSpawnerAPIHandler
from batchspawner.batchspawner import JobStatus, SlurmSpawner
from jupyterhub.spawner import SpawnException
from tornado import web
from traitlets import Set

c = get_config()  # noqa: F821
# Not JupyterHub's load_subconfig: it passes over a file that it can't find, and a hub with nothing
# but defaults would listen on all addresses.
exec(Path(__file__).with_name("common.py").read_text())

if os.geteuid() != 0:
    sys.exit("a hub over Slurm needs root, to submit each job with its trainee's account")
for program in ("sbatch", "squeue", "scancel", "runuser"):
    if not shutil.which(program):
        sys.exit(f"no {program} in PATH={os.environ['PATH']}: install Slurm's commands here")

# Profiles -------------------------------------------------------------------------------------

KEYS = ("label", "partition", "account", "qos", "nprocs", "memory", "gres", "runtime", "options")


def read_profiles(file):
    """Return the profiles of a file, each value a text of one line: it ends up in a script."""
    try:
        profiles = tomllib.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        sys.exit(f"HUB_PROFILES: {file}: can't be read as TOML: {error}")
    for name, profile in profiles.items():
        if not isinstance(profile, dict):
            sys.exit(f"{file}: {name!r} stands outside of a profile: expected one first, as [cpu]")
        if not (name and name.isprintable()):
            sys.exit(f"{file}: profile {name!r}: expected a name of one line, such as [cpu]")
        for key, value in profile.items():
            where = f"{file}: {key!r} in [{name}]"
            if key not in KEYS:
                sys.exit(f"{where}: unknown, expected one of {', '.join(KEYS)}")
            if not (type(value) is int or (isinstance(value, str) and value.isprintable())):
                sys.exit(
                    f"{where}: expected a text of one line, or a whole number; found {value!r}"
                )
    if not profiles:
        sys.exit(f"{file} has no profile: expected at least one, such as [cpu]")
    return {
        name: {key: str(value) for key, value in profile.items()}
        for name, profile in profiles.items()
    }


profiles = read_profiles(
    Path(os.environ.get("HUB_PROFILES") or Path(__file__).with_name("profiles.toml"))
)
c.Spawner.options_form = "".join(
    f'<div class="radio"><label><input type="radio" name="profile" value="{escape(name)}"'
    f"{' checked' if i == 0 else ''}> {escape(profile.get('label', name))}</label></div>"
    for i, (name, profile) in enumerate(profiles.items())
)
c.Spawner.options_from_form = lambda form: {"profile": ", ".join(form.get("profile", []))}


def apply_profile(spawner, chosen):
    """Ask Slurm for what the chosen profile says.

    Batchspawner puts every user option into the job's script. The hub's API accepts any, so all but
    the profile's name are dropped.
    """
    name = chosen.get("profile") if chosen.get("profile", "") != "" else next(iter(profiles))
    if not isinstance(name, str) or name not in profiles:
        told = f"no profile {name!r:.100}: expected one of {', '.join(profiles)}"
        refusal = SpawnException(told, reason="profile")
        refusal.jupyterhub_message = told  # on the page
        raise refusal
    spawner.user_options = {"profile": name}
    for key in KEYS[1:]:
        setattr(spawner, f"req_{key}", profiles[name].get(key, ""))


c.Spawner.apply_user_options = apply_profile

# Servers --------------------------------------------------------------------------------------

COMMAND_S, COMMAND_BYTES = 60, 1 << 16
CONNECT_S = 30
CONNECTIONS = 200  # of one server at once: a page of JupyterLab has about ten
# Each is two files of the hub's.
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
encrypted = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
encrypted.check_hostname, encrypted.verify_mode = False, ssl.CERT_NONE  # Server.reach compares it


class Said(asyncio.SubprocessProtocol):
    """What a command prints, up to a limit."""

    def __init__(self):
        self.out = {1: b"", 2: b""}
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport):
        self.transport = transport

    def pipe_data_received(self, fd, data):
        self.out[fd] += data
        if len(self.out[fd]) > COMMAND_BYTES:
            self.transport.close()

    def connection_lost(self, error):
        if not self.ended.done():
            self.ended.set_result(None)


async def passed_on(reader, writer):
    """Pass on what comes, until it ends."""
    with closing(writer), suppress(OSError):
        while some := await reader.read(1 << 16):
            writer.write(some)
            await writer.drain()


class Server(AtSocket, SlurmSpawner):  # noqa: F821  common.py defines it
    """A trainee's server, in a job of theirs.

    Others may have jobs on the same node. So the hub connects its socket with the port that the
    server has reported, and the program that answers must have the certificate that was reported.
    """

    certificate = relay = None
    connections = Set()  # the event loop itself does not keep its tasks

    async def start(self):
        """Start it, and give up as soon as its job has ended.

        Batchspawner and the hub would wait for it until they time out, ten minutes later.
        """
        self.certificate = None
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
        """Return where the server is, once it answers: it reports its port before."""
        where = await super().start()
        await self.listen()
        await self.server.wait_up(timeout=self.http_timeout, http=True, extra_path="api")
        return where

    def cmd_formatted_for_batch(self):
        return shlex.join(self.cmd + self.get_args())

    def reported(self, port, certificate):
        """Keep where the server says that it is, and how it is known."""
        if type(port) is not int or not 0 < port < 1 << 16:
            raise ValueError(port)
        self.certificate, self.port = ssl.PEM_cert_to_DER_cert(certificate), port

    async def listen(self):
        """Have the proxy reach the server."""
        if not self.relay:
            self.relay = await asyncio.start_unix_server(self.relayed, self.socket_file)

    async def relayed(self, reader, writer):
        """Connect the proxy with the server, if it is the server that answers."""
        self.connections.add(asyncio.current_task())
        with closing(writer):
            try:
                if len(self.connections) > CONNECTIONS:
                    raise OSError(f"it has {CONNECTIONS} connections")
                async with asyncio.timeout(CONNECT_S):
                    from_server, to_server = await self.reach()
                await asyncio.gather(passed_on(reader, to_server), passed_on(from_server, writer))
            except OSError as error:  # TimeoutError is one
                self.log.warning("the server of %s can't be reached: %r", self.user.name, error)
            finally:
                self.connections.remove(asyncio.current_task())

    async def reach(self):
        """Return a connection with the server."""
        reader, writer = await asyncio.open_connection(self.ip, self.port, ssl=encrypted)
        if writer.get_extra_info("ssl_object").getpeercert(True) != self.certificate:
            writer.close()
            raise OSError(f"another program answers at {self.ip}:{self.port}")
        return reader, writer

    async def poll(self):
        """Return whether the job has ended; after a restart of the hub, reach its server again."""
        status = await super().poll()
        if status is None and self.certificate:
            await self.listen()
        return status

    def get_state(self):
        certificate = (self.certificate or b"").hex()
        where = {"ip": self.ip, "port": self.port, "certificate": certificate}
        return super().get_state() | where

    def load_state(self, state):
        super().load_state(state)
        if "certificate" in state:
            self.ip, self.port = state["ip"], state["port"]
            self.certificate = bytes.fromhex(state["certificate"])

    def clear_state(self):
        """Forget a server that has ended."""
        super().clear_state()
        if self.relay:
            self.relay.close()
        self.certificate = self.relay = None

    async def last_words(self):
        """Return the end of the job's log; root may not read it on a file system of all nodes."""
        home = self.user_env({})["HOME"]
        tail = f"timeout 2 tail -c 2000 {shlex.quote(home)}/.jupyter-server.log"
        try:
            said = await self.run_command(f"runuser -u {self.user.name} -- {tail}")
        except RuntimeError as error:
            said = str(error)
        said = "\n".join(said.splitlines()[-3:])
        return "".join(sign for sign in said if sign.isprintable() or sign == "\n") or (
            f"its log says nothing; `scontrol show job {self.job_id}` may say more"
        )

    async def run_command(self, cmd, input=None, env=None):
        """Return what a command prints.

        It runs as the trainee, who may stop its processes, or have them print for ever.
        """
        loop = asyncio.get_running_loop()
        transport, said = await loop.subprocess_shell(Said, cmd, env=env)
        try:
            transport.get_pipe_transport(0).write((input or "").encode())
            transport.get_pipe_transport(0).close()
            async with asyncio.timeout(COMMAND_S):
                await said.ended
        except TimeoutError:
            raise RuntimeError(f"no answer in {COMMAND_S} s: {cmd}") from None
        finally:
            transport.close()  # ends it as well
        out, error = (said.out[fd].decode(errors="replace").strip() for fd in (1, 2))
        if code := transport.get_returncode():
            raise RuntimeError(error or f"exit status {code}: {cmd}")
        return out


def report(handler):
    """Let a server report where it is.

    Batchspawner's own method lets it set any attribute: also the commands that root runs.
    """
    try:
        for spawner in handler.current_user.spawners.values():
            if spawner.api_token == handler.get_auth_token():
                spawner.reported(**handler.get_json_body())
    except (AttributeError, TypeError, ValueError):
        raise web.HTTPError(400, "expected a port and a certificate") from None
    handler.set_status(201)


BatchSpawnerAPIHandler.post = web.authenticated(report)
c.JupyterHub.spawner_class = Server
# Servers talk to the hub by the cluster's network in clear text, so it must be one that only the
# cluster's machines can listen to.
hub_port = c.JupyterHub.hub_bind_url.rpartition(":")[2]
c.JupyterHub.hub_bind_url = f"http://{os.environ.get('HUB_ADDRESS', '127.0.0.1')}:{hub_port}"
c.Spawner.start_timeout = 600  # the queue may be long; the page says "Pending in queue"
c.Spawner.http_timeout = 120  # a node that reads the environment for the first time is slow
c.Spawner.poll_interval = 10  # how soon a job that ended is noticed; the default is 30 s
# Kernels talk over ports of the node, where others have jobs.
c.Spawner.args.append("--KernelManager.transport_encryption=auto")
if "SLURM_CONF" in os.environ:
    c.Spawner.environment["SLURM_CONF"] = os.environ["SLURM_CONF"]

# The default is sudo, which a bare machine lacks.
c.BatchSpawnerBase.exec_prefix = "runuser -u {username} --"
# No answer is no news: the job is not given up.
unknown = SlurmSpawner.state_unknown_re.default_value
c.SlurmSpawner.state_unknown_re = f"{unknown}|^no answer"
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
