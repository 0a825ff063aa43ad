"""Two programs of any make, compared by their first steps: work, losses, speed, and why.

All runs are one job: accounts of both (see `dlojz.watch.account`), then timed runs in the order
before, after, after, before. Each is watched, and ended after the steps that are asked for.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

from dlojz import launch
from dlojz.course import UserError
from dlojz.launch import Request, series, sites
from dlojz.launch.series import Entry
from dlojz.pairing import accounts
from dlojz.runs import outcome, stats
from dlojz.runs.stats import EARLY_PAIRS, Caution
from dlojz.table import Table
from dlojz.traces import breakdown
from dlojz.traces.trace import TraceError, open_trace

SIDES = "before", "after"
ACCOUNTS = {"before": {}, "after": {}, "nudged": {"DLOJZ_NUDGE": "1"}, "again": {}}
ACCOUNTED, LEAST = 10, 30  # steps of an account, and at least of a timed run
VAGUE = 4  # the ends of an interval, one by the other, from which on it says nothing
UNSEEN = (
    "not seen: anything after these steps, accuracy (`--seeds 5` compares whole trainings), and "
    "what a program does otherwise when it is watched"
)


@dataclass(frozen=True)
class Findings:
    """The findings on two programs: sentences, `lines`, and a table of the parts of a step."""

    commands: tuple[str, str]
    parts: Table | None  # of a step, before and after; None without a trace of both

    @property
    def head(self) -> list[str]:
        """Return the sentences that begin the findings: what is compared."""
        return [f"{side}: {command}" for side, command in zip(SIDES, self.commands, strict=True)]

    def __repr__(self):
        return "\n".join([*self.lines, "", repr(self.parts or "")])

    def _repr_html_(self):
        lines = "".join(f"<p>{escape(line)}</p>" for line in self.lines)
        return lines + (self.parts._repr_html_() if self.parts else "")

    def to_dict(self) -> dict:
        """Return the fields of all findings, for programs."""
        rows = self.parts and [dict(zip(self.parts.head, r, strict=True)) for r in self.parts.rows]
        return {"parts": rows, "text": self.lines}


@dataclass(frozen=True, repr=False)
class Steps(Findings):
    """The comparison of two programs by their first steps."""

    account: accounts.Comparison
    speed: stats.Comparison | None  # None: a run was too short to be timed

    @property
    def lines(self) -> list[str]:
        speed = self.speed or "not measured: the programs ended before enough steps were timed"
        if self.speed and self.speed.low and self.speed.high / self.speed.low > VAGUE:
            speed = f"{speed}. The runs differ too much to say more: again, on a quiet machine"
        speed = f"speed of after, in images: {speed}"
        cautions = self.speed.warnings if self.speed else ()
        return [*self.head, *self.account.lines, speed, *cautions, UNSEEN]

    def to_dict(self) -> dict:
        """Return all of it, for programs."""
        speed = self.speed and {n: getattr(self.speed, n) for n in ("ratio", "low", "high", "word")}
        account = {n: getattr(self.account, n) for n in ("steps", "work", "apart", "off", "band")}
        return account | {"speed": speed} | super().to_dict()


def by_steps(
    before: str,
    after: str,
    pairs: int = stats.MIN_PAIRS,
    steps: int = 60,
    time_max: str = "00:30:00",
    **where,
) -> Steps:
    """Return the comparison of two programs, "train.py --lr 0.1", by their first steps.

    pairs: of timed runs. steps: of each of these. where: n_gpu, account and module, as in
    `launch.submit`. Raises UserError if a program fails, or does not train.
    """
    if steps < LEAST or pairs < 1:
        raise UserError(f"{steps} steps, {pairs} pairs: expected at least {LEAST} and 1")
    given = dict(zip(SIDES, map(_words, (before, after)), strict=True))
    entries = [
        _entry(
            name, given.get(name, given["before"]), ACCOUNTED, {"DLOJZ_ACCOUNT": ACCOUNTED} | env
        )
        for name, env in ACCOUNTS.items()
    ]
    timed = {side: [f"{side}-{n + 1}" for n in range(pairs)] for side in SIDES}
    for n in range(pairs):
        for side in SIDES if n % 2 == 0 else SIDES[::-1]:
            entries.append(_entry(timed[side][n], given[side], steps, {}))
    request = Request(name="pair", time_max_s=sites.seconds(time_max), **where)
    job = series.submit(entries, request)
    folders = {}
    for name, folder in series.as_they_end(job):
        folders[name] = folder
        if code := int((folder / "exit_code").read_bytes()):
            job.cancel("one of its runs failed")
            raise UserError(_failure(name, given, folder, code))
    account = accounts.compared(*(folders[name] for name in ACCOUNTS))
    runs = [[folders[name] for name in timed[side]] for side in SIDES]
    return Steps((before, after), parts(*runs), account, _speed(*runs))


def _words(command):
    trainer, flags = launch.trainer_and_flags(command)
    return Path(trainer), tuple(flags)


def _entry(name, words, steps, environment):
    told = {key: str(value) for key, value in environment.items()}
    return Entry(name, *words, environment=told | {"DLOJZ_STEPS": str(steps)}, watch=True)


def _failure(name, given, folder, code) -> str:
    trainer, _ = given.get(name.split("-")[0], given["before"])
    said = outcome.tail(folder / "stderr.txt").splitlines()[-5:]
    return "\n".join([f"{name}: {trainer} ended with exit code {code}", *said, f"in {folder}"])


def _speed(before, after) -> stats.Comparison | None:
    with suppress(UserError):
        found = stats.compare(before, after, least=EARLY_PAIRS)
        return replace(found, cautions=disturbed(found))
    return None


def disturbed(found) -> tuple[Caution, ...]:
    """Return the cautions of a comparison that hold for programs whose work differs, too."""
    return tuple(caution for caution in found.cautions if caution.kind == Caution.DISTURBED)


def parts(before, after) -> Table | None:
    """Return a table of the parts of a step: of the runs of each side, the one with the shortest.

    The differences add up. None without a trace of both.
    """
    found = [_shortest(runs) for runs in (before, after)]
    if None in found:
        return None
    columns = [reading.kinds | _idle(reading) for _, reading in found]
    ends = [reading.step_ms for _, reading in found]
    rest = [ms - sum(column.values()) for ms, column in zip(ends, columns, strict=True)]
    names = dict.fromkeys([*columns[0], *columns[1]])
    cells = {name: [column.get(name, 0.0) for column in columns] for name in names}
    cells |= {"overlapped, counted twice": rest} if any(abs(ms) > 0.01 for ms in rest) else {}
    order = sorted(cells.items(), key=lambda item: item[1][1] - item[1][0])
    order.append(("a step, under the profiler", ends))
    rows = [(n, f"{a:.2f}", f"{b:.2f}", f"{b - a:+.2f}") for n, (a, b) in order]
    rows.append(("launches", *(f"{reading.launches:,.0f}" for _, reading in found), ""))
    if None not in (cores := [reading.tensor_cores for _, reading in found]):
        rows.append(("products on tensor cores", *(f"{share:.0%}" for share in cores), ""))
    own = [stats.summary(run) for run, _ in found]
    for what, unit in (("peak_memory_bytes", 1e9), ("energy_per_image_j", 1)):
        if None not in (values := [getattr(s, what) for s in own]):
            name = "peak memory, GB" if unit > 1 else "joules of an image"
            rows.append((name, *(f"{value / unit:.3g}" for value in values), ""))
    return Table(("", "before, ms", "after, ms", "difference"), rows, "<>>>")


def _shortest(runs):
    """Return the run whose traced step is the shortest, with its reading; None without a trace."""
    found = []
    for run in runs:
        with suppress(TraceError):
            found.append((run, breakdown.analyse(open_trace(run))))
    return min(found, key=lambda pair: pair[1].step_ms, default=None)


def _idle(reading) -> dict[str, float]:
    return {f"waits: {cause}": ms for cause, ms in reading.idle.items()}
