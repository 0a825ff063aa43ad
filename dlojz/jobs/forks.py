"""Forked processes that run a training script.

Importing torch and torchvision takes seconds of a core. A process that has imported them can be
forked for one run after the other: `dlojz.jobs.several` does so for the runs of one job.
"""

import atexit
import builtins
import faulthandler
import gc
import io
import os
import signal
import sys
import tempfile
import types
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

STACK = signal.SIGUSR2  # has a process of a series write where it stands
_exit_code = None  # of a fork or a fresh process, once it is known


@cache
def prepare():
    """Import what each run would, before the first fork. Raises what an import raises."""
    atexit.register(_leave)  # registered first, so called last
    import torch.distributed.checkpoint.state_dict  # dlojz.training.checkpoint would
    import torchvision.transforms.v2  # noqa: F401

    import dlojz.runs.log  # noqa: F401

    torch.compiler.list_backends()  # imports what the first optimizer would, and asks no GPU
    # The collector then skips what was imported: each fork would copy that memory by touching it,
    # and search all of it for tensors that are still alive.
    gc.freeze()


def run_script(file: str, flags: Sequence[str]):
    """Run a script as Python itself would, from here to the end of the process."""
    sys.path.insert(0, str(Path(file).parent))
    _run(file, flags)


def begin_anew(file: str, flags: Sequence[str]):
    """Run a script in this process, as a Python that has imported nothing yet."""
    python = os.environ.get("DLOJZ_PYTHON", sys.executable)
    os.execv(python, [python, "-P", __file__, file, *flags])


def _run(file, flags):
    """Behave like `python -P file flags`, up to the exit code."""
    for finalizer in weakref.finalize._registry:
        finalizer.atexit = False  # its maker is the parent: torch would take 0.04 s to clear up
    tempfile.tempdir = None  # TMPDIR was read at the import
    if random := sys.modules.get("numpy.random"):
        random.seed()  # otherwise all forks draw the same numbers
    sys.argv = [file, *flags]
    # Not runpy's module, which is gone when the script ends: threads and exit handlers need it.
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(__file__=file, __cached__=None, __builtins__=builtins)
    try:
        exec(compile(Path(file).read_bytes(), file, "exec", dont_inherit=True), main.__dict__)
    except SystemExit as ending:
        code = ending.code
        leave_with(0 if code is None else code & 0xFF if isinstance(code, int) else 1)
        raise  # Python prints a code that is not a number
    except (Exception, KeyboardInterrupt) as error:
        own = error.__traceback__
        while own and own.tb_frame.f_code.co_filename != file:
            own = own.tb_next  # frames of this file would only distract
        own = own or error.__traceback__
        sys.excepthook(type(error), error.with_traceback(own), own)
        sys.exit(leave_with(-signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1))
    leave_with(0)


def leave_with(code: int) -> int:
    """Make this the exit code of a fork when it ends; returns it.

    Below 0 it is the signal that kills the fork.
    """
    global _exit_code
    _exit_code = code
    return code


def _leave():
    """Skip the rest of Python's shutdown, in which a fork would copy all modules to clear them.

    With torch that takes half a second per fork. By now threads have ended, and all other exit
    handlers were called.
    """
    if _exit_code is None:
        return
    left_open = [o for o in gc.get_objects() if type(o) in (io.TextIOWrapper, io.BufferedWriter)]
    for stream in (sys.stdout, sys.stderr, *left_open):
        with suppress(OSError, ValueError):
            stream.flush()
    if _exit_code < 0:  # the parent must see the signal, as of any interrupted Python
        signal.signal(-_exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -_exit_code)
    os._exit(_exit_code)


if __name__ == "__main__":
    atexit.register(_leave)
    faulthandler.register(STACK)
    run_script(sys.argv[1], sys.argv[2:])
