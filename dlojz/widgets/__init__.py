"""The interactive parts of a notebook: monitor, queue, form, quiz, answer, prediction, mystery.

They are thin layers over `launch`, `runs` and `progress`: a control, an output, a call.

Each notebook imports them in its first cell, which therefore shows an update of the course, once.
"""

from dlojz.chapters.n04_profiler.mysteries import accuse
from dlojz.chapters.n05_dataloader.search import trials
from dlojz.course import updates
from dlojz.widgets.answer import answer
from dlojz.widgets.form import submit_form
from dlojz.widgets.monitor import monitor
from dlojz.widgets.prediction import Score, predict, score, score_gain, score_value
from dlojz.widgets.queue import queue
from dlojz.widgets.quiz import quiz

__all__ = [
    "Score",
    "accuse",
    "answer",
    "monitor",
    "predict",
    "queue",
    "quiz",
    "score",
    "score_gain",
    "score_value",
    "submit_form",
    "trials",
]

if _update := updates.unseen():
    print(_update)
