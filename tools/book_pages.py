"""The book's pages: solved notebooks with their kept outputs, and the course's Markdown files.

Links between the files become links between the pages. Any other file that is linked comes along,
to be downloaded.
"""

import os
import random
import re
import shutil
import sys
from collections.abc import Iterator
from difflib import unified_diff
from html import escape
from pathlib import Path

import nbformat
from book_outputs import OUTPUTS, REPOSITORY
from PIL import Image

from dlojz import course
from dlojz.widgets.answer import ANSWERS
from dlojz.widgets.quiz import QUIZZES, as_html

NOTEBOOKS = sorted((REPOSITORY / "solutions").glob("[0-9]*.ipynb"))
TALKS = ("solutions/TALK.md", "solutions/talks/README.md")
TALKS = tuple(file for file in TALKS if (REPOSITORY / file).exists())
SITES = ("slurm/README.md", "jupyterhub/README.md")
DOCS = ("own", "race", "benchmark", "recordings")
CONTENTS = {
    "Before you begin": ("README.md", "GLOSSARY.md"),
    "Notebooks": tuple(f"solutions/{path.name}" for path in NOTEBOOKS),
    "The verdict": ("VERDICT.md", "docs/checks.md", "tests/wrong/museum/README.md"),
    "For a class": (
        "INSTRUCTORS.md",
        "solutions/TALK.md",
        "slurm/README.md",
        "jupyterhub/README.md",
    ),
    "More": (
        "docs/own.md",
        "docs/race.md",
        "docs/benchmark.md",
        "docs/recordings.md",
        "CONTRIBUTING.md",
    ),
}
FILES = [file for files in CONTENTS.values() for file in files]
TITLES = {"README.md": "The course", "solutions/TALK.md": "Questions of the room"}
CODE = re.compile(r"(^(`{3,}).*?^\2$|`[^`\n]+`)", re.M | re.S)
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")
COPIED = re.compile(r"\]\(files/([^)]+)\)")
POWER = re.compile(r"\$(\d+)\^\{(-?)(\d+)\}\$")
ASKED = re.compile(r'^(quiz|answer)\("([^"]+)"\)$\n?', re.M)
PREDICTED = re.compile(r"^predict\(.*  # exercise: (.*)$", re.M)
SOLVED = re.compile(r"  # exercise: .*$", re.M)


def write(folder: Path):
    """Write the sources of all pages into a folder, with the files that they link."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "outputs").symlink_to(OUTPUTS)
    for name, text in pages():
        (folder / f"{name}.md").write_text(text, encoding="utf-8")
        for file in COPIED.findall(text):
            copy = folder / "files" / file
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / file, copy)


def pages() -> Iterator[tuple[str, str]]:
    """Yield the name and the Markdown of each page."""
    yield "index", cover()
    for file in FILES:
        path = REPOSITORY / file
        yield page_name(file), notebook(path) if path.suffix == ".ipynb" else document(file)


def page_name(file: str) -> str:
    """Return the name of a file's page: "02_amp", "docs-own", "slurm" for slurm/README.md."""
    path = Path(file)
    if path.suffix == ".ipynb":
        return path.stem
    parts = path.with_suffix("").parts
    return "-".join(parts[:-1] if len(parts) > 1 and parts[-1] == "README" else parts).lower()


# Markdown files ----------------------------------------------------------------------------------


