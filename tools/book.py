"""The course as a book, a static site: `make book`, or

    python tools/book.py build              # in book/_build/html; lists the cells without outputs
    python tools/book.py run                # the notebooks of those cells, again
    DLOJZ_PRESET=cpu python tools/book.py run 02 03

A site's own book has BOOK_REPOSITORY, its address of the repository, and BOOK_HUB, that of a hub on
which each page's notebook can be opened.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import book_outputs
import book_pages

from dlojz.classroom import rehearse

BOOK = book_outputs.REPOSITORY / "book"


def build(folder: Path) -> Path:
    """Write the pages, and have Sphinx make the site of them; return its first page."""
    source, html = folder / "source", folder / "html"
    book_pages.write(source)
    settings = ["-W", "--keep-going", "-q", "-j", "2", "-c", BOOK]
    if subprocess.run([sys.executable, "-m", "sphinx", *settings, source, html]).returncode:
        sys.exit("the book has errors: see above")
    return html / "index.html"


def run(names: list[str]):
    """Run notebooks and keep their outputs: those of these names, or those that have changed."""
    names = names or sorted({cell.partition("[")[0] for cell in book_pages.stale()})
    preset = os.environ.get("DLOJZ_PRESET") or "smoke"
    for path in map(rehearse.find, names):
        start = time.monotonic()
        book_outputs.run(path, preset)
        print(f"{path.stem}: {time.monotonic() - start:.0f} s", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=("build", "run"))
    parser.add_argument("names", nargs="*", help="notebooks to run, such as 02")
    parser.add_argument("--into", type=Path, default=BOOK / "_build", help="folder to build in")
    args = parser.parse_args()
    if args.command == "run":
        run(args.names)
        return
    first = build(args.into)
    if left := book_pages.stale():
        print("without outputs: python tools/book.py run", *left, sep="\n  ")
    print(f"the book: {first}")


if __name__ == "__main__":
    main()
