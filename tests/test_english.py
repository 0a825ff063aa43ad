"""Words and phrases that a careful writer would not use, wherever a reader meets text."""

import ast
import re
from functools import cache
from pathlib import Path

import nbformat
import pytest

REPOSITORY = Path(__file__).parent.parent
PROGRAMS = ("dlojz/**/*.py", "solutions/*.py", "tools/*.py")
TABLES = ("dlojz/**/*.toml",)
TEXTS = {
    *("README.md", "CONTRIBUTING.md", "GLOSSARY.md", "slurm/README.md", "docs/benchmark.md"),
    *("INSTRUCTORS.md", "solutions/TALK.md", "jupyterhub/README.md"),
    *("CHANGELOG.md", "VERDICT.md", "docs/checks.md", "docs/race.md", "docs/recordings.md"),
}
INSTEAD = {
    r"who(ever|m)\b": "if you, that",
    r"\banew\b": "again, re-",
    r"in the mean\b": "on average",
    r"(?<!no )\bno more\b(?! than)": "no longer",
    r"\bso many\b": "N, that many",
    r"\b(lie|lies|lying) upon\b": "coincide",
    r"\bat last\b": "finally",
    r"\bby (itself|himself|themselves)\b": "automatically, alone",
    r"\b(is|are|was|were) told\b": "is reported",
    r"\bis said\b": "says",
    r"\bbelongs? into\b": "belongs in",
    r"\bdifference to the\b": "difference from the",
    r"\bis no (test|format|multiple|training|number|job|run)\b": "is not a",
    r"\bunasked\b": "unless you ask",
    r"\bout of the box\b": "by default",
    r"\b(somebody|someone) (must|clips|checked|has)\b": "name what does it",
    r"\bnobody (writes|reads|compared|else could)\b": "is not written, read, compared",
    r"\bless that of\b": "minus, the difference from",
    r"\bwhole for a moment\b": "gathered, all-gathered",
    r"\b(win|wins|won|winning) back\b": "pay for itself, regain",
    r"\b(brings? nothing|of no use)\b": "gains nothing, cannot",
    r"\bas it comes\b": "plain, as it arrives",
    r"\bhand(s|ed)? on\b": "pass on",
    r"\bless what\b": "minus",
    r"\bgone by then\b": "gone, freed",
    r"\b(a|A) training (that|whose|shows|from|on|with)\b": "a training run",
    r"^(Of|Whether|Is|Are|Has|Have|Does|Do|Where|How|What|Those|Such) ": "Return ..., Write ...",
}
OF_DOCSTRINGS = {r"^(Of|Whether|Is|Are|Has|Have|Does|Do|Where|How|What|Those|Such) "}
# A docstring begins with a noun, or with a verb and a noun: not "Return how many ...".
VERB = r"((Return|Yield|Write|Draw|Print) )?"
BAD = r"(what|how|why|where|which|when|who|of|by|from|as|on|for|after)\b"
QUESTION = re.compile(f"{VERB}{BAD}|Return (a finding|findings): ", re.I)


@cache
def texts():
    """All that is covered: a list of (where, its text, is it a docstring)."""
    return [*_texts()]


def _texts():
    for name in TEXTS:
        yield name, (REPOSITORY / name).read_text(), False
    for path in REPOSITORY.glob("solutions/talks/*.md"):
        yield path.name, path.read_text(), False
    for path in REPOSITORY.glob("solutions/*.ipynb"):
        for i, cell in enumerate(nbformat.read(path, as_version=4).cells):
            if cell.cell_type == "markdown":
                yield f"{path.name}[{i}]", cell.source, False
            else:
                yield from spoken(f"{path.name}[{i}]", cell.source)
    for path in (p for pattern in PROGRAMS for p in sorted(REPOSITORY.glob(pattern))):
        yield from spoken(path.name, path.read_text())
    for path in (p for pattern in TABLES for p in sorted(REPOSITORY.glob(pattern))):
        yield path.name, path.read_text().replace("\\\n", ""), False


def spoken(where, source):
    """Yield the docstrings of a source, and its strings of several words: its messages."""
    tree, docstrings = ast.parse(source), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and (
            text := ast.get_docstring(node)
        ):
            docstrings.add(text)
            function = isinstance(node, ast.FunctionDef)
            yield f"{where}: {getattr(node, 'name', 'module')}", text, function
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and len(text.split()) > 2 and text not in docstrings:
            yield f"{where}:{node.lineno}", text, False


@pytest.mark.parametrize("pattern", INSTEAD)
def test_a_phrase_is_not_used(pattern):
    found = [
        f"{where}: {text[max(0, hit.start() - 40) : hit.end() + 30]!r}, say: {INSTEAD[pattern]}"
        for where, text, docstring in texts()
        if docstring or pattern not in OF_DOCSTRINGS
        for hit in re.finditer(pattern, text, 0 if pattern in OF_DOCSTRINGS else re.I)
    ]
    assert found == []


def test_a_docstring_begins_with_what_it_is_about():
    docstrings = [(where, text) for where, text, _ in texts() if ": " in where]
    found = [
        f"{where}: {text.splitlines()[0]}" for where, text in docstrings if QUESTION.match(text)
    ]
    assert found == [], "name the thing: Return the number of ..., not Return how many ..."


HELPED = ("dlojz/chapters/*/*.py", "dlojz/chapters/*/experiments/*.py", "tools/*.py")
PREPOSITION = re.compile(r"(of|in|for|with|on|to|at|by|as|how|what|where|which|when|whose)\b")


def test_a_help_text_is_a_noun_phrase_or_a_clause():
    found = [
        f"{path.name}: {keyword.value.value}"
        for path in sorted(p for pattern in HELPED for p in REPOSITORY.glob(pattern))
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        for keyword in call.keywords
        if keyword.arg == "help" and isinstance(keyword.value, ast.Constant)
        if PREPOSITION.match(keyword.value.value)
    ]
    assert found == [], "name the thing: steps of each case, not: of each case"


def test_a_phrase_would_be_found():
    """The patterns find what they are for, and texts() what is covered."""
    assert re.search(next(iter(INSTEAD)), "Whoever does not know", re.I)
    covered = {where.split(":")[0].split("[")[0] for where, _, _ in texts()}
    assert {"README.md", "06_ddp.ipynb", "quiz.toml", "common.toml", "jobs.py"} <= covered
    assert {"dlojz.py", "dlojz_06_ddp.py", "storage.py", "evidence.py", "keeper.py"} <= covered


@pytest.mark.parametrize(("page", "words"), [("README.md", 1300), ("VERDICT.md", 700)])
def test_a_page_stays_short(page, words):
    assert len((REPOSITORY / page).read_text().split()) <= words


def test_the_changelog_has_at_most_15_lines_for_a_version():
    _, *versions = (REPOSITORY / "CHANGELOG.md").read_text().split("\n## ")
    counts = {text.split()[0]: text.count("\n- ") for text in versions}
    assert {version: n for version, n in counts.items() if n > 15} == {}


@pytest.mark.parametrize("page", sorted(TEXTS))
def test_each_link_of_a_page_leads_to_a_file(page):
    file = REPOSITORY / page
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", file.read_text())
    assert [link for link in links if not (file.parent / link).exists()] == []
