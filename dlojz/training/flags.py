"""The trainer's flags, each declared once. The launcher reads them, too, so no torch is imported.

    args = flags.parse("precision", "channels-last")

A word is the name of a flag that a step of the course adds; all other flags are always there.
"""

import argparse
import ast
import os
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from dlojz import course, idr_torch
from dlojz.course import UserError


class ByDevice(NamedTuple):
    """A default that depends on whether there is a GPU."""

    gpu: str
    cpu: str

    def __str__(self):
        return f"{self.gpu} on a GPU, else {self.cpu}"


@dataclass(frozen=True)
class Flag:
    """A flag of the trainer."""

    names: tuple[str, ...]  # ("-b", "--batch-size")
    default: object
    help: str
    kind: type = str  # of its value; bool: a switch
    choices: tuple = ()
    least: int | None = None  # of a whole number
    opposite: bool = False  # --x has --no-x
    values: tuple[str, ...] = ()  # the names of its values, if there are several
    group: str = ""  # its title in --help; "" for the model and its training

    @property
    def label(self) -> str:
        """Return the flag's long name."""
        return max(self.names, key=len)

    @property
    def spellings(self) -> tuple[str, ...]:
        """Return all spellings of this flag on a command line."""
        return (*self.names, *([f"--no-{self.label[2:]}"] if self.opposite else []))

    def words(self, value) -> list[str]:
        """Return the words that set this value; none for the default."""
        if value == self.default or value is None or value == "":
            return []
        if self.kind is bool:
            return [f"--no-{self.label[2:]}" if self.opposite and not value else self.label]
        if self.values:  # typed into a form, "2 9", or parsed, [2, 9]
            return [self.names[0], *(value.split() if isinstance(value, str) else map(str, value))]
        return [self.names[0], str(value)]

    def add_to(self, parser):
        """Add this flag to a parser or an argument group."""
        about = {"default": self.default, "help": self.help}
        if self.kind is bool:
            about["action"] = argparse.BooleanOptionalAction if self.opposite else "store_true"
        else:
            about["type"] = self.kind if self.least is None else at_least(self.least)
            about["choices"] = self.choices or None
            about |= {"nargs": len(self.values), "metavar": self.values} if self.values else {}
        parser.add_argument(*self.names, **about)


def at_least(least: int):
    """Return the type of a flag whose value is a whole number from `least` on."""

    def whole_number(text: str) -> int:
        if int(text) < least:
            expected = f"expected a whole number of at least {least}"
            raise argparse.ArgumentTypeError(f"{text}: {expected}")
        return int(text)

    whole_number.__name__ = "whole number"  # of argparse's message: "invalid whole number value"
    return whole_number


def _flag(names: str, default, help: str, **about) -> Flag:
    """Return a flag, whose values have the type of its default."""
    kind = str if isinstance(default, ByDevice) else type(default)
    return Flag(tuple(names.split()), default, help, **{"kind": kind} | about)


def _switch(name, default, help):
    return _flag(name, default, help, opposite=True)


