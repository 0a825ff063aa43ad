"""The comparison of two programs, judged: a gain, or what keeps it from being one."""

import re
import tomllib
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path

from dlojz import launch
from dlojz.pairing.steps import Steps
from dlojz.runs.stats import FASTER, SLOWER

# By the beginning of a difference of the work, as `dlojz.pairing.accounts` words it: its hint. The
# first that is there is given: another model, for example, also draws another order of the images.
DIFFERENCES = {
    "parameters": "model",
    "the batch: ": "batch",
    "the images have": "values",
    "the batch has other": "order",
    r"\d+ (forwards|backwards)": "passes",
    r"\d+ updates": "updates",
    "weight_decay ": "decay",
    "autocast|formats": "format",
    "layouts": "",  # where numbers lie is no other training
    "": "settings",
}


@dataclass(frozen=True)
class Gain:
    """A comparison of two programs, with its judgement."""

    found: Steps

    @property
    def passed(self) -> bool:
        """Return whether after does the same work, has the same losses, and is faster."""
        return self.key == "gain"

    @cached_property
    def key(self) -> str:
        """Return the name of the hint."""
        account, speed = self.found.account, self.found.speed
        if _program(self.found.commands[0]) == _program(self.found.commands[1]):
            return "nothing"
        matched = (next(b for b in DIFFERENCES if re.match(b, work)) for work in account.work)
        if named := [begin for begin in matched if DIFFERENCES[begin]]:
            return DIFFERENCES[min(named, key=[*DIFFERENCES].index)]
        if account.unseeded or account.apart is not None:
            return "unseeded" if account.unseeded else "losses"
        if speed is None:
            return "short"
        return {FASTER: "gain", SLOWER: "slower"}.get(speed.word, "open")

    @property
    def hint(self) -> str:
        hints = tomllib.loads(Path(__file__).with_name("hints.toml").read_text("utf-8"))
        return hints[self.key].strip()

    @property
    def text(self) -> str:
        return f"{'✓' if self.passed else '–'} {self.hint}"

    def __repr__(self):
        return f"{self.found}\n\n{self.text}"

    def _repr_html_(self):
        return f"{self.found._repr_html_()}<p><b>{escape(self.text)}</b></p>"


def judged(found: Steps) -> Gain:
    """Return a comparison of `dlojz.pairing.steps.by_steps` with its judgement."""
    return Gain(found)


def _program(command):
    """Return the content of a command's program, and its flags."""
    trainer, flags = launch.trainer_and_flags(command)
    return Path(trainer).read_bytes(), list(flags)
