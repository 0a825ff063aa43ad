"""The flags of a trainer, read from its source: to import it would import torch.

A flag is a call of `add_argument` or of `flags.switch`. A trainer that calls `flags.parser` and
`flags.parse` has the flags of dlojz/training/flags.py, too. A default that is computed is unknown,
such as one that depends on whether there is a GPU.
"""

import ast
from dataclasses import dataclass
from pathlib import Path

from dlojz.course import UserError

COMMON = Path(__file__).parent.parent / "training" / "flags.py"
UNKNOWN = None  # a default that is computed, or None itself
LEAST = {"positive": 1, "natural": 0}  # the types of dlojz/training/flags.py
KINDS = {"positive": int, "natural": int, "int": int, "float": float}


@dataclass(frozen=True)
class Flag:
    """A flag of a trainer."""

    names: tuple[str, ...]  # as they are declared: ("-b", "--batch-size")
    kind: type = str  # of its value: bool for one that is there or not
    default: object = UNKNOWN
    choices: tuple = ()
    help: str = ""
    least: int | None = None  # of a whole number
    opposite: bool = False  # --x has --no-x
    common: bool = False  # one of those that say how a run is made, and not what it trains

    @property
    def label(self) -> str:
        """Return its long name."""
        return max(self.names, key=len)

    @property
    def spellings(self) -> tuple[str, ...]:
        """Return all words that are this flag on a command line."""
        return (*self.names, *([f"--no-{self.label[2:]}"] if self.opposite else []))

    def words(self, value) -> list[str]:
        """Return the words that give it this value; none for its default."""
        if value == self.default or value is None or value == "":
            return []
        if self.kind is bool:
            return [f"--no-{self.label[2:]}" if self.opposite and not value else self.label]
        return [self.names[0], str(value)]


def flags_of(trainer: Path) -> list[Flag]:
    """Return the flags of a trainer, in the order of --help. Raise UserError if it has none."""
    source = trainer.read_text(encoding="utf-8")
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise UserError(f"{trainer}, line {error.lineno}: {error.msg}: mend it first") from None
    found = _flags(tree)
    common = ast.parse(COMMON.read_bytes())
    (first,) = (node for node in common.body if getattr(node, "name", "") == "parser")
    common.body.remove(first)
    if "flags.parser(" in source:
        found = _flags(first) + found
    if "flags.parse(" in source:
        found += _flags(common, common=True)
    if not found:
        raise UserError(f"{trainer} has no flag: expected a trainer that calls add_argument")
    return found


def is_ours(trainer: Path) -> bool:
    """Return whether a trainer takes the flags of this course's, such as --model and --test."""
    try:
        return any(flag.common for flag in flags_of(trainer))
    except (OSError, ValueError):  # no file, or no Python
        return False


def _flags(tree, common=False) -> list[Flag]:
    constants = _constants(tree)
    return [flag for call in _calls(tree) if (flag := _flag(call, constants, common))]


def _calls(tree) -> list[ast.Call]:
    """Return the calls that add a flag, in their order."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    wanted = [call for call in calls if _name(call.func) in ("add_argument", "switch")]
    return sorted(wanted, key=lambda call: call.lineno)


def _name(node) -> str:
    """Return the last part of a dotted name: "positive" for flags.positive."""
    return getattr(node, "attr", None) or getattr(node, "id", "")


def _constants(tree) -> dict:
    """Return the names that are given a literal, such as a tuple of choices, by line."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append((node.lineno, node.value))
    return found


def _literal(node, constants, line):
    """Return the value of an expression; UNKNOWN if it is computed."""
    if isinstance(node, ast.Name):
        before = [value for at, value in constants.get(node.id, []) if at < line]
        node = before[-1] if before else None
    try:
        return ast.literal_eval(node) if node is not None else UNKNOWN
    except ValueError:
        return UNKNOWN


def _flag(call, constants, common=False) -> Flag | None:
    words = [_literal(arg, constants, call.lineno) for arg in call.args]
    given = {word.arg: word.value for word in call.keywords}
    read = {n: _literal(v, constants, call.lineno) for n, v in given.items()}
    if _name(call.func) == "switch":  # switch(group, name, default, text)
        _, name, default, text = [*words, *[None] * 4][:4]
        names, of = (name,), {"kind": bool, "default": default, "help": text, "opposite": True}
    else:
        names = tuple(word for word in words if isinstance(word, str) and word.startswith("-"))
        of = _of_argument(given, read)
    names = tuple(name for name in names if name)
    return Flag(names, common=common, **of) if names else None


def _of_argument(given, read) -> dict:
    """Return a flag as add_argument declares it."""
    action, type_ = given.get("action"), _name(given.get("type"))
    of = {"default": read.get("default"), "help": read.get("help") or ""}
    if _name(action) == "BooleanOptionalAction":
        return of | {"kind": bool, "opposite": True}
    if read.get("action") in ("store_true", "store_false"):
        return of | {"kind": bool, "default": read["action"] == "store_false"}
    choices = tuple(read.get("choices") or ())
    return of | {"kind": KINDS.get(type_, str), "choices": choices, "least": LEAST.get(type_)}
