"""Rehearsals: solved notebooks that run unattended, in parts, with a report."""

import json
import sys
import time
from types import SimpleNamespace

import nbformat
import pytest
import verify_notebooks

import notebooks
from dlojz import cli
from dlojz.classroom import rehearse
from dlojz.runs import stats

CARD = "# A\n\n| | |\n|---|---|\n| **It takes** | about 1 minutes |"


@pytest.fixture
def notebook(course_folder):
    """Write a solved notebook from the sources of its code cells."""

    def write(*cells, name="90_small"):
        book = nbformat.v4.new_notebook()
        book.cells = [nbformat.v4.new_markdown_cell(CARD), *map(nbformat.v4.new_code_cell, cells)]
        path = course_folder / "solutions" / f"{name}.ipynb"
        nbformat.write(book, path)
        for folder in (course_folder / "notebooks", rehearse.folder()):
            folder.mkdir(parents=True, exist_ok=True)
        nbformat.write(book, course_folder / "notebooks" / path.name)
        return path

    return write


def noted(path, seconds=1.0, error=None, begin=0):
    """Keep what a rehearsal of its first code cell would have found, and return that."""
    cell = {"cell": 1, "line": "", "seconds": seconds, "error": error}
    return rehearse.note(path, [cell], begin, time.time())


def test_each_code_cell_is_timed_and_one_that_fails_ends_it_and_is_named(notebook):
    path = notebook(
        "import time; time.sleep(0.3)",
        "print('seen'); raise ValueError('no such thing')",
        "print('not reached')",
    )
    found = rehearse.rehearsed(path)
    assert [cell["cell"] for cell in found["cells"]] == [1, 2]
    assert found["cells"][0]["seconds"] >= 0.3
    assert rehearse.problems(found) == ["cell 2: ValueError: no such thing"]
    assert "ValueError" in str(rehearse.report([found]))
    shown = nbformat.read(rehearse.folder() / path.name, as_version=4)
    assert [len(cell.get("outputs", "")) for cell in shown.cells] == [0, 0, 2, 0], "as many cells"
    assert nbformat.read(path, as_version=4).cells[2].outputs == [], "the solution is as it was"


def test_a_second_part_has_the_names_of_the_first(notebook):
    path = notebook(
        "import math\nfrom dlojz import table\nx, square = 3, lambda y: y * y\nbig = [x] * 2",
        "assert (math.pi, table, big) and x == 3",
    )
    (part,) = [*rehearse.run(path, 0, time.monotonic() + 60)][:1]
    rehearse.note(path, [part], 0, time.time())
    assert rehearse.problems(rehearse.kept(path)) == ["not done: go on with --from 2"]
    found = rehearse.rehearsed(path, begin=2)
    assert [cell["error"] for cell in found["cells"]] == [None, None]


def test_it_is_noted_on_what_the_jobs_ran(notebook, monkeypatch):
    path = notebook("x = 1")
    assert "CPU cores (" in noted(path)["on"], "without a job it is this machine"
    seen = {"a": ("cuda:0", 2, "a GPU"), "b": ("?", 1, "?"), "c": ("cpu", 1, "a processor")}
    jobs = [SimpleNamespace(name=n, info={"submitted": 9e9}, status={}) for n in seen]
    summaries = {
        n: stats.Summary(n, "COMPLETED", device=d, size=s, device_name=m)
        for n, (d, s, m) in seen.items()
    }
    monkeypatch.setattr(rehearse.launch, "jobs", lambda: jobs)
    monkeypatch.setattr(rehearse.stats, "summary", lambda job: summaries[job.name])
    assert noted(path)["on"] == "2 x a GPU"
    del jobs[0]
    assert noted(path, begin=1)["on"] == "2 x a GPU", "as the first part had"
    assert noted(path)["on"].endswith("CPU cores (a processor)")
    monkeypatch.setattr(rehearse.nvml, "visible", lambda: ("GPU-0",))
    monkeypatch.setattr(rehearse.facts, "gpus", lambda: {"cards": [{"name": "H"}]})
    found = noted(path)
    assert found["on"].endswith("CPU cores (a processor) beside a GPU, H")
    assert verify_notebooks.kind(found) == found["on"]


def test_a_kernel_that_dies_is_reported(notebook):
    found = rehearse.rehearsed(notebook("import os; os._exit(1)"))
    assert "kernel died" in found["cells"][-1]["error"]


def test_a_verdict_of_an_earlier_rehearsal_does_not_count(notebook):
    path = notebook('check("01_gpu")')
    kept = rehearse.folder() / "progress.json"
    for passed, year, problems in ((True, 2026, []), (False, 2999, ["check 01_gpu did not pass"])):
        entry = {"value": {"passed": passed}, "time": f"{year}-01-01T00:00:00+00:00"}
        kept.write_text(json.dumps({"verdicts": {"01_gpu": [entry]}}))
        found = noted(path)
        assert len(found["verdicts"]) == len(problems)
        assert rehearse.problems(found) == problems


def kept(**more):
    """What a rehearsal has found."""
    cells = [{"cell": 1, "seconds": 10.0, "error": None}]
    found = {"notebook": "90_small", "card_minutes": 10, "cells": cells, "code_cells": [1]}
    return found | {"jobs": [{"n_gpu": 2, "seconds": 60.0}], "verdicts": {}} | more


