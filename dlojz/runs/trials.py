"""Trials of a loader: the knobs of a run and its results, as they are kept for later."""

from dlojz.runs import stats

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
    """Return the knobs and figures of a trial that are kept, ready for JSON."""
    s = stats.summary(run)
    knobs = {name: s.arguments.get(name) for name in KNOBS}
    if s.num_workers is not None:  # the trainer starts no more of them than there are CPUs
        knobs["num_workers"] = s.num_workers
    figures = ("images_per_s", "first_load_s", "host_memory_bytes", "others_cpu", "steps", *SAME)
    return {
        "name": s.name,
        "started": s.started,
        "state": s.state,
        "ended": s.state not in ("QUEUED", "RUNNING"),
        "knobs": knobs,
        **{name: getattr(s, name) for name in figures},
        "data_share": s.shares.get("data"),
        "crowded": bool(s.others_cpu and s.cpus and s.others_cpu > stats.OTHERS_CPU * s.cpus),
        "code": s.trainer_sha256,
    }


def key(row: dict) -> str:
    """Return the key of a trial. A run's number may come again, but not with the same time."""
    return f"{row['name']} {row['started']}".strip()


def began(row: dict) -> bool:
    """Return whether a trial got as far as its log."""
    return row["model"] != "?"


def of_one_training(rows, like: dict) -> list[dict]:
    """Return the trials that are comparable with `like`, and those that never began."""
    setting = [like[name] for name in SAME]
    return [row for row in rows if not began(row) or [row[name] for name in SAME] == setting]
