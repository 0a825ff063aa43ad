"""The rules of a race: the file race.toml in its folder."""

import json
import os
import tomllib
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from dlojz import course
from dlojz.course import UserError, presets
from dlojz.images import dataset

RULES = "race.toml"
LIMITS = {  # of the whole numbers in the rules
    "classes": (2, 5000),
    "seed": (0, 2**32 - 1),
    "seconds": (1, 86_400),
    "runs": (2, 100),
    "judged": (1, dataset.MAX_VAL_IMAGES),
    "joules": (1, 10**9),
}
TEXT = """\
# The rules of a race; docs/race.md explains them. After the first round they stay as they are.
data = {data}  # the images to train on, made by `dlojz data`
classes = {classes}
seed = {seed}  # of these images
seconds = {seconds}  # budget of a run, from the start of its process to its end
{joules}
runs = {runs}  # of each entry in a round, each with a seed of its own
judged = {judged}  # images of each class that judge, drawn after the runs
level = {level}  # the risk of putting an entry ahead that is not better
"""


class RaceError(UserError):
    """A mistake in a race, its rules or an entry: what was found, and what to do."""


@dataclass(frozen=True)
class Race:
    """A race, as race.toml has it."""

    folder: Path
    data: str  # seen from the race's folder, so that both can be moved
    classes: int
    seed: int
    seconds: int
    runs: int
    judged: int
    level: float
    joules: int | None = None  # None: no budget of energy

    @property
    def images(self) -> Path:
        """Return the folder of the images to train on."""
        return (self.folder / self.data).resolve()

    @property
    def rules(self) -> dict:
        """Return the rules without the folder, ready for JSON."""
        return {name: value for name, value in asdict(self).items() if name != "folder"}


def new(folder, data=None, seconds=20, joules=None, runs=None, judged=50, level=0.05) -> Race:
    """Make the folder of a race, and return the race.

    data: the images to train on, by default the course's. seconds, joules: the budget of a run;
    None: no budget of energy. runs: of each entry in a round, by default 3 on a CPU, 5 on a GPU.
    judged: images of each class that judge. level: the risk that a tie is taken for a victory.
    Raises RaceError if there is a race already, or for a rule that can't be.
    """
    folder, data = Path(folder), Path(data or course.data_folder()).resolve()
    held = dataset.about(data)
    runs = runs or (5 if presets.gpus() else 3)
    seen = os.path.relpath(data, folder.resolve())
    race = Race(folder.resolve(), seen, held["classes"], held["seed"], seconds, runs, judged, level)
    race = _checked(asdict(race) | {"joules": joules}, folder / RULES)
    if os.path.lexists(folder / RULES):
        raise RaceError(f"{folder} holds a race already: `dlojz race board {folder}` shows it")
    with course.needs_room(folder):
        (folder / "entries").mkdir(parents=True, exist_ok=True)
    none = "# joules = 3000  # no budget of energy"
    given = f"joules = {joules}  # budget of a run's GPU" if joules else none
    quoted = race.rules | {"data": json.dumps(race.data), "joules": given}
    course.write_atomically(folder / RULES, TEXT.format_map(quoted))
    return race


def open_race(folder) -> Race:
    """Return the race in a folder. Raises RaceError."""
    if isinstance(folder, Race):
        return folder
    file = Path(folder) / RULES
    try:
        held = tomllib.loads(course.read_small(file).decode())
    except FileNotFoundError:
        raise RaceError(
            f"no race in {folder}: expected a file {RULES} in it; `dlojz race new {folder}` makes "
            "one"
        ) from None
    except (OSError, ValueError) as error:
        raise RaceError(f"{file} can't be read: {error}") from None
    return _checked({"folder": Path(folder).resolve()} | held, file)


def _checked(held, file) -> Race:
    """Return the race with these rules. Raises RaceError for one that can't be."""
    known, given = {f.name for f in fields(Race)}, {n for n in held if held[n] is not None}
    for words, names in (("unknown", given - known), ("missing", known - {"joules"} - given)):
        if names:
            raise RaceError(f"{file}: {words} rule {min(names)!r}; known are {sorted(known)}")
    for name, (low, high) in LIMITS.items():
        value = held.get(name)
        if name in given and not (type(value) is int and low <= value <= high):
            raise RaceError(f"{file}: {name} is {value!r}, expected {low} to {high:,}")
    if not (isinstance(held["level"], float) and 0 < held["level"] < 0.5):
        raise RaceError(f"{file}: level is {held['level']!r}, expected a risk such as 0.05")
    if not isinstance(held["data"], str):
        raise RaceError(f"{file}: data is {held['data']!r}, expected a folder")
    return Race(**held)
