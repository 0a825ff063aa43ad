"""The server of forks for the tests' jobs, which need not import torch each time.

Hundreds of small trainings would each spend seconds of a core on it. So the session starts a
server, `forking.py SOCKET`, which imports torch once; `stand_in.client` is what the keeper runs as
Python, and has the server fork a child that becomes the training. The kernels of notebooks are
forks, too. Nothing of it is in the package.
"""

import contextlib
import ctypes
import gc
import importlib.util
import json
import marshal
import os
import select
import signal
import socket
import subprocess
import sys
import time

from stand_in import KERNEL, TORCHRUN

LARGEST = 1 << 20  # bytes of a request
# Images of the synthetic set, a tenth of ImageNet's: to shuffle all of those takes a small training
# a fifth of its time.
FEWER = {"train": 128_117, "val": 5_000}
# Blocks of vit_tiny, a quarter of DeiT's, and of each stage of a ShuffleNet, one of each kind, and
# of a ResNet-18: most of a small training is what each block costs, whatever its size. Three
# quarters of a ShuffleNet's weights are its classifier's, which a check keeps and compares: it gets
# a quarter of the features.
BLOCKS, STAGE, RESNET_STAGE, FEATURES = 3, 2, 1, 256

# The server --------------------------------------------------------------------------------------


def serve(path: str):
    """Fork for each client; returns in each fork, with what it shall be."""
    from dlojz.jobs import forks, processes

    processes.end_with_parent(signal.SIGKILL)  # pytest
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(path)
    listening.listen(64)  # who asks before all is imported waits
    gc.disable()  # what is imported stays
    if not os.path.exists("/dev/nvidiactl"):
        # What follows imports Triton, too, whose own functions are interpreted from then on.
        os.environ["TRITON_INTERPRET"] = "1"
    forks.prepare()
    import torch._inductor.compile_fx  # noqa: F401  the first compilation would, for 0.7 s

    from dlojz.training import chronometer, conductor, flags  # noqa: F401
    from dlojz.watch import evidence  # noqa: F401

    load_in_forks()
    no_cache_flush()
    import_for_notebooks()
    gc.freeze()  # all these, too
    gc.enable()
    shorten()
    clients = {}  # child: its client's connection
    while True:
        waiting, _, _ = select.select([listening, *clients.values()], [], [], 0.02)
        for child, connection in list(clients.items()):
            if connection in waiting:  # the client was killed
                _kill_group(child)
        _tell_of_the_dead(clients)
        if listening not in waiting:
            continue
        connection, _ = listening.accept()
        message, descriptors, *_ = socket.recv_fds(connection, LARGEST, 3)
        if len(descriptors) < 3:  # it was killed before it could ask
            continue
        if (child := os.fork()) == 0:
            listening.close()
            for other in (connection, *clients.values()):
                other.close()
            return marshal.loads(message), descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        clients[child] = connection
        _send(connection, child)


def shorten():
    """Make data sets and models smaller, in all forks."""
    from torchvision.models.resnet import ResNet
    from torchvision.models.shufflenetv2 import ShuffleNetV2

    from dlojz.training import data, models

    data.Synthetic.LENGTHS = FEWER
    models.LARGER["vit_tiny"] = models.LARGER["vit_tiny"]._replace(layers=BLOCKS)
    ShuffleNetV2.__init__ = shorter(ShuffleNetV2.__init__)
    ResNet.__init__ = shorter_resnet18(ResNet.__init__)


def shorter(usual):
    """ShuffleNetV2's __init__, with fewer blocks in each stage, and fewer features at the end."""

    def begin(self, stages, channels, *more, **named):
        usual(self, [STAGE] * len(stages), [*channels[:-1], FEATURES], *more, **named)

    return begin


def shorter_resnet18(usual):
    """ResNet's __init__, with fewer blocks in each stage of a ResNet-18."""

    def begin(self, block, layers, *more, **named):
        layers = [RESNET_STAGE] * 4 if list(layers) == [2, 2, 2, 2] else layers
        usual(self, block, layers, *more, **named)

    begin.usual = usual
    return begin


def load_in_forks():
    """Have Inductor try the processor's instructions in forks of this process.

    It would start Python six times, to load a small library each, after importing torch. In
    torch 2.15 it does so without torch, which is as quick.
    """
    from torch._inductor import cpu_vec_isa

    if hasattr(cpu_vec_isa.VecISA, "_probe_load"):
        return

    class InForks:
        DEVNULL = subprocess.DEVNULL

        @staticmethod
        def check_call(command, cwd, **more):
            program = command[-1]
            if (pid := os.fork()) == 0:
                try:
                    os.chdir(cwd)
                    exec(program, {})
                    os._exit(0)
                finally:
                    os._exit(1)
            if status := os.waitpid(pid, 0)[1]:  # an instruction that there is not kills it
                raise subprocess.CalledProcessError(os.waitstatus_to_exitcode(status), command)

    cpu_vec_isa.subprocess = InForks


def no_cache_flush():
    """Have Dynamo not time its guards, for which it flushes the processor's caches."""
    from torch._dynamo import guards

    guards.profile_guard_manager = lambda *manager: 0.0


