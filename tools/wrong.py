"""Wrong answers of the exercises: `python tools/wrong.py check | rebase | museum | show FILE`.

Each is a unified diff against the exercise's solution, tests/wrong/<step>/<name>.diff, or against
a file that the solution imports, after two lines: `expect: <its hint>`, `why: <its meaning>`. There
may be more: `caught-by: <finding>`, the
evidence that must fail; `flags: <its runs' own>`; `on-gpu: <hint>`, if it differs there; and
`needs: gpu`, if it is right on a processor, or `needs: time`: only `make verify` judges those. The
folder museum has mistakes that suit any step, each against the solution that its diff names.

`check` reports those that no longer apply. `rebase` carries them over an edit of the solution, by a
three-way merge with the solution at the diff's last commit. `museum` writes the museum's page.
"""

import argparse
import difflib
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from dlojz import course
from dlojz.course import presets

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "wrong"
# Folders of answers that suit any step, which their diffs name.
MUSEUM, RIGHT = "museum", "right"


@dataclass(frozen=True)
class Wrong:
    """A plausible mistake."""

    path: Path
    expect: str  # the hint that must come first
    why: str
    caught_by: str = ""  # the finding that must fail; "": any
    flags: str = ""  # additional ones of its runs
    needs_gpu: bool = False
    needs_time: bool = False  # only `make verify` judges it
    on_gpu: str = ""  # the hint that must come first there; "": the same

    @property
    def step(self) -> str:
        if self.path.parent.name not in (MUSEUM, RIGHT):
            return self.path.parent.name
        name = re.search(r"^--- a/(\w+\.py)", self.path.read_text(), re.M).group(1)
        of_files = {file: step for step, file in course.BESIDE.items()}
        return of_files.get(name) or name.removeprefix("dlojz_").removesuffix(".py")

    @property
    def name(self) -> str:
        return self.path.stem


def read(path: Path) -> Wrong:
    """Return the wrong answer in this file. Raises ValueError if its first lines are incomplete."""
    head = path.read_text().partition("--- a/")[0]
    known = dict(line.split(": ", 1) for line in head.splitlines() if ": " in line)
    if not {"expect", "why"} <= known.keys():
        raise ValueError(f"{path}: expected to begin with 'expect: <hint>' and 'why: <sentence>'")
    return Wrong(
        path,
        known["expect"],
        known["why"],
        known.get("caught-by", ""),
        known.get("flags", ""),
        known.get("needs") == "gpu",
        known.get("needs") == "time",
        known.get("on-gpu", ""),
    )


def museum() -> list[Wrong]:
    """Return the mistakes of the museum, which suit any step."""
    return every(MUSEUM)


def right() -> list[Wrong]:
    """Return the right answers of another make, tests/right: they must pass."""
    return [read(path) for path in sorted((FOLDER.parent / RIGHT).glob("*.diff"))]


def every(step: str = "*") -> list[Wrong]:
    """Return all wrong answers, or those of one step; the museum's only by name."""
    return [
        read(path)
        for path in sorted(FOLDER.glob(f"{step}/*.diff"))
        if step == MUSEUM or path.parent.name != MUSEUM
    ]


def judged_here(step: str) -> list[Wrong]:
    """Return the answers of a step that are wrong on this machine."""
    return [answer for answer in every(step) if presets.gpus() or not answer.needs_gpu]


def solved(step: str) -> dict[str, str]:
    """Return the solution of a step and the files that it imports, by name."""
    solution = course.solution(step)
    files = [solution, *map(solution.with_name, course.files_beside(step))]
    return {file.name: file.read_text() for file in files}


def sources(wrong: Wrong, usual: dict[str, str] | None = None) -> dict[str, str]:
    """Return the wrong trainer and the files that it imports, by name.

    usual: those of the solution, by default as they are now. Raises ValueError if the diff no
    longer applies.
    """
    usual = usual or solved(wrong.step)
    with tempfile.TemporaryDirectory() as folder:
        for name, text in usual.items():
            Path(folder, name).write_text(text)
        done = subprocess.run(
            ["git", "apply", str(wrong.path.resolve())], cwd=folder, capture_output=True, text=True
        )
        if done.returncode:
            raise ValueError(
                f"{wrong.path} no longer applies to {' and '.join(usual)}: python tools/wrong.py "
                f"rebase\n{done.stderr}"
            )
        return {name: Path(folder, name).read_text() for name in usual}


