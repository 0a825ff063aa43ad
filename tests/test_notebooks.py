"""The notebooks are derived, short-celled and without outputs. nbval runs them."""

import ast
import re
from functools import cache
from pathlib import Path

import nbformat
import pytest

import notebooks
from dlojz import course
from dlojz.widgets.answer import ANSWERS
from dlojz.widgets.quiz import QUIZZES

REPOSITORY = Path(__file__).parent.parent
FOLDERS = (REPOSITORY / "notebooks", REPOSITORY / "solutions")
FILES = [path for folder in FOLDERS for path in folder.glob("[0-9]*.ipynb")]
INSTRUCTORS = REPOSITORY / "solutions" / "instructor.ipynb"  # not a part of the course
SECOND = [p for p in FILES if p.name[2].isalpha()]  # optional second parts: 02b follows 02
MAIN = [p for p in FILES if p not in SECOND]
CHECKED = re.compile(r'\bcheck\("(\w+)"')
MAY_NOT_IMPORT = {"jobs", "training"}  # they are for programs that run as jobs


def named(path):
    """Return how a test's name says which notebook it looks at."""
    return f"{path.parent.name}/{path.name}"


@cache
def all_cells(path):
    return nbformat.read(path, as_version=4).cells


@cache
def prose(path):
    """Return the markdown of a notebook."""
    return "\n".join(c.source for c in all_cells(path) if c.cell_type == "markdown")


def number(path):
    """Return "00" or "00b"."""
    return path.name.partition("_")[0]


def code_cells(path):
    return [c for c in all_cells(path) if c.cell_type == "code"]


def test_the_notebooks_are_derived_from_the_solved_ones():
    assert notebooks.check() == []
    assert len(FILES) >= 4


def test_only_numbered_notebooks_are_handed_out():
    handed_out = {path.name for path in (REPOSITORY / "notebooks").glob("*.ipynb")}
    solved = {path.name for path in (REPOSITORY / "solutions").glob("*.ipynb")}
    assert INSTRUCTORS.name in {path.name for path in notebooks.wanted()}
    assert solved - handed_out == {INSTRUCTORS.name}
    assert handed_out == {path.name for path in FILES}


def test_only_an_exercise_may_raise_and_only_where_the_trainee_writes():
    cell = nbformat.v4.new_code_cell("plot(after)", metadata={"tags": ["exercise-raises"]})
    solved = nbformat.v4.new_notebook(cells=[cell])
    assert notebooks.exercise(solved).cells[0].metadata.tags == ["raises-exception"]
    for path in REPOSITORY.glob("solutions/*.ipynb"):
        for cell in code_cells(path):
            assert "raises-exception" not in cell.metadata.get("tags", ()), cell.source


def test_a_line_becomes_what_is_handed_out():
    cell = nbformat.v4.new_code_cell("x = 3  # exercise: x = None\ny = 4")
    solved = nbformat.v4.new_notebook(cells=[cell])
    assert notebooks.exercise(solved).cells[0].source == "x = None\ny = 4"


def test_a_difference_becomes_html_which_jupyterlab_shows_in_colours():
    cell = nbformat.v4.new_markdown_cell("Look:\n\n```diff\n-x = 1\n+y < 2\n```\n\nDone.")
    solved = nbformat.v4.new_notebook(cells=[cell])
    head, found, end = notebooks.exercise(solved).cells[0].source.split("\n\n")
    assert found == course.Diff("-x = 1\n+y < 2")._repr_html_()
    assert (head, end) == ("Look:", "Done.")


def test_a_code_cell_is_short_and_defines_nothing(subtests):
    for path in [*FILES, INSTRUCTORS]:
        with subtests.test(named(path)):
            for cell in code_cells(path):
                assert len(cell.source.splitlines()) <= 10, cell.source
                assert not cell.outputs
                for node in ast.walk(ast.parse(cell.source)):
                    assert not isinstance(node, ast.FunctionDef | ast.ClassDef), cell.source
                    if isinstance(node, ast.ImportFrom) and node.module.startswith("dlojz"):
                        names = [a.name for a in node.names] if node.module == "dlojz" else []
                        used = {n for n in names} | set(node.module.split(".")[1:])
                        assert not used & MAY_NOT_IMPORT, cell.source