def cover() -> str:
    """Return the first page: its text, the README's table of notebooks, and the contents."""
    text = (REPOSITORY / "book" / "cover.md").read_text("utf-8")
    table = section((REPOSITORY / "README.md").read_text("utf-8"), "## The notebooks")
    text = text.replace("{notebooks}", table.partition("![")[0])
    text = re.sub(r"^\| `(\w+)`", r"| [\1](notebooks/\1.ipynb)", text, flags=re.M)
    for caption, files in CONTENTS.items():
        lines = "\n".join(map(_entry, files))
        text += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{lines}\n```\n"
    return as_page(text, "README.md")


def _entry(file):
    name = page_name(file)
    return f"{TITLES[file]} <{name}>" if file in TITLES else name


def section(text: str, heading: str) -> str:
    """Return a section of a Markdown text, with its heading."""
    return heading + text.partition(heading)[2].partition("\n## ")[0] + "\n"


def document(file: str) -> str:
    """Return the page of a Markdown file."""
    text = (REPOSITORY / file).read_text("utf-8")
    if file == "README.md":  # its notebooks are on the cover
        text = text.replace(section(text, "## The notebooks"), "")
    if "museum" in file:
        diffs = sorted((REPOSITORY / file).parent.glob("*.diff"))
        text = re.sub(r"\]\(([\w-]+)\.diff\)", r"](#\1)", text)
        text += "".join(f"\n## {d.stem}\n\n````diff\n{d.read_text('utf-8')}````\n" for d in diffs)
    return as_page(text, file)


def as_page(text: str, file: str) -> str:
    """Return a file's Markdown with its links and powers as the book has them; code is kept."""
    parts = CODE.split(text)
    for i in range(0, len(parts), 3):
        parts[i] = LINK.sub(lambda match: _link(match, file), parts[i])
        parts[i] = POWER.sub(lambda m: f"{m[1]}<sup>{'−' * bool(m[2])}{m[3]}</sup>", parts[i])
    return "".join(part for i, part in enumerate(parts) if i % 3 < 2)


def _link(match, file):
    """Return a link's target: a page, a picture or a file that comes along; a folder's is none."""
    path = os.path.normpath(Path(file).parent / match[1]).replace("notebooks/", "solutions/")
    if path in FILES:
        return f"]({page_name(path)}.md{match[2] or ''})"
    path = os.path.normpath(Path(file).parent / match[1])
    if (REPOSITORY / path).is_dir():
        return "](index.md)"
    if not (REPOSITORY / path).is_file():
        sys.exit(f"{file} links to {match[1]}: expected a file of the repository, {path} is none")
    return f"](files/{path})"


# Notebooks ---------------------------------------------------------------------------------------


def notebook(path: Path) -> str:
    """Return the page of a solved notebook."""
    kept = outputs(path.stem)
    first, *cells = nbformat.read(path, as_version=4).cells
    parts = [as_page(first.source, f"solutions/{path.name}"), about(path.stem, kept)]
    for cell in cells:
        if cell.cell_type == "code":
            parts += code(cell.source, kept.get("cells", {}).get(cell.source, ()))
        else:
            text = as_page(cell.source, f"solutions/{path.name}")
            parts.append(text.replace("\n## Run", f"\n{edit(path.stem)}\n\n## Run"))
    return "\n\n".join(parts) + "\n"


def outputs(name: str) -> dict:
    """Return the record of a notebook's run; {} if it was never run."""
    return course.read_table(OUTPUTS / f"{name}.json")


def about(name: str, kept: dict) -> str:
    """Return the way to open a notebook, and the machine that it was run on for this page."""
    there = f"To work through it: <code>make lab</code>, <code>notebooks/{name}.ipynb</code>"
    if hub := os.environ.get("BOOK_HUB"):
        if not (repository := os.environ.get("BOOK_REPOSITORY")):
            sys.exit("BOOK_HUB needs BOOK_REPOSITORY, too: the address that the hub clones from")
        sys.path.append(str(REPOSITORY / "jupyterhub"))
        from link import link

        url = link(hub, repository, notebook=name)
        there = f'<a class="hub" href="{escape(url)}">Open it on the hub</a>'
    ran = "This page was not run yet."
    if kept:
        ran = (
            f"This page is the solved notebook, run on {kept['on']} in the sizes of the preset "
            f"<i>{kept['preset']}</i> (torch {kept['torch']}, {kept['date']}). Figures of other "
            "hardware are recorded, and say so."
        )
    return f'<p class="about">{there}. {ran}</p>'


def edit(name: str) -> str:
    """Return the solution of a step, folded: its difference from the step before."""
    if name not in course.CHAIN[1:]:
        return ""
    before, after = (p.read_text("utf-8") for p in (course.before(name), course.solution(name)))
    lines = [*unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=1)][2:]
    return folded("One solution", course.Diff("\n".join(lines))._repr_html_())


def code(source: str, found: list) -> Iterator[str]:
    """Yield the Markdown of a code cell: what it asks, its code, what it shows."""
    shown = SOLVED.sub("", PREDICTED.sub(r"\1", ASKED.sub("", source))).strip()
    if shown:
        yield f"````{{code-block}} python\n:class: cell\n\n{shown}\n````"
    for kind, key in ASKED.findall(source):
        yield question(key) if kind == "quiz" else answer(key)
    for output in found:
        yield from output_of(output)


def output_of(output: dict) -> Iterator[str]:
    """Yield the Markdown of one output."""
    ((kind, value),) = output.items()
    if kind == "picture":
        width = Image.open(OUTPUTS / value).width // 2  # it has two pixels for each point
        about = f":alt: {Path(value).stem}, of the cell above\n:width: {width}px"
        yield '<div class="picture">'
        yield f"```{{image}} outputs/{value}\n{about}\n```"
        yield "</div>"
    elif kind == "html":
        yield f'`````{{raw}} html\n<div class="output">{value}</div>\n`````'
    elif value.startswith("noted:"):
        yield folded("Our guess", f"<p>{escape(value.removeprefix('noted:'))}</p>")
    else:
        yield f'<pre class="output {kind}">{escape(value.rstrip())}</pre>'


def folded(summary: str, html: str, before: str = "") -> str:
    """Return a block of which the reader unfolds the second part."""
    block = f"<details><summary>{summary}</summary>{html}</details>"
    return f'`````{{raw}} html\n<div class="asked">{before}{block}</div>\n`````'


def question(key: str) -> str:
    """Return a quiz: its question and choices; folded, the right one and why."""
    asked = QUIZZES[key]
    order = random.Random(key).sample(asked.answers, len(asked.answers))
    choices = "".join(f"<li>{as_html(each.text)}</li>" for each in order)
    reasons = "".join(
        f'<p class="{"right" if each.right else "wrong"}"><b>{as_html(each.text)}</b>'
        f"<br>{as_html(each.why)}</p>"
        for each in sorted(order, key=lambda each: not each.right)
    )
    return folded("Answer", reasons, f"<p><b>{as_html(asked.question)}</b></p><ol>{choices}</ol>")


def answer(key: str) -> str:
    """Return a question at the end of a notebook, with an answer to unfold."""
    name = key.split(" ", 1)[1].capitalize()
    return folded(f"{name}: an answer", f"<p>{as_html(ANSWERS[key])}</p>")


def stale() -> list[str]:
    """Return the cells whose outputs are not kept, because they were edited since."""
    return [
        f"{path.stem}[{i}] {cell.source.splitlines()[0]}"
        for path in NOTEBOOKS
        for i, cell in enumerate(nbformat.read(path, as_version=4).cells)
        if cell.cell_type == "code"
        and ASKED.sub("", cell.source).strip()
        and cell.source not in outputs(path.stem).get("cells", {})
    ]
