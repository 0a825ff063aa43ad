"""The table of a trainee's loader trials, which is kept across sessions."""

from pathlib import Path

from dlojz.chapters.n05_dataloader.trial import began, key, trial
from dlojz.course import progress
from dlojz.table import Table


def trials(jobs=(), file: Path | None = None) -> Table:
    """Return a table of the knobs of each trial and its results, earlier sessions first.

    jobs: one or several. Ended ones are kept in `file`, by default beside
        progress.json. Trials of other models, sizes or machines are kept, but not shown.
    """
    from dlojz.chapters.n05_dataloader import figures  # here, because it imports matplotlib

    rows = map(trial, jobs if isinstance(jobs, list | tuple) else [jobs])
    new = {key(row): row for row in rows}
    ended = {k: row for k, row in new.items() if row["ended"] and began(row)}
    file = file or progress.file().with_name("trials.json")
    kept = progress.change(file, lambda kept: kept.update(ended))
    known = [row for row in list(new.values()) or list(kept.values()) if began(row)]
    return figures.trials(list({**kept, **new}.values()), like=known[-1] if known else None)