TRAINING = (
    _flag("--model", "resnet152", "a classifier of torchvision.models, or a larger model"),
    _flag("--image-size", 224, "height and width of the images, in pixels", least=1),
    _flag("-b --batch-size", 32, "images in each batch of each process", least=1),
    _flag("-e --epochs", 1, "passes over the training images", least=1),
    _flag("--accumulate", 1, "batches that make one update of the weights", least=1),
    _flag("--lr", 0.1, "the highest learning rate of the schedule"),
    _flag("--mom", 0.9, "momentum of SGD"),
    _flag("--wd", 5e-4, "weight decay"),
    _flag("--clip-norm", 0.0, "the largest norm of the gradients; 0: no limit"),
)
STEPS = (  # each is added by a step of the course, by its name without the hyphens
    _flag(
        "--precision",
        ByDevice("fp16", "fp32"),
        "format of matrix products and convolutions; weights stay in fp32",
        choices=("fp32", "tf32", "fp16", "bf16"),
    ),
    _switch("--channels-last", True, "the channels of a pixel lie next to each other in memory"),
    _switch("--profile", False, "a trace of a few steps, which are then slower"),
    _flag(
        "--mix",
        "off",
        "mix each image of the training, and its label, with another one of its batch",
        choices=("off", "mixup", "cutmix"),
    ),
    _flag(
        "--randaugment",
        None,
        "each crop goes through N operations, drawn, of magnitude M: 0 to 30",
        **{"kind": int, "least": 0, "values": ("N", "M")},
    ),
    _flag(
        "--optimizer",
        "sgd",
        "sgd, lars, lion and muon keep one value for each weight, adamw and lamb two",
        choices=("sgd", "adamw", "lamb", "lars", "lion", "muon"),
    ),
    _flag("--warm-up", 0.3, "the share of the updates in which the learning rate rises"),
    _flag(
        "--schedule",
        "onecycle",
        "the fall of the learning rate afterwards; onecycle also rises in a curve",
        choices=("onecycle", "cosine", "constant"),
    ),
    _flag("--find-lr", 0, "learning rates to try before the training; 0: none", least=0),
    _flag(
        "--compile",
        ByDevice("default", "off"),
        "mode of torch.compile; aot_eager generates no code, it only shows the graphs",
        choices=("off", "aot_eager", "default", "reduce-overhead", "max-autotune"),
    ),
    _flag(
        "--normalize",
        "torch",
        "torch: an operation, and autocast's cast; triton: the kernel in kernels.py, in one pass",
        choices=("torch", "triton"),
    ),
    _flag(
        "--sharding",
        "ddp",
        "ddp: a full copy of the model in each process; fsdp: one copy, in shards",
        choices=("ddp", "fsdp"),
    ),
    _flag(
        "--checkpointing",
        "off",
        "recompute activations in the backward pass: off, or block by block",
        choices=("off", "blocks"),
    ),
)
RUNNING = {  # by their title in --help
    "the images and how they are loaded": (
        _flag("--data", "data", "a folder of images, arranged as ImageNet's are, or 'synthetic'"),
        _flag("--num-workers", 10, "processes that load images; at most one per CPU", least=0),
        _switch("--persistent-workers", True, "workers are kept between epochs"),
        _flag("--prefetch-factor", 3, "batches that each worker loads ahead", least=1),
        _switch("--pin-memory", True, "batches in page-locked memory, which a GPU copies faster"),
        _switch("--non-blocking", True, "the host does not wait for copies to the GPU"),
        _switch("--drop-last", False, "a last, smaller batch is left out"),
    ),
    "reproducing a run": (
        _flag("--seed", 0, "seed of the weights, the order of the images, and their crops"),
        _flag("--deterministic", False, "bit-identical runs, which are slower"),
    ),
    "a short run, to see how fast it is": (
        _flag("--test", False, "a few steps in each epoch, and no checkpoint"),
        _flag("--test-nsteps", 50, "steps in each epoch of such a run", least=1),
    ),
    "stopping and going on": (
        _flag("--checkpoint", None, "file to write; None: one in the run's folder", kind=Path),
        _flag(
            "--checkpoint-every",
            0,
            "steps between two checkpoints; 0: only after each epoch",
            least=0,
        ),
        _flag("--resume", None, "checkpoint to go on from", kind=Path),
    ),
}


def declared(*words: str) -> list[Flag]:
    """Return the flags of a trainer, in the order of --help. Raise UserError for another word."""
    steps = {flag.label.removeprefix("--"): flag for flag in STEPS}
    if unknown := [word for word in words if word not in steps]:
        raise UserError(
            f"flags.parse: no flag {unknown[0]!r}: expected some of {', '.join(map(repr, steps))}; "
            "`dlojz catch-up STEP` replaces a trainer of an earlier version"
        )
    return [*TRAINING, *(steps[word] for word in words), *_running()]


def _running():
    """Yield the flags of RUNNING, each with its group; $DLOJZ_DATA is the default of --data."""
    for title, own in RUNNING.items():
        for flag in own:
            data = os.environ.get("DLOJZ_DATA") if flag.label == "--data" else None
            yield replace(flag, group=title, default=data or flag.default)