def test_a_class_needs_the_devices_of_all_its_jobs():
    assert "8 minutes of jobs: fits into its 10" in rehearse.room([kept()], 8, 1)
    assert "12 minutes of jobs: does not fit" in rehearse.room([kept()], 12, 2)
    assert "3 minutes of jobs: fits" in rehearse.room([kept()], 12, 8)


def test_a_cell_of_more_than_five_minutes_is_named():
    slow = kept(cells=[{"cell": 1, "seconds": 301.0, "error": None}])
    assert rehearse.problems(slow) == ["cell 1 takes 5.0 min"]
    assert rehearse.failures(slow) == [], "it ran whole all the same"


def test_the_command_rehearses_and_says_where_to_look(notebook, capsys):
    notebook("x = 1")
    assert cli.main(["rehearse", "90", "--trainees", "3"]) == 0
    out = capsys.readouterr().out
    assert "90_small" in out
    assert "3 trainees on 1 device" in out
    assert str(rehearse.folder()) in out


def test_a_rehearsal_that_has_no_time_left_gives_up_and_says_how_to_go_on(notebook, capsys):
    notebook("import time; time.sleep(60)")
    notebook("x = 1", name="91_next")
    start = time.monotonic()
    # Of 6 seconds a busy machine's kernel takes some.
    assert cli.main(["rehearse", "90", "91", "--minutes", "0.1"]) == 1
    assert time.monotonic() - start < 30
    out = capsys.readouterr().out
    assert "s were not enough: --from 1" in out
    assert "go on with: dlojz rehearse 91" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["77"], "no notebook '77': expected one of 90"),
        (["90", "--from", "9"], "--from 9: 90_small has the cells 0 to 1"),
        (["90", "--from", "1"], "nothing was kept of an earlier part"),
        (["90", "90", "--from", "1"], "name only that one"),
        (["90", "--trainees", "0"], "--trainees 0: expected at least 1"),
        (["90", "--minutes", "-1"], "--minutes -1: expected a number of minutes above 0"),
        (["90", "--minutes", "0"], "--minutes 0: expected a number of minutes above 0"),
        (["90", "--minutes", "nan"], "--minutes nan: expected a number of minutes above 0"),
        (["90", "--minutes", "inf"], "--minutes inf: expected a number of minutes above 0"),
    ],
)
def test_a_wrong_rehearsal_is_explained(notebook, capsys, words, said):
    notebook("x = 1")
    assert cli.main(["rehearse", *words]) == 2
    assert said in capsys.readouterr().err


def test_all_notebooks_have_minutes_on_their_card():
    for path in (rehearse.find(name) for name in ("00", "02b", "11_fsdp")):
        assert rehearse.CARD.search(path.read_text())


# The stamp on a card ------------------------------------------------------------------------------


@pytest.mark.parametrize(("error", "stamped"), [(None, True), ("ValueError", False)])
def test_a_notebook_that_ran_whole_is_stamped_even_if_it_was_slow(
    notebook, course_folder, monkeypatch, error, stamped
):
    notebook("x = 1")
    cell = {"cell": 1, "line": "", "seconds": rehearse.LONG_S + 1, "error": error}
    monkeypatch.setattr(rehearse, "run", lambda *_: iter([cell]))
    file = course_folder / "reference" / "verified.json"
    file.parent.mkdir()
    file.write_text("{}")
    monkeypatch.setattr(sys, "argv", ["verify_notebooks.py", "90"])
    with pytest.raises(SystemExit) as ended:
        verify_notebooks.main()
    assert ended.value.code == 1, "somebody should look at it"
    assert bool(json.loads(file.read_text())) == stamped


def test_a_stamp_replaces_an_older_one_of_the_same_hardware(course_folder):
    file = course_folder / "reference" / "verified.json"
    file.parent.mkdir()
    old = {"torch": "2.10.0", "date": "2026-01-01"}
    gpu, cpu = old | {"on": "a GPU"}, old | {"on": "8 CPU cores (y)"}
    file.write_text(json.dumps({"90_small": [cpu, gpu], "91_other": [gpu]}))
    verify_notebooks.stamp(kept(on="2 CPU cores (x)", torch="2.11.0", date="2026-02-02"))
    found = json.loads(file.read_text())
    now = {"on": "2 CPU cores (x)", "torch": "2.11.0", "date": "2026-02-02", "minutes": 0.2}
    assert found == {"90_small": [now, gpu], "91_other": [gpu]}


@pytest.mark.parametrize(
    ("runs", "row"),
    [
        ([], "not yet on a GPU. Some figures are recorded on X |"),
        (["2 CPU cores (x)"], "2 CPU cores (x), torch 1, 2026; not yet on a GPU. Some"),
        (["2 CPU cores (x)", "H"], "2 CPU cores (x), torch 1, 2026; H, torch 1, 2026. Some"),
        (["CPU cores (x) beside a GPU, H"], "CPU cores (x) beside a GPU, H, torch 1, 2026. Some"),
    ],
)
def test_a_card_says_what_the_notebook_was_last_verified_on(runs, row):
    card = "| **Last verified on** | long ago, 1.2.3. Some figures are recorded on X |"
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(card)])
    verified = {"90": [{"on": on, "torch": "1", "date": "2026"} for on in runs]}
    assert row in notebooks.stamped(book, "90", verified).cells[0].source
