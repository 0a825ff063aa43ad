"""A hub on one machine: each trainee's server is a process here.

With HUB_LOGIN=pam it runs with the trainee's own account. HUB_LOGIN=trial needs no
accounts: all servers are yours, so it shows how the course looks and isolates nobody.
"""

import os
import pwd
import socket
import sys
from contextlib import suppress
from pathlib import Path

c = get_config()  # noqa: F821
# Not JupyterHub's load_subconfig: it passes over a file that it can't find, and a hub with nothing
# but defaults would listen on all addresses.
exec(Path(__file__).with_name("common.py").read_text())

from jupyterhub.spawner import LocalProcessSpawner, SimpleLocalProcessSpawner  # noqa: E402  as there
from tornado.http1connection import HTTP1Connection  # noqa: E402


class HandsOver(AtSocket, LocalProcessSpawner):  # noqa: F821  common.py defines it
    """Start servers as processes of this machine, with their sockets made."""

    async def start(self):
        """Make the socket, and hand it over as standard input: see server.py."""
        self.socket_file.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self.socket_file))
            listener.listen(128)  # so that the hub's first question waits for the answer
            self.popen_kwargs = {"stdin": listener}
            return await super().start()


class Trial(HandsOver, SimpleLocalProcessSpawner):
    """A server for a name that is no account."""


class Account(HandsOver):
    """A server with the account of its trainee."""

    async def poll(self):
        """Return whether it has ended; after a reboot another process may have its number."""
        if self.pid and not self.proc:  # an earlier hub has started it
            with suppress(FileNotFoundError):
                if os.stat(f"/proc/{self.pid}").st_uid != pwd.getpwnam(self.user.name).pw_uid:
                    self.clear_state()
        return await super().poll()


c.Spawner.port = 1  # for JupyterHub wants one; nothing listens on it

if os.environ["HUB_LOGIN"] == "trial":
    c.JupyterHub.spawner_class = Trial
    homes = os.path.join(os.environ["HUB_STATE"], "homes")
    c.SimpleLocalProcessSpawner.home_dir_template = os.path.join(homes, "{username}")
    if os.geteuid() == 0:
        c.Spawner.args.append("--allow-root")
elif os.geteuid() != 0:
    sys.exit("HUB_LOGIN=pam needs root, to start each server with its trainee's account")
else:
    c.JupyterHub.spawner_class = Account
    # Servers go on while the hub restarts, and tell the hub their tokens: where they look for it,
    # only root can listen.
    hub = f"http+unix://%2Frun%2Fdlojz-hub-{port}"  # noqa: F821
    c.JupyterHub.hub_bind_url = c.JupyterHub.hub_connect_url = hub
    c.JupyterHub.hub_socket_mode = 0o666
    HTTP1Connection._can_keep_alive = lambda *request: True  # see server.py

    def make_room(spawner):
        """Have a server keep its keys outside the home: it must start when a quota is used up.

        Otherwise the trainee could not even log in to remove files.
        """
        user = pwd.getpwnam(spawner.user.name)
        folder = Path("/run/dlojz", user.pw_name)  # only root can have made it
        for place, owner, mode in ((folder.parent, 0, 0o711), (folder, user.pw_uid, 0o700)):
            place.mkdir(exist_ok=True)
            os.chown(place, owner, user.pw_gid if owner else 0)
            place.chmod(mode)
        spawner.environment = {**spawner.environment, "JUPYTER_RUNTIME_DIR": str(folder)}

    c.Spawner.pre_spawn_hook = make_room
    # Kernels that start in the same second may choose the same ports. Sockets' paths may have 107
    # bytes, which that folder's never exceed.
    c.Spawner.args.append("--KernelManager.transport=ipc")

# A class that comes at once shares the cores: of thirty servers on two cores, some were given up
# after JupyterHub's 30 s.
c.Spawner.http_timeout = c.Spawner.start_timeout = 300

# The folder that install.sh made for it.
c.Spawner.environment.setdefault("DLOJZ_QUEUE", str(Path(sys.prefix).parent / "queue"))
