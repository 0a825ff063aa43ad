"""A table of text cells: plain text in a terminal, HTML in a notebook."""

import re
import unicodedata
from html import escape

GOOD, BAD, QUIET = "#009E73", "#B3261E", "#5B5B66"  # for states and verdicts, in figures, on white
# The same in HTML: JupyterLab's own colours, which its themes set, light or dark. What follows the
# comma is for viewers without them, and legible on both.
GOOD_INK = "var(--jp-success-color0, #00875F)"
BAD_INK = "var(--jp-error-color1, #D0453C)"
QUIET_INK = "var(--jp-content-font-color2, #7B7B84)"
PAPER = "var(--jp-layout-color0, white)"  # behind the text; on a coloured chip, the text itself
# Of a job's states, in HTML; all others are bad news.
STATE_COLOURS = {"RUNNING": GOOD_INK, "COMPLETED": GOOD_INK}
STATE_COLOURS |= dict.fromkeys(("QUEUED", "CANCELLED"), QUIET_INK)

# Browsers break a line after any hyphen. These parts of a cell are kept whole: a flag, and of a
# name with hyphens as much as ends with the name or a hyphen within 20 characters.
PARTS = re.compile(r"(?<!\S)-\S+|(?<![^\s-])(?=\S+-)(?:\S{1,20}(?!\S)|\S{1,20}(?<=-))")


def harmless(text: str, keep: str = "") -> str:
    """Return `text` with the characters that control a terminal escaped: "\\x1b", "\\n".

    keep: control characters to leave alone, such as "\\n\\t" in a text of several lines.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep or unicodedata.category(c) == "Zs" else ascii(c)[1:-1]
        for c in text
    )


def _unbroken(text):
    """Return a cell in HTML whose flags stay whole, and whose names break into long parts."""
    return PARTS.sub(r'<span style="white-space:nowrap">\g<0></span>', escape(text))


class Table:
    """A table that is shown by its representation; an empty one shows `empty`.

    align: for each column "<" (left) or ">" (right), as in a format string.
    """

    def __init__(self, head, rows, align: str, empty: str = "nothing to show"):
        self.head, self.align, self.empty = tuple(head), align, empty
        self.rows = [tuple(harmless(cell) for cell in row) for row in rows]

    def __len__(self):
        return len(self.rows)

    def __repr__(self):
        if not self.rows:
            return self.empty
        rows = [self.head, *self.rows]
        widths = [max(len(row[i]) for row in rows) for i in range(len(self.head))]
        cells = [
            [f"{c:{a}{w}}" for c, a, w in zip(r, self.align, widths, strict=True)] for r in rows
        ]
        return "\n".join("  ".join(row).rstrip() for row in cells)

    def _repr_html_(self):
        if not self.rows:
            return f"<p>{escape(self.empty)}</p>"
        # A number stays in one line with its unit; a long title need not.
        narrow = "padding:.4em .35em;text-align:"  # up to 12 columns beside a file browser
        styles = {"<": f"{narrow}left", ">": f"{narrow}right"}
        more = {"<": "", ">": ";white-space:nowrap"}

        def row(cells, tag):
            pairs = zip(cells, self.align, strict=True)
            return "".join(
                f'<{tag} style="{styles[a]}{more[a] * (tag == "td")}">{_unbroken(c)}</{tag}>'
                for c, a in pairs
            )

        body = "".join(f"<tr>{row(r, 'td')}</tr>" for r in self.rows)
        return f"<table><tr>{row(self.head, 'th')}</tr>{body}</table>"
