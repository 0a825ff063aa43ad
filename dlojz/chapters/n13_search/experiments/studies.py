"""Whole studies of Optuna, over samplers, with and without Hyperband, and their winners again.

Submitted by a notebook:

    dlojz/chapters/n13_search/experiments/studies.py --repeats 3

A study has a budget of epochs: those of --trials whole trials. A trial begins while there is enough
left for a whole one, so with Hyperband, which stops some, a study tries more of them. All trials of
a repeat have its seed; the winner of each study, and the trainer's defaults, are trained again with
fresh seeds, and validated on images that no study saw, too.

In a job of several processes the repeats are dealt out among them.
"""

import time

import optuna
from tqdm import tqdm

from dlojz import idr_torch
from dlojz.chapters import session
from dlojz.chapters.n13_search import curves
from dlojz.chapters.n13_search.curves import Curves
from dlojz.training import flags

PRUNERS = ("none", "hyperband")
FIRST_SEED = 100  # of the first repeat; the seeds of --seeds count from 0
NOISE = 10  # fresh seeds of the defaults
ON_GPU = {"trials": 15, "repeats": 5, "seeds": 5, "reduction": 3, "compile": "reduce-overhead"}
ON_CPU = {"trials": 6, "repeats": 2, "seeds": 3, "reduction": 3}


def sampler(name: str, seed: int, trials: int):
    """Return a sampler. The first third of a budget's trials are random for each of them."""
    if name == "random":
        return optuna.samplers.RandomSampler(seed)
    kind = {"tpe": optuna.samplers.TPESampler, "gp": optuna.samplers.GPSampler}[name]
    return kind(seed=seed, n_startup_trials=max(2, trials // 3))


def pruner(name: str, args):
    """Return a pruner."""
    if name == "none":
        return optuna.pruners.NopPruner()
    return optuna.pruners.HyperbandPruner(1, args.epochs, args.reduction)


class Search:
    """The studies of a job, which log each trial as it ends."""

    def __init__(self, run, args, trained: Curves, progress):
        self.run, self.args, self.trained, self.progress = run, args, trained, progress

    def study(self, name: str, pruning: str, repeat: int):
        """Return a study that has used up its budget."""
        args, seed = self.args, FIRST_SEED + repeat
        study = optuna.create_study(
            sampler=sampler(name, seed, args.trials),
            pruner=pruner(pruning, args),
            study_name=f"{name} {repeat}",  # Hyperband deals trials out by it
            direction="maximize",
        )
        left = args.trials * args.epochs
        while left >= args.epochs:
            begin = time.perf_counter()
            trial = study.ask()
            suggested = curves.space(trial)
            told = {"sampler": name, "pruner": pruning, "repeat": repeat, "trial": trial.number}
            told |= suggested | {"asking_s": round(time.perf_counter() - begin, 4)}
            found = self.trial(trial, suggested, seed)
            complete = len(found["accuracies"]) == args.epochs
            state = optuna.trial.TrialState["COMPLETE" if complete else "PRUNED"]
            study.tell(trial, found["accuracies"][-1] if complete else None, state)
            left -= len(found["accuracies"])
            self.log("study", **told, state=state.name, **found)
            self.progress.update(len(found["accuracies"]))
        return study

    def trial(self, trial, suggested: dict, seed: int) -> dict:
        """Train until the end, or until the pruner stops it; return accuracies and seconds."""
        accuracies, seconds = [], 0.0
        for number, epoch in enumerate(self.trained.epochs(suggested, seed), 1):
            accuracies.append(epoch["accuracy"])
            seconds += epoch["seconds"]
            trial.report(epoch["accuracy"], number)
            if number < self.args.epochs and trial.should_prune():
                break
        return {"accuracies": accuracies, "seconds": round(seconds, 4)}

    def rest(self, study, **told):
        """Train the pruned trials of a study to their end, outside its budget."""
        for trial in study.get_trials(states=[optuna.trial.TrialState.PRUNED]):
            found = self.trained.whole(trial.params, FIRST_SEED + told["repeat"])
            self.log("rest", **told, trial=trial.number, accuracies=found["accuracies"])

    def again(self, phase: str, suggested: dict, seeds: int, **told):
        """Train with these flags and fresh seeds."""
        for seed in range(seeds):
            found = self.trained.whole(suggested, seed)
            own = {name: found[name] for name in ("accuracy", curves.UNSEEN, "seconds")}
            self.log(phase, **told, seed=seed, **own)

    def repeat(self, number: int):
        """Run all studies of a repeat, and train their winners again."""
        for name in self.args.samplers:
            for pruning in PRUNERS:
                told = {"sampler": name, "pruner": pruning, "repeat": number}
                study = self.study(name, pruning, number)
                if number == 0:
                    self.rest(study, **told)
                chosen = study.best_trial
                told["trial"] = chosen.number
                self.again("winner", chosen.params, self.args.seeds, **told)

    def log(self, phase: str, **fields):
        """Log a training under a name of its own."""
        about = ("sampler", "pruner", "repeat", "trial", "seed")
        name = ", ".join(f"{key} {fields[key]}" for key in about if key in fields)
        self.run.case(f"{phase}, {name}", phase=phase, **fields)


def main():
    device, begin = idr_torch.device(), time.perf_counter()
    sizes = ON_GPU if device.type == "cuda" else ON_CPU
    parser = curves.parser(__doc__, device, **sizes)
    add, positive = parser.add_argument, flags.at_least(1)
    add("--samplers", nargs="+", choices=("random", "tpe", "gp"), default=["random", "tpe", "gp"])
    add("--trials", type=positive, help="whole trials that a study may pay for")
    add("--repeats", type=positive, help="studies of each kind, each with a seed of its own")
    add("--seeds", type=positive, help="fresh seeds of each winner")
    add(
        "--reduction",
        type=flags.at_least(2),
        help="factor of Hyperband: one in this many trials goes on",
    )
    add("--minutes", type=float, default=60, help="begin no repeat that would take longer")
    args = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    numbers = curves.mine(range(args.repeats))
    total = len(numbers) * len(PRUNERS) * len(args.samplers) * args.trials * args.epochs
    with session.begin(args, device) as (run, _), tqdm(total=total, unit="epoch") as progress:
        search = Search(run, args, Curves(args, device, curves.draw(args, device)), progress)
        if idr_torch.is_master:
            search.again("default", {}, NOISE)
        first = time.perf_counter()
        for done, number in enumerate(numbers):
            now = time.perf_counter()
            if done and now - begin + (now - first) / done > 60 * args.minutes:
                break
            search.repeat(number)


if __name__ == "__main__":
    main()
