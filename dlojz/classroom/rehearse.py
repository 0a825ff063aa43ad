"""A rehearsal: solved notebooks run unattended, with the time of each cell and all verdicts.

    dlojz rehearse 01 02 03 --trainees 12    # before a class, on the hardware of the class
    dlojz rehearse 06 --minutes 9            # stops in time
    dlojz rehearse 06 --from 17              # and goes on

What it finds is kept in runs/rehearsal: the notebook with its outputs, and a file of numbers.
"""

import importlib
import json
import math
import os
import pickle
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

from dlojz import course, launch
from dlojz.course import UserError, progress
from dlojz.machine import facts, nvml
from dlojz.runs import log, stats
from dlojz.table import Table

CARD = re.compile(r"\*\*It takes\*\* \| about (\d+) minutes")
BESIDE = " beside a GPU, "  # which no job used, but for which the notebook chose its sizes
SHOWN = 60  # characters of a cell's first line
LONG_S = 300  # a cell that takes longer has people wait with nothing to do


def folder() -> Path:
    """Return the folder of what rehearsals have found."""
    return course.course_root() / "runs" / "rehearsal"


def find(name: str) -> Path:
    """Return the solved notebook of a name such as "03", "02b" or "03_channels_last"."""
    there = sorted((course.course_root() / "solutions").glob("[0-9]*.ipynb"))
    for path in there:
        if name in (path.stem, path.stem.partition("_")[0]):
            return path
    known = ", ".join(path.stem.partition("_")[0] for path in there)
    raise UserError(f"no notebook {name!r}: expected one of {known}")


def card_minutes(path: Path) -> int:
    """Return a trainee's minutes for a notebook, from its card."""
    return int(CARD.search(path.read_text(encoding="utf-8"))[1])


# Running -----------------------------------------------------------------------------------------


def run(path: Path, begin: int = 0, end: float | None = None) -> Iterator[dict]:
    """Run a notebook's code cells from `begin` on, and yield each: cell, line, seconds, error.

    The last one has an error if a cell failed, or none if all is done or the time is over.
    end: when no cell is begun any more, and a running one is given up, by time.monotonic.
    """
    import nbformat

    kept = folder() / f"{path.stem}.state"
    client = _client(path, begin, kept)
    environment = os.environ | {"DLOJZ_PROGRESS": str(folder() / "progress.json")}
    with client.setup_kernel(env=environment, stderr=subprocess.DEVNULL):
        if begin:
            _quietly(client, f"restore(globals(), {str(kept)!r})")
        for index, cell in enumerate([*client.nb.cells]):
            if index < begin or cell.cell_type != "code":
                continue
            left = end - time.monotonic() if end else None
            if left is not None and left <= 0:
                break
            client.timeout = left and math.ceil(left)
            start = time.monotonic()
            error = _error_of(client, cell, index)
            seconds = round(time.monotonic() - start, 2)
            if not error:
                _quietly(client, f"keep(globals(), {str(kept)!r})")
            nbformat.write(client.nb, folder() / path.name)
            line = cell.source.split("\n")[0][:SHOWN]
            yield {"cell": index, "line": line, "error": error, "seconds": seconds}
            if error:
                break


def _client(path, begin, kept):
    """Return the client of a notebook. Raise UserError if it can't begin with this cell."""
    import nbformat
    from nbclient.client import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    if not 0 <= begin < len(notebook.cells):
        last = len(notebook.cells) - 1
        raise UserError(f"--from {begin}: {path.stem} has the cells 0 to {last}")
    if begin and not kept.is_file():
        raise UserError(f"--from {begin}: nothing was kept of an earlier part; leave --from out")
    kept.parent.mkdir(parents=True, exist_ok=True)
    inside = {"metadata": {"path": str(path.parent)}}
    return NotebookClient(notebook, kernel_name="python3", resources=inside)


