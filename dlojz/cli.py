"""The command `dlojz`: what a notebook does, from a terminal."""

import argparse
import difflib
import io
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from dlojz import classroom, course, images, launch
from dlojz.chapters.n09b_modes import worth
from dlojz.course import presets, progress, updates
from dlojz.launch import series, sites
from dlojz.runs import memory, source
from dlojz.runs.folder import events_file
from dlojz.table import harmless
from dlojz.traces import suspects

BAD_INPUT = (launch.SlurmError, images.DataError)
WATCH_S = 10  # between two looks of `dlojz class --watch`
SHARING = """\
What is shared: which notebook's predictions, quizzes, questions and checks you have done and when,
whether they were right or passed, the name of a hint, the speed-up, the numbers that you predicted
and what was measured; the state and the times of your last jobs. Not shared: code, paths, host
names, your login name, the words that you typed.

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
BROKEN_PIPE = 128 + signal.SIGPIPE  # a shell's exit status for `yes` in `yes | head`


def main(argv=None) -> int:
    """Run one command and return its exit status: 0 success, 1 bad news, 2 bad input."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may lack a letter, as in locale C
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            return _answer(sys.argv[1:] if argv is None else argv)
        finally:
            if sys.stdout:  # None where it was closed
                sys.stdout.flush()
    except OSError as error:  # of standard output: its reader has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at exit
        if isinstance(error, BrokenPipeError):
            return BROKEN_PIPE
        print(f"dlojz: standard output: {error}", file=sys.stderr)
        return 2


