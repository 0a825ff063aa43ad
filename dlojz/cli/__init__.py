"""The command `dlojz`: what a notebook does, from a terminal."""

import argparse
import difflib
import io
import os
import re
import signal
import sys
from contextlib import suppress

from dlojz import launch
from dlojz.cli import classes, course, jobs, pairs, race, tools
from dlojz.course import STARTER
from dlojz.table import harmless

COMMANDS = {  # in the order of the help
    "doctor": "this machine's devices, and problems with its installation",
    "data": "make an ImageNet-shaped set of images; no download",
    "submit": "run the trainer as a job, when its turn comes",
    "watch": "run any training program as a job, and say where its time goes",
    "queue": "the jobs that are queued or running, and the last ones",
    "cancel": "take a job from the queue, or end it",
    "report": "the throughput, memory and energy of a job",
    "trace": "the time of a step by its parts, from a profiler's trace",
    "worth": "the gain of compiling your model, and its break-even",
    "estimate": "the memory of a training step, without a GPU",
    "pair": "two programs compared: work, losses, speed; or whole trainings by seed",
    "check": "the verdict: same training, faster, by the mechanism",
    "progress": "your verdicts, predictions and answers, done and open",
    "solution": "show the trainer as it is after a step",
    "diff": "show your trainer beside a step's solution",
    "catch-up": "start a step from its starting point; yours is saved first",
    "rehearse": "run solved notebooks unattended, before a class does",
    "syllabus": "the course in one, two or four days, or two hours: a timetable",
    "restore": "put a saved trainer back; the present one is saved first",
    "update": "bring the course up to date; what you changed stays yours",
    "race": "best accuracy in a budget: enter a trainer, run it again, the board",
    "share": "show the class board how far you are; off by default",
    "class": "instructors: where the class is, what fails, who waits",
}
AS_JSON = ("doctor", "worth", "estimate", "pair", "check", "progress", "class")
OF_A_TRAINER = ("submit", "watch", "worth")  # its command is given in quotes
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
    except (launch.SlurmError, LookupError, OSError, ValueError) as error:
        told = error.args[0] if isinstance(error, KeyError) else error  # str() would quote it
        print(f"dlojz: {harmless(str(told), keep=chr(10))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("dlojz: interrupted; jobs that were submitted go on (dlojz queue)", file=sys.stderr)
        return 130


def _parse(words):
    parser, commands = _parser()
    if words and not words[0].startswith("-") and words[0] not in commands:
        guess = _did_you_mean([words[0]], commands) or _as_a_flag(words[0], commands)
        parser.error(f"no command {words[0]!r}{guess}: {', '.join(commands)}")
    args, unknown = parser.parse_known_args(words)
    if unknown:
        known = _flags(commands[words[0]])
        trainers = _trainers_flags() if words[0] in OF_A_TRAINER else set()
        typos = [w for w in unknown if w not in trainers and _did_you_mean([w], known)]
        told = f"unrecognized arguments: {' '.join(unknown)}{_did_you_mean(typos, known)}"
        if rest := [word for word in unknown if word not in typos] if trainers else []:
            before = words[: words.index(args.command[0])]
            mine = " ".join(word for word in before if word not in typos)
            quoted = " ".join([*args.command, *rest])
            told += f'; put the trainer\'s flags inside the quotes: dlojz {mine} "{quoted}"'
        if words[0] == "pair":
            told += '; put each program in quotes with its flags: "train.py --lr 0.1"'
        commands[words[0]].error(told)
    return args


def _did_you_mean(words, known):
    near = [n for word in words for n in difflib.get_close_matches(word, known, 1, 0.7)]
    return f"; did you mean {' '.join(near)}?" if near else ""


def _as_a_flag(word, commands):
    """Return a guess if this word is a flag of some command, as "hint" is."""
    names = (name for name, sub in commands.items() if f"--{word}" in _flags(sub))
    return next((f"; did you mean {name} --{word}?" for name in names), "")


def _flags(parser):
    return re.findall(r"--[\w-]+", parser.format_usage())


def _trainers_flags():
    """Return the trainer's flags, in all their spellings."""
    with suppress(OSError, ValueError):  # a trainer that is just being edited
        return {spelling for flag in launch.flags_of(STARTER) for spelling in flag.spellings}
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
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:])

    def command(name, run, more=""):
        sub = commands.choices[name]
        sub.set_defaults(run=run)
        if more:
            sub.epilog, sub.formatter_class = more, argparse.RawDescriptionHelpFormatter
        return sub.add_argument

    for module in (jobs, course, classes, tools, pairs):
        module.add(command)
    race.add(commands.choices["race"])
    for sub in (commands.choices[name] for name in AS_JSON):
        sub.add_argument("--json", action="store_true", help="print JSON, for programs")
    return parser, commands.choices
