"""Keep the trainer's steps in line: `python tools/steps.py check | carry`.

A step edits marked paragraphs: from a comment `# TODO 01: ...` (solved: `# 01: ...`) to the next
blank line. Several steps may edit one: `# 06c: ...; TODO 11d: ...`, or `# 02, TODO 03: ...`.
`check` reports any other difference of a solution from its predecessor. `carry` takes an edit of
dlojz/dlojz.py through all solutions, by a three-way merge each.
"""

import argparse
import difflib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from dlojz import course

MARK = re.compile(r"\s*# (?:TODO )?\d\d[a-f]?[:,] ")
STEP = re.compile(r"\b(\d\d)[a-f]?[:,] ")


def skeleton(source: str, step: str) -> list[str]:
    """Return the lines of a trainer with each paragraph of `step` ("01") replaced by a token."""
    lines, inside = [], False
    for line in source.splitlines():
        inside = inside and bool(line.strip())
        if MARK.match(line) and not inside:
            inside = step in STEP.findall(line)
            if inside:
                lines.append(f"<paragraph of step {step}>")
        if not inside:
            lines.append(line)
    return lines


def problems(before: str, after: str, step: str) -> list[str]:
    """Return the changes of a solution outside its step's paragraphs."""
    strayed = list(
        difflib.unified_diff(skeleton(before, step), skeleton(after, step), "before", "after", n=0)
    )
    left = [f"left to do: {line.strip()}" for line in after.splitlines() if f"TODO {step}" in line]
    return strayed + left


def check() -> list[str]:
    """Return the problems of the whole chain, each with its file."""
    found = []
    for earlier, later in zip(course.CHAIN, course.CHAIN[1:], strict=False):
        before, after = (course.solution(s).read_text() for s in (earlier, later))
        found += [f"{course.solution(later)}: {p}" for p in problems(before, after, later[:2])]
    if course.trainer().read_text() != course.solution(0).read_text():
        found.append(f"{course.trainer()} is not {course.solution(0)}: carry the edit, or undo it")
    return found


def carry():
    """Carry the starter's edit into every solution; write all of them, or none."""
    old, new = course.solution(0).read_text(), course.trainer().read_text()
    results = {course.solution(0): new}
    for step in course.CHAIN[1:]:
        path = course.solution(step)
        merged = _merge(path, old, new)
        old, new = path.read_text(), merged
        results[path] = merged
    for path, text in results.items():
        path.write_text(text)


def _merge(path: Path, old: str, new: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        base, theirs = Path(folder, "before the edit"), Path(folder, "after the edit")
        base.write_text(old)
        theirs.write_text(new)
        done = subprocess.run(
            ["git", "merge-file", "-p", str(path), str(base), str(theirs)],
            capture_output=True,
            text=True,
        )
    if done.returncode:
        sys.exit(f"{done.stdout}\n{path}: the edit meets a paragraph of this step; edit it by hand")
    return done.stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=("check", "carry"))
    if parser.parse_args().command == "carry":
        carry()
    found = check()
    print("\n".join(found) or f"{len(course.CHAIN)} steps, each differs only where it says")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
