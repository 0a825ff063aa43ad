"""The curves of a learning-rate finder: the loss, while the rate grows from update to update.

Submitted by a notebook: submit("dlojz/chapters/n08_large_batch/experiments/finder.py").

The finder is `find_rate` of the solved optimizers.py, with SGD on the small task of batches.py.
Every curve begins with fresh weights.
"""

import argparse
from itertools import islice
from types import SimpleNamespace

import torch
from tqdm import tqdm

from dlojz import idr_torch
from dlojz.chapters import resident, session
from dlojz.chapters.n08_large_batch import trainings
from dlojz.chapters.n08_large_batch.trainings import Plan
from dlojz.training import flags, metrics, models

STEPS = {"cuda": 100, "cpu": 30}  # updates


def curve(plan, steps, args, images, device) -> list[tuple[float, float]]:
    """Return the rates with their losses, as the finder found them."""
    torch.manual_seed(plan.seed)
    model = models.build(args.model, args.classes, args.image_size)
    model = model.to(device, memory_format=torch.channels_last).train()
    optimizer = plan.build(plan, model)
    scheduler = trainings.schedule(plan, optimizer, steps)
    training = SimpleNamespace(model=model, optimizer=optimizer, scheduler=scheduler)
    training.scaler = torch.amp.GradScaler(device.type, enabled=False)
    training.metrics = metrics.build().to(device)

    def train(images, labels):
        model.zero_grad()
        loss = trainings.backward(model, images, labels)
        optimizer.step()
        return loss.item()

    loader = trainings.loader(images, "train", args.image_size, plan)
    batches = islice(trainings.endless(loader), steps)
    return trainings.optimizers().find_rate(training, train, list(batches))


def main():
    device = idr_torch.device()
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    batches = [64, 256, 1024] if device.type == "cuda" else [16, 128]
    trainings.add_flags(parser, device)
    positive = flags.at_least(1)
    parser.add_argument("--steps", type=positive, default=STEPS[device.type], help="updates")
    parser.set_defaults(batches=batches, seeds=3 if device.type == "cuda" else 1)
    args = trainings.check(parser, parser.parse_args())
    with session.begin(args, device) as (run, _):
        images = resident.draw(args, device)
        plans = [Plan("sgd", b, 0.1, seed) for b in args.batches for seed in range(args.seeds)]
        for plan in tqdm(plans, unit="curve"):
            rates, losses = zip(*curve(plan, args.steps, args, images, device), strict=True)
            about = {"optimizer": plan.optimizer, "batch": plan.batch, "seed": plan.seed}
            name = f"batch {plan.batch}, seed {plan.seed}"
            run.case(name, **about, rates=rates, losses=losses)


if __name__ == "__main__":
    main()
