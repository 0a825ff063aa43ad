"""A live view of the jobs that wait or run."""

import threading
import time
from html import escape

import ipywidgets
from IPython.display import display

from dlojz import launch
from dlojz.table import BAD_INK, STATE_COLOURS
from dlojz.widgets.box import Column

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
        self._lines = {}  # job id: (cells by column, button, line)
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
                self._lines[job.id] = self._line(job)
            cells, button, _ = self._lines[job.id]
            row = dict(zip(launch.QUEUE, launch.queue_row(job, status), strict=True))
            for column, cell in cells.items():
                colour = (
                    STATE_COLOURS.get(row["state"], BAD_INK) if column == "state" else "inherit"
                )
                cell.value = f'<span style="color:{colour}">{escape(row[column])}</span>'
            button.disabled = launch.State(status["state"]).final
        lines = [self._lines[job.id][2] for job, _ in found]
        wanted = (self._head, *lines) if lines else (self._nothing,)
        if self.box.children != wanted:
            self.box.children = wanted
        return any(not launch.State(status["state"]).final for _, status in found)

    def _line(self, job):
        cells = {column: _cell("", width) for column, width in COLUMNS.items()}
        button = ipywidgets.Button(description="cancel", layout=ipywidgets.Layout(width="6em"))
        button.on_click(lambda _: job.cancel())
        return cells, button, ipywidgets.HBox([*cells.values(), button])


def _cell(html, width):
    return ipywidgets.HTML(html, layout=ipywidgets.Layout(width=width))
