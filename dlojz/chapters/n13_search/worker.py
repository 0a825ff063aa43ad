"""A worker of a search: a process that asks Optuna for trials, each of which is a job.

It holds no place in the queue, its trials do. It notes in a trial which process it is, and which
job it submits. If it is killed, the next worker that asks cancels that job, tells Optuna that the
trial failed, and puts its parameters back into the queue.
"""

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from dlojz import launch
from dlojz.chapters.n13_search.study import SIZES, SearchError, search
from dlojz.course import UserError, presets
from dlojz.jobs import processes
from dlojz.launch.follow import events
from dlojz.runs import by_hand
from dlojz.runs.folder import events_file

SILENT_S = 100  # of a worker on another machine, whose job has ended
IN_A_ROW = 3  # failed trials, after which a worker gives up
POLL_S = 0.2  # between looks into a log


class TrialError(Exception):
    """A trial whose job failed, which is no fault of the objective."""


# What an objective calls --------------------------------------------------------------------------


def submit(trial, flags: str, **more) -> launch.Job:
    """Submit the study's trainer, with these flags added to those of all trials; return the job.

    more: arguments of `dlojz.launch.submit`, such as time_max="01:00:00".
    """
    name = f"{trial.study.study_name}-{trial.number}"  # by which it is found if we are killed here
    job = launch.submit(f"{trial.study.user_attrs['command']} {flags}", name=name, **more)
    trial.set_user_attr("job", job.id)
    return job


def epochs(job: launch.Job) -> Iterator[tuple[int, float]]:
    """Yield, as an epoch ends, how many are done: 1, 2, ...; and the validation accuracy, 0 to 1.

    Raise TrialError if the job fails.
    """
    for _state, found in events(job, POLL_S):
        for event in found:
            if event["event"] == "epoch":
                yield event["epoch"] + 1, event["val_accuracy"]
    if job.state != launch.State.COMPLETED:
        raise TrialError(job.explain())


# Its loop -----------------------------------------------------------------------------------------


