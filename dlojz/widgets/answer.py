"""The questions at the end of a notebook: type your answer, then compare it with another.

The other answers are in the chapter's answers.toml. What the trainee typed is kept by
`dlojz.course.progress`.
"""

import ipywidgets
from IPython.display import display

from dlojz.course import progress
from dlojz.widgets.box import Column
from dlojz.widgets.quiz import as_html, close_lines, tables

ANSWERS: dict[str, str] = tables("answers.toml")


def answer(key: str):
    """Ask for an answer to a question, such as "00 what if"; keep it, then show another one.

    The typed text is shown again, even after the notebook was closed.
    """
    if key not in ANSWERS:
        raise KeyError(f"no question {key!r}: expected one of {', '.join(ANSWERS)}")
    kept = progress.last("answers", key) or ""
    typed = ipywidgets.Textarea(value=kept, placeholder="your answer")
    typed.layout.width = "calc(100% - 4px)"  # less its margins
    button = ipywidgets.Button(description="Show an answer")
    shown = ipywidgets.HTML(_other(key) if kept else "")

    def show(_):
        if not typed.value.strip():
            shown.value = close_lines("Type yours first: a few words will do.")
            return
        progress.keep("answers", key, typed.value.strip())
        shown.value = _other(key)

    def text():
        yours = progress.last("answers", key) or "-"
        return f"{_label(key)}\nYour answer: {yours}\nAn answer: {ANSWERS[key]}"

    button.on_click(show)
    label = ipywidgets.HTML(f"<b>{_label(key)}</b>")
    display(Column([label, typed, button, shown], text))


def _label(key):
    """Return the name of a question in its notebook: "What if" for "00 what if"."""
    return key.split(" ", 1)[1].capitalize()


def _other(key):
    return close_lines(f"<b>An answer:</b> {as_html(ANSWERS[key])}")
