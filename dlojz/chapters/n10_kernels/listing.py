"""The source of a function of this chapter, shown in its notebook."""

import ast
from html import escape
from pathlib import Path

from dlojz.course import UserError

FOLDER = Path(__file__).parent
FILES = ("in_pytorch.py", "in_triton.py", "experiments/inline.py")


class Source(str):
    """A function's source, with its lines as they are in its file."""

    def __repr__(self):
        return str(self)

    def _repr_html_(self):
        return f'<pre style="line-height:1.35;overflow-x:auto">{escape(self)}</pre>'


def source(name: str) -> Source:
    """Return the source of a function, or a string's assignment, with this name."""
    for file in FILES:
        text = (FOLDER / file).read_text("utf-8")
        for node in ast.parse(text).body:
            if name in _names(node):
                first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
                return Source("\n".join(text.splitlines()[first - 1 : node.end_lineno]))
    raise UserError(f"no function {name!r} in this chapter: expected one in {', '.join(FILES)}")


def _names(node) -> list[str]:
    """Return the names that a statement defines."""
    if isinstance(node, ast.FunctionDef):
        return [node.name]
    return [t.id for t in getattr(node, "targets", ()) if isinstance(t, ast.Name)]
