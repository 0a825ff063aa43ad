"""A trainee's server, on a socket that no other program can have.

On one machine the hub has made the socket, and hands it over as standard input. Over Slurm it is a
port of the node, which the server holds before it reports it, with a certificate of its own: others
on the node may take the port as soon as the server has ended, but not the certificate's key.
"""

import json
import os
import socket
import stat
import subprocess
import sys
import urllib.request

from jupyter_server.serverapp import ServerApp
from jupyterhub.singleuser.extension import JupyterHubSingleUser
from tornado.http1connection import HTTP1Connection

REPORT_S = 60  # a hub that starts fifty servers at once is slow


def handed_over() -> socket.socket:
    """Return the socket that is standard input, which kernels and jobs must not inherit."""
    listener = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    return listener


def on_this_node() -> socket.socket:
    """Return a socket at a free port, once the hub knows the port and the certificate."""
    listener = socket.create_server(("", 0), backlog=128)
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=server"
    words += " -days 3650 -keyout /dev/stdout -out /dev/stdout"
    done = subprocess.run(["openssl", *words.split()], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"no certificate for the server, openssl says: {done.stderr}")
    file = os.memfd_create("certificate")  # the key is on no disk
    os.write(file, done.stdout.encode())
    sys.argv.append(f"--ServerApp.certfile=/proc/self/fd/{file}")
    certificate = done.stdout[done.stdout.index("-----BEGIN CERTIFICATE") :]
    where = {"port": listener.getsockname()[1], "certificate": certificate}
    request = urllib.request.Request(
        f"{os.environ['JUPYTERHUB_API_URL']}/batchspawner",
        data=json.dumps(where).encode(),
        headers={"Authorization": f"token {os.environ['JUPYTERHUB_API_TOKEN']}"},
    )
    urllib.request.urlopen(request, timeout=REPORT_S).close()
    return listener


class Server(ServerApp):
    """Jupyter Server on that socket."""

    def _find_http_port(self):
        """Look for no other port."""

    def _bind_http_server(self):
        listener.setblocking(False)
        self.http_server.add_socket(listener)


# The proxy asks that each connection be closed, and closes it itself. If the server is faster, the
# proxy fails at a Unix socket (EPIPE): one of a thousand notebooks was not saved.
HTTP1Connection._can_keep_alive = lambda *request: True

listener = handed_over() if stat.S_ISSOCK(os.fstat(0).st_mode) else on_this_node()
JupyterHubSingleUser.serverapp_class = Server
JupyterHubSingleUser.launch_instance()
