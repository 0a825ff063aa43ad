"""Sphinx's settings of the book. Its pages are written by `tools/book.py`."""

import os

project = author = "DLO-JZ"
copyright = "the authors of DLO-JZ, BSD 3-Clause"
html_title = "DLO-JZ"
extensions = ["myst_parser"]
myst_heading_anchors = 4
smartquotes = False  # -- is a flag
html_theme = "sphinx_book_theme"
html_static_path = ["static"]
html_css_files = ["book.css"]
html_js_files = ["search.js"]

html_copy_source = False
html_last_updated_fmt = None
html_theme_options = {
    "home_page_in_toc": True,
    "navbar_persistent": [],  # its search is in the side bar
    "use_download_button": False,
    "use_fullscreen_button": False,
    "logo": {"text": "DLO-JZ"},
}
if repository := os.environ.get("BOOK_REPOSITORY"):
    html_theme_options["extra_footer"] = f'<a href="{repository}">The repository</a>'
