"""The quizzes of the notebooks: a question, its answers, the right one and the reason.

They are in quizzes/NN.toml, by the notebook that asks them. The trainee's answers are kept by
`dlojz.progress`.
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


@dataclass(frozen=True)
class Quiz:
    """A question with one right answer."""

    question: str
    answers: list[str]
    right: int  # index into answers
    why: str  # shown once it is answered


def load() -> dict[str, Quiz]:
    """All quizzes by key, in the order of the notebooks."""
    found = {}
    for file in sorted(resources.files("dlojz.widgets").joinpath("quizzes").iterdir(), key=str):
        found |= {
            key: Quiz(**table) for key, table in tomllib.loads(file.read_text("utf-8")).items()
        }
    return found


QUIZZES = load()


def quiz(key: str):
    """Ask the quiz with this key; an answer is told right or wrong, with the reason, and kept."""
    if key not in QUIZZES:
        raise KeyError(f"no quiz {key!r}: expected one of {', '.join(QUIZZES)}")
    asked = QUIZZES[key]
    choice = ipywidgets.RadioButtons(options=asked.answers, value=None)
    choice.layout.width = "100%"
    verdict = ipywidgets.HTML()

    def answer(change):
        if change["new"] is None:
            return
        given = asked.answers.index(change["new"])
        progress.keep("quizzes", key, given, right=given == asked.right)
        verdict.value = _verdict(asked, given)

    choice.observe(answer, names="value")
    display(ipywidgets.VBox([ipywidgets.HTML(f"<b>{_html(asked.question)}</b>"), choice, verdict]))


def _html(text):
    """Plain text with `code` as HTML."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _verdict(asked, given):
    if given != asked.right:
        return f'<span style="color:{BAD}"><b>Not so.</b></span> Think again, and choose another.'
    return f'<span style="color:{GOOD}"><b>Yes.</b></span> {_html(asked.why)}'