def main(file: str):
    """Search, as this program's command line says, by its `open_study` and its `objective`."""
    parser = argparse.ArgumentParser(description="Search hyper-parameters: each trial is a job.")
    parser.add_argument("--study", required=True, help="its name; the same name goes on with it")
    trials = "completed or pruned, of all workers together (default: %(default)s)"
    parser.add_argument("--trials", type=int, default=12, help=trials)
    parser.add_argument("--workers", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--command", default="", help="the trainer and the flags of all trials")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    try:
        if args.worker is None:
            print(search(Path(file).resolve(), args.study, args.trials, args.workers, args.command))
        else:
            _work(sys.modules["__main__"], Path(file).parent, args)
    except UserError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command again goes on")


def _work(program, folder, args):
    """Ask for trials until there are enough, and run them."""
    from dlojz.chapters.n13_search import journal

    signal.signal(signal.SIGTERM, _interrupt_once)
    storage, me = journal.storage(folder / "journal.log"), processes.identity(os.getpid())
    with journal.one_at_a_time(folder):
        study = program.open_study(args.study, storage, args.worker)
        _agree(study, args.command)
    in_a_row = 0
    try:
        while in_a_row < IN_A_ROW:
            with journal.one_at_a_time(folder):
                give_up_lost(study)
                if sum(map(_counts, study.get_trials(deepcopy=False))) >= args.trials:
                    return
                trial = study.ask()
                trial.set_user_attr("worker", me)
            in_a_row = 0 if _run(study, trial, program.objective) else in_a_row + 1
    except BaseException as error:
        again = isinstance(error, KeyboardInterrupt)
        with suppress(OSError), journal.one_at_a_time(folder):  # a full disk: the next worker does
            _give_up_own(study, me, again)
        raise
    raise SearchError(f"{IN_A_ROW} trials in a row failed: mend the cause first")


def _interrupt_once(number, _frame):
    """Raise KeyboardInterrupt; later signals are ignored, while the trial is given up.

    The kernel sends one for each thread of the parent that ends.
    """
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _agree(study, command):
    """Note the command of all trials in a new study. Raise SearchError if it had another one."""
    known = study.user_attrs.get("command")
    wanted = command or known or f"dlojz/dlojz.py {SIZES[presets.choose().name]}"
    if known not in (None, wanted):
        raise SearchError(
            f"the trials of study {study.study_name} are {known!r}, and {wanted!r} was asked for: "
            "give the study another name, or leave the command out"
        )
    if known is None:
        study.set_user_attr("command", wanted)


def _counts(trial) -> bool:
    return trial.state.name in ("RUNNING", "COMPLETE", "PRUNED")


def _run(study, trial, objective) -> bool:
    """Run a trial, and tell Optuna how it ended. Return False if its job failed."""
    from optuna import TrialPruned
    from optuna.trial import TrialState

    _keep_whole(study, trial)
    try:
        value = objective(trial)
    except TrialPruned:
        study.tell(trial, state=TrialState.PRUNED)
        print(f"trial {trial.number}: pruned", flush=True)
    except TrialError as error:
        study.tell(trial, state=TrialState.FAIL)
        print(f"trial {trial.number}: failed. {error}", flush=True)
        return False
    else:
        study.tell(trial, value)
        print(f"trial {trial.number}: {value}", flush=True)
    return True


def _keep_whole(study, trial):
    """Let the pruner stop a trial only before its last epoch: after it, nothing is saved."""
    stops = trial.should_prune

    def should_prune() -> bool:
        done, job = study.get_trials(deepcopy=False)[trial.number].last_step, job_of(study, trial)
        whole = _arguments(job).get("epochs", math.inf) if job else math.inf
        return (done is None or done < whole) and stops()

    trial.should_prune = should_prune


def _arguments(job) -> dict:
    """Return the flags of a job; {} if its log has not begun."""
    start, _ = by_hand.ends(events_file(job.directory))
    return (start or {}).get("arguments", {})


# Trials of workers that were killed ---------------------------------------------------------------


def give_up_lost(study):
    """Give up the running trials whose workers are gone; call it with the lock of `asking`."""
    for trial in study.get_trials(deepcopy=False):
        if trial.state.name == "RUNNING" and not is_busy(study.study_name, trial):
            give_up(study, trial)


def _give_up_own(study, me, again):
    """Give up this process's trial, or that which it has just asked for."""
    for trial in study.get_trials(deepcopy=False):
        if trial.state.name == "RUNNING" and trial.user_attrs.get("worker", me) == me:
            give_up(study, trial, again)


def give_up(study, trial, again: bool = True):
    """Cancel a trial's job and tell Optuna that it failed. again: and queue its parameters."""
    from optuna.trial import TrialState

    if job := job_of(study.study_name, trial):
        job.cancel(f"trial {trial.number} of study {study.study_name} was given up")
    study.tell(trial.number, state=TrialState.FAIL)
    if again and trial.params:
        study.enqueue_trial(trial.params, user_attrs={"instead_of": trial.number})


def is_busy(study: str, trial) -> bool:
    """Return whether a trial is running and its worker is alive, as far as this process can tell.

    A worker of another machine is gone if its job ended a while ago: it would have told so.
    """
    if trial.state.name != "RUNNING" or not (who := trial.user_attrs.get("worker")):
        return False  # asking and noting who asks are one step, under a lock
    alive = processes.is_alive(who)
    if alive is not None:
        return alive
    since, job = trial.datetime_start, job_of(study, trial)
    if job:
        status = job.status
        if not launch.State(status["state"]).final:
            return True
        since = datetime.fromtimestamp(status.get("ended") or 0)
    return time.time() - since.timestamp() < SILENT_S


def job_of(study: str, trial) -> launch.Job | None:
    """Return the job of a trial; None if it has none, or its folder was removed."""
    with suppress(LookupError):
        number = trial.user_attrs.get("job")
        return launch.find(number) if number else launch.latest(f"{study}-{trial.number}")
    return None
