"""What a trainee does in JupyterLab, in Chromium: alone on a machine, or through a hub.

Each method of `Lab` with `@step` is one thing that a trainee does. If it fails, its message says
which, what the page and the browser's console showed, and where the picture and the log are.
"""

import json
import re
import shutil
import time
from contextlib import suppress
from functools import wraps
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
NOTEBOOKS = REPOSITORY / "notebooks"
IN_SIGHT = ".jp-NotebookPanel:visible"
LOOK_MS = 250  # between looks at a page: each of them has the browser lay it out
# A cell that raised; the second is how the course's own errors for trainees look.
ERRORS = ("Traceback (most recent call last)", re.compile(r"^\s*\w+Error: "))


LONG = (  # a cell for a notebook that knows its preset
    'flags = f"-e 9999 --data synthetic --model {preset.model} --image-size {preset.image_size}"\n'
    'job = submit(f"dlojz/dlojz.py {flags}", name="long")\n'
    "monitor(job)"
)


class StepError(AssertionError):
    """A step of a trainee that did not work."""


def step(words):
    """Have a method's failure say which step it was; {} in `words` is its first argument."""

    def decorate(method):
        @wraps(method)
        def call(self, *args, **more):
            try:
                return method(self, *args, **more)
            except StepError:  # of a step within this one
                raise
            except Exception as error:
                raise StepError(self.story(words.format(*args), error)) from error

        return call

    return decorate