def put(wrong: Wrong, folder: Path) -> Path:
    """Write the wrong trainer as dlojz.py, and beside it what it imports; return its path."""
    trainer = Path(folder, course.trainer().name)
    for name, text in sources(wrong).items():
        mine = trainer if name == course.solution(wrong.step).name else trainer.with_name(name)
        mine.write_text(text)
    return trainer


def write(wrong: Wrong, usual: dict[str, str], changed: dict[str, str]):
    """Write the diff from the solution's files to the changed ones."""
    wrong.path.parent.mkdir(parents=True, exist_ok=True)
    head = {"expect": wrong.expect, "why": wrong.why, "caught-by": wrong.caught_by}
    needs = "gpu" if wrong.needs_gpu else "time" if wrong.needs_time else ""
    head |= {"flags": wrong.flags, "on-gpu": wrong.on_gpu, "needs": needs}
    text = "".join(f"{name}: {value}\n" for name, value in head.items() if value)
    for name, original in usual.items():
        lines = original.splitlines(True), changed[name].splitlines(True)
        text += "".join(difflib.unified_diff(*lines, f"a/{name}", f"b/{name}"))
    wrong.path.write_text(text)


def rebase(wrong: Wrong):
    """Carry a diff over the edits of its solution since the diff was committed."""
    usual = solved(wrong.step)
    commit = _git("log", "-1", "--format=%H", "--", str(wrong.path)).strip()
    if not commit:
        sys.exit(f"{wrong.path} was never committed: make it again by hand")
    old = {name: _git("show", f"{commit}:solutions/{name}") for name in usual}
    mine = sources(wrong, old)
    changed = {name: _merged(wrong, mine[name], old[name], usual[name]) for name in usual}
    write(wrong, usual, changed)


def _merged(wrong, mine, old, usual) -> str:
    """Return a wrong file, carried over the edits of the solution's."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("the wrong answer", "the old solution", "the new")]
        for file, text in zip(files, (mine, old, usual), strict=True):
            file.write_text(text)
        merge = ["git", "merge-file", "-p", *map(str, files)]
        done = subprocess.run(merge, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}\n{wrong.path}: the edit meets this mistake; write it again")
    return done.stdout


PAGE = FOLDER / MUSEUM / "README.md"
INTRO = """# The museum

Mistakes that suit any step, each a diff against a solution: in the data, the settings or the log,
late ones, and images or work that are left out. A check refuses each of them: `make verify` judges
every one, `make test` some of each kind. Deliberate cheating is not collected here, and
[some of it passes](../../../VERDICT.md).

`python tools/wrong.py museum` writes this page.

| mistake | what it does | caught by |
|---|---|---|
"""


def page() -> str:
    """Return the museum's page as it is now."""
    cells = ((f"[{a.name}]({a.path.name})", a.why, a.caught_by) for a in museum())
    return INTRO + "".join(f"| {' | '.join(row)} |\n" for row in cells)


def _git(*words):
    root = FOLDER.parent.parent
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True).stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=("check", "rebase", "museum", "show"))
    parser.add_argument("file", nargs="?", type=Path, help="diff to show")
    args = parser.parse_args()
    if args.command == "show":
        print("".join(sources(read(args.file)).values()), end="")
        return
    if args.command == "museum":
        PAGE.write_text(page())
        return
    stale, answers = [], [*every(), *museum(), *right()]
    for wrong in answers:
        try:
            sources(wrong)
        except ValueError as error:
            stale.append(wrong)
            print(error if args.command == "check" else f"rebasing {wrong.path}")
    if args.command == "rebase":
        for wrong in stale:
            rebase(wrong)
        return
    print(f"{len(answers) - len(stale)} of {len(answers)} answers apply")
    sys.exit(bool(stale))


if __name__ == "__main__":
    main()
