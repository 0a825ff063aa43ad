"""A class, from a terminal: shared and shown on a board, rehearsed and planned."""

import json
import math
import sys
import time
from pathlib import Path

from dlojz.classroom import share
from dlojz.course import presets

WATCH_S = 10  # between two looks of `dlojz class --watch`
SHARING = """\
What is shared: which notebook's predictions, quizzes, questions and checks you have done and when,
whether they were right or passed, the name of a hint, the speed-up, the numbers that you predicted
and those measured or estimated; the state and the times of your last jobs. Not shared: code, paths,
host names, your login name, the words that you typed.

Before you agree, the command shows the very file. It is written again after each answer and each
change of a job. Its name is drawn, but it is yours: those who can list the folder see its owner.
"""
CLASS = """\
A trainee is on the board who typed `dlojz share FOLDER`. To make the folder, once:

  mkdir class; chgrp instructors class; chmod 3773 class    # read by the group instructors only
  mkdir class; chmod 1777 class                             # read by all who are on the system

The first needs a group that the instructors are in; trainees need not be. Both have the sticky bit,
without which trainees could remove each other's files. Names are pseudonyms, but each file has an
owner, and `ls -l` shows it to you. The board does not; `dlojz share` says so to trainees. What is
in the folder and is not a small, well-formed file is skipped and counted. If there are too many
files, each owner's newest are read first. A clock that differs from the folder's is named.
"""


def add(command):
    """Add these commands to the parser."""
    arg = command("rehearse", _rehearse)
    arg("notebook", nargs="*", help="01, 02b, ...")
    arg("--day", type=int, help="rehearse the notebooks of this day ...")
    arg("--of", type=int, metavar="DAYS", help="... of the course in this many days")
    arg("--from", dest="begin", type=int, default=0, metavar="CELL", help="go on with this cell")
    arg("--minutes", type=float, help="stop in time, and say with which cell to go on")
    arg("--trainees", type=int, default=1, help="number of trainees who will share the devices")
    arg("--devices", type=int, help="number of GPUs that they share (default: this machine's)")

    arg = command("syllabus", _syllabus)
    arg("--days", type=int, help="only the course in this many days")
    arg("--laptop", action="store_true", help="only the two hours without a GPU, for one person")

    arg = command("share", _share, SHARING)
    arg("folder", nargs="?", help="the one that your instructor has named")
    arg("--as", dest="pseudonym", metavar="NAME", help="a pseudonym (default: one is drawn)")
    arg("--yes", action="store_true", help="agree without being asked, after a look at what it is")
    arg("--stop", action="store_true", help="share no longer, and remove what was shared")

    arg = command("class", _class, CLASS)
    arg("folder", help="folder into which the trainees share")
    arg("--notebook", metavar="NAME", help="show times in this notebook (default: where most are)")
    arg("--watch", action="store_true", help="look again every 10 seconds, until Ctrl-C")
    arg("--png", type=Path, help="draw the board into this file")
    arg("--race", metavar="RACE", help="show the board of this race below: docs/race.md")


def _rehearse(args):
    from dlojz.classroom import rehearse

    for flag, value in (("--trainees", args.trainees), ("--devices", args.devices)):
        if value is not None and value < 1:
            raise ValueError(f"{flag} {value}: expected at least 1")
    if args.minutes is not None and not 0 < args.minutes < math.inf:
        raise ValueError(f"--minutes {args.minutes:g}: expected a number of minutes above 0")
    paths, found = [rehearse.find(name) for name in _notebooks(args)], []
    if args.begin and len(paths) > 1:
        raise ValueError("--from goes on with one notebook: name only that one")
    end = time.monotonic() + 60 * args.minutes if args.minutes else None
    for path in paths:
        if end and time.monotonic() >= end:
            names = " ".join(path.stem.partition("_")[0] for path in paths[len(found) :])
            print(f"  the time is over; go on with: dlojz rehearse {names}")
            break
        print(f"{path.stem}: {path}", flush=True)
        found.append(rehearse.rehearsed(path, args.begin, end))
    print(f"\n{rehearse.report(found)}\n")
    if args.trainees > 1:
        print(rehearse.room(found, args.trainees, args.devices or len(presets.gpus()) or 1))
    print(f"outputs: {rehearse.folder()}")
    return 1 if len(found) < len(paths) or any(map(rehearse.problems, found)) else 0


