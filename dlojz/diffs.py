"""What differs between a trainee's trainer and a solution, as text and in colours."""

import difflib
from html import escape
from pathlib import Path

from dlojz.course import course_root, solution


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
