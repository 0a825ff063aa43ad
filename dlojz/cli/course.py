"""The course, from a terminal: verdicts, progress, and the trainer from step to step."""

import json
import shutil
import sys
from textwrap import TextWrapper

from dlojz import course, launch
from dlojz.cli import jobs
from dlojz.course import progress, updates
from dlojz.table import harmless


def add(command):
    """Add these commands to the parser."""
    runs = {"check": _check, "solution": _solution, "diff": _diff, "catch-up": _catch_up}
    args = {name: command(name, run) for name, run in runs.items()}
    for arg in args.values():
        arg("step", help="01, 02, ...")
    args["diff"]("--job", help="compare this job's trainer instead of yours")
    arg = args["check"]
    arg("job", nargs="?", help="its number (default: the last submission)")
    arg("--pairs", type=int, help="runs before and after (default: 6 where a gain is required)")
    arg("--hint", action="store_true", help="show a hint on what fails, a larger one each time")

    command("progress", _progress)

    arg = command("restore", _restore)
    arg("file", nargs="?", help="its name (default: the newest that differs from yours)")
    arg("--list", action="store_true", help="only show the saved files")

    arg = command("update", _update)
    arg("--last", action="store_true", help="only show what the last update did")
    arg("--take", metavar="FILE", help="replace a file by the course's; yours is saved first")


def _check(args):
    from dlojz.check import check

    course.course_root()  # has the solutions; without it a check is refused at once
    # A typo is reported before anything is submitted.
    notebooks = {course.chapter(name)[1:]: name for name in course.PREPARED}  # 04c_slow: 04_slow
    step = notebooks.get(args.step, args.step)
    step = step if step in course.PREPARED else course.step(step)
    verdict = check(step, args.job or jobs.last(), args.pairs)
    print(json.dumps(verdict.to_dict(), indent=1) if args.json else _wrapped(repr(verdict)))
    if args.hint:
        print(harmless(repr(verdict.hint(climb=True)), keep="\n\t"))
    return 0 if verdict.passed else 1


def _wrapped(text):
    """Return a text whose long lines go on below their beginning, if it goes to a terminal."""
    if not sys.stdout.isatty():
        return text
    width = max(40, shutil.get_terminal_size().columns)
    wrapper = TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    found = []
    for line in text.splitlines():
        wrapper.subsequent_indent = " " * (len(line) - len(line.lstrip()) + 2)
        found += wrapper.wrap(line)
    return "\n".join(found)


def _progress(args):
    print(json.dumps(progress.items(), indent=1) if args.json else progress.overview())


def _solution(args):
    file = course.solution(args.step)
    print(file.read_text(encoding="utf-8"), end="")
    for name in course.files_beside(args.step):
        print(f"it imports {file.with_name(name)}, beside it", file=sys.stderr)


def _diff(args):
    found = course.diff(launch.find(args.job) if args.job else course.trainer(), args.step)
    print(harmless(repr(found), keep="\n\t"))


def _catch_up(args):
    link = _behind_a_link()
    saved = course.catch_up(args.step)
    print(f"{course.trainer()} is now where step {course.step(args.step)} begins{link}")
    for name in course.files_beside(args.step):
        print(f"and so is {course.trainer().with_name(name)}")
    if saved:
        print(f"yours was saved: {saved}\n`dlojz restore {saved.name}` puts it back")
    else:
        print("your file was an unchanged step of the course, so no copy of it is kept")


def _restore(args):
    if args.list:
        print("\n".join(map(str, course.saved())) or "no saved file yet: `dlojz catch-up` saves")
        return
    link = _behind_a_link()
    file, saved = course.restore(args.file)
    print(f"{course.trainer()} is now {file}{link}")
    print(f"yours was saved: {saved}" if saved else "yours was a step of the course: not saved")


def _behind_a_link() -> str:
    """Return words on the file behind the trainer; "" if that is no link, which is replaced."""
    trainer = course.trainer()
    return f"; it was a link to {trainer.resolve()}, which is as it was" * trainer.is_symlink()


def _update(args):
    if args.take:
        saved = updates.take(args.take)
        print(f"{args.take} is now the course's" + (f"; yours was saved: {saved}" if saved else ""))
        return
    before = updates.last()
    if not args.last:
        print("pulling ...", file=sys.stderr, flush=True)
        updates.update()
    found = updates.last()
    if not args.last and found == before:
        print("nothing new since the last update: dlojz update --last shows that")
    else:
        print(found.text() if found else "no update yet: the course is as it was when you got it")
    updates.see()