def _notebooks(args):
    """Return the names of the notebooks to rehearse, of a day or one by one."""
    if (args.day is None) != (args.of is None):
        raise ValueError("--day and --of go together, as in: dlojz rehearse --day 2 --of 4")
    if bool(args.notebook) == bool(args.day is not None):
        raise ValueError("expected notebooks or a day: dlojz rehearse 01 02, or --day 2 --of 4")
    if args.notebook:
        return args.notebook
    from dlojz.classroom import syllabus

    return syllabus.notebooks(args.day, args.of)


def _syllabus(args):
    from dlojz.classroom import syllabus

    if args.laptop:
        hours = syllabus.laptop()
        print(f"{hours.title}\n\n{syllabus.timetable(hours)}")
        return 0
    wanted = {args.days: syllabus.of(args.days)} if args.days is not None else syllabus.read()
    wrong = []
    for days, plan in wanted.items():
        for number, day in enumerate(plan, 1):
            print(f"Day {number} of {days}: {day.title}\n\n{syllabus.timetable(day)}\n")
        wrong += [f"{days} days: {problem}" for problem in syllabus.problems(plan)]
    print("\n".join(wrong) or f"all of it fits; to change it, edit {syllabus.file()}")
    return 1 if wrong else 0


def _share(args):
    now = None if args.stop else share.consent_of()
    if args.stop:
        removed = share.stop(args.folder)
        none = "nothing was shared from here; `dlojz share --stop FOLDER` looks for a file of yours"
        none = f"no file of yours is shared in {args.folder}" if args.folder else none
        print(f"{removed} is removed; nothing is shared now" if removed else none)
    elif now and now.stopped:
        raise ValueError(f"{now.path} may be there still: `dlojz share --stop` removes it")
    elif now and args.folder:
        raise ValueError(f"you share already, as {now.pseudonym}: first `dlojz share --stop`")
    elif now:
        print(f"{now.path} is shared, as {now.pseudonym}; `dlojz share --stop` ends it:\n")
        print(share.preview(now))
    elif not args.folder:
        print("nothing is shared; `dlojz share FOLDER` shows what would be, and asks")
    else:
        return _ask_to_share(share.plan(args.folder, args.pseudonym), args.yes)
    return 0


def _ask_to_share(consent, agreed):
    print(f"This is what you would share as {consent.pseudonym}, in {consent.path}:\n")
    print(share.preview(consent))
    print(f"{SHARING.partition(chr(10) * 2)[0]}\n")
    print(f"It can be read by {share.readers(consent.folder)}.")
    print(f"Those who can list {consent.folder} see that you own the file.")
    for note in share.dangers(consent.folder):
        print(f"note: {note}")
    if not agreed and sys.stdin and sys.stdin.isatty():
        answer = input("Share this, and what you do from now on? [y/N] ")
        agreed = answer.strip().lower() in ("y", "yes")
    if not agreed:
        print("Nothing is shared. To agree, answer y, or add --yes.")
        return 1
    share.begin(consent)
    print(
        "Shared. `dlojz share` shows it again; `dlojz share --stop` ends it and removes the file."
    )
    return 0


def _class(args):
    from dlojz.classroom import board

    while True:
        found = board.open_class(args.folder)
        if args.png:
            print(f"wrote {board.save_board(found, args.png)}", file=sys.stderr)
        text = _text(board, found, args)
        clear = "\033[H\033[J" * (args.watch and sys.stdout.isatty())
        print(f"{clear}{text}", flush=True)
        if not args.watch:
            return 0
        time.sleep(WATCH_S)


def _text(board, found, args):
    from dlojz.check import exercise

    if args.json:
        return json.dumps(board.to_dict(found), indent=1)
    tables = (board.overview(found), board.failing(found, exercise.nudges()), board.jobs(found))
    tables += (board.parts(found, args.notebook), board.calibration(found))
    shown = [repr(table) for table in tables if len(table)] or [board.NOBODY]
    if args.race:
        from dlojz import race

        shown.append(repr(race.board(args.race)))
    return "\n\n".join([board.notes(found), *shown])
