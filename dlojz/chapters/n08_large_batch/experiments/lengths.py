"""Trainings of several lengths: what a larger batch needs for the same accuracy.

Submitted by a notebook:

    dlojz/chapters/n08_large_batch/experiments/lengths.py

SGD trains with each batch, each length twice as long as the one before. Each length of each batch
tries the same learning rates, with seeds of their own, and the best one is trained again with fresh
seeds. In a job of several processes the trainings are dealt out among them.
"""

from itertools import product

from dlojz import idr_torch
from dlojz.chapters.n08_large_batch import trainings
from dlojz.chapters.n08_large_batch.trainings import TUNING_SEEDS, Plan
from dlojz.training import flags

# A longer training bears a higher rate than those that batches.py tunes.
ON_GPU = {"lengths": [4, 8, 16, 32, 64, 128], "updates": [60, 1200], "scale": 2.5, "rates": 7}
ON_CPU = {"lengths": [2, 4, 8], "updates": [12, 60]}


def settings(args) -> list[tuple[int, int]]:
    """Return the batches with their numbers of updates; what takes equally long stands together."""
    images, (fewest, most) = args.classes * args.images_per_class, args.updates
    found = [(b, epochs * (images // b)) for b, epochs in product(args.batches, args.lengths)]
    return [(batch, updates) for batch, updates in found if fewest <= updates <= most]


def tuning(args):
    """Return the trainings that choose a learning rate for each length."""
    return [
        (_about("tuning", updates), Plan("sgd", batch, rate, seed, updates))
        for batch, updates in settings(args)
        for rate in trainings.rates("sgd", args.rates, args.scale)
        for seed in TUNING_SEEDS
    ]


def fresh(args, chosen):
    """Return the trainings with what was chosen."""
    return [
        (
            {"phase": "fresh", "updates": updates},
            Plan("sgd", batch, chosen[batch, updates], seed, updates),
        )
        for batch, updates in settings(args)
        for seed in range(args.seeds)
    ]


def _about(phase, updates):
    return {"phase": phase, "updates": updates}  # which tell trainings of one batch apart


def main():
    device = idr_torch.device()
    parser = trainings.flags_of(__doc__, device)
    add, positive = parser.add_argument, flags.at_least(1)
    add("--lengths", type=positive, nargs="+", help="epochs of the trainings of each batch")
    add("--updates", type=positive, nargs=2, help="fewest and most of a training; others are not")
    parser.set_defaults(**(ON_GPU if device.type == "cuda" else ON_CPU))
    args = trainings.check(parser, parser.parse_args())
    if not settings(args):
        parser.error("no training has as many --updates: give other --lengths")
    number = len(tuning(args)) + args.seeds * len(settings(args))
    with trainings.begin(args, device, number) as trainer:
        chosen = trainings.best(trainer.each(tuning(args)), "batch", "updates")
        trainer.each(fresh(args, chosen))


if __name__ == "__main__":
    main()
