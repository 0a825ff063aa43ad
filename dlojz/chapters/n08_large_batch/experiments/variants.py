"""Whole trainings with a large batch, each with one change: warm-up, decay, mean weights, sizes.

Submitted by a notebook:

    dlojz/chapters/n08_large_batch/experiments/variants.py

Both optimizers, SGD and AdamW, choose their learning rate first, with seeds of their own; every
change keeps it. A seed has the same first weights and images in all, so they are compared by pairs.

In a job of several processes the trainings are dealt out among them, each with its own GPU.
"""

from dataclasses import dataclass, field

import torch

from dlojz import idr_torch
from dlojz.chapters.n08_large_batch import trainings
from dlojz.chapters.n08_large_batch.trainings import KINDS, TUNING_SEEDS, Plan

HIGHER = 4  # the rates of "a high rate", relative to the chosen one
DECAY = KINDS["adamw"].decay


@dataclass(frozen=True)
class Change:
    """A difference from the clean training of an optimizer."""

    title: str
    times: float = 1.0  # the chosen learning rate
    of: dict = field(default_factory=dict)  # other fields of its Plan


def adam(decay, coupled=False, everywhere=False):
    """Return a function that builds Adam with this weight decay.

    coupled: decay is a part of the gradient, as Adam's own; else AdamW's. everywhere: also in the
    weights of one dimension, of normalization and biases.
    """
    kind = torch.optim.Adam if coupled else torch.optim.AdamW

    def build(plan, model):
        of = trainings.optimizers().groups
        weights = list(model.parameters()) if everywhere else of(model, decay)
        return kind(weights, plan.rate, weight_decay=decay, fused=True)

    return build


CHANGES = {  # the first of each optimizer is the clean training
    "sgd": {
        "clean": Change("SGD"),
        "no-warm-up": Change("no warm-up", of={"warm_up": 0.0}),
        "warm-up-half": Change("warm-up over 50 %", of={"warm_up": 0.5}),
        "high": Change(f"rate x {HIGHER}", HIGHER),
        "high-no-warm-up": Change(f"rate x {HIGHER}, no warm-up", HIGHER, {"warm_up": 0.0}),
        "high-warm-up-half": Change(
            f"rate x {HIGHER}, warm-up over 50 %", HIGHER, {"warm_up": 0.5}
        ),
        "ema": Change("mean of the weights (EMA 0.9)", of={"ema": 0.9}),
        "constant": Change("constant rate", of={"constant": True}),
        "constant-ema": Change(
            "constant rate, mean of the weights (EMA 0.9)", of={"constant": True, "ema": 0.9}
        ),
        "growing": Change("3/4 of the side in the first half", of={"growing": True}),
    },
    "adamw": {
        "clean": Change("AdamW, on matrices only", of={"build": adam(DECAY)}),
        "no-decay": Change("no decay", of={"build": adam(0.0)}),
        "everywhere": Change("decay on all weights", of={"build": adam(DECAY, everywhere=True)}),
        "coupled": Change("coupled: Adam with L2", of={"build": adam(DECAY, coupled=True)}),
        "stronger": Change("decay x 10", of={"build": adam(10 * DECAY)}),
        "stronger-everywhere": Change(
            "decay x 10, on all weights", of={"build": adam(10 * DECAY, everywhere=True)}
        ),
    },
}


def tuning(args):
    """Return the trainings that choose the learning rates."""
    return [
        ({"phase": "tuning"}, Plan(name, args.at, rate, seed))
        for name in CHANGES
        for rate in trainings.rates(name, args.rates, args.scale)
        for seed in TUNING_SEEDS
    ]


def changed(args, chosen):
    """Return the trainings of all changes, by seed."""
    found = []
    for seed in range(args.seeds):
        for optimizer, changes in CHANGES.items():
            for name, change in changes.items():
                about = {"phase": "fresh", "variant": name, "title": change.title}
                rate = float(f"{change.times * chosen[optimizer, args.at]:.3g}")
                found.append((about, Plan(optimizer, args.at, rate, seed, **change.of)))
    return found


def main():
    device = idr_torch.device()
    parser = trainings.flags_of(__doc__, device)
    args = trainings.check(parser, parser.parse_args())
    number = len(tuning(args)) + args.seeds * sum(map(len, CHANGES.values()))
    with trainings.begin(args, device, number) as trainer:
        chosen = trainings.best(trainer.each(tuning(args)))
        trainer.each(changed(args, chosen))


if __name__ == "__main__":
    main()
