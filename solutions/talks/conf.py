"""Sphinx's settings for the talks: `make talks`."""

import sys
from html import escape
from multiprocessing import Pool
from pathlib import Path
from zlib import crc32

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective

sys.path.insert(0, str(Path(__file__).parent))
import figures

from dlojz.classroom import syllabus

project = "DLO-JZ"
extensions = ["myst_parser", "sphinx_revealjs"]
exclude_patterns = ["_build"]
suppress_warnings = ["toc.not_included", "config.cache"]
revealjs_static_path = ["_static"]
revealjs_style_theme = "white"
revealjs_css_files = ["talks.css"]
revealjs_script_files = ["revealjs/dist/reveal.js", "talks.js"]
revealjs_script_plugins = [{"src": "revealjs/plugin/notes/notes.js", "name": "RevealNotes"}]
revealjs_script_conf = {
    "width": 1280,
    "height": 720,
    "margin": 0,
    "center": False,
    "hash": True,
    "controls": False,
    "slideNumber": "c/t",
    "transition": "none",
    "pdfMaxPagesPerSlide": 1,
}


wanted = {}  # figures, by their file: the arguments of figures.draw


class Draw(SphinxDirective):
    """A figure, drawn by the code of the block.

    :long:    the short form of the talk leaves this slide out
    :inches:  the figure's width for Matplotlib: more inches, smaller type
    """

    has_content = True
    option_spec = {"long": directives.flag, "inches": float}  # noqa: RUF012 - as docutils has it

    def run(self):
        code, inches = "\n".join(self.content), self.options.get("inches", figures.INCHES)
        name = (
            f"figures/{crc32(f'{code} {inches}'.encode()):08x}.webp"  # the same in two talks: once
        )
        wanted[name] = code, inches, float(self.config.scale)
        classes = "long" if "long" in self.options else "short"
        return [figure("", f'<img class="{classes}" src="{name}"', format="html")]


class figure(nodes.raw):  # noqa: N801 - nodes are named like this
    """An <img> that is yet to get its slide's title as its text."""


def describe(app, doctree):
    """End each <img>: what it shows is its slide's title."""
    for node in list(doctree.findall(figure)):
        text = f'{node.astext()} alt="{escape(node.parent.next_node(nodes.title).astext())}">'
        node.replace_self(nodes.raw("", text, format="html"))


class Talks(SphinxDirective):
    """The list of all talks, with their minutes from solutions/syllabi.toml."""

    def run(self):
        rows = []
        for title, path in syllabus.talks().items():
            page = f"{path.stem}.html"
            minutes = sorted({part.minutes for part in syllabus.parts(title)})
            marked = ":long:" in path.read_text(encoding="utf-8")
            short = f'<a href="{page}?short">short</a>' if marked else ""
            rows.append(
                f'<tr><td><a href="{page}">{title}</a></td><td>{short}</td>'
                f"<td>{' · '.join(map(str, minutes))} min</td></tr>"
            )
        return [nodes.raw("", f"<table class='talks'>{''.join(rows)}</table>", format="html")]


def draw(app, exception):
    """Draw the figures of all slides that were read, on all cores."""
    if not exception:
        figures.names()  # imported once, before the processes part
        with Pool() as pool:
            pool.starmap(figures.draw, [(app.outdir / name, *a) for name, a in wanted.items()])


def setup(app):
    app.add_directive("draw", Draw)
    app.add_directive("talks", Talks)
    app.add_config_value("scale", "1.5", "env")  # pixels of a figure for each of a slide
    app.connect("doctree-read", describe)
    app.connect("build-finished", draw)
