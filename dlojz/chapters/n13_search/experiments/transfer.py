"""The same random trials with a small model and with a larger one, and the best of both again.

Submitted by a notebook:

    dlojz/chapters/n13_search/experiments/transfer.py

The larger model is then trained with fresh seeds: with the flags that were best for the small one,
with those that were best for itself, and with the trainer's defaults.
"""

import optuna
from tqdm import tqdm

from dlojz import idr_torch
from dlojz.chapters import session
from dlojz.chapters.n13_search import curves
from dlojz.chapters.n13_search.curves import Curves
from dlojz.training import flags

SEED = 100  # of all trials; the seeds of --seeds count from 0
ON_GPU = {"larger": "resnet50", "trials": 12, "seeds": 5}
ON_CPU = {"larger": "resnet34", "trials": 6, "seeds": 3}


def search(run, args, trained: Curves, progress) -> dict[str, dict]:
    """Train each trial with both models; return the flags of the best one, by model."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(SEED))
    best = {}
    for number in range(args.trials):
        suggested = curves.space(study.ask())
        for model in (args.model, args.larger):
            found = trained.whole(suggested, SEED, model)
            about = {"phase": "trial", "trial": number, "model": model}
            run.case(f"trial {number}, {model}", **about, **suggested, **found)
            best[model] = max(best.get(model, (0.0, {})), (found["accuracy"], suggested), key=first)
            progress.update()
    return {model: suggested for model, (_, suggested) in best.items()}


def first(pair):
    """Return the first of two values."""
    return pair[0]


def again(run, args, trained: Curves, best: dict[str, dict], progress):
    """Train the larger model with fresh seeds: the best flags of each, and the defaults."""
    for seed in range(args.seeds):
        for of, suggested in {**best, "default": {}}.items():
            found = trained.whole(suggested, seed, args.larger)
            about = {"phase": "winner", "of": of, "model": args.larger, "seed": seed}
            run.case(f"best of {of}, seed {seed}", **about, **suggested, **found)
            progress.update()


def main():
    device = idr_torch.device()
    sizes = ON_GPU if device.type == "cuda" else ON_CPU
    parser = curves.parser(__doc__, device, **sizes)
    add, positive = parser.add_argument, flags.at_least(1)
    add("--larger", help="the larger model, also of torchvision")
    add("--trials", type=positive, help="random trials, the same for both models")
    add("--seeds", type=positive, help="fresh seeds of what was best")
    args = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    total = 2 * args.trials + 3 * args.seeds
    with session.begin(args, device) as (run, _), tqdm(total=total, unit="training") as progress:
        trained = Curves(args, device, curves.draw(args, device))
        again(run, args, trained, search(run, args, trained, progress), progress)


if __name__ == "__main__":
    main()
