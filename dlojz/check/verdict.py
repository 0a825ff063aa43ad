"""The verdict of a check and its hints, as text and as a card in the notebook."""

import hashlib
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from html import escape

from dlojz import launch
from dlojz.check.exercise import FASTER, PARTS, Finding, State
from dlojz.course import UserError, diff, progress
from dlojz.runs import stats
from dlojz.runs.reached import Reached
from dlojz.table import BAD_INK, GOOD_INK, PAPER, QUIET_INK

AGAIN = "(Ask again for more.)"
WORST_FIRST = (State.FAILED, State.UNMEASURED, State.OPEN, State.PASSED, State.NOT_ASKED)
SIGNS = {State.PASSED: "✓", State.FAILED: "✗", State.NOT_ASKED: "–"}
SIGNS |= dict.fromkeys((State.UNMEASURED, State.OPEN), "?")
COLOURS = {State.PASSED: GOOD_INK} | dict.fromkeys((State.OPEN, State.NOT_ASKED), QUIET_INK)
COLOURS |= dict.fromkeys((State.FAILED, State.UNMEASURED), BAD_INK)


class CheckError(UserError):
    """A job that can't be checked, with the remedy."""


@dataclass
class Verdict:
    """The answer of `check`: its parts, usually three, each with its findings."""

    step: str
    findings: list[Finding]
    hints: dict  # of the exercise, by key, in order
    comparison: stats.Comparison | None = None
    cautions: tuple[stats.Caution, ...] = ()  # on the comparison, if they are to be shown
    notes: tuple[str, ...] = ()
    job: launch.Job | None = None  # the job that was judged
    reached: dict[str, Reached] = field(default_factory=dict)  # by step of the course, if it passed
    seconds: float = 0.0
    parts: tuple[str, ...] = PARTS
    second_name: str = FASTER  # the displayed name of the part FASTER
    rung: int = field(default=0, repr=False)  # of the last hint that this verdict gave

    @property
    def passed(self) -> bool:
        return bool(self.findings) and not self.failing

    def part(self, name: str) -> State:
        """Return the state of a part: the worst of its findings."""
        found = {f.state for f in self.findings if f.part == name}
        return next((state for state in WORST_FIRST if state in found), State.NOT_ASKED)

    @property
    def failing(self) -> list[Finding]:
        return [f for f in self.findings if f.fails]

    @property
    def hint_key(self) -> str | None:
        """Return the first hint that applies, in the exercise's order."""
        asked = {f.hint for f in self.failing}
        return next((key for key in self.hints if key in asked), None)

    def hint(self, climb: bool = False) -> "Advice":
        """Return help with the first failure: a nudge, then the API, then the diff.

        Each further call on one verdict climbs a rung. The first call repeats the last hint that
        was given for this trainer, so that a notebook can be run again without giving more away;
        with `climb` it climbs, too. An edited trainer begins with the first hint.
        """
        key = self.hint_key
        if key is None:
            text = "nothing left to do" if self.passed else "no hint for this failure"
            return Advice(f"{self.step}: {text}")
        name = f"{self.step}/{key}/{self._trainers_hash()}"
        self.rung = min(max(1, self._last_rung(name) + bool(self.rung or climb)), 3)
        with suppress(OSError, ValueError):  # a hint is worth more than the record of it
            progress.keep("hints", name, self.rung)
        hint = self.hints[key]
        if self.rung == 1:
            return Advice(f"Hint 1 of 3. {hint.nudge} {AGAIN}")
        if self.rung == 2:
            return Advice(f"Hint 2 of 3. {hint.api} {AGAIN}", link=hint.link)
        text = "Hint 3 of 3. What differs from the solution:"
        return Advice(text, diff=diff(self.job, self.step, {f.part for f in self.failing}))

    def _last_rung(self, name):
        with suppress(OSError, ValueError):
            return progress.last("hints", name) or 0
        return self.rung

    def _trainers_hash(self):
        texts = launch.sources(self.job.directory / "trainer.py").values() if self.job else ()
        return hashlib.sha256(b"".join(texts)).hexdigest()[:8]

    def to_dict(self) -> dict:
        """Return the verdict for programs, in JSON's types only."""
        return {
            "step": self.step,
            "passed": self.passed,
            "headline": self.headline,
            "job": self.job.id if self.job else None,
            "parts": {name: self.part(name) for name in self.parts},
            "findings": [asdict(f) for f in self.findings],
            "comparison": asdict(self.comparison) if self.comparison else None,
            "reached": {step: found.written() for step, found in self.reached.items()},
            "hint": self.hint_key,
            "notes": [*self.notes, *map(str, self.cautions)],
            "seconds": round(self.seconds, 1),
        }

    def __repr__(self):
        lines = [f"{self.step}: {self.headline}{self._whose}"]
        for name in self.parts:
            lines.append(f"  {self._head(name)}")
            for f in self._shown(name):
                lines.append(f"      {SIGNS[f.state]} {f.what}: {f.yours}")
                if f.state != State.PASSED:
                    lines.append(f"        {'' if _is_report(f) else 'expected: '}{f.expected}")
        lines += [f"  note: {text}" for text in self._all_notes]
        if self.hint_key:
            lines.append(f"  next: {self._next}")
        return "\n".join(lines)

    @property
    def _all_notes(self):
        """Return the notes; if the verdict passed, add to a caution that nothing more is needed."""
        again = self.passed and any(caution.again for caution in self.cautions)
        more = "it passed all the same: measured again, the gain would only be known better"
        return (*self.notes, *map(str, self.cautions), *[more] * again)

    @property
    def _next(self):
        """Return the first nudge, and a sentence on other rows with hints of their own.

        Of a prepared file, it names the part that it is about; its rows have causes of their own.
        """
        nudge = self.hints[self.hint_key].nudge
        if len({f.part for f in self.failing}) > 1 and FASTER not in self.parts:
            part = next(f.part for f in self.failing if f.hint == self.hint_key)
            nudge = f"{part}: {nudge}"
        others = {f.hint for f in self.failing} - {self.hint_key, None}
        why = "may follow from this" if FASTER in self.parts else "have hints of their own"
        return nudge + (f" Then check again: the other rows marked ✗ {why}." if others else "")

    @property
    def headline(self) -> str:
        """Return the answer in words; one that passed without a measured speed says so."""
        if not self.passed:
            return "not yet"
        return "passed, speed not measured" if self.part(FASTER) == State.OPEN else "passed"

    @property
    def _whose(self):
        return f" ({self.job.kind} {self.job.id})" if self.job else ""

    def _head(self, part):
        """Return the heading of a part: its sign, its name, and a remark if nothing was asked."""
        state, name = self.part(part), self.second_name if part == FASTER else part
        remark = {State.NOT_ASKED: " (nothing asked here)", State.OPEN: " (not measured)"}
        return f"{SIGNS[state]} {name}{remark.get(state, '')}"

    def _shown(self, part):
        """Return the findings of a part to print: those that did not pass, and always the speed."""
        found = [f for f in self.findings if f.part == part]
        return [f for f in found if f.state != State.PASSED or part == FASTER]

    def _repr_html_(self):
        return _card(self)