def _error_of(client, cell, index) -> str | None:
    """Run a cell; return its error, in words."""
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    try:
        client.execute_cell(cell, index)
    except CellTimeoutError:
        return f"its {client.timeout} s were not enough: --from {index}"
    except DeadKernelError:
        return "its kernel died: out of memory?"
    except CellExecutionError as error:
        return f"{error.ename}: {error.evalue}"


def _quietly(client, call):
    """Run a call of this module in the kernel, as a cell that the notebook does not have."""
    import nbformat

    cell = nbformat.v4.new_code_cell(f"from dlojz.classroom.rehearse import keep, restore; {call}")
    client.nb.cells.append(cell)
    client.execute_cell(cell, len(client.nb.cells) - 1, store_history=False)
    client.nb.cells.pop()


def keep(names: dict, file: str):
    """Write the values of a notebook's names into a file, for the next part of a rehearsal."""
    found = {}
    for name, value in names.items():
        if name.startswith("_") or name in ("In", "Out", "exit", "quit", "open"):
            continue
        with suppress(Exception):  # some can't be kept: a figure, a widget
            module = isinstance(value, ModuleType)
            found[name] = value.__name__ if module else pickle.dumps(value)
    course.write_atomically(Path(file), pickle.dumps(found))


def restore(names: dict, file: str):
    """Bring back what `keep` has written."""
    for name, value in pickle.loads(Path(file).read_bytes()).items():
        names[name] = (
            importlib.import_module(value) if isinstance(value, str) else pickle.loads(value)
        )


# What was found ----------------------------------------------------------------------------------


def kept(path: Path) -> dict:
    """Return the record of a notebook: machine, time, cells, jobs and verdicts; {} without one."""
    return course.read_table(folder() / f"{path.stem}.json")


def rehearsed(path: Path, begin: int = 0, end: float | None = None) -> dict:
    """Run a part of a notebook, print each cell, keep what was found, and return that."""
    started, cells = time.time(), []
    for cell in run(path, begin, end):
        cells.append(cell)
        print("  cell {cell:2d} {seconds:8.1f} s  {line}".format(**cell), flush=True)
    return note(path, cells, begin, started)


def note(path: Path, cells: list[dict], begin: int, started: float) -> dict:
    """Keep what a part of a rehearsal has found, and return it with that of the earlier parts.

    started: Unix seconds; jobs that were submitted later count as its own.
    """
    found, sources = kept(path) if begin else {}, json.loads(path.read_bytes())["cells"]
    before = [cell for cell in found.get("cells", []) if cell["cell"] < begin]
    mine = [job for job in launch.jobs() if (job.info.get("submitted") or 0) >= started]
    begun, on = found.get("begun", started), _hardware(mine)
    found = {
        "notebook": path.stem,
        "begun": begun,
        "on": found["on"] if found and "CPU cores" in on else on,  # an earlier part had a GPU
        "torch": version("torch"),
        "date": datetime.now(UTC).date().isoformat(),
        "card_minutes": card_minutes(path),
        "code_cells": [i for i, cell in enumerate(sources) if cell["cell_type"] == "code"],
        "cells": before + cells,
        "jobs": found.get("jobs", []) + [_job(job) for job in mine],
        "verdicts": _verdicts(path, begun),
    }
    course.write_atomically(folder() / f"{path.stem}.json", json.dumps(found, indent=1))
    return found


def _hardware(jobs):
    """Return the hardware of the jobs' logs: the largest number of devices, and their name.

    If no log names any, it is this machine's processor, and the card beside it if it has one.
    """
    found = [(False, 1, facts.cpu()["model"])]
    for job in jobs:
        with suppress(OSError, log.LogError):
            seen = stats.summary(job)
            if seen.device != "?":  # failed without one
                found.append((seen.device != "cpu", seen.size, seen.device_name))
    on_gpu, size, name = max(found)
    if on_gpu:
        return f"{size} x {name}" if size > 1 else name
    cores = f"{len(os.sched_getaffinity(0))} CPU cores ({name})"
    cards = facts.gpus()["cards"] if nvml.visible() else ()
    return f"{cores}{BESIDE}{cards[0].get('name', '?')}" if cards else cores


