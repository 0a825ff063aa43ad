"""Tools, from a terminal: the machine, images, and predictions from the trainer."""

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from dlojz import course, launch
from dlojz.chapters.n09b_modes import worth
from dlojz.cli import jobs
from dlojz.course import presets
from dlojz.machine import doctor
from dlojz.runs import memory, source
from dlojz.table import harmless

SIZES = ("classes", "images_per_class", "val_images_per_class")  # of a preset, as flags
COMMAND = (
    '"dlojz/dlojz.py --model resnet18 -b 64" or a model of your own, "mymodels:build -b 64", in '
    "quotes, which runs here; or the number of a watched job"
)
JUDGE = """\
With --judge, the classes are those of --seed, and the images of val/ others than in any set so far:
what was tuned on val/ is judged on them. train/ stays empty, unless --images-per-class is given.

  dlojz data --judge 2026 judged      # choose the number afterwards, and tell it to nobody before
"""


def add(command):
    """Add these commands to the parser."""
    arg = command("doctor", _doctor)
    arg("--quick", action="store_true", help="do not measure the storage or import torch")

    arg = command("data", _data, JUDGE)
    arg("folder", help="folder to make, such as data")
    arg("--preset", choices=sorted(presets.PRESETS), help="sizes (default: this machine's)")
    arg("--classes", type=int, help="number of classes")
    arg("--images-per-class", type=int, help="images of each class in train/")
    arg("--val-images-per-class", type=int, help="images of each class in val/")
    arg("--seed", type=int, default=0)
    arg("--judge", type=int, metavar="SEED", help="only val/, of images that nobody has seen")
    arg("--workers", type=int, help="processes (default: the CPUs of this one)")

    arg = command("worth", _worth)
    arg("subject", choices=("compile",), help="the optimization to predict")
    arg("command", nargs=1, help=COMMAND)
    arg("--steps", type=int, help="number of steps of your training run")
    arg("--mode", choices=worth.MODES, default="default", help="mode of torch.compile")
    arg("--measure", action="store_true", help="then compile the whole model, and compare")

    arg = command("estimate", _estimate)
    memory.add_flags_of_a_plan(arg)
    arg("--trainer", help="a file (default: yours, dlojz/dlojz.py)")
    arg("--flags", default="", help='more of the trainer\'s, in quotes: "--no-channels-last"')


def _doctor(args):
    found = doctor.examine(quick=args.quick)
    print(json.dumps(found.to_dict(), indent=1, default=str) if args.json else found)
    return 1 if any(not problem.note for problem in found.problems) else 0


def _data(args):
    from dlojz import images

    preset = presets.choose(args.preset)
    asked = ((getattr(args, name), getattr(preset, name)) for name in SIZES)
    sizes = classes, train, val = [usual if size is None else size for size, usual in asked]
    if args.judge is not None and args.images_per_class is None:
        sizes[1] = train = 0
    more = {"workers": args.workers, "judge": args.judge}
    folder = images.generate(args.folder, *sizes, seed=args.seed, **more)
    if not train:
        print(f"{folder} has {classes * val:,} images in val/, and none to train on")
        return
    default = " (the default)" if folder.resolve() == course.data_folder().resolve() else ""
    flag = f"--data {shlex.quote(str(folder))}{default}"
    print(f"{folder} has {classes * (train + val):,} images: train on them with {flag}")


def _worth(args):
    from dlojz.chapters.n09b_modes import worth_figures as tables

    if args.steps is not None and args.steps < 1:
        raise ValueError(f"--steps {args.steps}: expected how many steps you train, at least 1")
    if not args.measure:
        worth.must_know(args.mode)  # before minutes are spent
    if args.command[0].isdecimal():
        if args.measure or args.json or args.steps:
            raise ValueError("of a run: leave out --measure, --json and --steps, or name the model")
        print(tables.of_a_run(launch.find(args.command[0]), args.mode))
        return 0
    trainer, _, rest = args.command[0].partition(" ")
    if source.names_model(trainer):
        source.must_name_model(trainer)
        flags = shlex.split(rest)
    else:
        trainer, flags = launch.trainer_and_flags(args.command[0])
        source.must_be_trainer(trainer)
        if large := jobs.too_large(args.command):
            print(large, file=sys.stderr)
    words = [f"--mode={args.mode}", *["--measure"] * args.measure, str(trainer), *flags]
    status, row = _result_of("dlojz.chapters.n09b_modes.measuring", words)
    if row and args.json:
        print(json.dumps(tables.to_dict(row, args.steps), indent=1))
    elif row:
        print(tables.about(row))
        print(f"\n{tables.answer(row, args.steps)}")
    return status


def _estimate(args):
    from dlojz.figures import plans as tables

    memory.must_be_positive(args)
    memory.must_divide(args)
    memory.must_be_inputs(args)
    limit = memory.bytes_of(args.fits) if args.fits else None
    trainer = _trainer_of(args)
    given = {name: value for name, value in vars(args).items() if value is not None}
    own = ("run", "json", "trainer")
    words = [f"--{n.replace('_', '-')}={value}" for n, value in given.items() if n not in own]
    status, row = _result_of("dlojz.estimate.estimate", [*words, str(trainer)])
    if row and args.json:
        print(json.dumps(row, indent=1))
    elif row:
        print(tables.about(row))
        if limit:
            print(f"\n{tables.fits(row, limit)}")
    return status


def _trainer_of(args):
    """Return the file of the trainer that estimates a model of the course's; a name for others."""
    if not source.names_model(args.model):
        if args.input or args.tokens:
            raise ValueError(
                f"--model {args.model} takes images: expected --image-size, or a model of your own "
                "such as mymodels:build"
            )
        trainer, _ = launch.trainer_and_flags(shlex.quote(args.trainer or "dlojz/dlojz.py"))
        source.must_be_trainer(trainer)
        return trainer
    if args.trainer or args.flags:
        raise ValueError(f"--model {args.model} needs no trainer: leave out --trainer and --flags")
    source.must_name_model(args.model)
    return args.model


def _result_of(module, words):
    """Return the status of a program of ours that needs torch, and its result if it wrote one."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        into = Path(folder) / "result.json"
        program = [sys.executable, "-m", module, f"--into={into}", *words]
        if status := _run_program(program, folder):
            return status, None
        if into.exists():
            return 0, json.loads(into.read_bytes())
    # The trainer's --help, for one.
    print("dlojz: the trainer ended before a step, so nothing was measured", file=sys.stderr)
    return 1, None


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
