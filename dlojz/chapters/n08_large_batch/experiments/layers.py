"""The length of an update relative to the weights, layer by layer, with SGD and with LAMB.

Submitted by a notebook:

    dlojz/chapters/n08_large_batch/experiments/layers.py --optimizers solutions/optimizers.py

Both begin with the same weights, and train on the same random images. LAMB is that of the file: its
lengths are those of the `trust_ratio` in it. Weights of one dimension are left out.
"""

import argparse
from types import SimpleNamespace

import torch

from dlojz import course
from dlojz.chapters import session
from dlojz.training import flags, imports, models

CLASSES = 10
RATES = {"SGD": 0.1, "LAMB": 0.02}  # of LAMB it is also the ratio that each layer must have


def built(name, model, file) -> torch.optim.Optimizer:
    """Return SGD as in the trainer, or LAMB of the trainee's file."""
    rate = RATES[name]
    if name == "SGD":
        return torch.optim.SGD(model.parameters(), rate, momentum=0.9, weight_decay=5e-4)
    own = imports.from_file(course.course_root() / file, "optimizers_of_a_figure")
    given = SimpleNamespace(optimizer="lamb", lr=rate, wd=0.02, mom=0.9)
    return own.build(given, model)


def ratios(model, before) -> dict[str, float]:
    """Return the length of each layer's last update, divided by that of its weights."""
    weights = [(name, w) for name, w in model.named_parameters() if w.ndim > 1]
    return {
        name: ((w - before[name]).norm() / before[name].norm()).item()
        for name, w in weights
        if before[name].any()
    }


def trained(name, args, device) -> dict[str, float]:
    """Return the ratios of the last of a few updates."""
    torch.manual_seed(0)
    model = models.build(args.model, CLASSES, args.image_size).to(device)
    optimizer = built(name, model, args.optimizers)
    images, labels = session.batch(args, device)
    labels = torch.randint_like(labels, CLASSES)
    for _ in range(args.updates):
        before = {name: w.detach().clone() for name, w in model.named_parameters()}
        session.one_step(model, optimizer, images, labels, None)
    with torch.no_grad():
        return ratios(model, before)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    session.add_sizes(parser, batch_size=32)
    parser.add_argument("--optimizers", required=True, help="a file with the trainee's optimizers")
    parser.add_argument("--updates", type=flags.at_least(1), default=5, help="the last is measured")
    parser.set_defaults(model="resnet18", image_size=64)
    args = parser.parse_args()
    with session.begin(args) as (run, device):
        for name, rate in RATES.items():
            run.case(name, rate=rate, ratios=trained(name, args, device))


if __name__ == "__main__":
    main()