@dataclass(frozen=True)
class Advice:
    """One rung of the ladder of hints."""

    text: str
    link: str | None = None
    diff: str | None = None

    def __repr__(self):
        return "\n".join(filter(None, (self.text, self.link, self.diff)))

    def _repr_html_(self):
        code = _code_html(self.text)
        link = f' <a href="{escape(self.link)}">documentation</a>' if self.link else ""
        return f"<p>{code}{link}</p>" + (self.diff._repr_html_() if self.diff else "")


def _code_html(text):
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _card(verdict):
    colour = GOOD_INK if verdict.passed else BAD_INK
    chip = f"color:{PAPER};background:{colour};padding:1px 8px;border-radius:8px"
    hint = ""
    if verdict.hint_key:
        nudge = _code_html(verdict._next)
        hint = f"<div><b>Next:</b> {nudge} <i>More: <code>verdict.hint()</code></i></div>"
    parts = "".join(_part_html(verdict, name) for name in verdict.parts)
    notes = "".join(f"<div>Note: {_code_html(text)}</div>" for text in verdict._all_notes)
    return (
        f'<div style="border-left:6px solid {colour};padding:4px 12px;max-width:860px;'
        f'line-height:1.5"><b>{verdict.step}</b> <span style="{chip}">{verdict.headline}</span>'
        f"{escape(verdict._whose)}{hint}{parts}{notes}</div>"
    )


def _part_html(verdict, part):
    """Return a part as HTML: its state, the rows to look at, and the others folded away."""
    shown = verdict._shown(part)
    others = [f for f in verdict.findings if f.part == part and f not in shown]
    folded = ""
    if others:
        count = f"{len(others)} row{'s' * (len(others) > 1)} {SIGNS[State.PASSED]}"
        style = f"margin-left:18px;color:{QUIET_INK}"
        folded = f'<details style="{style}"><summary>{count}</summary>{_rows(others)}</details>'
    head = f'<b style="color:{COLOURS[verdict.part(part)]}">{verdict._head(part)}</b>'
    return f'<div style="margin-top:6px">{head}{_rows(shown)}{folded}</div>'


def _rows(findings):
    """Return findings as a table, with the same column widths in every part."""
    if not findings:
        return ""
    head = (
        "" if all(_is_report(f) for f in findings) else _row("", QUIET_INK, "", "yours", "expected")
    )
    body = head + "".join(_finding_html(f) for f in findings)
    widths = "".join(f'<col style="width:{width}">' for width in ("24px", "24%", "36%", "auto"))
    style = "table-layout:fixed;width:100%;border-collapse:collapse;margin:0;font:inherit"
    return f'<table style="{style}"><colgroup>{widths}</colgroup>{body}</table>'


def _is_report(finding):
    """Return whether a finding only reports something, with nothing expected."""
    return finding.state == State.NOT_ASKED


def _finding_html(f):
    texts = (f"{f.yours}: {f.expected}",) if _is_report(f) else (f.yours, f.expected)
    return _row(SIGNS[f.state], COLOURS[f.state], f.what, *texts)


def _row(sign, colour, what, *texts):
    """Return a row of a verdict's table; a single text spans the last two columns."""
    cell = "text-align:left;vertical-align:top;padding:1px 8px 1px 0;overflow-wrap:anywhere"
    quiet = f"{cell};color:{QUIET_INK}" if not sign else cell
    span = f' colspan="{3 - len(texts)}"'
    texts = (escape(text).replace(" %", "&nbsp;%") for text in texts)
    cells = "".join(f'<td{span} style="{quiet}">{text}</td>' for text in texts)
    return (
        f'<tr><td style="{cell};color:{colour}">{sign}</td>'
        f'<td style="{cell}">{escape(what)}</td>{cells}</tr>'
    )
