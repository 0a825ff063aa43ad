"""The answer of a check: the verdict and its hints, as text and as a card in the notebook."""

import hashlib
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from html import escape

from dlojz import launch, progress
from dlojz.check.exercises import FASTER, PARTS, Finding, State
from dlojz.course import UserError, diff
from dlojz.runs import stats
from dlojz.table import BAD, GOOD, QUIET

WORST_FIRST = (State.FAILED, State.UNMEASURED, State.PASSED, State.NOT_ASKED)
SIGNS = {State.PASSED: "✓", State.FAILED: "✗", State.UNMEASURED: "?", State.NOT_ASKED: "–"}
COLOURS = {State.PASSED: GOOD, State.FAILED: BAD, State.UNMEASURED: BAD, State.NOT_ASKED: QUIET}


class CheckError(UserError):
    """A job that can't be checked, with what to do instead."""


@dataclass
class Verdict:
    """The answer of `check`: three parts, each with its findings."""

    step: str
    findings: list[Finding]
    hints: dict  # of the exercise, by key, in order
    comparison: stats.Comparison | None = None
    notes: tuple[str, ...] = ()
    job: launch.Job | None = None  # the job that was judged
    seconds: float = 0.0
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
            return Advice(f"Hint 1 of 3. {hint.nudge}")
        if self.rung == 2:
            return Advice(f"Hint 2 of 3. {hint.api}", link=hint.link)
        return Advice(
            "Hint 3 of 3. What differs from the solution:", diff=diff(self.job, self.step)
        )

    def _last_rung(self, name):
        with suppress(OSError, ValueError):
            return progress.last("hints", name) or 0
        return self.rung

    def _trainers_hash(self):
        source = (self.job.directory / "trainer.py").read_bytes() if self.job else b""
        return hashlib.sha256(source).hexdigest()[:8]

    def to_dict(self) -> dict:
        """Return the verdict for programs, in JSON's types only."""
        return {
            "step": self.step,
            "passed": self.passed,
            "job": self.job.id if self.job else None,
            "parts": {name: self.part(name) for name in PARTS},
            "findings": [asdict(f) for f in self.findings],
            "comparison": asdict(self.comparison) if self.comparison else None,
            "hint": self.hint_key,
            "notes": list(self.notes),
            "seconds": round(self.seconds, 1),
        }

    def __repr__(self):
        lines = [f"{self.step}: {self._word}{self._whose}"]
        for name in PARTS:
            lines.append(f"  {self._head(name)}")
            for f in self._shown(name):
                lines.append(f"      {_sign(f)} {f.what}: {f.yours}")
                if f.state != State.PASSED:
                    lines.append(f"        expected: {f.expected}")
        lines += [f"  note: {text}" for text in self.notes]
        if self.hint_key:
            lines.append(f"  next: {self.hints[self.hint_key].nudge}")
        return "\n".join(lines)

    @property
    def _word(self):
        return "passed" if self.passed else "not yet"

    @property
    def _whose(self):
        return f" (job {self.job.id})" if self.job else ""

    def _head(self, part):
        """Return the line of a part: its sign, its name, and why it neither passed nor failed."""
        state = self.part(part)
        if any(f.open for f in self.findings if f.part == part):
            return f"? {part} (open)"
        return f"{SIGNS[state]} {part}" + " (nothing asked here)" * (state == State.NOT_ASKED)

    def _shown(self, part):
        """Return what to print of a part: what fails or was not asked, and always the speed."""
        found = [f for f in self.findings if f.part == part]
        return [f for f in found if f.state != State.PASSED or part == FASTER]

    def _repr_html_(self):
        return _card(self)


def _sign(finding):
    return "?" if finding.open else SIGNS[finding.state]


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
    """Return plain text as HTML, with `code` set as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _card(verdict):
    colour = GOOD if verdict.passed else BAD
    parts = "".join(_part_html(verdict, name) for name in PARTS)
    notes = "".join(f"<p>Note: {escape(text)}</p>" for text in verdict.notes)
    hint = ""
    if verdict.hint_key:
        nudge = _code_html(verdict.hints[verdict.hint_key].nudge)
        hint = f"<p><b>Next:</b> {nudge} <i>More: <code>verdict.hint()</code></i></p>"
    return (
        f'<div style="border-left:6px solid {colour};padding:4px 12px;max-width:860px">'
        f'<b>{verdict.step}</b> <span style="color:white;background:{colour};padding:1px 8px;'
        f'border-radius:8px">{verdict._word}</span>{verdict._whose}{parts}{notes}{hint}</div>'
    )


def _part_html(verdict, name):
    state = verdict.part(name)
    rows = "".join(
        f'<tr><td style="color:{COLOURS[f.state]}">{_sign(f)}</td>'
        f'<td style="text-align:left">{escape(f.what)}</td>'
        f'<td style="text-align:left">{escape(f.yours)}</td>'
        f'<td style="text-align:left">{escape(f.expected)}</td></tr>'
        for f in verdict.findings
        if f.part == name
    )
    head = "<tr><th></th><th></th><th style='text-align:left'>yours</th>"
    return (
        f"<details {'open' if state.fails or name == FASTER else ''}>"
        f'<summary><b style="color:{COLOURS[state]}">{verdict._head(name)}</b></summary>'
        f"<table>{head}<th style='text-align:left'>expected</th></tr>{rows}</table></details>"
    )
