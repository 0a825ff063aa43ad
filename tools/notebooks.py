"""Derive notebooks/ from the solved ones in solutions/: `tools/notebooks.py write | check`.

Outputs are stripped. A line `solved  # exercise: as handed out` becomes `as handed out`. A cell
with the tag `exercise-raises` needs code that the trainee has yet to write, so it may raise.
A difference, in a fence ```diff, becomes HTML: JupyterLab would show it without colours.
Only numbered notebooks are handed out: what has another name, such as instructor.ipynb, is stripped
where it is. The card's row "Last verified on" comes from reference/verified.json, which
tools/verify_notebooks.py writes.
"""

import argparse
import json
import re
import sys
from pathlib import Path

import nbformat

from dlojz.classroom import rehearse
from dlojz.course import Diff, course_root

VERIFIED = re.compile(
    r"(\*\*Last verified on\*\* \| ).*?((?:\. Some figures are [^|]*)? \|)$", re.M
)
DIFF = re.compile(r"^```diff\n(.*?)\n```$", re.M | re.S)
HANDED_OUT = re.compile(r"^(\s*).*?  # exercise: (.*)$", re.M)


def stripped(notebook):
    """Return the notebook without outputs, counts, and editors' metadata."""
    for number, cell in enumerate(notebook.cells):
        cell.metadata = {k: v for k, v in cell.metadata.items() if k == "tags"}
        cell.id = f"cell-{number:02d}"
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def exercise(notebook):
    """Return the notebook as it is handed out."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = DIFF.sub(lambda fence: Diff(fence[1])._repr_html_(), cell.source)
        if cell.cell_type == "code":
            cell.source = HANDED_OUT.sub(r"\1\2", cell.source)
            if "exercise-raises" in cell.metadata.get("tags", ()):
                cell.metadata["tags"] = ["raises-exception"]
    return stripped(notebook)


def stamped(notebook, name, verified):
    """Return the notebook with the hardware and dates of its last runs on its card."""
    runs = verified.get(name, [])
    found = [f"{run['on']}, torch {run['torch']}, {run['date']}" for run in runs]
    if not any(rehearse.has_gpu(run["on"]) for run in runs):
        found.append("not yet on a GPU")
    said = "; ".join(found)
    card = notebook.cells[0]
    card.source = VERIFIED.sub(lambda match: match[1] + said + match[2], card.source)
    return notebook


def wanted() -> dict[Path, str]:
    """Return the right content of each notebook file, by path."""
    files = {}
    verified = json.loads((course_root() / "reference" / "verified.json").read_text())
    for path in sorted((course_root() / "solutions").glob("*.ipynb")):
        if not path.name[:2].isdigit():  # for instructors: it has no card and is not handed out
            files[path] = stripped(nbformat.read(path, as_version=4))
            continue
        solved, handed_out = (
            stamped(nbformat.read(path, as_version=4), path.stem, verified) for _ in range(2)
        )
        files[path] = stripped(solved)
        files[course_root() / "notebooks" / path.name] = exercise(handed_out)
    return {path: nbformat.writes(notebook) + "\n" for path, notebook in files.items()}


def check() -> list[str]:
    """Return the notebooks that differ from their right content."""
    return [str(p) for p, text in wanted().items() if not p.exists() or p.read_text() != text]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=("write", "check"))
    if parser.parse_args().command == "write":
        for path, text in wanted().items():
            path.write_text(text)
    if found := check():
        sys.exit("not as derived: " + ", ".join(found) + "; run python tools/notebooks.py write")
    handed_out = sum(path.parent.name == "notebooks" for path in wanted())
    print(f"{handed_out} notebooks, each as derived from its solved one")


if __name__ == "__main__":
    main()