def import_for_notebooks():
    """Import what each notebook's kernel would, and what the notebooks do."""
    os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # the debugger would say so
    import ipykernel.debugger
    import ipykernel.ipkernel
    import ipykernel.kernelapp
    import ipykernel.zmqshell  # noqa: F401
    import ipywidgets  # noqa: F401
    import matplotlib.pyplot as plt
    import scipy.stats  # noqa: F401
    from IPython.core import pylabtools

    import dlojz.check
    import dlojz.figures.report
    import dlojz.widgets  # noqa: F401

    ask_torch_in_forks()
    # A figure is drawn where it is shown, once: pyplot would draw it at the end of its cell, too,
    # and the inline backend to see how much of it there is.
    plt._draw_all_if_interactive = lambda: None
    usual = pylabtools.print_figure
    pylabtools.print_figure = lambda *figure, bbox_inches, **more: usual(
        *figure, bbox_inches=None, **more
    )


def ask_torch_in_forks():
    """Have the doctor ask torch in a fork: it does so in a process of its own."""
    from dlojz.machine import facts

    facts.torch_build.__defaults__ = (os.environ["DLOJZ_PYTHON"], 60)


def _tell_of_the_dead(clients):
    for child in list(clients):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            _kill_group(child)  # workers of a training that was killed
            connection = clients.pop(child)
            _send(connection, os.waitstatus_to_exitcode(status))
            connection.close()


def _send(connection, number):
    with contextlib.suppress(OSError):
        connection.send(str(number).encode())


def _kill_group(child):
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)


def become(request, descriptors):
    """Be what a client asked for, from here to the end of the process."""
    from dlojz.course import presets
    from dlojz.jobs import forks

    os.setsid()
    _be_on_the_host_of(request["client"])
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.umask(request["umask"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    presets.gpus.cache_clear()
    argv = request["argv"]
    if argv[:2] == KERNEL:
        _be_a_kernel(argv[2:])
    elif argv[:2] == TORCHRUN:
        count = next(int(w.split("=")[1]) for w in argv if w.startswith("--nproc-per-node="))
        _run_torchrun(argv[2:], count)
    elif argv[0] == "-m":  # of ours, and what it says of a model is compared
        from torchvision.models.resnet import ResNet

        ResNet.__init__ = ResNet.__init__.usual
        sys.path.insert(0, os.getcwd())
        forks._run(importlib.util.find_spec(argv[1]).origin, argv[2:])
    elif argv[0] == "-P":
        forks._run(argv[1], argv[2:])
    else:
        forks.run_script(argv[0], argv[1:])


def _be_a_kernel(argv):
    """Be the kernel of a notebook, which draws into the notebook."""
    import ipykernel_launcher
    import matplotlib as mpl

    from dlojz.jobs import forks

    # matplotlib reads it as it is imported, and a kernel sets it before that.
    mpl.rcParams["backend"] = os.environ.get(
        "MPLBACKEND", "module://matplotlib_inline.backend_inline"
    )
    forks._run(ipykernel_launcher.__file__, argv)


def _be_on_the_host_of(client):
    """Take the client's host name: each node of the tests' Slurm has its own."""
    theirs, ours = (f"/proc/{process}/ns/uts" for process in (client, "self"))
    if os.stat(theirs).st_ino == os.stat(ours).st_ino:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    with open(theirs) as namespace:
        if libc.setns(namespace.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")


def _run_torchrun(argv, count):
    """Be torchrun: its processes are forks of this one.

    They are forked before it begins, and wait: later it has threads, and handlers of signals.
    """
    from dlojz.jobs import forks

    children = []
    for _ in range(count):
        told, tell = os.pipe()
        if (pid := os.fork()) == 0:
            for other in (tell, *(child.tell for child in children)):
                os.close(other)  # so that the pipe closes when torchrun ends
            return _wait_to_be_told(told)
        os.close(told)
        children.append(_Child(pid, tell))

    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    SubprocessHandler._popen = lambda _, args, env: children.pop(0).begin(args, env)
    return forks._run(torchrun.__file__, argv)  # without its folder on the path


def _wait_to_be_told(told):
    from dlojz.jobs import forks, processes

    processes.end_with_parent(signal.SIGKILL)
    os.setsid()  # torchrun ends a group of processes
    with os.fdopen(told) as file:
        message = file.read()
    if not message:  # torchrun has ended
        os._exit(0)
    (_, _, file, *flags), environment = json.loads(message)
    os.environ.clear()
    os.environ.update(environment)
    forks.run_script(file, flags)


class _Child:
    """A process that waits; as much of a Popen as torchrun asks for."""

    def __init__(self, pid, tell):
        self.pid, self.tell, self.returncode = pid, tell, None

    def begin(self, args, environment):
        """Make it `python -u script flags`."""
        with os.fdopen(self.tell, "w") as file:
            json.dump((args, environment), file)
        return self

    def poll(self):
        if self.returncode is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(ended[1])
        return self.returncode

    def wait(self, timeout=float("inf")):
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a fork", timeout)
            time.sleep(0.02)
        return self.returncode


if __name__ == "__main__":
    sys.path.pop(0)  # the tests' folder: a fork is no test
    become(*serve(sys.argv[1]))