def flags_of(trainer: Path) -> list[Flag]:
    """Return the flags in a trainer's source. Raise UserError if it has none."""
    try:
        tree = ast.parse(trainer.read_text(encoding="utf-8"))
    except SyntaxError as error:
        raise UserError(f"{trainer}, line {error.lineno}: {error.msg}: mend it first") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "flags.parse":
            words = (word for arg in node.args for word in ast.walk(arg))  # also in *("x", "y")
            return declared(*(word.value for word in words if isinstance(word, ast.Constant)))
    raise UserError(f"{trainer} has no flag: expected a trainer that calls flags.parse")


def is_ours(trainer: Path) -> bool:
    """Return whether a trainer takes the course's flags, such as --model and --test."""
    try:
        return bool(flags_of(trainer))
    except (OSError, ValueError):  # no file, or no Python
        return False


def parser(*words: str) -> argparse.ArgumentParser:
    """Return the trainer's parser, with the flags added by steps of the course."""
    parser = argparse.ArgumentParser(
        prog="dlojz.py",
        description="Train a torchvision classifier on ImageNet-shaped images, and log how fast.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    groups = {"": parser}
    for flag in declared(*words):
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(flag.group)
        flag.add_to(groups[flag.group])
    return parser


def parse(*words: str) -> argparse.Namespace:
    """Return the arguments of this command line. Applies some of them to torch."""
    import torch  # loaded already, as a trainer calls this

    from dlojz.training import models

    own = parser(*words)
    own.epilog = f"larger models: {models.larger()}"
    args, unknown = own.parse_known_args()
    if unknown:
        own.error(f"unrecognized arguments: {' '.join(unknown)}{_added_by(unknown)}")
    check(own, args)
    for name, value in vars(args).items():
        if isinstance(value, ByDevice):
            setattr(args, name, value.gpu if torch.cuda.is_available() else value.cpu)
    # The key of torch 2.11's cache of compiled code holds whether autocast is on, not its dtype: a
    # run in fp16 would use that of one in bf16 (https://github.com/pytorch/pytorch/pull/181564).
    torch.compiler.config.cache_key_tag = getattr(args, "precision", "")
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS
        torch.use_deterministic_algorithms(True)
    return args


def _added_by(words: list[str]) -> str:
    """Return the step that adds one of these flags, and what to type; "" if none does."""
    given = {word.partition("=")[0] for word in words}
    for step, after in zip_longest(course.CHAIN, course.CHAIN[1:]):
        for flag in flags_of(course.solution(step)):
            if given & {*flag.spellings}:
                begins = f": `dlojz catch-up {after}` begins after it" if after else ""
                return f"; {step} adds {flag.label}{begins}"
    return ""


def check(parser: argparse.ArgumentParser, args: argparse.Namespace):
    """Exit with the remedy if the arguments are not compatible."""
    from dlojz.training import models

    if args.model not in models.names():
        parser.error(models.unknown(args.model))
    if args.checkpoint and args.checkpoint.exists() and args.checkpoint != args.resume:
        parser.error(f"--checkpoint {args.checkpoint} exists: name another, or --resume from it")
    if getattr(args, "sharding", "") == "fsdp" and idr_torch.size == 1:
        parser.error("--sharding fsdp needs at least two processes: submit it with n_gpu=2")
    if (getattr(args, "sharding", ""), getattr(args, "optimizer", "")) == ("fsdp", "muon"):
        parser.error("--optimizer muon needs whole matrices: with --sharding fsdp take another one")
    if getattr(args, "mix", "off") != "off" and idr_torch.is_master:
        print("note: with --mix, the training's accuracy counts each image's own label only")
    if not 0 <= getattr(args, "warm_up", 0) <= 1:
        parser.error(f"--warm-up {args.warm_up}: expected a share, from 0 to 1")
    if args.num_workers == 0 and idr_torch.is_master:
        print("note: without workers, --persistent-workers and --prefetch-factor have no effect")
