"""The mysteries of notebook 04: recorded training runs with a planted fault to name."""

from dataclasses import replace
from html import escape
from pathlib import Path

import ipywidgets
from IPython.display import display

from dlojz.chapters.n04_profiler import planted
from dlojz.chapters.n04_profiler.planted import FAULTS
from dlojz.course import UserError, course_root, progress
from dlojz.table import BAD_INK, GOOD_INK, Table
from dlojz.traces import trace
from dlojz.traces.suspects import suspects
from dlojz.traces.trace import open_traces
from dlojz.widgets.box import Row

# A hint for each fault, which does not name it.
LOOK = {
    "none": "Is there any gap that is worth closing? Add up what is hatched.",
    "item": "Look at the waits: how many are there in a step, and what for?",
    "unpinned": "Look at the copies in the table: how long do they take, and what else runs then?",
    "one-worker": "Find the longest gap. What is the host doing right above it?",
    "small-batch": "Divide the computed milliseconds by the number of kernels. How long is one?",
    "nchw": "Hardly anything waits. So compare the kinds of work with those of another mystery.",
    "print": "Look at the waits: which line of code asks for them?",
    "straggler": "Compare the processes. What is one doing while the other waits?",
    "garbage": "Find the longest gap. Right above it is a bar of another colour. What is it?",
    "else": "Find the longest gap. Does anything stand right above it that has a name?",
}
ANSWERS = FAULTS | {"else": "something is wrong that is not in this list"}
# Recordings under reference/, in an order that reveals nothing. Some faults occur twice, or not at
# all, so that other answers do not help. More of them: tools/cases.py.
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
    "J": "h100/04-trace-held-out-none",
    "K": "h200/04-trace-unseen-garbage",
    "L": "h100/04-trace-held-out-item",
    "M": "h200/04-trace-fault-none-x2",
    "N": "h200/04-trace-unseen-unpinned",
    "O": "h200/04-trace-unseen-nchw",
    "P": "cpu/04-cpu-trace-sleep",
}
KIND = "mysteries"  # the kind of entry in dlojz.course.progress


def mystery(letter: str, process: int = 0) -> trace.Trace:
    """Return a recorded trace with a planted fault, under a name that does not reveal it."""
    found = open_traces(_folder(letter))
    if not 0 <= process < len(found):
        raise UserError(f"no process {process} of mystery {letter}: it has {len(found)}, from 0")
    return replace(found[process], path=Path(f"mystery {letter}"))


def mysteries() -> dict[str, trace.Trace]:
    """Return all traces by letter and process, as `timeline.plot_shares` expects them."""
    found = {}
    for letter in MYSTERIES:
        traces = open_traces(_folder(letter))
        for process, each in enumerate(traces):
            name = letter if len(traces) == 1 else f"{letter}, process {process}"
            found[name] = replace(each, path=Path(f"mystery {letter}"))
    return found


def truth(letter: str) -> str:
    """Return the planted fault, one of ANSWERS."""
    fault = planted.fault(_folder(letter))
    return fault if fault in FAULTS else "else"


def evidence(letter: str) -> str:
    """Return the sentence that proves a mystery's fault."""
    return suspects(open_traces(_folder(letter)))[0].evidence


def hint(letter: str) -> str:
    """Return a hint after a wrong answer: first the place to look at, then the evidence."""
    true = truth(letter)
    wrong = sum(fault != true for fault in answers(letter))
    return LOOK[true] if wrong < 2 else f"The evidence: {evidence(letter)}."


def answer(letter: str, fault: str) -> bool:
    """Keep an answer; return whether it is right."""
    if fault not in ANSWERS:
        raise UserError(f"no fault {fault!r}: expected one of {', '.join(ANSWERS)}")
    right = fault == truth(letter)
    progress.keep(KIND, letter, fault, right=right, of=len(MYSTERIES))
    return right


def answers(letter: str) -> list[str]:
    """Return the answers so far."""
    return [entry["value"] for entry in progress.load().get(KIND, {}).get(letter, [])]


def score() -> Table:
    """Return a table of the first answer to each mystery, and of the attempts needed.

    A mystery solved after hints is counted apart from one that needed none.
    """
    rows, firsts, later = [], 0, 0
    for letter in MYSTERIES:
        given, true = answers(letter), truth(letter)
        if not given:
            rows.append((letter, "-", "", ""))
            continue
        first = given[0] == true
        firsts += first
        later += not first and true in given
        needed = str(given.index(true) + 1) if true in given else "not yet"
        rows.append((letter, ANSWERS[given[0]], "yes" if first else "no", needed))
    words = f"{firsts} of {len(MYSTERIES)} right at the first attempt, {later} later"
    rows.append(("all", words, "", ""))
    return Table(("mystery", "first answer", "right", "attempts needed"), rows, "<<<>")


def _folder(letter):
    if letter not in MYSTERIES:
        raise KeyError(f"no mystery {letter!r}: expected one of {', '.join(MYSTERIES)}")
    return course_root() / "reference" / MYSTERIES[letter]


def accuse(letter: str):
    """Ask for the fault of a mystery; keep each answer, and reply to a wrong one with a hint.

    The last answer is shown again, even after the notebook was closed.
    """
    options = [("what is wrong?", None), *((words, key) for key, words in ANSWERS.items())]
    kept = _kept(letter)
    place = [key for _, key in options].index(kept)  # a value of None would show nothing
    choice = ipywidgets.Dropdown(options=options, index=place, description=letter)
    choice.layout.width = "40em"
    choice.style.description_width = "2em"
    verdict = ipywidgets.HTML(_sentence(letter, kept == truth(letter)) if kept else "")

    def judge(change):
        if change["new"] is not None:
            right = answer(letter, change["new"])
            verdict.value = _sentence(letter, right)

    choice.observe(judge, names="value")
    display(Row([choice, verdict], lambda: _text(letter)))


def _kept(letter):
    """Return the last answer; None if there is none, or it is no longer an option."""
    given = progress.last(KIND, letter)
    return given if given in ANSWERS else None


def _text(letter):
    kept = _kept(letter)
    if kept is None:
        return f"{letter}: what is wrong? {', '.join(ANSWERS.values())}"
    return f"{letter}: {ANSWERS[kept]}. {' '.join(_reply(letter, kept == truth(letter)))}"


def _reply(letter, right) -> tuple[str, str]:
    return ("Yes:", f"{evidence(letter)}.") if right else ("Not quite.", hint(letter))


def _sentence(letter, right):
    word, why = _reply(letter, right)
    colour = GOOD_INK if right else BAD_INK
    return f'<span style="color:{colour}"><b>{word}</b></span> {escape(why)}'
