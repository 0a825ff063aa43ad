"""A live view of the jobs that wait or run."""

import threading
import time
from html import escape

import ipywidgets
from IPython.display import display

from dlojz import launch
from dlojz.table import BAD_INK, STATE_COLOURS
from dlojz.widgets.box import Column, cancel_button

COLUMNS = {"job": "4em", "name": "9em", "state": "10em", "time": "6em", "note": "24em"}


def queue(name: str | None = None, last: int = 5, every: float = 2.0):
    """Display the jobs that wait or run, live, each with a button to cancel it.

    Returns at once, so that the notebook can be used; the view is updated until no job is left.

    name: only jobs with this name; last: how many ended jobs to show; every: seconds between looks.
    """
    view = _Queue(name, last)
    view.look()
    display(view.box)
    threading.Thread(target=view.follow, args=(every,), daemon=True).start()


class _Queue:
    """A line of widgets for each job, kept between looks so that no click is lost."""

    def __init__(self, name, last):
        self._name, self._last = name, last
        self._lines = {}  # job id: a box with a cell for each of COLUMNS, and a button
        self._head = ipywidgets.HBox([_cell(f"<b>{c}</b>", width) for c, width in COLUMNS.items()])
        self._nothing = ipywidgets.HTML("no jobs")
        self.box = Column([], lambda: repr(launch.queue(name, last)))

    def follow(self, every):
        while self.look():
            time.sleep(every)

    def look(self) -> bool:
        """Show the jobs as they are now; return whether any of them waits or runs."""
        found = launch.in_queue(self._name, self._last)
        for job, status in found:
            if job.id not in self._lines:
                self._lines[job.id] = _line(job)
            *cells, button = self._lines[job.id].children
            row = dict(zip(launch.QUEUE, launch.queue_row(job, status), strict=True))
            colours = {"state": STATE_COLOURS.get(row["state"], BAD_INK)}
            for column, cell in zip(COLUMNS, cells, strict=True):
                colour = colours.get(column, "inherit")
                cell.value = f'<span style="color:{colour}">{escape(row[column])}</span>'
            button.disabled = launch.State(status["state"]).final
        lines = [self._lines[job.id] for job, _ in found]
        wanted = (self._head, *lines) if lines else (self._nothing,)
        if self.box.children != wanted:
            self.box.children = wanted
        return any(not launch.State(status["state"]).final for _, status in found)


def _line(job):
    cells = [_cell("", width) for width in COLUMNS.values()]
    return ipywidgets.HBox([*cells, cancel_button(job)])


def _cell(html, width):
    return ipywidgets.HTML(html, layout=ipywidgets.Layout(width=width))
