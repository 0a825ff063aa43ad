"""The race, from a terminal: made, entered, run by its organiser, and shown."""

import argparse
import json
import os
import shlex
import sys
from pathlib import Path

from dlojz.classroom import share

TEXT = """\
  dlojz race new races/mine --seconds 20
  dlojz race enter races/mine starter "dlojz/dlojz.py --model resnet18 --image-size 64 -e 2"
  dlojz race run races/mine
  dlojz race board races/mine --png board.png
  dlojz race diff races/mine starter

An entry is a trainer and its flags. `dlojz race run` runs it as the organiser's own process, so an
entry of another user is not run without --yes: read it first, with `dlojz race diff`. docs/race.md
has the rules. To let others enter: chmod 1777 races/mine/entries
"""


def add(parser):
    """Add the actions of `dlojz race` to its parser."""
    parser.epilog, parser.formatter_class = TEXT, argparse.RawDescriptionHelpFormatter
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    def action(name, call, summary):
        about = summary[0].upper() + summary[1:]
        sub = actions.add_parser(name, help=summary, description=about)
        sub.set_defaults(run=call)
        sub.add_argument("folder", help="folder of the race")
        return sub.add_argument

    arg = action("new", _new, "make the folder of a race")
    arg("--data", help="images to train on, made by `dlojz data` (default: the course's)")
    arg("--seconds", type=int, default=20, help="budget of a run, from start to end (default: 20)")
    arg("--joules", type=int, help="budget of a run's GPU (default: none)")
    arg("--runs", type=int, help="runs of each entry in a round (default: 5, on a CPU 3)")
    arg("--judged", type=int, default=50, help="images of each class that judge (default: 50)")

    arg = action("enter", _enter, "enter a trainer and its flags")
    arg("name", help="name of the entry: small letters, digits and -")
    arg("command", help='"dlojz/dlojz.py --model resnet18 -e 2", in quotes')
    arg("--as", dest="by", metavar="NAME", help="a pseudonym (default: that of `dlojz share`)")

    arg = action("run", _run, "run and judge the entries that wait; resumes after an interruption")
    arg("--yes", action="store_true", help="also run those of other users: you have read them")
    arg("--again", action="store_true", help="then one more round of the best and its ties")

    arg = action("board", _board, "show the places, and why they are so")
    arg("--png", type=Path, help="draw the board into this file")
    arg("--json", action="store_true", help="print JSON, for programs")

    arg = action("diff", _diff, "show the lines in which an entry differs")
    arg("name", help="name of the entry")
    arg("other", nargs="?", default="", help="another entry (default: the course's starter)")


def _new(args):
    from dlojz import race

    made = race.new(args.folder, args.data, args.seconds, args.joules, args.runs, args.judged)
    folder = shlex.quote(args.folder)
    few = "; 3 are few: a small gain stays a tie" if made.runs < 5 else ""
    print(f"{args.folder}: {made.runs} runs of {made.seconds} s for each entry in a round{few}")
    print(f'next: dlojz race enter {folder} starter "dlojz/dlojz.py --model resnet18 -e 2"')


def _enter(args):
    from dlojz import race

    shared = share.consent_of() if args.by is None else None
    by = shared.pseudonym if shared else args.by or ""
    made = race.enter(args.folder, args.name, args.command, by)
    print(f"{made.name} is entered: {made.folder}, sha256 {made.sha256[:16]}")


def _run(args):
    from dlojz import race

    others = [entry for entry in race.waiting(args.folder) if entry.owner != os.getuid()]
    try:
        race.run(args.folder, args.again, [entry.sha256 for entry in others if args.yes])
    except KeyboardInterrupt:
        told = "the run in progress was cancelled, and results are kept: `dlojz race run` goes on"
        print(f"dlojz: interrupted; {told}", file=sys.stderr)
        return 130
    print(race.board(args.folder))
    print(race.told(args.folder))
    if others and not args.yes:
        names = ", ".join(entry.name for entry in others)
        print(f"of other users, and not run: {names}; read them with `dlojz race diff`, then --yes")
    return 0


def _board(args):
    from dlojz import race

    table = race.board(args.folder)
    if args.json:
        print(json.dumps([dict(zip(table.head, row, strict=True)) for row in table.rows], indent=1))
    else:
        print(table)
    if args.png:
        race.plot_board(args.folder)[0].figure.savefig(args.png, dpi=150)


def _diff(args):
    from dlojz import race

    print(repr(race.diff(args.folder, args.name, args.other)))
