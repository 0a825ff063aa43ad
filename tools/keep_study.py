"""Keep a study, whose trials are jobs, as one log: `python tools/keep_study.py FILE [STUDY]`.

The log names the command in a terminal that makes such a study, and no machine.
"""

import argparse
import json
from pathlib import Path

from dlojz import course
from dlojz.chapters import n13_search as n13
from dlojz.chapters.n13_search import kept


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path, help="such as reference/h100/13-study.jsonl")
    parser.add_argument("study", nargs="?", help="its name; by default the newest")
    args = parser.parse_args()
    lines = [json.dumps(event) + "\n" for event in kept.events(n13.find(args.study))]
    course.write_atomically(args.file, "".join(lines))


if __name__ == "__main__":
    main()
