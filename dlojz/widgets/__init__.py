"""The interactive parts of a notebook: monitor, queue, form, quiz, answer, prediction.

They are thin layers over `launch`, `runs` and `progress`: a control, an output, a call.

Each notebook imports them in its first cell, which therefore shows an update of the course, once.
"""

from dlojz import classroom  # noqa: F401  shares what is kept with the class, if there is one
from dlojz.course import updates
from dlojz.widgets.answer import answer
from dlojz.widgets.form import submit_form
from dlojz.widgets.monitor import monitor
from dlojz.widgets.prediction import Score, predict, score, score_gain, score_value
from dlojz.widgets.queue import queue
from dlojz.widgets.quiz import quiz

__all__ = [
    "Score",
    "answer",
    "monitor",
    "predict",
    "queue",
    "quiz",
    "score",
    "score_gain",
    "score_value",
    "submit_form",
]

if _update := updates.unseen():
    print(_update)
