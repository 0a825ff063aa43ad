"""To be a training in a process that was forked, and not started.

Importing torch and torchvision takes seconds of a core. A process that has done so can be forked
for one training after the other: `dlojz.warm` for jobs, `dlojz.series` for the runs of one job.
"""

import atexit
import gc
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

_exit_code = None  # of a fork, once it is known


@cache
def prepare():
    """Import what each training would, before the first fork. Raises ImportError."""
    atexit.register(_leave)  # the first that is registered is the last that is called
    import torch._dynamo  # noqa: F401  the first optimizer would
    import torchvision  # noqa: F401

    # The collector leaves alone what was imported: each fork would copy all of that memory, by
    # touching it, and look through it for the tensors that it kept.
    gc.freeze()


def run_script(file: str, flags: Sequence[str]):
    """Run a script as Python itself would, from here to the end of the process."""
    sys.argv = [file, *flags]
    sys.path.insert(0, str(Path(file).parent))
    try:
        runpy.run_path(file, run_name="__main__")
    except SystemExit as ending:
        code = ending.code
        leave_with(0 if code is None else code & 0xFF if isinstance(code, int) else 1)
        raise  # Python prints what is no number
    except (Exception, KeyboardInterrupt) as error:
        own = error.__traceback__
        while own and own.tb_frame.f_code.co_filename != file:
            own = own.tb_next  # frames of this file and of runpy would only be in the way
        own = own or error.__traceback__
        sys.excepthook(type(error), error.with_traceback(own), own)
        sys.exit(leave_with(-signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1))
    leave_with(0)


def leave_with(code: int) -> int:
    """Make this the exit code of a fork, when it has come to its end; returns it.

    Below 0 it is a signal that the fork dies by.
    """
    global _exit_code
    _exit_code = code
    return code


def _leave():
    """Skip the rest of what Python does at its end: a fork would copy all modules to clear them.

    Half a second for each, with torch among them. Threads have ended by now, and what others have
    registered to be called at the end was called.
    """
    if _exit_code is None:
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if _exit_code < 0:  # whoever waits for an interrupted Python is told of the signal
        signal.signal(-_exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -_exit_code)
    os._exit(_exit_code)
