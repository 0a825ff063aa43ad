"""A hub on one machine: each trainee's server is a process here.

With HUB_LOGIN=pam it runs with the trainee's own account. HUB_LOGIN=trial needs no
accounts: all servers are yours, so it shows how the course looks and isolates nobody.
"""

import itertools
import os
import pwd
import socket
import sys
from pathlib import Path

c = get_config()  # noqa: F821
# Not JupyterHub's load_subconfig: it passes over a file that it can't find, and a hub with nothing
# but defaults would listen on all addresses.
exec(Path(__file__).with_name("common.py").read_text())

# JupyterHub asks the system for any free port, and another program may be given the same one before
# the server listens on it. These are given to nobody: they lie below the system's, and above those
# of jobs (dlojz/idr_torch.py).
ports = itertools.cycle(range(30_000, 32_000))


def choose_port(spawner):
    """Have a server listen on a port that no other program is given meanwhile."""
    for port in itertools.islice(ports, 2_000):
        with socket.socket() as free:
            if free.connect_ex(("127.0.0.1", port)):  # nobody answers
                spawner.port = port
                return


c.Spawner.pre_spawn_hook = choose_port

if os.environ["HUB_LOGIN"] == "trial":
    c.JupyterHub.spawner_class = "simple"
    homes = os.path.join(os.environ["HUB_STATE"], "homes")
    c.SimpleLocalProcessSpawner.home_dir_template = os.path.join(homes, "{username}")
    if os.geteuid() == 0:
        c.Spawner.args.append("--allow-root")
elif os.geteuid() != 0:
    sys.exit("HUB_LOGIN=pam needs root, to start each server with its trainee's account")
else:
    c.JupyterHub.spawner_class = "jupyterhub.spawner.LocalProcessSpawner"

    def make_room(spawner):
        """Have a server keep its keys outside the home: it must start when a quota is used up.

        Otherwise the trainee could not even log in to remove files.
        """
        choose_port(spawner)
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
