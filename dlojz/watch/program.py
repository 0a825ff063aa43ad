"""The start of a training program under watch, without an edit: see `dlojz.watch.observer`.

    DLOJZ_RUN=folder python -m dlojz.watch.program train.py --epochs 1

`dlojz watch "train.py --epochs 1"` makes a job of it.
"""

import runpy
import sys
from pathlib import Path

from dlojz.watch import observer


def run(path):
    """Run a program in this process, as Python would; sys.argv has its flags behind one word."""
    sys.argv[0] = str(path)
    if (home := str(Path(path).resolve().parent)) != sys.path[0]:
        sys.path.insert(0, home)
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


def main():
    """Run the program that is named first, with the arguments behind it."""
    del sys.argv[0]
    sys.path.pop(0)  # the current folder, which `python -m` has put there
    run(sys.argv[0])


if __name__ == "__main__":
    main()
