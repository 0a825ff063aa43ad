"""A trainee's search for a faster loader: the knobs and results of each trial, in a file."""

from pathlib import Path

from dlojz.course import progress
from dlojz.runs import derived, log, stats

KNOBS = {
    "num_workers": "workers",
    "persistent_workers": "persistent",
    "prefetch_factor": "prefetch",
    "pin_memory": "pinned",
    "non_blocking": "non-blocking",
    "drop_last": "drop last",
}
# Two trials are comparable only if these are the same.
SAME = ("model", "image_size", "batch_size", "size", "data", "device_name")


def trial(run) -> dict:
    """Return the knobs and figures of a trial to keep, for JSON."""
    s = stats.summary(run)
    knobs = {name: s.arguments.get(name) for name in KNOBS}
    if s.num_workers is not None:  # the trainer starts at most one for each CPU
        knobs["num_workers"] = s.num_workers
    figures = ("images_per_s", "first_load_s", "host_memory_bytes", "disturbance", "steps", *SAME)
    row = {
        "name": s.name,
        "started": s.started,
        "state": s.state,
        "ended": s.state not in ("QUEUED", "RUNNING"),
        "knobs": knobs,
        **{name: getattr(s, name) for name in figures},
        "data_share": s.shares.get("data"),
        "spread": stats.SPREAD_GPU if s.on_gpu else stats.SPREAD_CPU,
        "code": s.trainer_sha256,
    }
    return row | (_while_workers_decode(log.read(run), ready(row), s) if s.images_per_s else {})


def ready(row: dict) -> int:
    """Return the number of batches that workers may have made before the clock started."""
    return (row["knobs"]["num_workers"] or 0) * (row["knobs"]["prefetch_factor"] or 0)


def _while_workers_decode(run, ready, s):
    """Return the speed and the share of waiting, without the steps after the workers had ended.

    At the end of an epoch nothing is left to decode: the last batches are in the queue, and on a
    processor the workers' cores are free for the training.
    """
    chosen = derived.measured(run)
    length = run.setup.get("steps_per_epoch") or len(run.steps) + ready
    kept = chosen[chosen % length < length - ready]
    if not 0 < len(kept) < len(chosen):
        return {}
    _, times = derived.step_times(run)
    all_ms = sum(times.values())
    return {
        "images_per_s": s.images_per_s * float(all_ms[chosen].mean() / all_ms[kept].mean()),
        "data_share": float(times["data"][kept].sum() / all_ms[kept].sum()),
        "left_out": len(chosen) - len(kept),
    }


def key(row: dict) -> str:
    """Return the key of a trial. A run's number may recur, but not with the same time."""
    return f"{row['name']} {row['started']}".strip()


def began(row: dict) -> bool:
    """Return whether a trial has a log."""
    return row["model"] != "?"


def of_one_training(rows, like: dict) -> list[dict]:
    """Return the trials that are comparable with `like`, and those without a log."""
    setting = [like[name] for name in SAME]
    return [row for row in rows if not began(row) or [row[name] for name in SAME] == setting]


def kept(jobs=(), file: Path | None = None) -> tuple[list[dict], dict | None]:
    """Keep the trials of these jobs that have ended; return all trials, and the last one.

    jobs: one or several. Ended ones are kept in `file`, by default beside progress.json.
    """
    rows = map(trial, jobs if isinstance(jobs, list | tuple) else [jobs])
    new = {key(row): row for row in rows}
    ended = {k: row for k, row in new.items() if row["ended"] and began(row)}
    file = file or progress.file().with_name("trials.json")
    kept = progress.change(file, lambda kept: kept.update(ended))
    known = [row for row in list(new.values()) or list(kept.values()) if began(row)]
    return list({**kept, **new}.values()), known[-1] if known else None
