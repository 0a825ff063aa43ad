"""The table of a trainee's trials of the loader, which stay for later sessions."""

from pathlib import Path

from dlojz import progress
from dlojz.runs.trials import began, key, trial
from dlojz.table import Table


def trials(jobs=(), file: Path | None = None) -> Table:
    """Return the knobs of each trial and what came of them, those of earlier sessions first.

    jobs: one or several. Those that have ended are kept in `file`, by default beside
        progress.json. Trials of other models, sizes or machines are kept, and not shown.
    """
    from dlojz.figures import loading  # matplotlib: only who asks for a table waits for it

    rows = map(trial, jobs if isinstance(jobs, list | tuple) else [jobs])
    new = {key(row): row for row in rows}
    with progress.changing(file or progress.file().with_name("trials.json")) as kept:
        kept.update((k, row) for k, row in new.items() if row["ended"] and began(row))
    known = [row for row in list(new.values()) or list(kept.values()) if began(row)]
    return loading.trials(list({**kept, **new}.values()), like=known[-1] if known else None)
