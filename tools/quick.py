"""Run the tests of the changed files, in less than a minute: `make quick`.

Changed files differ from the point where this branch left main, are not committed, or are new.
Its tests are in the file named like the module, or else like the nearest folder of a module
(`widgets/quiz.py`: test_widgets.py), and in the files that import it, unless those are many. A
chapter is one module. A file outside of dlojz/ has the tests that mention it, too. An answer, a
solution or the exercise of a step has the tests of all steps, of which that step's are run.

Left out, and listed, are tests marked `slow`, except those of such a step, and tests for which the
minute was not enough.
"""

import ast
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
FEW = 12  # test files that import a module, or mention a file: more are listed, and not run
ENOUGH_S = 45  # after which no test begins
OF_ALL_STEPS = ("test_course.py", "test_exercises.py", "test_trainer.py", "test_wrong.py")
STEP = re.compile(
    r"(?:solutions/dlojz_|tests/wrong/|dlojz/chapters/n(?=\w+/(?:exercise|hints)\.))(\d\d_\w+)"
)


def changed() -> list[str]:
    """Return the paths that differ from where this branch left main, and the new ones."""
    base = _git("merge-base", "HEAD", "main") or ["HEAD"]
    paths = _git("diff", "--name-only", base[0])
    return sorted({*paths, *_git("ls-files", "--others", "--exclude-standard")})


def _git(*words):
    done = subprocess.run(["git", *words], cwd=REPOSITORY, capture_output=True, text=True)
    return done.stdout.splitlines()


def imported(source: str) -> set[str]:
    """Return all dotted names that this source imports, at any place."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def module(path: str) -> tuple[str, ...]:
    """Return the parts of the name of this file's module."""
    parts = Path(path).with_suffix("").parts
    if path.endswith(".ipynb"):
        return "notebooks", parts[-1]
    if parts[:2] == ("dlojz", "chapters"):
        return parts[:3]
    if parts[0] in ("tools", "tests"):  # imported by their last name
        return parts[1:]
    return parts[:-1] if parts[-1] == "__init__" else parts


def named_like(path: str, tests) -> list[str]:
    """Return the test file of this module, or else of its nearest folder."""
    for name in reversed(module(path)):
        own = (f"test_{name}.py", f"test_{re.sub(r'^n[0-9]+[a-z]?_', '', name)}.py")
        if found := [test for test in tests if test in own]:
            return found
    return []


def tests_of(path: str, tests: dict[str, str]) -> tuple[list[str], list[str]]:
    """Return the test file named like a changed file, and those that import or mention it."""
    name, wanted = Path(path).name, ".".join(module(path))
    if path.startswith("tests/") and name in tests:
        return [name], []
    own = named_like(path, tests)
    mentions = () if path.startswith("dlojz/") else (name, f'"{Path(name).stem}"')

    def uses(source):
        imports = any(f"{each}.".startswith(f"{wanted}.") for each in imported(source))
        return imports or any(mention in source for mention in mentions)

    return own, [test for test, source in tests.items() if test not in own and uses(source)]


class Minute:
    """Leave out slow tests, tests of other steps, and all that would begin after the minute."""

    def __init__(self, whole, steps):
        self.whole, self.steps = whole, steps  # files to run; steps to run of tests for all steps
        self.begin, self.slow, self.late = time.monotonic(), set(), set()

    def pytest_collection_modifyitems(self, config, items):
        whole = [item for item in items if item.path.name in self.whole]
        slow = [item for item in whole if item.get_closest_marker("slow")]
        of_steps = [item for item in items if self._is_of_a_step(item)]
        keep = [item for item in whole if item not in slow]
        keep += [item for item in of_steps if item not in keep]
        self.slow = {item.path.name for item in slow if item not in keep}
        config.hook.pytest_deselected(items=[item for item in items if item not in keep])
        order = [*self.whole, *OF_ALL_STEPS]
        items[:] = sorted(keep, key=lambda item: order.index(item.path.name))

    def _is_of_a_step(self, item):
        return item.path.name in OF_ALL_STEPS and any(step in item.nodeid for step in self.steps)

    def pytest_runtest_setup(self, item):
        if time.monotonic() - self.begin > ENOUGH_S:
            self.late.add(item.path.name)
            pytest.skip(f"{ENOUGH_S} s are over")


def plan(paths, tests):
    """Return {test file: path for which it is run}, {test file left out: path}, paths without."""
    found = {path: tests_of(path, tests) for path in paths}
    whole = {test: path for path, (own, _) in found.items() for test in own}
    whole |= {
        test: path
        for path, (_, more) in found.items()
        for test in more
        if test not in whole and len(more) <= FEW
    }
    many = {test: path for path, (_, more) in found.items() for test in more if test not in whole}
    return whole, many, [path for path, tests in found.items() if not any(tests)]


def main():
    """Print the tests to run and the reasons, run them, and print those left out."""
    tests = {p.name: p.read_text() for p in sorted((REPOSITORY / "tests").glob("test_*.py"))}
    paths = changed()
    whole, many, none = plan(paths, tests)
    steps = {match[1] for match in map(STEP.match, paths) if match}
    steps |= {"00_start"} if "dlojz/dlojz.py" in paths else set()
    files = [*whole, *(name for name in OF_ALL_STEPS if steps and name not in whole)]
    for name in files:
        print(f"{name}: for {whole.get(name) or 'step ' + ', '.join(sorted(steps))}")
    if none:
        print("No test is named like, imports or mentions", *none)
    minute = Minute(whole, steps)
    words = ["-q", "-r", "fE", *(str(REPOSITORY / "tests" / name) for name in files)]
    code = pytest.main(words, plugins=[minute]) if files else 0
    for what, left in (
        ("Slow tests are left out of", minute.slow),
        ("The minute was not enough for all of", minute.late),
        (f"Not run, for more than {FEW} files import the same:", many),
    ):
        if left:
            print(what, *sorted(left))
    print("`make test` runs all." if files else "Nothing to run: `make test` runs all.")
    sys.exit(code)


if __name__ == "__main__":
    main()
