"""Any training program under watch, without an edit: see `dlojz.watch.observer`.

DLOJZ_RUN=folder python -m dlojz.watch.program train.py --epochs 1
"""

import runpy
import sys
from pathlib import Path

from dlojz.watch import observer


def main():
    """Run the program that is named first, with the arguments behind it, as Python would."""
    del sys.argv[0]
    path = sys.argv[0]
    sys.path[0] = str(Path(path).resolve().parent)
    seen = observer.observe()
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as ending:
        seen.end(ending.code in (None, 0))
        raise
    except BaseException:
        seen.flush()  # the log's own hook says how it ended
        raise
    seen.end()


if __name__ == "__main__":
    main()