def sources(name):
    """Return the code cells of a notebook that is handed out, in order."""
    cells = json.loads((NOTEBOOKS / name).read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def figures(name):
    """Return how many figures a notebook draws."""
    return sum(len(re.findall(r"\.plot_\w+\(", source)) for source in sources(name))


def show_all_cells(home):
    """Have JupyterLab keep all cells in the page, not only those in sight: a test looks at each."""
    settings = home / ".jupyter/lab/user-settings/@jupyterlab/notebook-extension"
    settings.mkdir(parents=True, exist_ok=True)
    (settings / "tracker.jupyterlab-settings").write_text('{"windowingMode": "none"}')


def jobs(root):
    """Return what is known of the jobs in a course folder, by number: name, state, times."""
    found = {}
    for file in sorted(Path(root).glob("runs/*/job.json")):
        state = file.with_name("state.json")
        known = json.loads(state.read_text()) if state.exists() else {}
        found[file.parent.name] = json.loads(file.read_text()) | known
    return found


class Lab:
    """JupyterLab as one trainee has it on the screen."""

    def __init__(self, page, log, kept):
        """log: the server's file. kept: a folder for what there is to see of a step that failed."""
        self.page, self.log, self.kept = page, Path(log), Path(kept)
        self.console, self.name = [], None
        page.on("console", lambda said: said.type == "error" and self.console.append(said.text))
        page.on("pageerror", lambda error: self.console.append(f"uncaught: {error}"))

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if error is None:
            self.console_is_clean()
        elif isinstance(error, Exception) and not isinstance(error, StepError):
            error.add_note(self.story("what a step has left", error))

    def story(self, words, error):
        """Return all that helps to see why a step failed, and keep it in files."""
        self.kept.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.log, self.kept / "server.log")
        (self.kept / "console.txt").write_text("\n".join(self.console))
        raised = []
        with suppress(Exception):  # the browser itself may have ended
            self.page.screenshot(path=self.kept / "page.png")
            raised = [text for word in ERRORS for text in self.outputs(word).all_inner_texts()]
        parts = (
            f'step "{words}": {type(error).__name__}: {error}',
            *(f"a cell raised: {text}" for text in raised[:1]),
            *(f"the console says: {text}" for text in self.console[-3:]),
            "the server's last lines: " + self.log.read_text(errors="replace")[-600:],
            f"kept: page.png, server.log, console.txt in {self.kept}",
        )
        return "\n".join(parts)

    @step("the browser's console has no errors")
    def console_is_clean(self):
        assert not self.console, "\n".join(self.console)

    def until(self, condition, otherwise, seconds=60):
        """Wait for a condition; `otherwise()` says what there is instead."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"{seconds} s passed: {otherwise()}"
            self.page.wait_for_timeout(LOOK_MS)  # unlike time.sleep: the page's events come

    # Getting there ----------------------------------------------------------------------------

    @step("open {}")
    def open(self, name, address):
        self.page.goto(address)
        self.shown(name)

    @step("log in at {}")
    def log_in(self, address, user, password):
        self.page.goto(address)
        self.page.fill("#username_input", user)
        self.page.fill("#password_input", password)
        self.page.click("#login_submit")

    @step("wait for {} and its kernel")
    def shown(self, name):
        self.page.wait_for_url(f"**/{name}*")
        self.page.locator(f"{IN_SIGHT} .jp-Cell:visible").first.wait_for()
        # The status bar: the notebook's own indicator says idle before the kernel is connected.
        self.idle()
        self.name = name

    def idle(self):
        self.page.locator("#jp-main-statusbar", has_text=re.compile(r"\| Idle")).wait_for()

    @step("open {} from the list of files")
    def open_file(self, path):
        """path: from the folder that is shown; from the server's own with a / in front."""
        if path.startswith("/"):
            self.page.locator(".jp-BreadCrumbs-home").click()
        for part in path.strip("/").split("/"):
            item = self.page.locator(".jp-DirListing-itemText", has_text=re.compile(f"^{part}$"))
            item.dblclick()

    @step("show the tab {}")
    def tab(self, name):
        self.page.locator(".lm-DockPanel .lm-TabBar-tabLabel", has_text=name).click()

    @step("choose {} in the menu")
    def choose(self, menu, entry):
        bar = self.page.locator(".lm-MenuBar-itemLabel", has_text=re.compile(f"^{menu}$"))
        bar.click()
        label = self.page.locator(".lm-Menu-itemLabel", has_text=re.compile(f"^{entry}$"))
        label.click()

    # The notebook -----------------------------------------------------------------------------

    def cell(self, text):
        """Return the code cell whose source, as handed out, has this text."""
        (place,) = [i for i, source in enumerate(sources(self.name)) if text in source]
        return self.page.locator(f"{IN_SIGHT} .jp-CodeCell").nth(place)

    def outputs(self, text):
        return self.page.locator(f"{IN_SIGHT} .jp-OutputArea-output", has_text=text)

    def raised_nothing(self):
        for word in ERRORS:
            assert self.outputs(word).count() == 0, self.outputs(word).first.inner_text()

    def start(self, cell):
        """Click into a cell, press Shift and Enter, and return its prompt."""
        prompt = cell.locator(".jp-InputPrompt")
        # After a restart of the kernel it may well be the number that it was.
        prompt.evaluate("prompt => { prompt.textContent = '' }")
        cell.locator(".jp-InputArea-editor .cm-content").click()
        self.page.keyboard.press("Shift+Enter")
        return prompt

    @step("run the cell with {}")
    def run(self, text, seconds=60):
        cell = self.cell(text)
        self.finish(self.start(cell), seconds)
        return cell

    def finish(self, prompt, seconds=60):
        """Wait until a cell that was started is done, and has not raised."""

        def done():
            return re.fullmatch(r"\[\d+\]:", prompt.inner_text())

        self.until(done, lambda: f"the prompt is {prompt.inner_text()}", seconds)
        self.raised_nothing()

    @step("run all cells")
    def run_all(self):
        self.choose("Run", "Run All Cells")
        self.all_ran()

    @step("run the cell with {} and all below")
    def run_from(self, text):
        self.cell(text).locator(".jp-InputArea-editor .cm-content").click()
        self.choose("Run", "Run Selected Cell and All Below")
        self.all_ran()

    @step("see all cells done, and all figures")
    def all_ran(self):
        cells = self.page.locator(f"{IN_SIGHT} .jp-CodeCell .jp-InputArea-prompt")
        images = self.page.locator(f"{IN_SIGHT} .jp-OutputArea-output img")
        expected = len(sources(self.name)), figures(self.name)

        def seen():  # a figure is drawn after its cell is done
            done = [re.fullmatch(r"\[\d+\]:", text) for text in cells.all_inner_texts()]
            return (sum(map(bool, done)) if len(done) == expected[0] else -1), images.count()

        def failed_or_done():
            self.raised_nothing()
            return seen() == expected

        said = "cells done and figures: expected {}, found {}"
        self.until(failed_or_done, lambda: said.format(expected, seen()), 240)

    @step("predict: replace each None of the cell with {}")
    def predict(self, text, *numbers):
        cell = self.cell(text)
        for number in numbers:
            # As with a mouse: a double click selects the word, and what is typed replaces it.
            word = cell.locator(".cm-line span", has_text=re.compile("^None$")).first
            word.dblclick()
            self.page.keyboard.type(f"{number:g}")
        self.finish(self.start(cell))
        noted = cell.locator(".jp-OutputArea-output", has_text="noted: ").inner_text()
        assert all(f"{number:g}" in noted for number in numbers), noted

    @step("answer the quiz {}")
    def answer(self, key, text, says):
        """text: part of the answer that is picked; says: part of what is shown then."""
        cell = self.cell(f'quiz("{key}")')
        cell.locator(".widget-radio-box label", has_text=text).first.click()
        cell.locator(".widget-html-content", has_text=says).first.wait_for()

    @step("restart the kernel")
    def restart(self):
        self.choose("Kernel", "Restart Kernel…")
        self.page.locator(".jp-Dialog button", has_text=re.compile("^Restart$")).click()
        self.page.locator(".jp-Dialog").wait_for(state="detached")
        self.idle()

    # Jobs -------------------------------------------------------------------------------------

    @staticmethod
    def bars(cell):
        """Return the lines of the monitor in a cell: the job, its bar, the button, its state."""
        return cell.locator(".widget-hbox", has=cell.page.get_by_role("button", name="cancel"))

    @step("watch the monitor of the cell with {} until its jobs have completed")
    def watch(self, text, number, moves=True, seconds=60):
        """number: of jobs. moves: expect to see more than the end."""
        bars, seen = self.bars(self.cell(text)), set()

        def ended():
            now = bars.all_inner_texts()
            seen.add(tuple(now))
            assert not re.search("FAILED|CANCELLED|OUT_OF_MEMORY|TIMEOUT", "".join(now)), now
            done = [re.search(r"COMPLETED (\d+)/\1 steps", said) for said in now]
            return len(done) == number and all(done)

        self.until(ended, lambda: f"the monitor says {bars.all_inner_texts()}", seconds)
        assert len(seen) > moves, f"the monitor never moved: {seen}"

    @step("submit a long job in a new cell, see its bar move, cancel it")
    def cancel_one(self, below, code):
        """Add a cell, run it, wait for its bar to move, click on cancel, and delete the cell."""
        self.cell(below).locator(".jp-InputPrompt").click()  # command mode
        self.page.keyboard.press("b")
        self.page.keyboard.press("Enter")
        self.page.keyboard.insert_text(code)
        new = self.page.locator(f"{IN_SIGHT} .jp-CodeCell.jp-mod-active")
        self.page.keyboard.press("Control+Enter")
        bar = self.bars(new)
        steps = re.compile(r"RUNNING (\d+)/\d+ steps")

        def done():
            found = steps.search("".join(bar.all_inner_texts()))
            return int(found[1]) if found else 0

        def says():
            return f"the monitor says {bar.all_inner_texts()}"

        self.until(lambda: done() > 0, says)
        first = done()
        self.until(lambda: done() > first, says)
        bar.get_by_role("button", name="cancel").click()
        self.until(lambda: "CANCELLED" in bar.inner_text(), says)
        assert bar.get_by_role("button", name="cancel").is_disabled()
        self.raised_nothing()
        new.locator(".jp-InputPrompt").click()
        self.page.keyboard.press("d")
        self.page.keyboard.press("d")
        new.locator(".widget-hbox").wait_for(state="detached")

    @step("begin the cell with {}")
    def begin(self, text):
        """Run a cell, and go on without waiting for it."""
        self.start(self.cell(text))

    @step("see the verdict on {}")
    def verdict(self, exercise, seconds=120):
        """Wait for the check that was begun; return the word that it shows: passed, or not yet."""
        cell = self.cell(f'check("{exercise}"')
        self.finish(cell.locator(".jp-InputPrompt"), seconds)
        return (
            cell.locator(".jp-OutputArea-output b", has_text=exercise)
            .locator("+ span")
            .inner_text()
        )

    @step("run the check {}")
    def check(self, exercise):
        self.begin(f'check("{exercise}"')
        return self.verdict(exercise)

    @step("wait for a new job to run in {}")
    def running(self, root, known):
        """Return the number of the first job that runs and is not among those known."""

        def found():
            states = {number: job["state"] for number, job in jobs(root).items()}
            return [n for n, state in states.items() if n not in known and state == "RUNNING"]

        self.until(found, lambda: f"none runs among {jobs(root)}")
        return found()[0]

    # The editor -------------------------------------------------------------------------------

    @step("go to line {}")
    def go_to_line(self, number):
        self.choose("Edit", "Go to Line…")
        box = self.page.locator(".cm-dialog input")
        box.fill(str(number))
        box.press("Enter")
        box.wait_for(state="detached")

    @step("type over lines {} to {}")
    def type_over(self, first, last, lines):
        """Select lines of the file in the editor, and type others.

        Keys, and not a text that is put in whole: the editor indents, and closes brackets, and that
        must not spoil what a trainee types. Words are put in as such: each key costs milliseconds.
        """
        self.go_to_line(last)
        self.page.keyboard.press("End")
        for _ in range(last - first):
            self.page.keyboard.press("Shift+ArrowUp")
        self.page.keyboard.press("Shift+Home")  # to where the line's text begins
        for i, line in enumerate(lines):
            if i:
                self.page.keyboard.press("Enter")
            for words, key in re.findall(r"([\w ]+)|(.)", line.strip()):
                self.page.keyboard.press(key) if key else self.page.keyboard.insert_text(words)

    @step("save {}")
    def save(self, name):
        self.page.keyboard.press("Control+s")
        tab = self.page.locator(".lm-DockPanel .lm-TabBar-tab.lm-mod-current", has_text=name)
        self.until(
            lambda: "jp-mod-dirty" not in tab.get_attribute("class"), lambda: "it is still unsaved"
        )
