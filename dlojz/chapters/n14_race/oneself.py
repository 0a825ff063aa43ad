"""A race with oneself: its folder, entries and edited trainers, for cells that run again."""

from pathlib import Path

from dlojz import course, images, launch, race

IMAGES = {"gpu": (24, 100, 20), "cpu": (8, 60, 20), "smoke": (2, 16, 8)}  # as of `generate`
SPARE = 0.05  # of the budget of a training, so that few are too long
STEP = "05"  # of the trainer that is edited
LAST = "epoch + 1 == args.epochs"
ONCE = {  # it validates and saves at the end only
    "device, args)\n        chrono.idle()": f"device, args) if {LAST} else train\n"
    "        chrono.idle()",
    "if args.checkpoint:\n            save(": f"if {LAST}:\n            save(",
}
KEPT = {  # a worker decodes each image once, and keeps it small
    "from itertools import": "from functools import cache\nfrom itertools import",
    "def decode(path):": "@cache\ndef decode(path):",
    'return torchvision.io.decode_image(path, mode="RGB")': "image = "
    'torchvision.io.decode_image(path, mode="RGB")\n'
    "    return torchvision.transforms.v2.functional.resize(image, [64])",
}
EDITS = {  # texts of the trainer, and what they become
    "validated-once": ONCE,
    "images-kept": ONCE | KEPT,
    "cheat": {"images=len(images)": "images=1000 * len(images)"},
}


def edited(name: str, folder: Path | None = None) -> Path:
    """Write a trainer of the course with one of EDITS to a folder, and return its path.

    folder: by default races/ of the course. Raises ValueError if the trainer has changed.
    """
    text = course.read_small(course.solution(STEP)).decode()
    for old, new in EDITS[name].items():
        if text.count(old) != 1:
            raise ValueError(f"{course.solution(STEP)}: expected once: {old!r}")
        text = text.replace(old, new)
    file = (folder or course.course_root() / "races") / f"{name.replace('-', '_')}.py"
    file.parent.mkdir(exist_ok=True)
    course.write_atomically(file, text)
    return file


def own_race(name: str = "mine", size: str = "cpu", **rules) -> race.Race:
    """Return the race races/NAME of the course, made with its images if it is not there.

    size: of its images, a key of IMAGES. rules: as `race.new` takes them; a race that is there
    keeps its own, and says so.
    """
    folder = course.course_root() / "races"
    if (folder / name / "race.toml").exists():
        found = race.open_race(folder / name)
        kept = {rule: getattr(found, rule) for rule in rules if rule in found.rules}
        if others := [f"{rule}={value}" for rule, value in kept.items() if rules[rule] != value]:
            print(f"{folder / name} keeps {', '.join(others)}: for other rules choose another name")
        return found
    data = images.generate(folder / f"images-{size}", *IMAGES[size])
    return race.new(folder / name, data, **rules)


def enter(into: race.Race, name: str, command: str, by: str = "") -> race.Entry:
    """Enter a trainer and its flags under a free name: NAME, or NAME-2, ...; return the entry.

    The same trainer with the same flags is entered only once. Raises race.RaceError.
    """
    trainer, flags = launch.trainer_and_flags(command)
    there, damaged = race.entries(into)
    for entry in there:
        if (entry.flags, entry.files) == (tuple(flags), launch.sources(trainer)):
            return entry
    taken, free, number = {*damaged, *(entry.name for entry in there)}, name, 1
    while free in taken:
        number += 1
        free = f"{name}-{number}"
    return race.enter(into, free, command, by)
