"""What a trainee touches in a notebook: a run's monitor, the queue, a quiz, a prediction.

Shells over `report`, `launch` and `progress`: a control, an output, a call.
"""

import re
import threading
import time
from dataclasses import dataclass
from html import escape

import ipywidgets
from IPython.display import display

from dlojz import detective, launch, progress
from dlojz.quizzes import QUIZZES
from dlojz.runs import stats, suspects

GOOD, BAD = "#009E73", "#B3261E"


# A run under way -----------------------------------------------------------------------------


def monitor(job):
    """A progress bar for a job, or one for each of a list; they move by themselves.

    The cell returns at once, so that the notebook can be used while the job runs.
    """
    jobs = job if isinstance(job, list) else [job]
    for one, label in zip(jobs, labels(jobs), strict=True):
        bar, text, cancel = _bar(one, label)
        display(ipywidgets.HBox([bar, cancel, text]))
        threading.Thread(target=_move, args=(one, bar, text, cancel), daemon=True).start()


def labels(jobs) -> list[str]:
    """What sets each of several jobs apart: its name or, in a sweep, the flags of its own."""
    names = [job.name for job in jobs]
    if len(set(names)) == len(names):
        return names if len(jobs) > 1 else [""]
    flags = [_flags(job) for job in jobs]
    common = set.intersection(*map(set, flags))
    return [" ".join(flag for flag in one if flag not in common) for one in flags]


def _flags(job):
    """The flags of a job, each with its value: ["--test", "-b 64"]."""
    found = []
    for word in job.info.get("command", [])[1:]:
        if found and not word.startswith("-"):
            found[-1] += f" {word}"
        else:
            found.append(word)
    return found


def _bar(job, label):
    bar = ipywidgets.IntProgress(description=f"job {job.id} {label}".strip(), min=0, max=1)
    bar.style.description_width = "14em" if label else "initial"  # one below the other
    bar.layout.width = "34em" if label else "24em"
    cancel = ipywidgets.Button(description="cancel", layout=ipywidgets.Layout(width="6em"))
    cancel.on_click(lambda _: job.cancel())
    return bar, ipywidgets.Label(), cancel


def _move(job, bar, text, cancel):
    for now in launch.follow(job):
        bar.max, bar.value = now.total or 1, now.done
        text.value = _news(now, job)
    ended_well = job.state == "COMPLETED"
    bar.bar_style = "success" if ended_well else "danger"
    if ended_well:
        bar.value = bar.max
    cancel.disabled = True


def _news(now, job):
    """What a job is doing, in one line."""
    if now.total:
        pace = f", {now.images_per_s:,.0f} images/s, loss {now.loss:.3f}" if now.loss else ""
        return f"{now.state} {now.done}/{now.total} steps{pace}"
    if now.state != "RUNNING":
        return now.state
    if now.total is None:
        return "RUNNING: starting"
    return f"RUNNING for {time.time() - job.status.get('started', time.time()):.0f} s"


# The queue ------------------------------------------------------------------------------------

COLUMNS = {"job": "4em", "name": "9em", "state": "10em", "time": "6em", "note": "24em"}
COLOURS = {"RUNNING": GOOD, "COMPLETED": GOOD, "QUEUED": "#666666", "CANCELLED": "#666666"}


def queue(name: str | None = None, last: int = 5, every: float = 2.0):
    """The jobs that wait or run, live, each with a button to cancel it; returns at once.

    name: only jobs with this name; last: how many that have ended; every: seconds between looks.
    Goes on by itself until no job is left, so that the notebook can be used meanwhile.
    """
    view = _Queue(name, last)
    view.look()
    display(view.box)
    threading.Thread(target=view.follow, args=(every,), daemon=True).start()


class _Queue:
    """One line of widgets for each job; kept from look to look, so that a click is not lost."""

    def __init__(self, name, last):
        self._name, self._last = name, last
        self._lines = {}  # job id: (cells by column, button, line)
        self._head = ipywidgets.HBox([_cell(f"<b>{c}</b>", width) for c, width in COLUMNS.items()])
        self._nothing = ipywidgets.HTML("no jobs")

        class Box(ipywidgets.VBox):
            def __repr__(self):  # where there are no widgets: text
                return repr(launch.queue(name, last))

        self.box = Box()

    def follow(self, every):
        while self.look():
            time.sleep(every)

    def look(self) -> bool:
        """Show the jobs as they are now; are there any that wait or run?"""
        found = launch.in_queue(self._name, self._last)
        for job, status in found:
            if job.id not in self._lines:
                self._lines[job.id] = self._line(job)
            cells, button, _ = self._lines[job.id]
            row = dict(zip(launch.QUEUE, launch.queue_row(job, status), strict=True))
            for column, cell in cells.items():
                colour = COLOURS.get(row["state"], BAD) if column == "state" else "inherit"
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


