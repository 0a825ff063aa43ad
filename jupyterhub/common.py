"""What one machine and a Slurm cluster have in common; both run this file.

Started by start.sh, which sets HUB_URL, HUB_LOGIN and HUB_STATE, the folder in which it begins.
"""

import os
import secrets
import sys
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

c = get_config()  # noqa: F821  defined by JupyterHub

env = Path(sys.prefix)  # the environment that install.sh made, for the hub and for all trainees
state = Path(os.environ["HUB_STATE"])
url, login = os.environ["HUB_URL"], os.environ["HUB_LOGIN"]


def on_loopback(host):
    """Return whether only this machine can reach the address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a name, which may come to mean another address tomorrow
        return host == "localhost"


# Addresses ------------------------------------------------------------------------------------

where = urlsplit(url)
if where.scheme not in ("http", "https") or not where.hostname:
    sys.exit(f"HUB_URL={url}: expected an address such as http://127.0.0.1:8000")
port = where.port or (443 if where.scheme == "https" else 8000)
certificate = os.environ.get("HUB_CERTIFICATE"), os.environ.get("HUB_KEY")
if not on_loopback(where.hostname):
    # One password would open every account to the whole network.
    if login == "trial":
        sys.exit(
            f"HUB_LOGIN=trial with HUB_URL={url}: expected http://127.0.0.1:8000, for a trial has "
            "one password for all; or HUB_LOGIN=pam"
        )
    # Passwords and session cookies would cross the network in clear text.
    if where.scheme != "https" or not all(certificate):
        sys.exit(
            f"HUB_URL={url}: expected https://... with HUB_CERTIFICATE and HUB_KEY, the files of a "
            "TLS certificate; or stay on http://127.0.0.1 behind a web server that has one"
        )
c.JupyterHub.bind_url = f"{where.scheme}://{where.hostname}:{port}{where.path}"
if where.scheme == "https":
    c.JupyterHub.ssl_cert, c.JupyterHub.ssl_key = certificate
# How servers and the proxy reach the hub. A hub of root's has a socket instead, see one_machine.py.
c.JupyterHub.hub_bind_url = f"http://127.0.0.1:{port + 81}"

# Secrets --------------------------------------------------------------------------------------

# The cookie secret and the database are files of the hub's own folder (0700). The proxy's token is
# drawn at each start, and kept in no file. None of them is in the hub's environment, for a process
# that the hub starts for a trainee could inherit it (batchspawner's squeue does).
c.JupyterHub.cookie_secret_file = str(state / "cookie_secret")
c.JupyterHub.db_url = f"sqlite:///{state / 'hub.sqlite'}"
c.ConfigurableHTTPProxy.auth_token = secrets.token_hex(32)

# Who may log in -------------------------------------------------------------------------------

# Names become words of commands that root runs. The pattern is matched at the start only: hence \Z.
c.Authenticator.username_pattern = r"[a-z_][a-z0-9_-]{0,31}\Z"
c.Authenticator.blocked_users = {"root"}
if login == "trial":
    # A password, also on loopback: other users of this machine reach it, too.
    password = secrets.token_urlsafe(9)
    c.JupyterHub.authenticator_class = "shared-password"
    c.SharedPasswordAuthenticator.user_password = password
    c.Authenticator.allow_all = True  # since JupyterHub 5 nobody gets in without it
    c.JupyterHub.log_level = "WARN"  # or the password would scroll away
    c.ConfigurableHTTPProxy.log_level = "warn"
    print(f"Log in at {url} with any name, such as ann, and the password {password}", flush=True)
elif login == "pam":  # the accounts and passwords of this machine
    c.JupyterHub.authenticator_class = "pam"
    c.PAMAuthenticator.allowed_groups = {"dlojz"}
    c.PAMAuthenticator.admin_groups = {"dlojz-teachers"}
else:
    sys.exit(f"HUB_LOGIN={login}: expected pam, or trial")

# A restart of the hub need not end the servers: it finds them again. A trial leaves nothing behind.
c.JupyterHub.cleanup_servers = login == "trial"

# Sockets --------------------------------------------------------------------------------------

# The proxy listens to the hub, and finds each server, at a socket in HUB_STATE. Only the hub's own
# account may enter that folder: no program of anybody else can answer in a server's place, neither
# before it starts nor after it has ended. Their paths begin there, for 107 bytes is the longest.


from jupyterhub.spawner import Spawner  # noqa: E402  slow: a wrong setting is refused before


class AtSocket:
    """What makes a spawner's servers be found at a socket."""

    @property
    def socket_file(self):
        return Path(f"server-{self.user.name}")

    def _at_socket(self):
        server = Spawner.server.fget(self)
        if server is not None:  # also one that an earlier hub has started
            server.connect_url = f"http+unix://{self.socket_file}"
        return server

    server = property(_at_socket, Spawner.server.fset)


# The proxy ends with the hub, however that ends; JupyterHub sees to it only once it has started.
# What has the number of an earlier proxy's process now is another program, not to be ended.
until_hub_ends = ("setpriv", "--pdeathsig", "TERM", "sh", "-c")
until_hub_ends += (f'[ $PPID = {os.getpid()} ] && exec "$@"', "-")  # it may have ended just now
proxy = env.parent / "proxy" / "node_modules" / ".bin" / "configurable-http-proxy"
c.ConfigurableHTTPProxy.command = [*until_hub_ends, str(proxy)]
c.ConfigurableHTTPProxy.api_url = "http+unix://proxy"
c.ConfigurableHTTPProxy.command_umask = 0o077
c.ConfigurableHTTPProxy.pid_file = "proxy.pid"
for name in ("proxy", "proxy.pid"):
    Path(name).unlink(missing_ok=True)

# Servers --------------------------------------------------------------------------------------


def compiled_code(spawner):
    """Return where torch.compile keeps its code: in the home.

    By default it is /tmp/torchinductor_<name>, which any other user could have made before, with
    code of their own in it. Its headers stay there: each job sees to them (guard_compiled_code in
    dlojz/course/files.py).
    """
    return f"{spawner.user_env({})['HOME']}/.cache/torchinductor"


c.Spawner.default_url = "/lab"
c.Spawner.cmd = [str(env / "bin" / "python"), str(env / "share" / "dlojz" / "server.py")]
c.Spawner.environment = {
    # So that a terminal knows `dlojz` and `python`, and a job the same Python.
    "PATH": f"{env / 'bin'}:/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin",
    "DLOJZ_DATA": str(env.parent / "data"),
    "TORCHINDUCTOR_CACHE_DIR": compiled_code,
    "GIT_CONFIG_SYSTEM": str(env.parent / "gitconfig"),
    # What else the site says: DLOJZ_DATA, DLOJZ_SITE, DLOJZ_QUEUE, ...
    **{name: value for name, value in os.environ.items() if name.startswith("DLOJZ_")},
}
# A server that nobody uses ends after two hours, and frees its memory, or its node. Jobs go on:
# each has a keeper of its own, or is in Slurm's queue.
c.Spawner.args = [
    "--MappingKernelManager.cull_idle_timeout=7200",
    "--ServerApp.shutdown_no_activity_timeout=7200",
    # Otherwise each start of a server looks for language servers, with a Node.js process.
    "--LanguageServerManager.autodetect=False",
]
