"""A study as one small log, which can be kept without its jobs: tools/keep_study.py writes it.

It begins as the log of its first job, without the flags that were suggested. Then come its jobs:

{"event": "case", "case": "trial 3", "phase": "trial", "worker": 0, "state": "COMPLETE", "begin_s": 0.2, "seconds": 29.9, "accuracies": [0.04, 0.742], "lr": 0.044, "mom": 0.85, "wd": 0.00064}
{"event": "case", "case": "again, seed 1", "phase": "again", "begin_s": 152.8, "seconds": 25.5, "accuracies": [0.04, 0.696]}

`begin_s` counts from the begin of the first job; `seconds` are all that a job held its GPU.
"""  # noqa: E501  a sample line stays one line

import shlex
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from dlojz import launch
from dlojz.chapters.n13_search.recorded import is_complete, last
from dlojz.chapters.n13_search.study import SearchError, Study
from dlojz.figures import drawing
from dlojz.runs import log

of_study = partial(drawing.of_experiment, field="begin_s", experiment="tools/keep_study.py")


# Writing ------------------------------------------------------------------------------------------


def events(study: Study) -> Iterator[dict]:
    """Yield the events of a study's log. Raise SearchError if its best trial was not run again."""
    from dlojz.chapters.n13_search import exercise, worker

    pairs = [(t, worker.job_of(study.id, t)) for t in study.found if t.state.is_finished()]
    pairs = [(trial, job) for trial, job in pairs if job and "started" in job.status]
    again = exercise.read(study.directory)["study"].again
    if not again:
        raise SearchError(f"study {study.id}: no run of its best trial again: n13.again first")
    first, began = log.read(pairs[0][1]), min(job.status["started"] for _, job in pairs)
    suggested = {name for trial, _ in pairs for name in trial.params}
    arguments = {k: v for k, v in first.start["arguments"].items() if k not in suggested}
    workers = [*dict.fromkeys(trial.user_attrs["worker"]["pid"] for trial, _ in pairs)]
    command = f"search.py --study {study.id} --trials {study.finished} --workers {len(workers)}"
    command += f" --command {shlex.quote(study.optuna.user_attrs['command'])}"
    yield first.start | {"hostname": "recorded", "arguments": arguments, "command": command}
    yield first.setup
    for trial, job in pairs:
        curve = [accuracy for _, accuracy in sorted(trial.intermediate_values.items())]
        name = {"event": "case", "case": f"trial {trial.number}", "phase": "trial"}
        own = workers.index(trial.user_attrs["worker"]["pid"])
        about = {"worker": own, "state": trial.state.name} | _job(job, began, curve)
        yield name | about | trial.params
    for run in again:
        name = {"event": "case", "case": f"again, seed {run.flags['seed']}", "phase": "again"}
        yield name | _job(launch.find(run.job), began, run.accuracies)
    ended = max(launch.find(run.job).status["ended"] for run in again)
    time = datetime.fromtimestamp(ended, UTC).isoformat(timespec="seconds")
    yield {"event": "end", "outcome": "completed", "time": time}


def _job(job, began, curve) -> dict:
    """Return the seconds of a job, and its accuracies."""
    at, end = (job.status[name] for name in ("started", "ended"))
    seconds = {"begin_s": round(at - began, 1), "seconds": round(end - at, 1)}
    return seconds | {"accuracies": [round(accuracy, 4) for accuracy in curve]}


# Reading ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    """A study: its trials in order, and its best trial again, with fresh seeds on unseen images."""

    trials: tuple[dict, ...]
    again: tuple[dict, ...]

    @property
    def complete(self) -> list[dict]:
        """Return the trials that were trained to their end."""
        return [*filter(is_complete, self.trials)]

    @property
    def best(self) -> dict:
        """Return the complete trial with the highest accuracy; of equal ones the first."""
        return max(self.complete, key=last)

    @property
    def seconds(self) -> dict[str, float]:
        """Return the seconds in which jobs held their GPUs: of complete, and of stopped trials."""
        whole, every = (sum(t["seconds"] for t in own) for own in (self.complete, self.trials))
        return {"complete": whole, "stopped": every - whole}

    @property
    def unstopped_s(self) -> float:
        """Return the seconds of as many whole trials, by the median of the complete ones."""
        return len(self.trials) * statistics.median(t["seconds"] for t in self.complete)

    @property
    def saved_s(self) -> float:
        """Return the part of those seconds that was not used, 0 to 1."""
        return 1 - sum(self.seconds.values()) / self.unstopped_s

    @property
    def saved_epochs(self) -> float:
        """Return the part of as many whole trials' epochs that was not trained, 0 to 1."""
        done, whole = (sum(len(t["accuracies"]) for t in x) for x in (self.trials, self.complete))
        return 1 - done / len(self.trials) / (whole / len(self.complete))


def read(run) -> Kept:
    """Return the study of a log. Raise UserError if it is of something else."""
    cases = of_study(run).cases.values()
    return Kept(*(tuple(c for c in cases if c["phase"] == phase) for phase in ("trial", "again")))