# A quiz --------------------------------------------------------------------------------------


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
        progress.keep("quizzes", key, given)
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


# A mystery -----------------------------------------------------------------------------------


def accuse(letter: str):
    """Ask for the fault of a recorded mystery; a wrong answer is given a hint, and all are kept."""
    options = [("what is wrong?", None), *((words, key) for key, words in suspects.FAULTS.items())]
    choice = ipywidgets.Dropdown(options=options, value=None, description=letter)
    choice.layout.width = "34em"
    choice.style.description_width = "2em"
    verdict = ipywidgets.HTML()

    def judge(change):
        if change["new"] is not None:
            right = detective.answer(letter, change["new"])
            verdict.value = _sentence(letter, right)

    choice.observe(judge, names="value")
    display(ipywidgets.HBox([choice, verdict]))


def _sentence(letter, right):
    if right:
        why = escape(detective.evidence(letter))
        return f'<span style="color:{GOOD}"><b>Yes:</b></span> {why}.'
    hint = escape(detective.hint(letter))
    return f'<span style="color:{BAD}"><b>Not so.</b></span> {hint}'


# A prediction --------------------------------------------------------------------------------

# What can be predicted: its unit, and where it stands in a summary.
PREDICTABLE = {
    "images_per_s": ("images/s", lambda s: s.images_per_s),
    "step_ms": ("ms", lambda s: s.step_ms),
    "peak_memory_gb": ("GB", lambda s: s.peak_memory_bytes and s.peak_memory_bytes / 1e9),
    "epoch_s": ("s", lambda s: s.epoch_s),
    "backward_share": ("of the step", lambda s: s.shares.get("backward")),
    "data_share": ("of the step", lambda s: s.shares.get("data")),
    "ratio": ("times", lambda s: None),  # of two figures that no single run has: `score_value`
}


def predict(key: str, **values):
    """Keep a prediction: predict("baseline", images_per_s=100). None stands for no guess yet."""
    for name, value in values.items():
        if name not in PREDICTABLE:
            raise ValueError(f"{name} can't be predicted: expected one of {', '.join(PREDICTABLE)}")
        most = 1 if name.endswith("_share") else float("inf")
        if value is not None and not (isinstance(value, int | float) and 0 < value <= most):
            limit = ", at most 1" if most == 1 else ""
            raise ValueError(
                f"{name}={value!r}: expected a number above 0{limit}, or None for no guess"
            )
    progress.keep("predictions", key, values)
    given = {name: value for name, value in values.items() if value is not None}
    missing = [name for name in values if name not in given]
    print(f"noted: {given}" if given else f"no guess yet: write a number for {', '.join(missing)}")


@dataclass(frozen=True)
class Score:
    """A prediction beside what was measured."""

    rows: list  # (name, unit, predicted or None, measured or None)

    def __repr__(self):
        return "\n".join(
            f"{name}: predicted {_number(p)}, measured {_number(m)} {unit}: {_word(p, m)}"
            for name, unit, p, m in self.rows
        )

    def _repr_html_(self):
        rows = "".join(
            f"<tr><td>{name}</td><td>{_number(p)}</td><td>{_number(m)} {unit}</td>"
            f"<td style='text-align:left'>{_word(p, m)}</td></tr>"
            for name, unit, p, m in self.rows
        )
        head = "<tr><th></th><th>predicted</th><th>measured</th><th></th></tr>"
        return f"<table>{head}{rows}</table>"


def score(key: str, run) -> Score:
    """The last prediction under `key` beside the figures of `run`."""
    found, given = stats.summary(run), progress.last("predictions", key) or {}
    return Score([(n, PREDICTABLE[n][0], p, PREDICTABLE[n][1](found)) for n, p in given.items()])


def score_value(key: str, **measured) -> Score:
    """The last prediction under `key` beside figures of no single run: score_value("b", ratio=2).

    What was not measured is None, or left out.
    """
    given = progress.last("predictions", key) or {}
    return Score([(n, PREDICTABLE[n][0], p, measured.get(n)) for n, p in given.items()])


def _number(value):
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _word(predicted, measured):
    if predicted is None:
        return "no prediction"
    if measured is None:
        return "not measured"
    factor = max(predicted / measured, measured / predicted)
    if factor <= 1.1:
        return "★★★ within 10 %"
    if factor <= 1.25:
        return "★★ within 25 %"
    if factor <= 2:
        return f"★ a factor of {factor:.1f}"
    return f"a factor of {factor:.1f}: what did you not think of?"
