"""Build the talks of solutions/talks, and print them: `make talks`, with PDF=1, CLASS=FOLDER."""

import argparse
import os
import shutil
import sys
from pathlib import Path

from dlojz.classroom import syllabus
from dlojz.course import UserError, course_root

SOURCE = course_root() / "solutions" / "talks"
TARGET = course_root() / "book" / "_build" / "talks"


def build(target: Path = TARGET, scale: float = 1.5) -> Path:
    """Write the slides of all talks, and return the page that lists them. Raises UserError.

    scale: pixels of a figure for each pixel of a slide
    """
    try:
        from sphinx.cmd.build import main
    except ImportError:
        raise UserError("no Sphinx here: make setup, or pip install -e '.[dev]'") from None
    shutil.rmtree(target, ignore_errors=True)
    options = ["-q", "-W", "--keep-going", "-b", "revealjs", "-D", f"scale={scale}"]
    if main([*options, str(SOURCE), str(target)]):
        raise UserError(f"the talks of {SOURCE} have errors: see above")
    return target / "index.html"


def print_all(folder: Path = TARGET):
    """Write each talk of a folder also as a PDF, a page for each slide. Raises UserError."""
    from playwright.sync_api import sync_playwright

    if (chromium := shutil.which("chromium") or shutil.which("chromium-browser")) is None:
        raise UserError("no Chromium here, which prints the slides: make system")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        for path in syllabus.talks().values():
            talk = folder / f"{path.stem}.html"
            page.goto(f"{talk.as_uri()}?print-pdf")
            page.wait_for_selector(".pdf-page")
            page.pdf(path=talk.with_suffix(".pdf"), prefer_css_page_size=True)
        browser.close()


def main():
    """Build, and print if that is wanted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pdf", action="store_true", help="print each talk, too")
    parser.add_argument("--class", dest="folder", help="the class board's folder")
    wanted = parser.parse_args()
    if wanted.folder:
        os.environ["DLOJZ_CLASS"] = str(Path(wanted.folder).resolve())
    try:
        print(f"The talks are listed in {build()}")
        if wanted.pdf:
            print_all()
            print(f"and are, as PDF, in {TARGET}")
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
