"""The start of a training program under watch, without an edit: see `dlojz.watch.observer`.

`dlojz watch "train.py --epochs 1"` puts a file beside the program that calls `run`.
"""

import runpy
import sys

from dlojz.watch import observer


def run(path):
    """Run a program in this process, as Python would, with the flags in sys.argv."""
    sys.argv[0] = str(path)
    seen = observer.observe()
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as ending:
        seen.end(ending.code in (None, 0))
        raise
    except BaseException:
        seen.flush()  # the log's own hook says how it ended
        raise
    seen.end()
