"""The quizzes of the notebooks: a question, its answers, the right one and the reason.

Those of notebook NN are in quizzes/NN.toml. The trainee's answers are kept by `dlojz.progress`.
"""

import re
import tomllib
from dataclasses import dataclass
from html import escape
from importlib import resources

import ipywidgets
from IPython.display import display

from dlojz import progress
from dlojz.table import BAD, GOOD

NOT_QUITE = "Not quite. Think again and pick another."


@dataclass(frozen=True)
class Quiz:
    """A question with one right answer."""

    question: str
    answers: list[str]
    right: int  # index into answers
    why: str  # shown once it is answered


def load() -> dict[str, Quiz]:
    """Return all quizzes by key, in the order of the notebooks."""
    found = {}
    for file in sorted(resources.files("dlojz.widgets").joinpath("quizzes").iterdir(), key=str):
        found |= {
            key: Quiz(**table) for key, table in tomllib.loads(file.read_text("utf-8")).items()
        }
    return found


QUIZZES = load()


def quiz(key: str):
    """Ask the quiz with this key; keep the answer, and say whether it is right, with the reason.

    The last answer is shown again, even after the notebook was closed.
    """
    if key not in QUIZZES:
        raise KeyError(f"no quiz {key!r}: expected one of {', '.join(QUIZZES)}")
    asked = QUIZZES[key]
    kept = _kept(key, asked)
    value = None if kept is None else asked.answers[kept]
    choice = ipywidgets.RadioButtons(options=asked.answers, value=value)
    choice.layout.width = "100%"
    verdict = ipywidgets.HTML("" if kept is None else _verdict(asked, kept))

    def answer(change):
        if change["new"] is None:
            return
        given = asked.answers.index(change["new"])
        progress.keep("quizzes", key, given, right=given == asked.right)
        verdict.value = _verdict(asked, given)

    class Box(ipywidgets.VBox):
        def __repr__(self):  # as text, in front ends without widgets
            return _text(asked, _kept(key, asked))

    choice.observe(answer, names="value")
    question = ipywidgets.HTML(_lines(f"<b>{_html(asked.question)}</b>"))
    display(Box([question, choice, verdict]))


def _kept(key, asked):
    """Return the last answer; None if there is none, or the quiz no longer offers it."""
    given = progress.last("quizzes", key)
    return given if given is not None and given < len(asked.answers) else None


def _text(asked, given):
    """Return the quiz as text, with the answer that was given."""
    answers = [f"  {'x' if i == given else '-'} {a}" for i, a in enumerate(asked.answers)]
    lines = [asked.question, *answers]
    if given is not None:
        lines.append(f"Yes. {asked.why}" if given == asked.right else NOT_QUITE)
    return "\n".join(lines)


def _html(text):
    """Return plain text as HTML, with `code` set as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _lines(html):
    """Return HTML whose lines stand as close as those of text; a widget's are as high as a bar."""
    return f'<div style="line-height:1.5">{html}</div>'


def _verdict(asked, given):
    if given != asked.right:
        return f'<span style="color:{BAD}">{NOT_QUITE}</span>'
    return _lines(f'<span style="color:{GOOD}"><b>Yes.</b></span> {_html(asked.why)}')