def has_gpu(on: str) -> bool:
    """Return whether what a rehearsal ran on, in words, has a GPU, used or not."""
    return "CPU cores" not in on or BESIDE in on


def _job(job):
    """Return the number of a job's devices, and its seconds."""
    status = job.status
    begin = status.get("started")
    seconds = (status.get("ended") or time.time()) - begin if begin else 0
    return {"n_gpu": job.info.get("n_gpu", 1), "seconds": round(seconds, 1)}


def _verdicts(path, begun):
    """Return {step: passed} for the checks of this notebook since the rehearsal began."""
    asked = {key for book, kind, key in progress.asked() if (book, kind) == (path.stem, "verdicts")}
    given = progress.load(folder() / "progress.json").get("verdicts", {})
    last = {step: given[step][-1] for step in sorted(asked & set(given))}
    return {
        step: entry["value"]["passed"]
        for step, entry in last.items()
        if datetime.fromisoformat(entry["time"]).timestamp() >= int(begun)
    }


# The report --------------------------------------------------------------------------------------


def report(found: Sequence[Mapping]) -> Table:
    """Return a table of notebooks: the card's minutes, those that the cells took, what is wrong."""
    rows = []
    for each in found:
        seconds = sum(cell["seconds"] for cell in each["cells"])
        none = {"seconds": 0, "cell": "none"}  # the time was over
        longest = max(each["cells"], key=lambda cell: cell["seconds"], default=none)
        cells = f"{_minutes(longest['seconds'])} (cell {longest['cell']})"
        jobs = sum(job["seconds"] for job in each["jobs"])
        times = (f"{each['card_minutes']} min", *map(_minutes, (seconds, jobs)), cells)
        rows.append((each["notebook"], *times, "; ".join(problems(each)) or "all passed"))
    head = ("notebook", "its card", "its cells", "of it jobs", "longest", "")
    return Table(head, rows, "<>>>><")


def _minutes(seconds):
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"


def problems(found: Mapping) -> list[str]:
    """Return the problems of a class, in words: failures, and slow cells."""
    return failures(found) + [
        f"cell {cell['cell']} takes {_minutes(cell['seconds'])}"
        for cell in found["cells"]
        if cell["seconds"] > LONG_S and not cell["error"]
    ]


def failures(found: Mapping) -> list[str]:
    """Return the failures of a notebook's run and of its checks, in words."""
    said = [f"cell {c['cell']}: {c['error']}" for c in found["cells"] if c["error"]]
    done = {cell["cell"] for cell in found["cells"]}
    if not said and (left := [cell for cell in found["code_cells"] if cell not in done]):
        said.append(f"not done: go on with --from {left[0]}")
    checks = found["verdicts"].items()
    return said + [f"check {step} did not pass" for step, passed in checks if not passed]


def room(found: Sequence[Mapping], trainees: int, devices: int) -> str:
    """Return whether a class's jobs fit into the time of the cards, in a sentence or two.

    devices: GPUs that the jobs of all trainees share; 1 for a processor, which runs job by job.
    """
    lines = []
    for each in found:
        alone = sum(job["seconds"] * min(job["n_gpu"], devices) for job in each["jobs"])
        needed, card = trainees * alone / devices / 60, each["card_minutes"]
        words = f"fits into its {card}" if needed <= card else f"does not fit into its {card}"
        lines.append(f"{each['notebook']}: {needed:.0f} minutes of jobs: {words}")
    share = f"{trainees} trainees on {devices} device{'s' * (devices > 1)}, one job after another"
    return f"{share}:\n  " + "\n  ".join(lines)
