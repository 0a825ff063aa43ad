"""The outputs that the book shows: solved notebooks are run, and what they show is kept.

    python tools/book.py run 02 03                        # in book/outputs/
    DLOJZ_PRESET=cpu python tools/book.py run 02

A file for each notebook has the outputs by the source of their cells, so that a cell that was
edited since shows none. A picture lies beside it as WebP, with the name of the function
that drew it. A widget is kept as its text, as it is when the notebook has ended.
"""

import base64
import io
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
OUTPUTS = REPOSITORY / "book" / "outputs"
SHARED = (".course-root", "dlojz", "notebooks", "reference", "slurm", "solutions", "tools")
COLOURS = 128  # of a figure: it shows no difference, and a quarter of the bytes is saved
LARGE = 150_000  # bytes; a figure has half of it, and a few photographs have ten times as much
DREW = re.compile(r"\b(plot_\w+)\(")
LADDER = re.compile(r"\bplot_ladder\(\"(\w+)\"\)")  # the same one in several notebooks
# Figures for screens with two pixels per point.
# A reader has no ladder of their own.
BEFORE = """
get_ipython().run_line_magic('config', "InlineBackend.figure_formats = ['retina']")
from dlojz.figures import ladder
ladder.yours = lambda: None
"""
# The book asks the quizzes and questions itself.
AFTER = """
import ipywidgets, json
asked = ("dlojz.widgets.quiz", "dlojz.widgets.answer")
texts = {k: w._text for k, w in ipywidgets.widgets.widget._instances.items() if hasattr(w, "_text")}
kept = {k: t() for k, t in texts.items() if getattr(t, "__module__", "") not in asked}
print(json.dumps(kept))
"""


def run(path: Path, preset: str):
    """Run a solved notebook in a course folder of its own, and keep its outputs."""
    folder = Path(tempfile.mkdtemp(prefix="dlojz-book-"))
    try:
        notebook, texts = executed(path, course(folder, preset), preset)
        keep(path.stem, notebook, texts, preset, cleaner(folder))
    finally:
        shutil.rmtree(folder)


def course(folder: Path, preset: str) -> dict[str, str]:
    """Make a course folder whose runs and images are its own; return the environment for it."""
    root = folder / "course"
    root.mkdir()
    for name in SHARED:
        (root / name).symlink_to(REPOSITORY / name)
    environment = os.environ | {
        "DLOJZ_ROOT": str(root),
        "DLOJZ_QUEUE": str(folder / "queue"),
        "DLOJZ_PROGRESS": str(folder / "progress.json"),
        "DLOJZ_PRESET": preset,
        "JUPYTERHUB_USER": "reader",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    command = [sys.executable, "-m", "dlojz.cli", "data", str(root / "data"), "--preset", preset]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return environment


def executed(path: Path, environment: dict, preset: str):
    """Run all cells of a notebook; return it with its outputs, and its widgets' texts by id."""
    import nbformat
    from nbclient.client import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    inside = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(notebook, kernel_name="python3", resources=inside, timeout=900)
    with client.setup_kernel(env=environment, stderr=subprocess.DEVNULL):
        _hidden(client, BEFORE)
        for index, cell in enumerate([*notebook.cells]):
            if cell.cell_type == "code":
                client.execute_cell(cell, index)
        texts = json.loads(_hidden(client, AFTER))
    return notebook, texts


def _hidden(client, source):
    """Run code that the notebook does not have; return what it printed."""
    import nbformat

    client.nb.cells.append(nbformat.v4.new_code_cell(source))
    cell = client.execute_cell(client.nb.cells[-1], len(client.nb.cells) - 1)
    client.nb.cells.pop()
    return "".join(output.get("text", "") for output in cell.outputs)


def cleaner(folder: Path):
    """Return a function that names the course's folder and host as a reader would have them."""
    names = {
        str(folder / "course"): "dlo-jz",
        str(folder): "dlo-jz",
        str(REPOSITORY): "dlo-jz",
        sys.prefix: ".venv",
        os.path.realpath(sys.prefix): ".venv",
        platform.release(): ".".join(platform.release().split(".")[:2]),
    }
    host = re.compile(rf"\b{re.escape(socket.gethostname())}\b")

    def clean(text):
        for found, shown in names.items():
            text = text.replace(found, shown)
        return host.sub("here", text)

    return clean


def keep(name: str, notebook, texts: dict, preset: str, clean):
    """Write a notebook's outputs, and its pictures beside them."""
    shutil.rmtree(OUTPUTS / name, ignore_errors=True)
    drawn, cells = Counter(), {}
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        calls = DREW.findall(cell.source) or ["figure"]
        found = []
        for output in cell.outputs:
            data = output.get("data", {})
            if "image/png" in data:
                call = calls.pop(0) if len(calls) > 1 else calls[0]
                drawn[call] += 1
                number = f"-{drawn[call]}" if drawn[call] > 1 else ""
                place = f"{name}/{call}{number}"
                if (ladder := LADDER.search(cell.source)) and call == "plot_ladder":
                    place = f"ladder/{call}-{ladder[1]}"
                found.append({"picture": picture(data, f"{place}.webp")})
            elif (widget := data.get("application/vnd.jupyter.widget-view+json")) is not None:
                if text := texts.get(widget["model_id"]):
                    _add(found, "widget", clean(text) + "\n")
            elif "text/html" in data:
                found.append({"html": clean(data["text/html"])})
            elif "text/plain" in data:
                found.append({"text": clean(data["text/plain"])})
            elif output.get("name") == "stdout":
                _add(found, "text", clean(output["text"]))
        cells[cell.source] = found
    kept = {
        "preset": preset,
        "on": f"{len(os.sched_getaffinity(0))} CPU cores",
        "torch": version("torch"),
        "date": datetime.now(UTC).date().isoformat(),
        "cells": cells,
    }
    OUTPUTS.mkdir(parents=True, exist_ok=True)
    text = json.dumps(kept, indent=1, ensure_ascii=False)
    (OUTPUTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def _add(found, kind, text):
    """Add a text to the outputs, or to the last one if that is of the same kind."""
    if not found or kind not in found[-1]:
        found.append({kind: ""})
    found[-1][kind] += text


def picture(data: dict, name: str) -> str:
    """Write a picture as WebP, with few colours unless it is of photographs; return its name."""
    from PIL import Image

    file = OUTPUTS / name
    file.parent.mkdir(parents=True, exist_ok=True)
    image = Image.open(io.BytesIO(base64.b64decode(data["image/png"]))).convert("RGB")
    few = image.quantize(COLOURS, dither=Image.Dither.NONE).convert("RGB")
    few.save(file, lossless=True, quality=100, method=6)
    if file.stat().st_size > LARGE:
        image.save(file, quality=85, method=6)
    return name
