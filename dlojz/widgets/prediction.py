"""Predictions of a trainee, and their score against what was measured."""

from dataclasses import dataclass, replace
from html import escape

from dlojz.course import UserError, progress
from dlojz.runs import stats
from dlojz.table import Table

# What can be predicted: its unit, and how to get it from a summary.
PREDICTABLE = {
    "images_per_s": ("images/s", lambda s: s.images_per_s),
    "step_ms": ("ms", lambda s: s.step_ms),
    "peak_memory_gb": ("GB", lambda s: s.peak_memory_bytes and s.peak_memory_bytes / 1e9),
    "epoch_s": ("s", lambda s: s.epoch_s),
    "backward_share": ("of the step", lambda s: s.shares.get("backward")),
    "data_share": ("of the step", lambda s: s.shares.get("data")),
    "idle_share": ("of the step", lambda s: None),  # of a pipeline's processes: `score_value`
    "ratio": ("times", lambda s: None),  # of two runs, so in no summary: see `score_gain`
    "rate": ("", lambda s: None),  # the best of a search: `score_value`
    "points": ("percentage points", lambda s: None),
    "gain_percent": ("%", lambda s: None),  # where a ratio is close to 1: see `score_value`
}


def predict(key: str, **values):
    """Keep a prediction: predict("baseline", images_per_s=100). None means no guess yet."""
    if wrong := [text for name, value in values.items() if (text := _problem(name, value))]:
        raise UserError("; ".join(wrong))
    progress.keep("predictions", key, values)
    given = [f"{value:,g} {PREDICTABLE[n][0]}" for n, value in values.items() if value is not None]
    nothing = f"no guess yet: write a number for {', '.join(values)}"
    print(f"noted: {', '.join(given)}" if given else nothing)


def _problem(name, value):
    """Return the problem of a predicted value; "" if it has none."""
    if name not in PREDICTABLE:
        return f"{name} can't be predicted: expected one of {', '.join(PREDICTABLE)}"
    most = 1 if name.endswith("_share") else float("inf")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None or (number and 0 < value <= most and value < float("inf")):
        return ""
    limit = ", at most 1" if most == 1 else ""
    percent = f" ({value / 100:g} for {value:g} %)" if limit and number and 1 < value <= 100 else ""
    return f"{name}={value!r}: expected a number above 0{limit}{percent}, or None for no guess"


@dataclass(frozen=True)
class Score:
    """A prediction beside the measured values, or those that were got in another way."""

    rows: list  # (name, unit, predicted or None, measured or None)
    note: str = ""  # why the measured figures may mislead
    how: str = "measured"  # or "estimated", "counted"

    def __repr__(self):
        lines = [
            f"{name}: predicted {_number(p)}, {self.how} {_number(m, unit)}: {self.word(p, m)}"
            for name, unit, p, m in self.rows
        ]
        return "\n".join(filter(None, [*lines, self.note]))

    def _repr_html_(self):
        rows = [
            (name, _number(p), _number(m, unit), self.word(p, m)) for name, unit, p, m in self.rows
        ]
        table = Table(("", "predicted", self.how, ""), rows, "<>><")
        return table._repr_html_() + (f"<p>{escape(self.note)}</p>" if self.note else "")

    def word(self, predicted, found) -> str:
        """Return the distance of a prediction from what was found, in words."""
        if predicted is None:
            return "no prediction"
        if found is None:
            return f"not {self.how}"
        if found == 0:
            return "there was none"
        if found < 0:
            return "the other way round"
        factor = max(predicted / found, found / predicted)
        if factor <= 1.1:
            return "★★★ within 10 %"
        if factor <= 1.25:
            return "★★ within 25 %"
        question = ": what did you not think of?" if factor > 2 else ""
        return f"{'★ ' * (factor <= 2)}a factor of {factor:.1f}{question}"


def score(key: str, run) -> Score:
    """Return the last prediction under `key` beside the figures of `run`."""
    found, given = stats.summary(run), progress.last("predictions", key) or {}
    rows = [(n, PREDICTABLE[n][0], p, PREDICTABLE[n][1](found)) for n, p in given.items()]
    return _kept(key, Score(rows, _doubts([found])))


def score_gain(key: str, before, after) -> Score:
    """Return the last predicted ratio under `key` beside the speeds of two runs: after / before."""
    found = [stats.summary(run) for run in (before, after)]
    speeds = [s.images_per_s for s in found]
    shown = score_value(key, ratio=speeds[1] / speeds[0] if all(speeds) else None)
    failed = [f"job {s.name} is {s.state}" for s in found if not s.completed]
    why = f"{', '.join(failed)}: job.explain() says why" if failed else _doubts(found)
    return replace(shown, note=why)


def _doubts(found):
    """Return doubts about the speeds of these runs: they were disturbed, or diverged."""
    disturbed = dict.fromkeys(s.disturbance for s in found if s.disturbance)
    notes = [f"disturbed: {', '.join(disturbed)}"] if disturbed else []
    notes += [f"the loss of run {s.name} is {s.divergence}" for s in found if s.divergence]
    return "; ".join(notes)


def score_value(key: str, how: str = "measured", **figures) -> Score:
    """Return the last prediction under `key` beside given figures: score_value("b", ratio=2).

    how: the source of these figures, in a word. One that is not known is None, or left out.
    """
    given = progress.last("predictions", key) or {}
    rows = [(name, PREDICTABLE[name][0], p, figures.get(name)) for name, p in given.items()]
    return _kept(key, Score(rows, how=how))


def _kept(key, score):
    """Keep a score for `progress.overview`; return it."""
    names = ("name", "unit", "predicted", "measured", "word", "how")
    given = [(*row, score.word(*row[2:]), score.how) for row in score.rows]
    rows = [dict(zip(names, row, strict=True)) for row in given]
    if any(row["measured"] is not None for row in rows):
        progress.keep("scores", key, rows)
    return score


def _number(value, unit=""):
    if value is None:
        return "-"
    number = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return f"{number} {unit}".rstrip()