def test_a_notebook_fits_a_sitting(subtests):
    for path in FILES:
        with subtests.test(named(path)):
            assert len(all_cells(path)) <= 45
            takes = r"^\| \*\*It takes\*\* \| about (\d+) minutes"
            [minutes] = re.findall(takes, prose(path), re.M)
            assert int(minutes) <= 75


def test_a_notebook_has_the_skeleton(subtests):
    for path in FILES:
        with subtests.test(named(path)):
            text = prose(path)
            headings = [line for line in text.splitlines() if line.startswith("#")]
            assert headings[0].startswith(f"# {path.stem.partition('_')[0]} · ")
            parts = ("The idea", "Predict", "Edit", "Run", "Check", "Read", "Question")
            for part in (*parts, "Further") if path in MAIN else ("Further",):
                assert f"## {part}" in headings, part
            for row in ("You will gain", "You need", "It takes", "Last verified on"):
                assert f"**{row}**" in text
            further = text.split("## Further")[1]
            assert further.count("](http") <= 2
            assert "(../GLOSSARY.md)" in all_cells(path)[0].source


LAPTOP = r"^\| \*\*It takes\*\* \|.*\n\| \*\*On a laptop\*\* \| (.+) \|$"


def test_a_card_says_what_a_laptop_gets_as_the_readme_does(subtests):
    readme = (REPOSITORY / "README.md").read_text()
    there = dict(re.findall(r"^\| `(\w+)`.*\| ([^|]+) \|$", readme, re.M))
    for path in FILES:
        with subtests.test(named(path)):
            assert re.findall(LAPTOP, prose(path), re.M) == [there[path.stem]]


def test_a_second_part_is_optional_and_edits_nothing_in_the_trainer(subtests):
    for path in SECOND:
        with subtests.test(named(path)):
            [first] = path.parent.glob(f"{path.name[:2]}_*.ipynb")
            _, says, *_ = all_cells(path)[0].source.split("\n\n")
            follows = f"this notebook follows [notebook {path.name[:2]}]({first.name})"
            assert says == f"*Optional: {follows}. Nothing in the trainer is edited.*"
            assert f"[Notebook {path.name[:3]}]({path.name}), optional: " in prose(first)
            assert "TODO" not in prose(path)
            # A prepared exercise is beside the trainer.
            checked = {key for c in code_cells(path) for key in CHECKED.findall(c.source)}
            assert checked <= set(course.PREPARED)


def test_a_notebook_that_is_named_exists():
    there = {number(path) for path in FILES}
    found = {named(p): set(re.findall(r"[Nn]otebook (\d\d\w?)\b", prose(p))) for p in FILES}
    assert {path: missing for path, names in found.items() if (missing := names - there)} == {}


def test_a_section_that_is_named_exists(subtests):
    """As in: see *What 16 bits lose in a sum* in notebook 02b."""
    for path in FILES:
        with subtests.test(named(path)):
            text = prose(path)
            found = re.findall(r"\*([^*\n]+)\* in notebook (\w+)", text)
            found += [(name, n) for n, name in re.findall(r"notebook (\w+), \*([^*\n]+)\*", text)]
            for name, number in found:
                [other] = path.parent.glob(f"{number}_*.ipynb")
                assert re.search(rf"^#+ {re.escape(name)}$", prose(other), re.M), (name, number)


