"""The exercises: the findings that each one asks for, and their hints.

An exercise is a table of facts: its own flags, the extra runs that it needs, and the findings that
it draws from their evidence. Its hints are in a TOML file of the same name. `dlojz.check` submits
the runs and puts the findings together; nothing here runs anything.
"""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from importlib import import_module
from pathlib import Path

from dlojz import course
from dlojz.check.bars import Bar
from dlojz.course import CHAIN, PREPARED
from dlojz.runs import log, stats

SAME, FASTER, MECHANISM = "same training", "faster", "mechanism"
PARTS = (SAME, FASTER, MECHANISM)
# Hints on different work come first, then those on dishonest measurements and missing flags.
WORK_FIRST = (
    *("called", "eval-mode", "train-mode", "images", "validation"),
    *("momentum", "optimizers", "closure", "backward", "marks", "flag"),
)


class State(StrEnum):
    """The state of a finding. One that was asked for and could not be measured does not pass."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_ASKED = "not asked"
    UNMEASURED = "unmeasured"
    OPEN = "open"  # measured, and too uncertain to tell; where no gain is asked, it passes

    @property
    def fails(self) -> bool:
        return self in (State.FAILED, State.UNMEASURED)


class Unseen(StrEnum):
    """The value of a finding for something that a run did not reach."""

    NONE = "none"
    UNKNOWN = "unknown"
    NULL = "None"


def shown(value) -> str:
    """Return a value as text; one that is missing stays `Unseen`."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, Unseen) else Unseen.NULL if value is None else str(value)


@dataclass(frozen=True)
class Finding:
    """One row of a verdict. Decisions read its key: texts are for people."""

    part: str  # one of PARTS
    key: str
    what: str
    state: State  # True and False become PASSED and FAILED
    yours: str
    expected: str  # if UNMEASURED: the remedy
    hint: str | None = None  # the name of the hint, if it fails
    open: bool = False  # measured, and uncertain
    precision: str = ""  # of the run, where several runs have a finding with this key

    def __post_init__(self):
        if isinstance(self.state, State):
            return
        if self.state is None or isinstance(self.state, str):
            raise TypeError(f"{self.key}: {self.state!r} is no state: say NOT_ASKED or UNMEASURED")
        object.__setattr__(self, "state", State.PASSED if self.state else State.FAILED)

    @property
    def fails(self) -> bool:
        return self.state.fails

    @property
    def reached(self) -> bool:
        """Return whether the run reached the subject of the finding."""
        return not isinstance(self.yours, Unseen)


@dataclass(frozen=True)
class Hint:
    """A ladder of help: a nudge, then the API; the last rung is the diff with the solution."""

    nudge: str
    api: str
    link: str


@dataclass(frozen=True)
class Extra:
    """An extra pair of runs: the trainee's trainer and the solution, with these flags.

    Those that compare losses or updates of a model with batch normalization ask for float32 and
    --deterministic: with a few images it magnifies the rounding differences of a GPU.
    """

    name: str  # the folder's
    flags: tuple[str, ...]
    rehearse: bool = False  # on the meta device


@dataclass(frozen=True)
class Beside:
    """A run of the solution with the flags of the job, and some more."""

    log: log.Run
    out_of_memory: bool = False  # a possible answer, too


@dataclass(frozen=True)
class Runs:
    """The logs that an exercise judges: those of the trainee's trainer and of the solution.

    mine, reference: with the flags of the job; extras: by name, (mine, reference); beside: by name,
    more runs of the solution; job: the job itself, which nobody audits.
    """

    mine: log.Run
    reference: log.Run
    extras: dict[str, tuple[log.Run, log.Run]] = field(default_factory=dict)
    beside: dict[str, Beside] = field(default_factory=dict)
    job: log.Run | None = None

    @property
    def on_gpu(self) -> bool:
        return self.reference.setup.get("device", "").startswith("cuda")

    @property
    def arguments(self) -> dict:
        return self.reference.start["arguments"]


@dataclass(frozen=True)
class Timed:
    """The pairs of a check; without pairs, `before` is empty and there is no comparison."""

    before: list[stats.Summary]
    after: list[log.Run]
    comparison: stats.Comparison | None


