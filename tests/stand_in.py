"""A stand-in for Python in the tests' jobs ($DLOJZ_PYTHON): a client of tests/forking.py.

It has the server fork a child that becomes the program, passes on signals and ends as the child
ends. What does not import torch, or has other variables that libraries read as they load, is run by
the real Python, in the client's place.

An experiment that a notebook submits runs once in a session. The same program with the same flags,
submitted by another notebook, has its files: the exercise's notebook and the solved one differ in
the trainer, and not in the experiments.

It begins once for each job, so it imports next to nothing: with json, re, signal and the like it
would take four times as long.
"""

import _signal as signal
import _socket as socket
import marshal
import os
import sys
import zlib

TORCHRUN = ["-m", "torch.distributed.run"]
KERNEL = ["-m", "ipykernel_launcher"]
PROGRAMS = (
    "dlojz.chapters.n09b_modes.measuring",
    "dlojz.estimate.estimate",
)  # modules of ours that are run
# How a line begins of a script that is forked.
FORKED = (b"# forked", b"import torch", b"from torch", b"import dlojz", b"from dlojz")
# What libraries read as they load: a fork can't have others than its parent.
READ_ONCE = (
    *("ATEN", "CUBLAS", "CUDA", "CUDNN", "GOMP", "KMP", "LD", "MALLOC", "MKL", "NCCL", "NVIDIA"),
    *("OMP", "ONEDNN", "OPENBLAS", "PYTHON", "PYTORCH", "TORCH", "TRITON"),
)
# All read the first, and later; torch sets the other itself.
NOT_ONCE = ("PYTHONUNBUFFERED", "TORCHINDUCTOR_CACHE_DIR", "TORCH_NCCL_ASYNC", "TORCHELASTIC")
# Where experiments' files are kept: only jobs of notebooks have it.
KEPT = "DLOJZ_TESTS_KEPT"
EXPERIMENT = b'"command": [\n  "dlojz/chapters/'  # in job.json
# What a launcher writes into a run's folder.
LAUNCHERS = ("job.json", "state.json", "keeper.json", "keeper.txt", ".reserve", "trainer.py")
SAID = ("stdout.txt", "stderr.txt")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def address(folder: str, environment, program=b"") -> str:
    """The socket of the server whose forks are as good as a process with this environment."""
    later = "CUDA_VISIBLE_DEVICES"  # read as CUDA begins, which is in the fork
    same = sorted((k, v) for k, v in read_once(environment).items() if k != later)
    text = repr(same).encode() + program
    return f"{folder}/{zlib.crc32(text):08x}{zlib.adler32(text):08x}"


def read_once(environment) -> dict:
    """The variables that libraries read as they load."""
    names = [k for k in environment if k.startswith(READ_ONCE) and not k.startswith(NOT_ONCE)]
    return {name: environment[name] for name in names}


def client(python: str, folder: str):
    """Be `python ARGUMENTS`: in a fork of the server, if it has one for this program."""
    argv = sys.argv[1:]
    kept = _kept(argv)
    if kept and os.path.isdir(kept):
        _bring(kept)
        os._exit(0)
    connection = _connect(argv, address(folder, os.environ))
    if connection is None:
        os.execv(python, [python, *argv])
    request = {"argv": argv, "environment": dict(os.environ), "cwd": os.getcwd()}
    request["client"] = os.getpid()
    request["umask"] = os.umask(0)
    descriptors = b"".join(number.to_bytes(4, sys.byteorder) for number in range(3))
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until the child that they go to is known
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
    connection.sendmsg([marshal.dumps(request)], rights)
    child = int(connection.recv(64))
    for number in SIGNALS:
        signal.signal(number, lambda number, _: _kill(child, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    code = int(connection.recv(64) or -9)
    if kept and code == 0:
        _keep(kept)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != 9 else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def _kept(argv):
    """Return where the files of this run are kept, or None: it is no experiment of a notebook."""
    folder, run = os.environ.get(KEPT), os.environ.get("DLOJZ_RUN")
    if not folder or not run or EXPERIMENT not in _read(f"{run}/job.json"):
        return None
    words = repr(argv)
    for place in (run, os.environ["DLOJZ_ROOT"], os.environ["DLOJZ_DATA"]):
        words = words.replace(place, "")  # each test process has its own
    return address(folder, os.environ, words.encode() + _read(f"{run}/trainer.py"))


def _bring(kept):
    """Put the files of an earlier run into this one's folder, and say what it said."""
    run = os.environ["DLOJZ_RUN"]
    _copy(kept, run, without=SAID)
    for descriptor, name in enumerate(SAID, 1):
        os.write(descriptor, _read(f"{kept}/{name}"))


def _keep(kept):
    own = f"{kept}.{os.getpid()}"
    os.mkdir(own)
    _copy(os.environ["DLOJZ_RUN"], own, without=LAUNCHERS)
    try:
        os.rename(own, kept)
    except OSError:  # the same experiment ran at the same time
        return


def _copy(source, target, without):
    names = [f"{source}/{name}" for name in os.listdir(source) if name not in without]
    if names and os.spawnvp(os.P_WAIT, "cp", ["cp", "-r", *names, target]):
        raise OSError(f"{source} could not be copied")


def _read(path):
    with open(path, "rb") as file:
        return file.read()


def _connect(argv, path):
    if not _wants_torch(argv):
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(path)
    except OSError:
        return None
    return connection


def _wants_torch(argv):
    if argv[:2] == TORCHRUN:
        argv = [word for word in argv if word.endswith(".py")]
    elif argv[:1] == ["-m"]:
        return argv[:2] == KERNEL or argv[1] in PROGRAMS
    argv = argv[argv[:1] == ["-P"] :]
    argv = argv[argv[0].endswith("/dlojz/jobs/forks.py") :]  # which runs the script that follows
    try:
        with open(argv[0], "rb") as file:
            return any(map(_is_of_torch, file))
    except (OSError, IndexError):
        return False


def _is_of_torch(line):
    """`import torchvision` is not of torch."""
    name = next((begin for begin in FORKED if line.startswith(begin)), None)
    return name is not None and not line[len(name) : len(name) + 1].replace(b"_", b"a").isalnum()


def _kill(pid, number):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
