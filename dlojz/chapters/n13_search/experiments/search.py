"""A search of hyper-parameters, in which each trial is a job of the trainer.

Run by notebook 13, from your own copy: n13.search(course.own("13_search"), "first", trials=6).
In a terminal: python search.py --study first --trials 6 --workers 2

A worker is a process of Optuna's on the processor. It asks for a trial, submits it, and reads its
log: `open_study`, then `objective` again and again. Several workers share a study by its journal.
"""

import optuna

from dlojz.chapters.n13_search import worker


def open_study(name, storage, seed):
    """Return the study of this name: a new one, or that of the other workers.

    storage: the study's journal. seed: of this worker's suggestions.
    """
    return optuna.create_study(
        study_name=name,
        storage=storage,
        load_if_exists=True,
        direction="maximize",
        sampler=optuna.samplers.TPESampler(n_startup_trials=5, seed=seed),
        pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3),
    )


def objective(trial):
    """Return the accuracy of a trial: on the validation images, after the last epoch of its job.

    worker.submit(trial, "--lr 0.1 --wd 1e-4") submits the trainer with these flags, and returns the
    job. worker.epochs(job) yields (epoch, accuracy) as soon as an epoch has ended: 1, 2, ...
    """
    # TODO 13a: suggest --lr, --mom and --wd, submit, report each epoch, prune: cancel the job
    raise NotImplementedError


def again(best, data):
    """Return the flags of at least three jobs that train the best trial again.

    data: a folder of images for --data, whose validation images no trial has seen.
    """
    # TODO 13b: its parameters, these images, and seeds that no trial had
    raise NotImplementedError


if __name__ == "__main__":
    worker.main(__file__)
