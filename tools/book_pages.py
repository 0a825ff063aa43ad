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
CLASS = ("INSTRUCTORS", "solutions/TALK", "slurm/README")
MORE = ("docs/own", "docs/race", "docs/benchmark", "docs/recordings", "CONTRIBUTING", "book/README")
CONTENTS = {
    "Before you begin": ("README.md", "GLOSSARY.md"),
    "Notebooks": [f"solutions/{path.name}" for path in NOTEBOOKS],
    "The verdict": ("VERDICT.md", "docs/checks.md", "tests/wrong/museum/README.md"),
    "For a class": [f"{name}.md" for name in (*CLASS, "jupyterhub/README")],
    "More": [f"{name}.md" for name in MORE],
}
FILES = [file for files in CONTENTS.values() for file in files]
TITLES = {"README.md": "The course"}
CODE = re.compile(r"(^(`{3,}).*?^\2$|`[^`\n]+`)", re.M | re.S)
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")
COPIED = re.compile(r"\]\(files/([^)]+)\)")
POWER = re.compile(r"\$(\d+)\^\{(-?)(\d+)\}\$")
NOTED = re.compile(r"^noted: (.*)\n?", re.M)
ASKED = re.compile(r'^(quiz|answer)\("([^"]+)"\)$\n?', re.M)
PREDICTED = re.compile(r"^predict\(.*  # exercise: (.*)$", re.M)
LARGER = re.compile(r'^if (preset != "smoke"|not smoke):', re.M)
NOT_RUN = '<p class="about">Not run for this page, whose sizes are the smallest: no output.</p>'
DRAWS = r'\ndef {}\([^"]*?"""Draw ([^"]*?)(?:[.;:] |[.;:]?\n\n|\.?""")'
COLUMNS = re.compile(r"^ *\S+ {2,}\S.* {2,}\S+.*$", re.M)  # a row of words set in columns
SECTION = re.compile(r"^(?=## )", re.M)
RUN = re.compile(r"## (Run|Check)$", re.M)
OWN = re.compile(r'course\.own\("(\w+)"\)')
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
    text = text.replace("{notebooks}", table.partition("![")[0]).replace("{clone}", clone())
    text = re.sub(r"^\| `(\w+)`", r"| [\1](notebooks/\1.ipynb)", text, flags=re.M)
    for caption, files in CONTENTS.items():
        lines = "\n".join(map(_entry, files))
        text += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{lines}\n```\n"
    return as_page(text, "README.md")


def clone() -> str:
    """Return the commands that fetch and open the course; "" if the site names no address of it."""
    if not (repository := os.environ.get("BOOK_REPOSITORY")):
        return ""
    return f"To work through it:\n\n```sh\ngit clone {repository} dlo-jz\ncd dlo-jz\nmake lab\n```"


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
        text += "".join(f"\n## {d.stem}\n\n````diff\n{change(d)}````\n" for d in diffs)
    return as_page(text, file)


def change(diff: Path) -> str:
    """Return a diff without the lines before it, which are for the tests."""
    lines = diff.read_text("utf-8").splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if line.startswith("--- "))
    return "".join(lines[first:])


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
    kept, (first, *cells) = outputs(path.stem), nbformat.read(path, as_version=4).cells
    parts = [as_page(first.source, f"solutions/{path.name}"), about(path.stem, kept)]
    blocks = []  # (whether it is code, text): a cell, or a section of one
    for cell in cells:
        text = cell.cell_type != "code"
        for block in SECTION.split(cell.source) if text else [cell.source]:
            blocks.append((not text, block))
    places = solutions(path.stem, blocks)
    for i, (is_code, block) in enumerate(blocks):
        parts += [solution(name) for name in places.get(i, ())]
        shown = kept.get("cells", {}).get(block, ())
        parts += code(block, shown) if is_code else [as_page(block, f"solutions/{path.name}")]
        if is_code and kept.get("preset") == "smoke" and not shown and LARGER.search(block):
            parts.append(NOT_RUN)
    return "\n\n".join(parts) + "\n"


def solutions(name: str, blocks: list[tuple[bool, str]]) -> dict[int, list[str]]:
    """Return the exercises whose solutions come before a block, by the block's place.

    That is where a section "Edit" is over, or behind the cell that runs the trainee's file.
    """
    texts = [block if not is_code else "" for is_code, block in blocks]
    edit = next((i for i, text in enumerate(texts) if text.startswith("## Edit")), len(texts))
    over = next((i for i in range(edit, len(texts)) if RUN.match(texts[i])), -1)
    places = {over: [name]} if name in course.CHAIN[1:] else {}
    for i, (_, block) in enumerate(blocks):
        for key in OWN.findall(block):
            place = places.setdefault(max(over, i + 1), [])
            place += [key] * (key not in place)
    return places


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
        few = ", in sizes so small that its times say little" * (kept["preset"] == "smoke")
        ran = (
            f"This page is the solved notebook, run on {kept['on']} with the preset "
            f"<i>{kept['preset']}</i>{few} (torch {kept['torch']}, {kept['date']}). Figures of "
            "other hardware are recorded, and say so."
        )
    return f'<p class="about">{there}. {ran}</p>'


def solution(name: str) -> str:
    """Return the solution of an exercise, folded: its differences from what is handed out."""
    pairs = []
    if name in course.CHAIN:
        pairs.append((course.before(name), course.solution(name)))
    if name in course.COPIED or name in course.BESIDE:
        file = (course.COPIED | course.BESIDE)[name]
        pairs.append((course.prepared(name), REPOSITORY / "solutions" / file))
    lines = []
    for pair in pairs:
        before, after = (path.read_text("utf-8").splitlines() for path in pair)
        lines += [*unified_diff(before, after, lineterm="", n=1)][2:]
    return folded(f"One solution of {name}", course.Diff("\n".join(lines))._repr_html_())


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
        about = f":alt: {drawn(value)}\n:width: {width}px"
        yield '<div class="picture">'
        yield f"```{{image}} outputs/{value}\n{about}\n```"
        yield "</div>"
    elif kind == "html":
        yield f'`````{{raw}} html\n<div class="output">{value}</div>\n`````'
    else:
        if text := NOTED.sub("", value).rstrip():
            kind = "columns" if len(COLUMNS.findall(text)) > 1 else kind
            yield f'<pre class="output {kind}">{escape(text)}</pre>'
        if noted := "; ".join(NOTED.findall(value)):
            yield folded("Our guess", f"<p>{escape(noted)}</p>")


def drawn(picture: str) -> str:
    """Return a picture's description: the first sentence of what drew it, or its name."""
    chapter, name = f"n{Path(picture).parent}", Path(picture).stem.partition("-")[0]
    files = sorted((REPOSITORY / "dlojz").rglob("*.py"), key=lambda file: chapter not in file.parts)
    for file in files:
        if found := re.search(DRAWS.format(name), file.read_text("utf-8"), re.S):
            return found[1][0].upper() + " ".join(found[1][1:].split())
    return f"{name}, of the cell above"


def folded(summary: str, html: str, before: str = "") -> str:
    """Return a block of which the reader unfolds the second part; no search finds that part."""
    block = _raw(f"<details><summary>{summary}</summary>{html}</details>")
    hidden = f"``````{{container}} no-search\n{block}\n``````"
    return "\n\n".join((_raw(f'<div class="asked">{before}'), hidden, _raw("</div>")))


def _raw(html):
    return f"`````{{raw}} html\n{html}\n`````"


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
