"""The course as a book: it builds, its links lead somewhere, it can be read on a phone."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlparse

import book_outputs
import book_pages
import nbformat
import pytest
from PIL import Image

from dlojz import course

REPOSITORY = Path(__file__).parent.parent
PHONE = {"width": 390, "height": 844}


class Page(HTMLParser):
    """The links, pictures and anchors of a page, and what it loads."""

    def __init__(self, path):
        super().__init__()
        self.links, self.pictures, self.loads, self.anchors = [], [], [], set()
        self.path = path
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if tag == "img":
            self.pictures.append(found)
        self.loads += [
            found[n] for n in ("src", "href") if tag in ("script", "link") and n in found
        ]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The book, as `make book` builds it for a site with a hub: its folder."""
    folder = tmp_path_factory.mktemp("book")
    command = [
        sys.executable,
        str(REPOSITORY / "tools" / "book.py"),
        "build",
        "--into",
        str(folder),
    ]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}  # this clone's quizzes
    environment |= {"BOOK_HUB": "https://hub.here", "BOOK_REPOSITORY": "https://git.here/course"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "html"


@pytest.fixture(scope="module")
def pages(site):
    """The pages of the book, by name."""
    return {path.stem: Page(path) for path in sorted(site.glob("*.html"))}


def test_every_notebook_and_document_has_a_page_that_the_contents_name(pages):
    wanted = {book_pages.page_name(file) for file in book_pages.FILES}
    assert {path.stem for path in (REPOSITORY / "notebooks").glob("*.ipynb")} <= wanted
    assert wanted <= pages.keys()
    assert {f"{name}.html" for name in wanted} <= set(pages["index"].links)
    cover = pages["index"].path.read_text("utf-8")
    assert [p.stem for p in book_pages.NOTEBOOKS if f">{p.stem}<" not in cover] == [], "its table"


def test_links_and_pictures_are_there(pages):
    broken = []
    for page in pages.values():
        for link in page.links + [picture["src"] for picture in page.pictures]:
            url = urlparse(link)
            if url.scheme or link == "#":
                continue
            there = page.path.parent / unquote(url.path) if url.path else page.path
            known = pages[there.stem].anchors if there.stem in pages else ()
            if not there.is_file() or (url.fragment and unquote(url.fragment) not in known):
                broken.append(f"{page.path.name}: {link}")
    assert broken == []


def test_it_needs_no_network(pages):
    assert [load for page in pages.values() for load in page.loads if urlparse(load).netloc] == []


def test_each_output_that_is_kept_is_shown_and_says_on_what_it_was_made(pages):
    for path in book_pages.NOTEBOOKS:
        kept = json.loads((book_outputs.OUTPUTS / f"{path.stem}.json").read_text("utf-8"))
        text = pages[path.stem].path.read_text("utf-8")
        sources = {cell.source for cell in nbformat.read(path, as_version=4).cells}
        shown = [o for s, outputs in kept["cells"].items() if s in sources for o in outputs]
        drawn = [Path(output["picture"]).name for output in shown if "picture" in output]
        found = [Path(picture["src"]).name for picture in pages[path.stem].pictures]
        assert len(drawn) == len([name for name in found if name.endswith(".webp")]), path.stem
        assert f"run on {kept['on']}" in text
        assert kept["preset"] in text


def test_kept_pictures_are_small_and_each_is_named_by_an_output():
    pictures = {str(p.relative_to(book_outputs.OUTPUTS)) for p in book_outputs.OUTPUTS.glob("*/*")}
    kept = [json.loads(file.read_text("utf-8")) for file in book_outputs.OUTPUTS.glob("*.json")]
    outputs = [o for each in kept for found in each["cells"].values() for o in found]
    assert pictures == {output["picture"] for output in outputs if "picture" in output}
    sizes = [file.stat().st_size for file in book_outputs.OUTPUTS.rglob("*") if file.is_file()]
    assert sum(sizes) < 10e6, "this is in every clone"


def test_few_cells_were_edited_since_their_outputs_were_kept():
    stale = book_pages.stale()
    assert len(stale) <= 12, "\n".join(["python tools/book.py run:", *stale[:12]])


def test_quizzes_questions_and_solutions_are_folded(pages):
    for path in book_pages.NOTEBOOKS:
        source = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells)
        asked = len(re.findall(r"^(?:quiz|answer)\(", source, re.M))
        text = pages[path.stem].path.read_text("utf-8")
        assert text.count('<div class="asked">') >= asked, path.stem
        assert "<details open" not in text
        exercises = {path.stem} & {*course.CHAIN[1:]}
        exercises |= {key for key in course.COPIED if f'course.own("{key}")' in source}
        solved = re.findall(r"<summary>One solution of (\w+)", text)
        assert sorted(solved) == sorted(exercises), "each once"


