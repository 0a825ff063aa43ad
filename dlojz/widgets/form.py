"""A form for a job: a control for each of the trainer's flags, the command, a button."""

import argparse
import shlex
from html import escape

import ipywidgets
from IPython.display import display

from dlojz import launch
from dlojz.course import UserError, progress
from dlojz.launch import Flag
from dlojz.table import BAD_INK, GOOD_INK
from dlojz.widgets.box import Column, Row
from dlojz.widgets.quiz import close_lines

AUTOMATIC = "(default)"  # the choice of a default that the trainer computes
MOST = 10**9  # of a whole number, where a control asks for a limit
NARROW = {"description_width": "10em"}


def submit_form(command: str = "dlojz/dlojz.py", n_gpu: int = 1, name: str = "dlojz"):
    """Display a form for a job, with the flags that the trainer has in its present source.

    command: what to begin with, such as "dlojz/dlojz.py --test -b 32".
    """
    form = _Form(command, n_gpu, name)
    display(form.box)


class _Parser(argparse.ArgumentParser):
    """The trainer's parser, whose errors are shown in a notebook."""

    def error(self, message):
        raise UserError(f"{message}; `python {self.prog} --help` lists the flags")


class _Form:
    """The controls of one command."""

    def __init__(self, command, n_gpu, name):
        trainer, words = launch.trainer_and_flags(command)
        self._trainer, flags = shlex.split(command)[0], launch.flags_of(trainer)
        self._parser = _Parser(prog=self._trainer, add_help=False)
        for flag in flags:
            flag.add_to(self._parser)
        given = vars(self._parser.parse_args(words))
        values = (given[flag.label[2:].replace("-", "_")] for flag in flags)
        self._controls = {f: _control(f, value) for f, value in zip(flags, values, strict=True)}
        self._n_gpu = ipywidgets.BoundedIntText(n_gpu, min=1, max=1024, description="n_gpu")
        self._name = ipywidgets.Text(name, description="name")
        self._preview, self._said = ipywidgets.HTML(), ipywidgets.HTML()
        self._button = ipywidgets.Button(description="Submit", button_style="primary")
        self._button.on_click(self._submit)
        about = (self._n_gpu, self._name)
        for control in about:
            control.style = NARROW
        for control in (*self._controls.values(), *about):
            control.observe(self._show, names="value")
        own, common = (_grid(self._of(which)) for which in (False, True))
        more = ipywidgets.Accordion([common], titles=["flags that no notebook changes"])
        submit = Row([self._button, self._said], self._call)
        folded = [more] * bool(self._of(True))
        self.box = Column([own, *folded, _grid(about), self._preview, submit], self._call)
        self._show()

    def _of(self, common):
        return [control for flag, control in self._controls.items() if bool(flag.group) == common]

    def _command(self):
        """Return the command as it is now; raise UserError for a value of another type."""
        words = [word for flag, c in self._controls.items() for word in flag.words(c.value)]
        self._parser.parse_args(words)
        return shlex.join([self._trainer, *words])

    def _call(self):
        """Return the call to type in a cell to the same effect."""
        n_gpu = f", n_gpu={self._n_gpu.value}" * (self._n_gpu.value != 1)
        name = f", name={self._name.value!r}" * (self._name.value != "dlojz")
        return f"submit({self._command()!r}{n_gpu}{name})"

    def _show(self, change=None):
        self._said.value = ""
        try:
            self._preview.value = close_lines(f"<code>{escape(self._call())}</code>")
            self._button.disabled = False
        except UserError as error:
            self._preview.value = _bad(error)
            self._button.disabled = True

    def _submit(self, button):
        button.disabled = True  # a second click comes while the first is at work
        try:
            job = launch.submit(self._command(), self._n_gpu.value, self._name.value)
        except (ValueError, OSError, launch.SubmitError, launch.SlurmError) as error:
            self._said.value = _bad(error)
        else:
            done = f'<b style="color:{GOOD_INK}">Job {job.id}</b> was submitted.'
            then = "<code>job = latest()</code> finds it."
            self._said.value = close_lines(f"{done} {then}")
            progress.share_state(job, "QUEUED")
        button.disabled = False


def _bad(error):
    return close_lines(f'<span style="color:{BAD_INK}">{escape(str(error))}</span>')


def _grid(controls):
    for control in controls:
        control.layout.width = "auto"  # as wide as its column
    layout = ipywidgets.Layout(grid_template_columns="repeat(auto-fill, minmax(22em, 1fr))")
    return ipywidgets.GridBox(list(controls), layout=layout)


def _control(flag: Flag, value):
    """Return the control for a flag's type, with a value; its tooltip is the flag's help."""
    about = {"description": flag.label, "tooltip": flag.help, "style": NARROW}
    if flag.kind is bool:
        return ipywidgets.Checkbox(value=bool(value), indent=True, **about)
    if flag.choices:
        options = [(str(choice), choice) for choice in flag.choices]
        if flag.default not in flag.choices:  # which argparse allows
            name = AUTOMATIC if flag.default is None else str(flag.default)
            options.insert(0, (name, flag.default))
        place = [choice for _, choice in options].index(value)  # a value of None selects nothing
        return ipywidgets.Dropdown(options=options, index=place, **about)
    if flag.kind is int and isinstance(value, int):
        least = -MOST if flag.least is None else flag.least
        return ipywidgets.BoundedIntText(value=value, min=least, max=MOST, **about)
    if flag.kind is float and isinstance(value, float | int):
        return ipywidgets.FloatText(value=value, **about)
    text = "" if value is None else " ".join(map(str, value)) if flag.values else str(value)
    return ipywidgets.Text(value=text, placeholder=AUTOMATIC, **about)
