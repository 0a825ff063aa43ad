"""A trainee's search for a faster loader: the knobs and results of each trial, kept and shown."""

from pathlib import Path
from textwrap import fill

from dlojz.course import UserError, progress
from dlojz.figures import drawing
from dlojz.figures.look import PALETTE, entitle
from dlojz.figures.report import bytes_text, duration_text
from dlojz.runs import derived, log, stats
from dlojz.table import Table

KNOBS = {
    "num_workers": "workers",
    "persistent_workers": "persistent",
    "prefetch_factor": "prefetch",
    "pin_memory": "pinned",
    "non_blocking": "non-blocking",
    "drop_last": "drop last",
}
READY = 0.3  # share of the steps; with more batches ready, a trial tells little about its loader
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


# Shown -------------------------------------------------------------------------------


def trials(jobs=(), file: Path | None = None) -> Table:
    """Return a table of the knobs of each trial and its results, earlier sessions first.

    Trials of other models, sizes or machines are kept, but not shown.
    """
    return trial_table(*kept(jobs, file))


def trial_table(runs, like: dict | None = None) -> Table:
    """Return a table of the six knobs of each trial and its results, with the fastest marked.

    Trials within the noise of the fastest are marked, too.

    runs: jobs, or kept trials; `trials` also shows those of earlier sessions.
    like: the trial to compare with, by default the last. Trials of other models, sizes or machines
    are left out.
    """
    rows, code = _comparable(runs, like)
    best = _fastest([row for row in rows if row["code"] == code])
    head = ("trial", *KNOBS.values(), "images/s", "waits for data", "first batch", "host memory")
    cells = [(*_trial_cells(row), _trial_note(row, best, code)) for row in rows]
    empty = "no trials yet: give the list that submit() returned"
    return Table((*head, ""), cells, "<" + ">" * 10 + "<", empty)


def _comparable(runs, like=None):
    """Return (the trials of one training, the code of its last trainer)."""
    runs = runs if isinstance(runs, list | tuple) else [runs]
    rows = [run if isinstance(run, dict) else trial(run) for run in runs]
    like = like or next((row for row in reversed(rows) if began(row)), None)
    return (of_one_training(rows, like), like["code"]) if like else (rows, None)


def plot_trials(runs, ax=None):
    """Draw the images per second of each trial, in order, with notes on what bars can't show."""
    rows = [row for row in _comparable(runs)[0] if row["images_per_s"]]
    if not rows:
        raise UserError("no trial with a speed: give jobs; job.explain() says what stopped them")
    best, names = _fastest(rows), _differences(rows)
    with drawing.axes(ax, (10, 1.2 + 0.42 * len(rows)), "x") as ax:
        for at, row in enumerate(rows):
            colour = PALETTE["update"] if row in best else PALETTE["speed"]
            speed, waits = row["images_per_s"], row["data_share"]
            ax.barh(at, speed, 0.7, color=colour)
            ax.barh(at, waits * speed, 0.7, color="white", alpha=0.55, hatch="////", ec="white")
            ax.text(speed, at, _trial_text(row), va="center", fontsize=9)
        drawing.rows(ax, [f"{r['name']}: {n}" for r, n in zip(rows, names, strict=True)])
        ax.set(xlim=(0, 1.9 * max(row["images_per_s"] for row in rows)))  # room for the text
        ax.set_xlabel("images/s (pale: the share of a step that waits for images)")
        what = f"{rows[0]['model']}, {rows[0]['image_size']} px, batch {rows[0]['batch_size']}"
        entitle(ax, _trials_text(rows, best), f"{what}; {rows[0]['device_name']}")
    return ax


def _trials_text(rows, best):
    """Return the fastest trial, relative to the first."""
    if not best:
        return "No trial was undisturbed and complete"
    fast = max(best, key=lambda row: row["images_per_s"])
    times = fast["images_per_s"] / rows[0]["images_per_s"]
    if fast is rows[0]:
        return f"{fast['name']}, the first of {len(rows)} trials, is the fastest"
    return f"{fast['name']}: {times:.3g} times as fast as {rows[0]['name']}, in {len(rows)} trials"


