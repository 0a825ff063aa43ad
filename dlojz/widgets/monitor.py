"""Live progress bars of jobs."""

import threading
import time
from functools import partial

import ipywidgets
from IPython.display import display

from dlojz import launch
from dlojz.course import progress
from dlojz.figures.report import speed_text
from dlojz.runs import outcome
from dlojz.runs.labels import labels
from dlojz.widgets.box import Row, cancel_button

MOST_CHARACTERS = 28  # the part of a label that fits in front of its bar


def monitor(job):
    """Display a progress bar for a job, or one for each of a list, and keep it up to date.

    The cell returns at once, so that the notebook can be used while the job runs.
    """
    jobs = job if isinstance(job, list) else [job]
    for one, label in zip(jobs, labels(jobs), strict=True):
        bar, text, cancel = _bar(one, label)
        display(Row([bar, cancel, text], partial(_text, one, bar, text)))
        threading.Thread(target=_move, args=(one, bar, text, cancel), daemon=True).start()


def _text(job, bar, text):
    return f"{bar.tooltip}: {text.value or job.state}"


def _bar(job, label):
    words = f"job {job.id} {label}".strip()
    short = words if len(words) <= MOST_CHARACTERS else f"{words[: MOST_CHARACTERS - 1]}…"
    bar = ipywidgets.IntProgress(description=short, tooltip=words, min=0, max=1)
    bar.style.description_width = "14em" if label else "initial"  # bars of a list are aligned
    bar.layout.width = "34em" if label else "24em"
    return bar, ipywidgets.Label(), cancel_button(job)


def _move(job, bar, text, cancel):
    for now in launch.follow(job):
        progress.share_state(job, now.state)
        bar.max, bar.value = now.total or 1, now.done
        text.value = _news(now, job)
    if reason := job.status.get("reason"):
        text.value += f": {reason.splitlines()[0]}"
    ended_well = job.state == "COMPLETED"
    bar.bar_style = {"COMPLETED": "success", "CANCELLED": "warning"}.get(job.state, "danger")
    if ended_well:
        bar.value = bar.max
    cancel.disabled = True


def _news(now, job):
    """Return the news of a job, in one line."""
    if now.total:
        pace = f", {speed_text(now.images_per_s)} images/s, loss {now.loss:.3f}" if now.loss else ""
        return f"{now.state} {now.done}/{now.total} steps{pace}"
    if now.state == "QUEUED" and (reason := job.status.get("reason")):
        return f"QUEUED: {reason}"
    if now.state != "RUNNING":
        return now.state
    if now.total is None and not outcome.is_foreign(job.directory):
        return "RUNNING: starting"
    seconds = time.time() - job.status.get("started", time.time())
    return f"RUNNING for {max(0.0, seconds):.0f} s"