def test_outputs_are_kept_by_source_with_pictures_named_for_what_drew_them(tmp_path, monkeypatch):
    monkeypatch.setattr(book_outputs, "OUTPUTS", tmp_path)
    folder = tmp_path / "folder"
    notebook = nbformat.v4.new_notebook()
    png = (
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJg"
        "gg=="
    )
    picture = nbformat.v4.new_output("display_data", {"image/png": png})
    says = nbformat.v4.new_output("stream", text=f"in {folder}/course/runs")
    shows = nbformat.v4.new_output(
        "display_data", {"application/vnd.jupyter.widget-view+json": {"model_id": "a"}}
    )
    cell = nbformat.v4.new_code_cell("a.plot_one(x)\na.plot_two(y);\nb.plot_one(x)")
    cell.outputs = [picture, picture, picture, says, shows]
    last = nbformat.v4.new_code_cell('ladder.plot_ladder("02_amp");', outputs=[picture])
    notebook.cells = [cell, last]
    clean = book_outputs.cleaner(folder)
    book_outputs.keep("01_a", notebook, {"a": "job 1: COMPLETED"}, "smoke", clean)
    kept = json.loads((tmp_path / "01_a.json").read_text())
    assert kept["cells"] == {
        cell.source: [
            {"picture": "01_a/plot_one.webp"},
            {"picture": "01_a/plot_two.webp"},
            {"picture": "01_a/plot_one-2.webp"},
            {"text": "in dlo-jz/runs"},
            {"widget": "job 1: COMPLETED\n"},
        ],
        last.source: [{"picture": "ladder/plot_ladder-02_amp.webp"}],  # once for all notebooks
    }
    assert Image.open(tmp_path / "01_a/plot_two.webp").size == (1, 1)


def test_links_between_files_become_links_between_pages():
    def page(text):
        return book_pages.as_page(text, "solutions/02_amp.ipynb")

    assert page("[a](../GLOSSARY.md#window)") == "[a](glossary.md#window)"
    assert page("[a](02b_formats.ipynb), `[b](c)`") == "[a](02b_formats.md), `[b](c)`"
    assert page("less than $2^{-24}$") == "less than 2<sup>−24</sup>"
    with pytest.raises(SystemExit, match=r"links to nowhere\.py: expected a file"):
        page("[a](nowhere.py)")


def test_each_notebook_has_a_link_to_the_hub_or_says_how_to_open_it(pages, monkeypatch):
    for path in book_pages.NOTEBOOKS:
        (link,) = [link for link in pages[path.stem].links if link.startswith("https://hub.here/")]
        query = parse_qs(urlparse(link).query)
        assert query["repo"] == ["https://git.here/course"]
        assert query["urlpath"] == [f"lab/tree/dlojz/notebooks/{path.name}"]
    assert "<code>notebooks/02_amp.ipynb</code>" in book_pages.about("02_amp", {})
    monkeypatch.setenv("BOOK_HUB", "https://hub.here")
    with pytest.raises(SystemExit, match="BOOK_REPOSITORY"):
        book_pages.about("02_amp", {})


@pytest.fixture
def phone(new_page, site):
    """Chromium with the width of a phone, on a page of the book: phone("02_amp")."""
    page = new_page()
    page.set_viewport_size(PHONE)

    def open_page(name):
        page.goto(f"file://{site}/{name}.html")
        return page

    return open_page


def test_no_page_scrolls_sideways_on_a_phone(phone, pages):
    def width(name):
        return phone(name).evaluate("document.documentElement.scrollWidth")

    widths = {name: width(name) for name in pages}
    assert {name: w for name, w in widths.items() if w > PHONE["width"]} == {}


def test_a_quiz_unfolds_and_search_finds_a_word(phone):
    page = phone("02_amp")
    quiz = page.locator(".asked", has_text="which operations on float32 tensors").first
    why = quiz.get_by_text("TF32 is on for cuDNN's convolutions")
    assert not why.is_visible()
    quiz.get_by_text("Answer", exact=True).click()
    assert why.is_visible()
    page = phone("search")
    page.goto(f"{page.url}?q=subnormal")
    page.locator("#search-results a", has_text="Fewer bits").first.wait_for()


def test_an_excerpt_in_search_has_no_folded_answer(phone, site):
    html = (site / "02_amp.html").read_text("utf-8")
    assert "TF32 is on for cuDNN&#x27;s convolutions" in html
    text = phone("search").evaluate("html => Search.htmlToText(html, '')", html)
    assert "Fewer bits" in text
    assert "TF32 is on for cuDNN" not in text
