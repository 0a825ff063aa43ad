"""The rate of false alarms: comparisons in which a trainer differs from itself, A/A.

    python tools/aa.py record reference/cpu [--runs 40] [--trainer FILE] [flags of the trainer]
    python tools/aa.py alarms reference/cpu/aa.jsonl

`record` runs the trainer many times, as one job, and keeps a line for each run: a log whose
measures are speeds. `alarms` draws comparisons from them, as `stats.compare` would make them, and
counts those that say "faster" or "slower".
"""

import argparse
import json
import math
import random
import statistics
import sys
from pathlib import Path

from record import anonymous
from tqdm import tqdm

from dlojz import course
from dlojz.course import presets
from dlojz.launch import Request, series
from dlojz.runs import log, stats
from dlojz.table import Table

TRIALS = 1000
PAIRS = (6, 8, 10)
SPEED = "speed of a run"
CAVEAT = (
    f"{TRIALS:,} trials each, drawn from the same runs: the intervals cover the draws only, and "
    "another hour on this machine may differ by more."
)


def record(folder: Path, trainer: Path, flags: list[str], runs: int) -> Path:
    """Make the recording `folder`/aa.jsonl."""
    file = folder / "aa.jsonl"
    if file.exists():
        sys.exit(f"{file} exists: remove it to record again, or name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    entries = [series.Entry(f"run-{i:03d}", trainer, flags) for i in range(runs)]
    job = series.submit(entries, Request(name="aa", time_max_s=3600))
    made = list(series.folders(job).values())
    try:
        for _, run in tqdm(series.as_they_end(job), total=runs, unit="run"):
            if stats.summary(run).state != "COMPLETED":
                sys.exit(f"{run}:\n{(run / 'stderr.txt').read_text()[-2000:]}")
    except RuntimeError as error:  # the job has ended
        sys.exit(str(error))
    except BaseException:  # interrupted, or a run failed: the others would be wasted
        job.cancel()
        raise
    root = course.course_root()
    place = trainer.relative_to(root) if trainer.is_relative_to(root) else trainer.name
    course.write_atomically(file, recording(made, f"{place} {' '.join(flags)}"))
    return file


def recording(runs: list[Path], command: str) -> str:
    """Return the log of a recording: the runs' common facts, and a measure for each."""
    first, last = log.read(runs[0]), log.read(runs[-1])
    events = [first.start, first.setup, *map(_measure, map(stats.summary, runs)), last.end]
    return anonymous("\n".join(map(json.dumps, events)), command)


def _measure(s):
    kept = ("step_ms", "step_ms_spread", "power_w", "others_cpu", "sm_clock_mhz", "throttled")
    found = {name: getattr(s, name) for name in kept}
    event = {"event": "measure", "what": SPEED, "value": s.images_per_s, "unit": "images/s"}
    return event | {name: value for name, value in found.items() if value not in (None, ())}


def speeds(run: log.Run) -> list[float]:
    """Return the images/s of the runs of a recording, in order."""
    return [m.value for m in run.measures if m.what == SPEED]


def alarms(speeds: list[float], pairs: int, margin: float, trials: int = TRIALS) -> int:
    """Return the number of trials that show a difference between a trainer and itself.

    Each trial takes consecutive runs, pairs neighbours, and picks one of each pair as "before" at
    random.
    """
    if len(speeds) < 2 * pairs:
        raise ValueError(
            f"{len(speeds)} runs, expected at least {2 * pairs} for {pairs} pairs: record more, "
            "--runs 40"
        )
    draw, shown = random.Random(0), 0
    for _ in range(trials):
        first = draw.randrange(len(speeds) - 2 * pairs + 1)
        ratios = [speeds[i] / speeds[i + 1] for i in range(first, first + 2 * pairs, 2)]
        ratios = [r if draw.random() < 0.5 else 1 / r for r in ratios]
        shown += stats.judge(ratios, margin)[-1] != stats.NO_DIFFERENCE
    return shown


def wilson(count: int, trials: int) -> tuple[float, float]:
    """Return the 95 % interval of a share by Wilson's formula, which also holds near zero."""
    z, share = statistics.NormalDist().inv_cdf(0.975), count / trials
    center = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z * math.sqrt(share * (1 - share) / trials + (z / (2 * trials)) ** 2)
    half /= 1 + z * z / trials
    return max(0.0, center - half), min(1.0, center + half)


def alarm_table(run: log.Run) -> Table:
    """Return a table of false alarms by number of pairs, with and without the margin."""
    on_gpu = run.setup["device"].startswith("cuda")
    rows = []
    for margin in (stats.MARGIN_GPU if on_gpu else stats.MARGIN_CPU, 0.0):
        for pairs in PAIRS:
            count = alarms(speeds(run), pairs, margin)
            low, high = wilson(count, TRIALS)
            interval = f"{low:.1%} to {high:.1%}"
            rows.append((f"{margin:.0%}", str(pairs), f"{count / TRIALS:.1%}", interval))
    return Table(("margin", "pairs", "false alarms", "95 % interval"), rows, ">>>>", "no runs")


def describe(run: log.Run) -> str:
    """Return the contents of a recording in words, with the spread of equal runs."""
    values = speeds(run)
    spread = statistics.stdev(values) / statistics.fmean(values)
    return (
        f"{len(values)} runs of {run.start['command']}\non {run.setup['device_name']}, "
        f"{run.start['time'][:10]}: {statistics.fmean(values):,.0f} images/s, standard deviation "
        f"{spread:.1%}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    sub = commands.add_parser("record", help="run a trainer many times", allow_abbrev=False)
    sub.add_argument("folder", type=Path, help="such as reference/cpu, for the file aa.jsonl")
    sub.add_argument("--runs", type=int, default=40, help="number of runs (default: 40)")
    sub.add_argument("--trainer", type=Path, help="default: solutions/dlojz_03_channels_last.py")
    sub = commands.add_parser("alarms", help="the rate of false alarms, from a recording")
    sub.add_argument("file", type=Path, help="such as reference/cpu/aa.jsonl")
    args, flags = parser.parse_known_args()
    if args.command == "record":
        sizes = presets.choose().flags
        flags = ["--test", "--data", "synthetic", *sizes.split(), *flags]
        trainer = args.trainer.resolve() if args.trainer else course.solution("03")
        if args.runs < 2 * max(PAIRS):
            parser.error(f"--runs {args.runs}: expected at least {2 * max(PAIRS)}")
        file = record(args.folder, trainer, flags, args.runs)
        print(f"{describe(log.read(file))}\nnext: python tools/aa.py alarms {file}")
        return
    if flags:
        parser.error(f"unknown: {' '.join(flags)}")
    run = log.read(args.file)
    print(describe(run), alarm_table(run), CAVEAT, sep="\n\n")


if __name__ == "__main__":
    main()
