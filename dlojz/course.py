"""Where the course's files are, and the chain of its steps. Imports nothing of ours, nor torch."""

import difflib
import os
import time
from html import escape
from pathlib import Path

MARKER = ".course-root"  # a file that stands in the top folder of a clone

# The steps that edit the trainer. Each solution is its predecessor with the step's TODOs done; the
# first is the trainer as it is handed out.
CHAIN = (
    *("00_start", "01_gpu", "02_amp", "03_channels_last", "04_profiler", "05_dataloader"),
    "06_ddp",
)


class UserError(ValueError):
    """An error that the reader of a notebook can mend: shown as its message, without a traceback.

    So it says what was found, what was expected, and what to type next.
    """

    def _render_traceback_(self):  # what IPython asks for
        return [f"{type(self).__name__}: {self}"]


def course_root(start=".") -> Path:
    """The course's top folder, above `start` (or $DLOJZ_ROOT): paths and runs/ are relative to it.

    A notebook's kernel starts in notebooks/, a job anywhere.
    """
    if "DLOJZ_ROOT" in os.environ:
        return Path(os.environ["DLOJZ_ROOT"]).resolve()
    here = Path(start).resolve()
    for folder in (here, *here.parents):
        if (folder / MARKER).exists():
            return folder
    raise FileNotFoundError(
        f"no course folder at or above {here}: expected a file {MARKER} in one of them; "
        "cd into your clone, or set DLOJZ_ROOT to it"
    )


def data_folder() -> Path:
    """The images that the trainer takes if it is told nothing: $DLOJZ_DATA, or data/."""
    return course_root() / (os.environ.get("DLOJZ_DATA") or "data")


def trainer() -> Path:
    """The file that the trainee edits."""
    return course_root() / "dlojz" / "dlojz.py"


def step(name: str | int) -> str:
    """The step's full name: 1, "1", "01" and "01_gpu" are "01_gpu"."""
    text = str(name)
    for known in CHAIN:
        if text == known or (text.isdigit() and int(text) == int(known[:2])):
            return known
    raise LookupError(
        f"no step {text!r} that edits the trainer: expected one of {', '.join(CHAIN)}"
    )


def solution(name: str | int) -> Path:
    """The trainer as it is after this step."""
    return course_root() / "solutions" / f"dlojz_{step(name)}.py"


def before(name: str | int) -> Path:
    """The trainer as it is before this step: its starting point."""
    place = CHAIN.index(step(name))
    return solution(CHAIN[max(0, place - 1)])


def catch_up(name: str | int) -> Path | None:
    """Make the trainee's trainer the starting point of a step; returns where theirs was saved.

    None if there was nothing to save: their file was a step of the course, unchanged.
    """
    mine, start = trainer(), before(name).read_bytes()
    saved = None
    if mine.exists() and mine.read_bytes() not in [solution(s).read_bytes() for s in CHAIN]:
        folder = course_root() / "saved"
        folder.mkdir(exist_ok=True)
        saved = folder / f"dlojz-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**6:06d}.py"
        with saved.open("xb") as file:  # never over an earlier one
            file.write(mine.read_bytes())
    write_atomically(mine, start)
    return saved


def write_atomically(path: Path, content: str | bytes):
    """Replace `path` in one step, so that a reader sees the old content or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    temporary.replace(path)


class Diff(str):
    """A unified diff, coloured in a notebook."""

    def _repr_html_(self):
        colours = {
            "+": "rgba(0,158,115,.18)",
            "-": "rgba(213,94,0,.18)",
            "@": "rgba(0,114,178,.14)",
        }
        lines = "".join(
            f'<div style="background:{colours.get(line[:1], "none")}">{escape(line) or " "}</div>'
            for line in self.splitlines()
        )
        return f'<pre style="line-height:1.35">{lines or "no difference"}</pre>'

    def __repr__(self):
        return str(self) or "no difference"


def diff(mine, step: str | int) -> Diff:
    """What differs between a job's trainer (or a file) and the solution of a step."""
    path = Path(getattr(mine, "directory", mine))
    path = path / "trainer.py" if path.is_dir() else path
    theirs = solution(step)
    return Diff(
        "\n".join(
            difflib.unified_diff(
                path.read_text().splitlines(),
                theirs.read_text().splitlines(),
                _relative(path),
                _relative(theirs),
                n=2,
                lineterm="",
            )
        )
    )


def _relative(path):
    root = course_root()
    return str(path.relative_to(root) if path.is_relative_to(root) else path)