def _fastest(rows):
    """Return the fastest trial, and those behind it by less than equal runs differ.

    Disturbed trials are left out, because their speed is unknown.
    """
    done = [row for row in rows if row["state"] == "COMPLETED" and not row.get("disturbance")]
    most = max((row["images_per_s"] or 0 for row in done), default=0)

    def is_near(row):
        speed, spread = row["images_per_s"] or 0, row.get("spread", stats.SPREAD_CPU)
        return speed >= (1 - spread) * most > 0

    return [row for row in done if is_near(row)]


def _trial_cells(row):
    knobs = (_knob_text(row["knobs"][name]) for name in KNOBS)
    figures = _figure_texts(row) if row["images_per_s"] else "----"
    return (row["name"], *knobs, *figures)


def _figure_texts(row):
    """Return images/s, the share of waiting, the time of the first batch, and the host memory."""
    yield f"{row['images_per_s']:,.0f}"
    yield f"{row['data_share']:.0%}"
    yield duration_text(row["first_load_s"])
    yield bytes_text(row["host_memory_bytes"])


def _trial_note(row, best, code):
    """Return the caveats about a trial's speed; code: the last trial's trainer's."""
    if row["state"] != "COMPLETED":
        return row["state"]
    star = "★ fastest" if len(best) == 1 else "among the fastest"
    notes = [star] * (row in best) + ["another trainer"] * (row["code"] not in (code, None))
    notes += [f"short: {ready(row)} batches were ready"] * (ready(row) > READY * row["steps"])
    if left_out := row.get("left_out"):
        notes.append(f"without its last {left_out} steps: nothing was left to decode")
    notes += [row["disturbance"]] if row.get("disturbance") else []
    return "; ".join(notes)


def _knob_text(value):
    if value is None:
        return "-"
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)


def _trial_text(row):
    text = "  {}; waits {}; first batch {}; {}".format(*_figure_texts(row))
    return f"{text}; disturbed" if row.get("disturbance") else text


def _differences(rows):
    """Return each trial's values of the knobs that differ between trials: "2 workers"."""
    names = [n for n in KNOBS if len({row["knobs"][n] for row in rows}) > 1] or ["num_workers"]
    return [", ".join(_knob_words(name, row["knobs"][name]) for name in names) for row in rows]


def _knob_words(name, value):
    if name == "num_workers":
        return workers_text(value)
    return f"{'not ' * (value is False)}{KNOBS[name]}{f' {value}' * (not isinstance(value, bool))}"


def workers_text(number: int) -> str:
    """Return "1 worker", "2 workers"."""
    return f"{number} worker{'s' * (number != 1)}"


def oversubscribed(jobs) -> str:
    """Return lines that name the jobs with more busy workers and threads than cores."""
    by_text = {}
    for job in jobs:
        by_text.setdefault(oversubscription(job) or "enough cores for all", []).append(job.id)
    return "\n".join(fill(f"{', '.join(ids)}: {text}", 100) for text, ids in by_text.items())


def oversubscription(run) -> str:
    """Return a warning if a run has more busy workers and threads than cores; else "".

    On a GPU only one thread of the training counts: the one that launches the work.
    """
    found = log.read(run)
    workers, cores = found.probe.loader.num_workers or 0, found.start.get("cpu_count") or 1
    on_gpu = found.setup.get("device", "").startswith("cuda")
    threads = 1 if on_gpu else found.start.get("threads") or 1
    if not workers or workers + threads <= cores:
        return ""
    return (
        f"oversubscribed: {workers_text(workers)} decoding and {threads} "
        f"thread{'s' * (threads > 1)} training share {cores} core{'s' * (cores > 1)}, so they "
        "wait for each other. Try fewer workers, or fewer threads (OMP_NUM_THREADS)"
    )