@dataclass(frozen=True)
class Exercise:
    """The task of a step of the course, as a check needs it."""

    step: str  # of the chain, such as "02_amp"
    own_flags: dict[str, int]  # unknown to the step before, each with its number of words
    mechanism: Callable[[Runs], list[Finding]]
    extras: Callable[[bool], list[Extra]] = lambda on_gpu: []
    errors: tuple[tuple[str, str], ...] = ()  # (pattern in stderr, hint): why a run may fail
    causes: tuple[tuple[str, str], ...] = ()  # errors after which a run's evidence misleads
    waited: str | None = None  # the hint if a process waited for another one in vain
    before_flags: tuple[str, ...] = ()  # extra flags of the runs before: fewer steps, if slow
    same_hardware: bool = True
    processes: int = 1  # at least this many are needed to judge a run
    recorded: tuple[str, str] | None = None  # before and after, in reference/
    follows: tuple[str, ...] = ()  # keys of its findings that follow from a wrong update
    bars: tuple[Bar, ...] = ()  # the speed-up to reach, by hardware: the first that fits counts
    hint_of: Mapping[str, str] = field(default_factory=dict)  # by key, for findings that all share
    of_files: bool = False  # the step is about loading, so a run may wait for its images
    first_hints: tuple[str, ...] = WORK_FIRST  # before its own, and those that all have in common
    # More runs of the solution, by name, such as "beside-ddp", with these additional flags.
    beside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Findings of the second part besides the speed, and the name of that part.
    second: Callable[[Runs], list[Finding]] = lambda runs: []
    second_name: str = FASTER
    # Further flags of the run of two epochs, which is among `Runs.extras`, too.
    epochs: str = "--precision fp32"
    # Hints for what differs in its second epoch only, by the finding's key.
    later: Mapping[str, str] = field(default_factory=dict)
    # Flags of a model whose state is small: it is audited in place of one over 0.5 GB.
    small: str = "--model shufflenet_v2_x0_5"
    # The price of the speed, which is reported and never fails.
    price: Callable[[Timed], list[Finding]] = lambda timed: []

    @cached_property
    def hints(self) -> dict[str, Hint]:
        """All hints of the exercise, in the order in which they are given."""
        common, own = read_hints("common"), read_hints(self.step)
        known = common | own
        return {key: known[key] for key in (*self.first_hints, *own, *common)}


@dataclass(frozen=True)
class Prepared:
    """The task of a prepared file that a trainee repairs, beside the trainer."""

    step: str  # its name, such as "09_repair"
    parts: tuple[str, ...]
    findings: Callable[[dict[str, dict]], list[Finding]]  # from the cases that its job logs
    last: str  # of these cases
    read: Callable[[Path], dict[str, dict]] = lambda folder: log.read(folder).cases
    # Return what is judged in place of one job, such as a study, with the members of a Job.
    find: Callable[[object], object] | None = None

    @cached_property
    def hints(self) -> dict[str, Hint]:
        """All hints of the exercise, in the order in which they are given."""
        return read_hints(self.step)


STEPS = CHAIN[1:]  # the ones with an exercise


def read_hints(step: str) -> dict[str, Hint]:
    """Return the hints of a step, or with "common" those of all steps, in the file's order."""
    file = Path(__file__).with_name("common.toml")
    if step != "common":
        file = file.parents[1] / "chapters" / course.chapter(step) / "hints.toml"
    return {key: Hint(**table) for key, table in tomllib.loads(file.read_text("utf-8")).items()}


def nudges() -> dict[tuple[str, str], str]:
    """Return the nudge of every hint, by step and by the hint's name."""
    common = read_hints("common")
    found = {step: common | read_hints(step) for step in STEPS}
    found |= {step: read_hints(step) for step in PREPARED}
    return {(step, key): hint.nudge for step, own in found.items() for key, hint in own.items()}


def find(step: str) -> Exercise | Prepared:
    """Return the exercise of this step of the chain, or of this prepared file."""
    if step not in (*STEPS, *PREPARED):
        raise LookupError(f"no exercise {step!r}: expected one of {', '.join(STEPS)}")
    return import_module(f"dlojz.chapters.{course.chapter(step)}.exercise").EXERCISE
