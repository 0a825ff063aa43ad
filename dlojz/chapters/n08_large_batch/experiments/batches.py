"""Accuracy, time and energy of whole trainings, over optimizers, batches and learning rates.

Submitted by a notebook:

    dlojz/chapters/n08_large_batch/experiments/batches.py

First each optimizer tries the same number of learning rates, with seeds of their own. The best one
by its mean goes on: it is trained again, with fresh seeds. SGD's best rate for the small batch is
also taken to the large one by the rules, in as many epochs and in as many updates.

In a job of several processes the trainings are dealt out among them, each with its own GPU.
"""

from itertools import product

from dlojz import idr_torch
from dlojz.chapters.n08_large_batch import trainings
from dlojz.chapters.n08_large_batch.trainings import TUNING_SEEDS, Plan

RULES = {  # of the learning rate, by the quotient of the batches
    "same rate": lambda quotient: 1.0,
    "square root": lambda quotient: quotient**0.5,
    "linear": lambda quotient: quotient,
}
AS_MANY_UPDATES = ("same rate", "linear")


def settings(args) -> list[tuple[str, int]]:
    """Return the optimizers with their batches; what takes equally long stands together."""
    swept = product(args.optimizers[:2], sorted(args.batches))
    return list(dict.fromkeys([*swept, *product(args.optimizers, [args.at])]))


def tuning(args):
    """Return the trainings that choose a learning rate."""
    return [
        ({"phase": "tuning"}, Plan(name, batch, rate, seed))
        for name, batch in settings(args)
        for rate in trainings.rates(name, args.rates, args.scale)
        for seed in TUNING_SEEDS
    ]


def fresh(args, chosen):
    """Return the trainings with what was chosen."""
    return [
        ({"phase": "fresh"}, Plan(*setting, chosen[setting], seed))
        for setting in settings(args)
        for seed in range(args.seeds)
    ]


def ruled(args, chosen):
    """Return the trainings of SGD with a rate that a rule takes from the small batch."""
    small = min(args.batches)
    if ("sgd", small) not in chosen:
        return []
    images = args.classes * args.images_per_class
    as_many = args.epochs * (images // small)
    found = []
    for phase, rules, updates in (
        ("as many updates", AS_MANY_UPDATES, as_many),
        ("rule", RULES, None),
    ):
        for rule in rules:
            rate = float(f"{chosen['sgd', small] * RULES[rule](args.at / small):.3g}")
            plans = [Plan("sgd", args.at, rate, seed, updates) for seed in range(args.seeds)]
            found += [({"phase": phase, "rule": rule}, plan) for plan in plans]
    return found


def main():
    device = idr_torch.device()
    parser = trainings.flags_of(__doc__, device)
    args = trainings.check(parser, parser.parse_args())
    number = len(tuning(args)) + args.seeds * len([*settings(args), *RULES, *AS_MANY_UPDATES])
    with trainings.begin(args, device, number) as trainer:
        chosen = trainings.best(trainer.each(tuning(args)))
        trainer.each(ruled(args, chosen) + fresh(args, chosen))


if __name__ == "__main__":
    main()
