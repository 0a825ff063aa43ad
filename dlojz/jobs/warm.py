"""A process with torch imported, forked for each job: `python -m dlojz.jobs.warm SOCKET`.

Importing torch and torchvision takes seconds of a core, and each job would begin with them. So the
first job of a user starts this process. It listens on a socket that only this user may open, and
forks the supervisors of jobs: they find everything imported, and so do their jobs. It ends when it
was not asked for a while: DLOJZ_WARM_S seconds; with 0 there is none.

A fork inherits what a process was started with. So there is one of these for each Python and state
of the course's own modules, container, control group, limits, and variables that libraries read as
they load. Where none can be had, a supervisor is a process of its own, and so is its job.
"""

import fcntl
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from dlojz.jobs import forks, supervisor

FOLDER = "/tmp/dlojz-warm-{}"  # by user; a short path: a socket's is limited to 107 bytes
KEEP_S = 600.0
START_S = 5.0  # until it listens
POLL_S = 0.5  # between looks at children that have ended
LARGEST = 1 << 20  # bytes of a request
# What libraries read as they load: a fork can't have others than its parent.
READ_ONCE = re.compile(
    r"(ATEN|CUBLAS|CUDA|CUDNN|GOMP|KMP|LD|MALLOC|MKL|NCCL|NVIDIA|OMP|ONEDNN|OPENBLAS|PYTHON|"
    r"PYTORCH|TORCH|TORCHINDUCTOR|TRITON)_?"
)


def supervise(run: Path, ticket: Path, fd: int, environment: Mapping[str, str]) -> bool:
    """Have the job in `run` supervised by a fork; False if there is no process to be forked.

    fd: the descriptor that holds the ticket; the fork gets it.
    """
    if _keep_s() <= 0:
        return False
    request = {"run": str(run), "ticket": str(ticket), "environment": dict(environment)}
    try:
        with _connect(_folder() / _key(environment), environment) as connection:
            socket.send_fds(connection, [json.dumps(request).encode()], [fd])
    except OSError:  # no socket, another user's, too much to say
        return False
    return True


def _keep_s():
    try:
        return float(os.environ.get("DLOJZ_WARM_S", KEEP_S))
    except ValueError:
        return 0.0


def _folder() -> Path:
    """Where this user's sockets are: nobody else may enter."""
    folder = Path(FOLDER.format(os.getuid()))
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if (found.st_uid, found.st_mode & 0o170777) != (os.getuid(), 0o040700):
        raise PermissionError(f"{folder} is not a folder of this user alone")
    return folder


def _key(environment) -> str:
    """What must be the same for a fork to be as good as a process of its own, in short."""
    package = Path(__file__).parent.parent
    own = [p for p in package.rglob("*.py") if p.name != "dlojz.py"]  # the trainee's: jobs copy it
    same = (
        sys.executable,
        sorted((str(p), p.stat().st_mtime_ns, p.stat().st_size) for p in own),
        sorted((k, v) for k, v in environment.items() if READ_ONCE.match(k)),
        sorted(os.sched_getaffinity(0)),
        Path(sysconfig.get_path("purelib")).stat().st_mtime_ns,  # of what was installed last
        sorted(os.readlink(p) for p in Path("/proc/self/ns").iterdir()),  # the container
        Path("/proc/self/cgroup").read_text(),
        Path("/proc/self/limits").read_text(),
        re.findall(r"^Umask.*", Path("/proc/self/status").read_text(), re.M),
    )
    return hashlib.sha256(repr(same).encode()).hexdigest()[:16]


def _connect(path: Path, environment) -> socket.socket:
    """A connection to the process that listens there, which is started if there is none."""
    end, server = time.monotonic() + START_S, None
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(str(path))
            return connection
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
        if time.monotonic() > end or (server and server.poll()):  # 0: another was faster
            raise TimeoutError(f"nobody listens at {path}")
        if not server:
            server = subprocess.Popen(
                [sys.executable, "-P", "-u", "-m", "dlojz.jobs.warm", str(path)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a notebook's interrupt or end does not reach it
            )
        time.sleep(0.02)


# The process that is forked ----------------------------------------------------------------


def serve(path: Path) -> tuple[dict, int]:
    """Fork for each request, and return it with the ticket's descriptor; at the end, exit."""
    lock = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit()  # somebody was faster
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(str(path))
    listening.listen(128)
    with suppress(Exception):  # a job says so itself
        forks.prepare()
    listening.settimeout(POLL_S)
    asked = time.monotonic()
    while True:
        if _reap():  # as long as a job runs
            asked = time.monotonic()
        if time.monotonic() - asked > _keep_s():
            path.unlink(missing_ok=True)  # those that are connected already are served
            listening.setblocking(False)
            asked = float("inf")
        descriptors = []
        try:
            connection, _ = listening.accept()
        except TimeoutError:
            continue
        except BlockingIOError:
            os._exit(0)  # at once: the lock keeps others from listening
        with connection, suppress(OSError):
            connection.settimeout(POLL_S)
            message, descriptors, *_ = socket.recv_fds(connection, LARGEST, 1)
        if not descriptors:  # it was killed or stopped before it could ask
            continue
        if os.fork() == 0:
            listening.close()
            os.close(lock)
            return json.loads(message), descriptors[0]
        os.close(descriptors[0])
        if asked != float("inf"):
            asked = time.monotonic()


def _reap() -> bool:
    """Is a child alive? Those that have ended are let go."""
    with suppress(ChildProcessError):
        while True:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return True
    return False


def main():
    """Serve; in a fork, be a supervisor; in a fork of that one, be the job."""
    told, ticket_fd = serve(Path(sys.argv[1]))
    os.setsid()
    run = Path(told["run"])
    with (run / "supervisor.txt").open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.clear()
    os.environ.update(told["environment"])
    try:
        supervisor.supervise(run, Path(told["ticket"]))
    except supervisor.BecomeJob as job:
        argv, processes = job.argv, job.processes
        os.close(ticket_fd)  # the supervisor holds it
    else:
        forks.leave_with(0)
        return
    forks.run(argv, processes)


if __name__ == "__main__":
    main()