def test_a_notebook_ends_with_three_sentences_and_the_ladder(subtests):
    for path in FILES:
        with subtests.test(named(path)):
            *_, before, remember, ladder = all_cells(path)
            assert "## Remember" not in before.source
            heading, *sentences = remember.source.split("\n")
            assert (heading, sentences.pop(0)) == ("## Remember", "")
            assert [sentence[:3] for sentence in sentences] == ["1. ", "2. ", "3. "]
            for sentence in sentences:
                assert re.fullmatch(r"\d\. ([^.]|\.\S)+\.", sentence), f"one sentence: {sentence}"
                assert len(sentence) <= 170
            [first] = [p for p in MAIN if p.parent == path.parent and number(p) == number(path)[:2]]
            last = first.stem if first.stem in course.CHAIN else course.CHAIN[-1]
            assert ladder.source.endswith(f'ladder.plot_ladder("{last}");')


TWO_JOBS = ["01_gpu", "02_amp", "03_channels_last", "06_ddp", "07_augmentation", "08_large_batch"]


@pytest.mark.parametrize("name", [*TWO_JOBS, "09_compile", "10_kernels", "11_fsdp"])
def test_after_a_restart_the_first_figure_finds_both_jobs_again(name):
    sources = [c.source for c in code_cells(REPOSITORY / f"notebooks/{name}.ipynb")]
    checked = next(i for i, s in enumerate(sources) if f'= check("{name}"' in s)
    compares = next(s for s in sources[checked:] if "before" in s)
    assert compares.startswith('before, after = latest("before"), latest("after")\n')
    for job in ("before", "after"):
        assert f'name="{job}")' in "".join(sources[:checked]), "found by its name"


def called(path, name):
    """Return the keys with which a notebook's cells call a function, in their order."""
    calls = re.compile(rf"^{name}\((.*)\)$", re.M)
    return [ast.literal_eval(key) for c in code_cells(path) for key in calls.findall(c.source)]


def test_every_quiz_is_asked_and_every_asked_quiz_exists():
    assert {key for path in FILES for key in called(path, "quiz")} == set(QUIZZES)


def test_a_notebook_asks_at_least_four_quizzes():
    """The second parts of 09 and 11 ask three."""
    least = {path: 3 if number(path) in ("09b", "11b") else 4 for path in FILES}
    assert [named(p) for p, n in least.items() if len(called(p, "quiz")) < n] == []


def test_both_questions_are_answered_only_below(subtests):
    """The answer is in no cell: it is shown to those who typed theirs."""
    for path in FILES:
        with subtests.test(named(path)):
            cells = all_cells(path)
            [asked] = [i for i, cell in enumerate(cells) if "## Question" in cell.source]
            assert re.findall(r"^\*(From the figures|What if):\*", cells[asked].source, re.M) == [
                "From the figures",
                "What if",
            ]
            keys = [f"{number(path)} from the figures", f"{number(path)} what if"]
            mine = [key for key in ANSWERS if key.partition(" ")[0] == number(path)]
            assert called(path, "answer") == mine == keys
            assert not any("answer(" in cell.source for cell in cells[:asked])
            assert not any(ANSWERS[key][:40] in cell.source for cell in cells for key in keys)


def test_every_answer_is_asked_for():
    assert {key for path in FILES for key in called(path, "answer")} == set(ANSWERS)


def test_the_exercise_notebooks_do_not_name_the_answer():
    for path in REPOSITORY.glob("notebooks/*.ipynb"):
        for cell in code_cells(path):
            assert f"solutions/dlojz_{path.stem}" not in cell.source
            assert "exercise:" not in cell.source


def test_every_figure_is_shown_where_it_is_drawn():
    """The first figure of a kernel chooses its backend, and must not spoil it for the next."""
    import nbclient

    draw = "report.plot_phases([runs.recorded('h100/01-resnet50-fp32-b0032')]);"
    cells = [
        nbformat.v4.new_code_cell(c)
        for c in ("from dlojz import runs; from dlojz.figures import report", draw, draw, draw)
    ]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    for cell in notebook.cells[1:]:
        assert ["image/png" in o.data for o in cell.outputs] == [True]