def _answer(words) -> int:
    args = _parse(words)
    try:
        return args.run(args) or 0
    except BrokenPipeError:
        raise
    except (*BAD_INPUT, LookupError, OSError, ValueError) as error:
        told = error.args[0] if isinstance(error, KeyError) else error  # str() would quote it
        print(f"dlojz: {harmless(str(told), keep=chr(10))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("dlojz: interrupted; jobs that were submitted go on (dlojz queue)", file=sys.stderr)
        return 130


def _parse(words):
    parser, commands = _parser()
    if words and not words[0].startswith("-") and words[0] not in commands:
        known = ", ".join(commands)
        guess = _did_you_mean([words[0]], commands) or _as_a_flag(words[0], commands)
        parser.error(f"no command {words[0]!r}{guess}: {known}")
    args, unknown = parser.parse_known_args(words)
    if unknown:
        sub = commands[words[0]]
        known = re.findall(r"--[\w-]+", sub.format_usage())
        trainers = _trainers_flags() if args.run in (_submit, _worth) else set()
        typos = [w for w in unknown if w not in trainers and _did_you_mean([w], known)]
        told = f"unrecognized arguments: {' '.join(unknown)}{_did_you_mean(typos, known)}"
        if rest := [word for word in unknown if word not in typos] if trainers else []:
            before = words[: words.index(args.command[0])]
            mine = " ".join(word for word in before if word not in typos)
            quoted = " ".join([*args.command, *rest])
            told += f'; put the trainer\'s flags inside the quotes: dlojz {mine} "{quoted}"'
        sub.error(told)
    return args


def _did_you_mean(words, known):
    near = [n for word in words for n in difflib.get_close_matches(word, known, 1, 0.7)]
    return f"; did you mean {' '.join(near)}?" if near else ""


def _as_a_flag(word, commands):
    """Return a guess if this word is a flag of some command, as "hint" is."""
    for name, sub in commands.items():
        if f"--{word}" in re.findall(r"--[\w-]+", sub.format_usage()):
            return f"; did you mean {name} --{word}?"
    return ""


def _trainers_flags():
    """Return the trainer's flags, in all their spellings."""
    with suppress(OSError, ValueError):  # a trainer that is just being edited
        flags = launch.flags_of(Path(__file__).with_name("dlojz.py"))
        return {spelling for flag in flags for spelling in flag.spellings}
    return set()


class Parser(argparse.ArgumentParser):
    """A parser whose errors do nothing to a terminal, whatever was typed."""

    def error(self, message):
        super().error(harmless(message))


def _parser():
    """Return the parser, and the parsers of its commands by name."""
    parser = Parser(
        prog="dlojz",
        description="The DLO-JZ workshop: make PyTorch training fast, one measured step at a time.",
        epilog='example: dlojz submit --wait "dlojz/dlojz.py --test --data synthetic -b 32"',
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name, run, summary, more=""):
        text = summary[0].upper() + summary[1:]
        form = argparse.RawDescriptionHelpFormatter if more else argparse.HelpFormatter
        sub = commands.add_parser(
            name, help=summary, description=text, epilog=more, formatter_class=form
        )
        sub.set_defaults(run=run)
        return sub.add_argument

    _add_machine_commands(command)
    _add_job_commands(command)
    _add_predictions(command)
    _add_course_commands(command)
    _add_class_commands(command)
    return parser, commands.choices


def _add_machine_commands(command):
    add = command("doctor", _doctor, "this machine's devices, and problems with its installation")
    add("--quick", action="store_true", help="do not measure the storage or import torch")
    add("--json", action="store_true", help="print JSON, for programs")

    add = command("data", _data, "make an ImageNet-shaped set of images; no download")
    add("folder", help="folder to make, such as data")
    add("--preset", choices=sorted(presets.PRESETS), help="sizes (default: this machine's)")
    add("--classes", type=int, help="number of classes")
    add("--images-per-class", type=int, help="images of each class in train/")
    add("--val-images-per-class", type=int, help="images of each class in val/")
    add("--seed", type=int, default=0)
    add("--workers", type=int, help="processes (default: the CPUs of this one)")


def _add_job_commands(command):
    add = command("submit", _submit, "run the trainer as a job, when its turn comes")
    add("command", nargs="+", help='"dlojz/dlojz.py --test -b 32", in quotes; several run in order')
    add("-n", "--n-gpu", type=int, default=1, help="GPUs, or processes where there is no GPU")
    add("--name", default="dlojz", help="name in the queue and in tables")
    add("--time-max", help="end it after HH:MM:SS or minutes (default: 00:10:00)")
    add("--account", help="Slurm account to charge; xyz@a100 also requests A100 nodes")
    add("--module", help="module to load on a cluster, instead of its site's")
    add("--dry-run", action="store_true", help="show the script or the command, submit nothing")
    add("--wait", action="store_true", help="wait for the end and show the report")

    add = command("queue", _queue, "the jobs that are queued or running, and the last ones")
    add("name", nargs="?", help="only jobs with this name")
    add("--last", type=int, default=5, help="number of ended jobs to show")

    add = command("cancel", _cancel, "take a job from the queue, or end it")
    add("job", nargs="+", help="its number")

    add = command("report", _report, "the throughput, memory and energy of a job")
    add("job", nargs="*", help="numbers, folders or recordings (default: the last submission)")
    add("--all", action="store_true", help="all runs, one row each")
    add("--png", type=Path, help="draw it into this file")

    add = command("trace", _trace, "the time of a step by its parts, from a profiler's trace")
    add("job", nargs="?", help="a number, a folder or a trace (default: the last submission)")
    add("--png", type=Path, help="draw one step into this file")


def _add_predictions(command):
    add = command("worth", _worth, "the gain of compiling your model, and its break-even")
    add("subject", choices=("compile",), help="the optimization to predict")
    add("command", nargs=1, help='"dlojz/dlojz.py --model resnet18 -b 64", in quotes; it runs here')
    add("--steps", type=int, help="number of steps of your training run")
    add("--mode", choices=worth.MODES, default="default", help="mode of torch.compile")
    add("--measure", action="store_true", help="then compile the whole model, and compare")
    add("--json", action="store_true", help="print JSON, for programs")

    add = command("estimate", _estimate, "the memory of a training step, without a GPU")
    memory.add_flags_of_a_plan(add)
    add("--trainer", help="a file (default: yours, dlojz/dlojz.py)")
    add("--flags", default="", help='more of the trainer\'s, in quotes: "--no-channels-last"')
    add("--json", action="store_true", help="print JSON, for programs")


def _add_course_commands(command):
    add = command("check", _check, "the verdict: same training, faster, by the mechanism")
    add("step", help="01, 02, ...")
    add("job", nargs="?", help="its number (default: the last submission)")
    add("--pairs", type=int, help="runs before and after (default: 6 where a gain is required)")
    add("--hint", action="store_true", help="show a hint on what fails, a larger one each time")
    add("--json", action="store_true", help="print JSON, for programs")

    add = command("progress", _progress, "your verdicts, predictions and answers, done and open")
    add("--json", action="store_true", help="print JSON, for programs")

    add = command("solution", _solution, "show the trainer as it is after a step")
    add("step", help="01, 02, ...")
    add = command("diff", _diff, "show your trainer beside a step's solution")
    add("step", help="01, 02, ...")
    add("--job", help="compare this job's trainer instead of yours")
    add = command(
        "catch-up", _catch_up, "start a step from its starting point; yours is saved first"
    )
    add("step", help="01, 02, ...")
    add = command("rehearse", _rehearse, "run solved notebooks unattended, before a class does")
    add("notebook", nargs="*", help="01, 02b, ...")
    add("--day", type=int, help="rehearse the notebooks of this day ...")
    add("--of", type=int, metavar="DAYS", help="... of the course in this many days")
    add("--from", dest="begin", type=int, default=0, metavar="CELL", help="go on with this cell")
    add("--minutes", type=float, help="stop in time, and say with which cell to go on")
    add("--trainees", type=int, default=1, help="number of trainees who will share the devices")
    add("--devices", type=int, help="number of GPUs that they share (default: this machine's)")
    add = command("syllabus", _syllabus, "the course in one, two or four days: a timetable")
    add("--days", type=int, help="only the course in this many days")
    add = command("restore", _restore, "put a saved trainer back; the present one is saved first")
    add("file", nargs="?", help="its name (default: the newest that differs from yours)")
    add("--list", action="store_true", help="only show the saved files")

    add = command("update", _update, "bring the course up to date; what you changed stays yours")
    add("--last", action="store_true", help="only show what the last update did")
    add("--take", metavar="FILE", help="replace a file by the course's; yours is saved first")


def _add_class_commands(command):
    add = command("share", _share, "show the class board how far you are; off by default", SHARING)
    add("folder", nargs="?", help="the one that your instructor has named")
    add("--as", dest="pseudonym", metavar="NAME", help="a pseudonym (default: one is drawn)")
    add("--yes", action="store_true", help="agree without being asked, after a look at what it is")
    add("--stop", action="store_true", help="share no longer, and remove what was shared")

    add = command("class", _class, "instructors: where the class is, what fails, who waits", CLASS)
    add("folder", help="folder into which the trainees share")
    add("--notebook", metavar="NAME", help="show times in this notebook (default: where most are)")
    add("--watch", action="store_true", help="look again every 10 seconds, until Ctrl-C")
    add("--png", type=Path, help="draw the board into this file")
    add("--json", action="store_true", help="print JSON, for programs")


def _doctor(args):
    from dlojz.machine import doctor

    found = doctor.examine(quick=args.quick)
    print(json.dumps(found.to_dict(), indent=1, default=str) if args.json else found)
    return 1 if any(not problem.note for problem in found.problems) else 0


def _data(args):
    preset = presets.choose(args.preset)
    classes = _or(args.classes, preset.classes)
    train = _or(args.images_per_class, preset.images_per_class)
    val = _or(args.val_images_per_class, preset.val_images_per_class)
    folder = images.generate(
        args.folder,
        classes=classes,
        images_per_class=train,
        val_images_per_class=val,
        seed=args.seed,
        workers=args.workers,
    )
    default = " (the default)" if folder.resolve() == course.data_folder().resolve() else ""
    flag = f"--data {shlex.quote(str(folder))}{default}"
    print(f"{folder} has {classes * (train + val):,} images: train on them with {flag}")


def _or(value, default):
    return default if value is None else value


def _submit(args):
    command = args.command if len(args.command) > 1 else args.command[0]
    time_max, large = args.time_max or "00:10:00", _too_large(args.command)
    jobs = launch.submit(
        command,
        args.n_gpu,
        args.name,
        time_max,
        module=args.module,
        account=args.account,
        dry_run=args.dry_run,
    )
    if args.dry_run:
        print(jobs)
        return 0
    jobs = jobs if isinstance(jobs, list) else [jobs]
    for job in jobs:
        print(f"job {job.id}: {harmless(job.command)}", flush=True)
    if args.time_max:
        print(f"each is ended after {_duration(sites.seconds(time_max))}")
    if large:
        print(large, file=sys.stderr)
    if not args.wait:
        print("see `dlojz queue`, then `dlojz report`")
        return 0
    states = [job.wait() for job in jobs]
    _show(jobs)
    return 0 if set(states) <= {launch.State.COMPLETED, launch.State.OUT_OF_MEMORY} else 1


def _too_large(commands):
    """Return a note if a command would train with the default sizes, meant for a GPU, on a CPU."""
    preset = presets.choose()
    if preset.name != "cpu" or launch.launcher().name != "local":
        return ""
    trainers = [launch.trainer_and_flags(c)[0] for c in commands if "--model" not in c]
    if not any(map(launch.is_ours, trainers)):
        return ""
    return (
        "note: without --model the trainer takes resnet152 at 224 px, which is slow on a CPU; "
        f"sizes for this machine: {preset.flags}"
    )


def _duration(seconds):
    """Return "5 minutes" for 300."""
    hours, rest = divmod(seconds, 3600)
    parts = ((hours, "hour"), (rest // 60, "minute"), (rest % 60, "second"))
    return " ".join(f"{n} {unit}{'s' * (n > 1)}" for n, unit in parts if n)


def _queue(args):
    print(launch.queue(args.name, args.last))


def _cancel(args):
    for job in [launch.find(number) for number in args.job]:
        job.cancel()
        print(f"job {job.id}: {'cancelling' if not job.state.final else job.state}")


def _run(text):
    """Return the job with this number, or the folder or file with this path."""
    if text and Path(text).exists() and not text.isdigit():
        return Path(text)
    if "/" in text:
        raise FileNotFoundError(f"no {text}: expected a job's number, a run's folder or its log")
    return launch.find(text)


def _last():
    """Return the last job; print a note if it is the last of a sweep."""
    found = launch.latest()
    if not isinstance(found, list):
        return found
    numbers = ", ".join(job.id for job in found)
    print(f"the last job of the last sweep ({numbers}); others by number", file=sys.stderr)
    return found[-1]


def _report(args):
    if args.all and args.png:
        raise ValueError("--png draws the runs that you name: dlojz report 12 13 --png FILE")
    if args.all:
        from dlojz.figures import report

        # A series that a check submitted has no log of its own.
        runs = [job for job in launch.jobs() if not (job.directory / "plan.json").exists()]
        print(report.compare_runs(runs))
        return
    found = [run for job in args.job for run in _runs_of(_run(job))] or launch.latest()
    _show(found if isinstance(found, list) else [found], args.png)


def _runs_of(job):
    """Return the runs of a series, such as a check's job; or else the job itself, in a list."""
    if not isinstance(job, launch.Job) or not (job.directory / "plan.json").exists():
        return [job]
    return [run for run in series.folders(job).values() if events_file(run).exists()] or [job]


def _trace(args):
    from dlojz.figures import timeline
    from dlojz.traces import breakdown

    run = _run(args.job) if args.job else _last()
    traces = timeline.open_traces(run)
    found = traces[0]
    print(f"{breakdown.analyse(found).verdict}: {found.path}")
    for note in dict.fromkeys(note for each in traces for note in each.notes):
        print(f"note: {note}")
    print(f"\n{timeline.times(found)}")
    if found.on_gpu:
        print(f"\n{timeline.waits(found)}")
    for suspect in suspects.suspects(traces):
        print(f"\n{suspects.sentence(suspect)}")
    if args.png:
        timeline.plot_step(found).figure.savefig(args.png, dpi=150, bbox_inches="tight")
        print(f"wrote {args.png}")


def _worth(args):
    from dlojz.chapters.n09b_modes import worth_figures as tables

    if args.steps is not None and args.steps < 1:
        raise ValueError(f"--steps {args.steps}: expected how many steps you train, at least 1")
    if not args.measure:
        worth.must_know(args.mode)  # before minutes are spent
    trainer, flags = launch.trainer_and_flags(args.command[0])
    source.must_be_trainer(trainer)
    if large := _too_large(args.command):
        print(large, file=sys.stderr)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        into = Path(folder) / "worth.json"
        program = [sys.executable, "-m", "dlojz.chapters.n09b_modes.measuring", "--mode", args.mode]
        program += ["--measure"] * args.measure + ["--into", str(into)]
        if status := _run_program([*program, str(trainer), *flags], folder):
            return status
        if not into.exists():  # the trainer's --help, for one
            print(
                "dlojz: the trainer ended before a step, so nothing was measured", file=sys.stderr
            )
            return 1
        row = json.loads(into.read_bytes())
    if args.json:
        print(json.dumps(tables.to_dict(row, args.steps), indent=1))
        return 0
    print(tables.about(row))
    print(f"\n{tables.answer(row, args.steps)}")
    return 0


def _estimate(args):
    from dlojz.figures import plans as tables

    memory.must_be_positive(args)
    limit = memory.bytes_of(args.fits) if args.fits else None
    trainer, _ = launch.trainer_and_flags(shlex.quote(args.trainer or "dlojz/dlojz.py"))
    source.must_be_trainer(trainer)
    given = {name: value for name, value in vars(args).items() if value is not None}
    own = ("run", "json", "trainer")
    plan = [f"--{n.replace('_', '-')}={value}" for n, value in given.items() if n not in own]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        into = Path(folder) / "memory.json"
        program = [sys.executable, "-m", "dlojz.estimate.estimate", f"--into={into}", *plan]
        if status := _run_program([*program, str(trainer)], folder):
            return status
        row = json.loads(into.read_bytes())
    if args.json:
        print(json.dumps(row, indent=1))
        return 0
    print(tables.about(row))
    if limit:
        print(f"\n{tables.fits(row, limit)}")
    return 0


def _run_program(words, folder):
    """Run a program that needs torch, and return its status; what it says is shown on stderr.

    folder: for its temporary files, which it leaves behind when it is killed.
    """
    print("  importing torch ...", file=sys.stderr, flush=True)
    environment = os.environ | {"TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "errors": "replace"}
    with subprocess.Popen(words, env=environment, **streams) as program:
        try:
            for line in program.stdout:
                print(harmless(line, keep="\n\t"), end="", file=sys.stderr, flush=True)
        except BaseException:  # Ctrl-C, or nobody reads our stderr
            program.kill()
            raise
    if program.returncode >= 0:
        return program.returncode
    killed = signal.Signals(-program.returncode).name
    why = ": perhaps the memory was not enough, so give a smaller -b" if killed == "SIGKILL" else ""
    print(f"dlojz: the program was ended by {killed}{why}", file=sys.stderr)
    return 1


def _show(runs, png=None):
    from dlojz.figures import report

    print(report.inspect_run(runs[0]) if len(runs) == 1 else report.compare_runs(runs))
    if png:
        print(f"wrote {report.save_figure(runs, png)}")


def _check(args):
    from dlojz.check import check

    course.course_root()  # has the solutions; without it a check is refused at once
    # A typo is reported before anything is submitted.
    step = args.step if args.step in course.PREPARED else course.step(args.step)
    verdict = check(step, args.job or _last(), args.pairs)
    print(json.dumps(verdict.to_dict(), indent=1) if args.json else verdict)
    if args.hint:
        print(harmless(repr(verdict.hint(climb=True)), keep="\n\t"))
    return 0 if verdict.passed else 1


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


def _behind_a_link() -> str:
    """Return words on the file behind the trainer; "" if that is no link, which is replaced."""
    trainer = course.trainer()
    return f"; it was a link to {trainer.resolve()}, which is as it was" * trainer.is_symlink()


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
    left = [*paths]
    for path in paths:
        print(f"{path.stem}: {path}", flush=True)
        started, cells = time.time(), []
        for cell in rehearse.run(path, args.begin, end):
            cells.append(cell)
            print("  cell {cell:2d} {seconds:8.1f} s  {line}".format(**cell), flush=True)
        if end and not cells:
            names = " ".join(path.stem.partition("_")[0] for path in left)
            print(f"  the time is over; go on with: dlojz rehearse {names}")
            break
        found.append(rehearse.note(path, cells, args.begin, started))
        left.remove(path)
    print(f"\n{rehearse.report(found)}\n")
    if args.trainees > 1:
        print(rehearse.room(found, args.trainees, args.devices or len(presets.gpus()) or 1))
    print(f"outputs: {rehearse.folder()}")
    return 1 if left or any(map(rehearse.problems, found)) else 0


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

    wanted = {args.days: syllabus.of(args.days)} if args.days is not None else syllabus.read()
    wrong = []
    for days, plan in wanted.items():
        for number, day in enumerate(plan, 1):
            print(f"Day {number} of {days}: {day.title}\n\n{syllabus.timetable(day)}\n")
        wrong += [f"{days} days: {problem}" for problem in syllabus.problems(plan)]
    print("\n".join(wrong) or f"all of it fits; to change it, edit {syllabus.file()}")
    return 1 if wrong else 0


def _restore(args):
    if args.list:
        print("\n".join(map(str, course.saved())) or "no saved file yet: `dlojz catch-up` saves")
        return
    link = _behind_a_link()
    file, saved = course.restore(args.file)
    print(f"{course.trainer()} is now {file}{link}")
    print(f"yours was saved: {saved}" if saved else "yours was a step of the course: not saved")


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


def _share(args):
    mine = progress.file()
    if args.stop:
        removed = classroom.stop(mine, args.folder)
        none = "nothing was shared from here; `dlojz share --stop FOLDER` looks for a file of yours"
        none = f"no file of yours is shared in {args.folder}" if args.folder else none
        print(f"{removed} is removed; nothing is shared now" if removed else none)
        return 0
    now = classroom.consent_of(mine)
    if now and now.stopped:
        raise ValueError(f"{now.path} may be there still: `dlojz share --stop` removes it")
    if now and not args.folder:
        print(f"{now.path} is shared, as {now.pseudonym}; `dlojz share --stop` ends it:\n")
        print(classroom.preview(now, mine))
        return 0
    if now:
        raise ValueError(f"you share already, as {now.pseudonym}: first `dlojz share --stop`")
    if not args.folder:
        print("nothing is shared; `dlojz share FOLDER` shows what would be, and asks")
        return 0
    return _ask_to_share(classroom.plan(args.folder, args.pseudonym), mine, args.yes)


def _ask_to_share(consent, mine, agreed):
    print(f"This is what you would share as {consent.pseudonym}, in {consent.path}:\n")
    print(classroom.preview(consent, mine))
    print(f"{SHARING.partition(chr(10) * 2)[0]}\n")
    print(f"It can be read by {classroom.readers(consent.folder)}.")
    print(f"Those who can list {consent.folder} see that you own the file.")
    for note in classroom.dangers(consent.folder):
        print(f"note: {note}")
    if not agreed and sys.stdin and sys.stdin.isatty():
        answer = input("Share this, and what you do from now on? [y/N] ")
        agreed = answer.strip().lower() in ("y", "yes")
    if not agreed:
        print("Nothing is shared. To agree, answer y, or add --yes.")
        return 1
    classroom.begin(consent, mine)
    print(
        "Shared. `dlojz share` shows it again; `dlojz share --stop` ends it and removes the file."
    )
    return 0


def _class(args):
    from dlojz.classroom import board as class_board

    while True:
        found = class_board.open_class(args.folder)
        if args.png:
            print(f"wrote {class_board.save_board(found, args.png)}", file=sys.stderr)
        text = json.dumps(class_board.to_dict(found), indent=1) if args.json else None
        text = text or _class_text(class_board, found, args.notebook)
        clear = "\033[H\033[J" * (args.watch and sys.stdout.isatty())
        print(f"{clear}{text}", flush=True)
        if not args.watch:
            return 0
        time.sleep(WATCH_S)


def _class_text(class_board, found, notebook):
    from dlojz.check import exercise

    tables = (
        class_board.overview(found),
        class_board.failing(found, exercise.nudges()),
        class_board.jobs(found),
        class_board.parts(found, notebook),
        class_board.calibration(found),
    )
    shown = [repr(table) for table in tables if len(table)] or [class_board.NOBODY]
    return "\n\n".join([class_board.notes(found), *shown])


def _progress(args):
    print(json.dumps(progress.items(), indent=1) if args.json else progress.overview())


if __name__ == "__main__":
    sys.exit(main())
