"""The commands that INSTRUCTORS.md and README.md show: they are there, and take what is shown."""

import re
import shlex
from pathlib import Path

from dlojz import cli

REPOSITORY = Path(__file__).parent.parent
PAGES = ("INSTRUCTORS.md", "README.md", "slurm/README.md", "solutions/TALK.md")


def shown(page, program):
    """Return the lines of a page that call a program, from its listings and its code spans."""
    text = (REPOSITORY / page).read_text()
    listings = re.findall(r"^```(?:sh|bash)\n(.*?)^```", text, flags=re.M | re.S)
    lines = [line for listing in listings for line in listing.splitlines()]
    rest = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    lines += re.findall(r"`([^`\n]+)`", rest)
    found = [re.sub(r"^([A-Z_]+=\S+ )+", "", line) for line in lines]
    return [line for line in found if line.startswith(f"{program} ")]


COMMANDS = sorted({line for page in PAGES for line in shown(page, "dlojz")})
WITHOUT_ARGUMENTS = {"dlojz worth compile", "dlojz estimate", "dlojz diff", "dlojz trace"}


def test_a_command_that_is_shown_is_one_of_ours(subtests):
    for line in COMMANDS:
        with subtests.test(line):
            if line in WITHOUT_ARGUMENTS:  # named in a sentence, and not to be typed
                assert line.split()[1] in cli._parser()[1]
            else:
                cli._parse(shlex.split(line, comments=True)[1:])


def test_what_make_is_asked_for_is_there():
    targets = re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), flags=re.M)
    asked = {line.split()[1] for page in PAGES for line in shown(page, "make")}
    assert "setup" in asked
    assert asked <= set(targets)


def test_each_page_of_the_instructors_is_linked_and_names_files_that_are_there():
    text = (REPOSITORY / "INSTRUCTORS.md").read_text()
    assert "(INSTRUCTORS.md)" in (REPOSITORY / "README.md").read_text()
    links = re.findall(r"\]\(([^)]+)\)", text)
    files = re.findall(r"`((?:dlojz|solutions|slurm|tools)/[\w/]+\.\w+)`", text)
    there = [name for name in files if "ours" not in name]
    assert "solutions/TALK.md" in links
    assert [name for name in links + there if not (REPOSITORY / name).exists()] == []


def test_each_variable_of_the_page_is_read_somewhere():
    text = (REPOSITORY / "INSTRUCTORS.md").read_text()
    code = "\n".join(path.read_text() for path in (REPOSITORY / "dlojz").rglob("*.py"))
    variables = set(re.findall(r"DLOJZ_[A-Z]+", text))
    assert len(variables) >= 6
    assert {name for name in variables if f'"{name}"' not in code} == set()
