"""Run solved notebooks whole on this machine, and stamp their cards with it.

python tools/verify_notebooks.py 03 --minutes 9     # stops in time, and says with which cell
python tools/verify_notebooks.py 03 --from 17       # to go on

Beside torch it needs nbclient and a kernel. A notebook that ran whole, and whose checks passed, is
noted in reference/verified.json, also if its cells took long, as beside other jobs; then
`python tools/notebooks.py write`.
"""

import argparse
import json
import sys
import time

from dlojz import course
from dlojz.classroom import rehearse


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebook", nargs="+", help="01, 02b, ...")
    parser.add_argument("--from", dest="begin", type=int, default=0, metavar="CELL")
    parser.add_argument("--minutes", type=float, help="stop in time")
    args = parser.parse_args()
    end = time.monotonic() + 60 * args.minutes if args.minutes else None
    failed = False
    for path in map(rehearse.find, args.notebook):
        print(path.stem)
        found = rehearse.rehearsed(path, args.begin, end)
        print(rehearse.report([found]))
        failed |= bool(rehearse.problems(found))
        if not rehearse.failures(found):
            stamp(found)
    sys.exit(failed)


def stamp(found):
    """Note that a notebook ran whole on this hardware.

    It replaces an older note, and a processor's note replaces any processor's.
    """
    file = course.course_root() / "reference" / "verified.json"
    verified = json.loads(file.read_text())
    now = {name: found[name] for name in ("on", "torch", "date")}
    now["minutes"] = round(sum(cell["seconds"] for cell in found["cells"]) / 60, 1)
    others = [run for run in verified.get(found["notebook"], []) if kind(run) != kind(now)]
    verified[found["notebook"]] = [now, *others]
    course.write_atomically(file, json.dumps(verified, indent=1, sort_keys=True) + "\n")


def kind(run) -> str:
    """Return the GPU of a run, or "CPU"."""
    return run["on"] if rehearse.has_gpu(run["on"]) else "CPU"


if __name__ == "__main__":
    main()
