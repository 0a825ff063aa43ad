"""The mysteries of notebook 04: recorded trainings with a planted fault, to be named."""

from dataclasses import replace
from html import escape
from pathlib import Path

import ipywidgets
from IPython.display import display

from dlojz import progress
from dlojz.course import course_root
from dlojz.runs import trace
from dlojz.runs.suspects import FAULTS, planted, suspects, traces_of
from dlojz.table import BAD, GOOD, Table

# Where to look for each, without its name.
LOOK = {
    "none": "Is there a hole at all that is worth the trouble? Add up what is hatched.",
    "item": "Look at the waits: how often in a step, and what for?",
    "unpinned": "Look at the copies in the table: how long do they take, and what runs meanwhile?",
    "one-worker": "Find the longest hole. What is the host doing right above it?",
    "small-batch": "Divide the computed milliseconds by the number of kernels. How long is one?",
    "nchw": "Hardly anything waits. So compare the kinds of work with those of another training.",
    "print": "Look at the waits: who asks?",
    "straggler": "Compare the processes. What is one doing while the other waits?",
    "garbage": "Find the longest hole. Right above it is a bar of another colour. What is it?",
}
# Recordings under reference/: a fixed order that says nothing.
MYSTERIES = {
    "A": "h100/04-trace-fault-small-batch",
    "B": "h100/04-trace-fault-print",
    "C": "h100/04-trace-fault-nchw",
    "D": "h100/04-trace-fault-garbage",
    "E": "h100/04-trace-fault-none",
    "F": "h100/04-trace-fault-unpinned",
    "G": "h100/04-trace-fault-item",
    "H": "h100/04-trace-fault-one-worker",
    "I": "h200/04-trace-fault-straggler-x2",
}
KIND = "mysteries"  # of what dlojz.progress keeps


def mystery(letter: str, process: int = 0) -> trace.Trace:
    """A recorded trace with a planted fault, under a name that does not tell which."""
    found = traces_of(_folder(letter))
    if not 0 <= process < len(found):
        raise ValueError(f"no process {process} of mystery {letter}: it has {len(found)}, from 0")
    return replace(found[process], path=Path(f"mystery {letter}"))


def mysteries() -> dict[str, trace.Trace]:
    """All of them by letter, each process by itself, as `timeline.plot_shares` wants them."""
    found = {}
    for letter in MYSTERIES:
        traces = traces_of(_folder(letter))
        for process, each in enumerate(traces):
            name = letter if len(traces) == 1 else f"{letter}, process {process}"
            found[name] = replace(each, path=Path(f"mystery {letter}"))
    return found


def truth(letter: str) -> str:
    """The fault that was planted: of FAULTS."""
    return planted(_folder(letter))


def evidence(letter: str) -> str:
    """The sentence that proves the fault of a mystery."""
    return suspects(traces_of(_folder(letter)))[0].evidence


def hint(letter: str) -> str:
    """After a wrong answer: first where to look, then the evidence."""
    true = truth(letter)
    wrong = sum(fault != true for fault in answers(letter))
    return LOOK[true] if wrong < 2 else f"The evidence: {evidence(letter)}."


def answer(letter: str, fault: str) -> bool:
    """Keep an answer; is it right?"""
    if fault not in FAULTS:
        raise ValueError(f"no fault {fault!r}: expected one of {', '.join(FAULTS)}")
    right = fault == truth(letter)
    progress.keep(KIND, letter, fault, right=right, of=len(MYSTERIES))
    return right


def answers(letter: str) -> list[str]:
    """What was answered so far."""
    return [entry["value"] for entry in progress.load().get(KIND, {}).get(letter, [])]


def score() -> Table:
    """The first answer to each mystery, and how many were needed."""
    rows, firsts = [], 0
    for letter in MYSTERIES:
        given, true = answers(letter), truth(letter)
        if not given:
            rows.append((letter, "-", "", ""))
            continue
        firsts += given[0] == true
        needed = str(given.index(true) + 1) if true in given else "not yet"
        rows.append((letter, FAULTS[given[0]], "yes" if given[0] == true else "no", needed))
    rows.append(("all", f"{firsts} of {len(MYSTERIES)} right at the first attempt", "", ""))
    return Table(("mystery", "first answer", "right", "attempts needed"), rows, "<<<>")


def _folder(letter):
    if letter not in MYSTERIES:
        raise KeyError(f"no mystery {letter!r}: expected one of {', '.join(MYSTERIES)}")
    return course_root() / "reference" / MYSTERIES[letter]


def accuse(letter: str):
    """Ask for the fault of a recorded mystery; a wrong answer is given a hint, and all are kept."""
    options = [("what is wrong?", None), *((words, key) for key, words in FAULTS.items())]
    choice = ipywidgets.Dropdown(options=options, value=None, description=letter)
    choice.layout.width = "34em"
    choice.style.description_width = "2em"
    verdict = ipywidgets.HTML()

    def judge(change):
        if change["new"] is not None:
            right = answer(letter, change["new"])
            verdict.value = _sentence(letter, right)

    choice.observe(judge, names="value")
    display(ipywidgets.HBox([choice, verdict]))


def _sentence(letter, right):
    if right:
        why = escape(evidence(letter))
        return f'<span style="color:{GOOD}"><b>Yes:</b></span> {why}.'
    help_ = escape(hint(letter))
    return f'<span style="color:{BAD}"><b>Not quite.</b></span> {help_}'
