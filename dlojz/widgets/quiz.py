"""The quizzes of the notebooks: a question and its answers, each with an explanation.

Those of a notebook are in its chapter's quiz.toml. The trainee's answers are kept by
`dlojz.course.progress`.
"""

import os
import random
import re
import tomllib
from dataclasses import dataclass
from html import escape
from pathlib import Path

import ipywidgets
from IPython.display import display

from dlojz.course import progress
from dlojz.table import BAD_INK, GOOD_INK
from dlojz.widgets.box import Column

CHAPTERS = Path(__file__).parents[1] / "chapters"


@dataclass(frozen=True)
class Answer:
    """An answer that can be picked, and why it is right or wrong."""

    text: str
    why: str
    right: bool = False


@dataclass(frozen=True)
class Quiz:
    """A question with one right answer."""

    question: str
    answers: list[Answer]

    @property
    def right(self) -> int:
        """Return the index of the right answer."""
        return [answer.right for answer in self.answers].index(True)


def tables(name: str) -> dict:
    """Return the tables in all chapters' files of this name, in the order of the notebooks."""
    found = {}
    for file in sorted(CHAPTERS.glob(f"*/{name}")):
        found |= tomllib.loads(file.read_text("utf-8"))
    return found


def load() -> dict[str, Quiz]:
    """Return all quizzes by key, in the order of the notebooks."""
    return {
        key: Quiz(table["question"], [Answer(**answer) for answer in table["answers"]])
        for key, table in tables("quiz.toml").items()
    }


QUIZZES = load()


def quiz(key: str):
    """Ask the quiz with this key; keep the answer, and explain why it is right or wrong.

    The last answer is shown again, even after the notebook was closed.
    """
    if key not in QUIZZES:
        raise KeyError(f"no quiz {key!r}: expected one of {', '.join(QUIZZES)}")
    asked = QUIZZES[key]
    # A radio button's text has no markup.
    texts = [answer.text.replace("`", "") for answer in asked.answers]
    kept, shown = _kept(key, asked), [texts[i] for i in order(key)]
    choice = ipywidgets.RadioButtons(options=shown, value=None if kept is None else texts[kept])
    choice.layout.width = "100%"
    verdict = ipywidgets.HTML("" if kept is None else _verdict(asked.answers[kept]))

    def answer(change):
        if change["new"] is None:
            return
        given = texts.index(change["new"])
        progress.keep("quizzes", key, given, right=given == asked.right)
        verdict.value = _verdict(asked.answers[given])

    choice.observe(answer, names="value")
    question = ipywidgets.HTML(close_lines(f"<b>{as_html(asked.question)}</b>"))
    display(Column([question, choice, verdict], lambda: _text(key, asked, _kept(key, asked))))


def order(key: str) -> list[int]:
    """Return the order in which a quiz's answers are shown: the trainee's own, always the same."""
    trainee = os.environ.get("JUPYTERHUB_USER") or progress.file()
    places = list(range(len(QUIZZES[key].answers)))
    random.Random(f"{trainee} {key}").shuffle(places)
    return places


def _kept(key, asked):
    """Return the last answer; None if there is none, or the quiz no longer offers it."""
    given = progress.last("quizzes", key)
    return given if given is not None and given < len(asked.answers) else None


def _text(key, asked, given):
    """Return the quiz as text, with the answer that was given."""
    answers = [f"  {'x' if i == given else '-'} {asked.answers[i].text}" for i in order(key)]
    lines = [asked.question, *answers]
    if given is not None:
        picked = asked.answers[given]
        lines.append(f"{_word(picked)} {picked.why}")
    return "\n".join(lines)


def as_html(text):
    """Return plain text as HTML, with `code` set as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def close_lines(html):
    """Return HTML whose lines stand as close as those of text; a widget's are as high as a bar."""
    return f'<div style="line-height:1.5">{html}</div>'


def _verdict(answer):
    """Return the verdict on an answer and its reason, as HTML."""
    color = GOOD_INK if answer.right else BAD_INK
    word = f'<span style="color:{color}"><b>{_word(answer)}</b></span>'
    return close_lines(f"{word} {as_html(answer.why)}")


def _word(answer):
    return "Yes." if answer.right else "Not quite."
