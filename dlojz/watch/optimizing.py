"""The optimizers of a trainer: how its training begins, and two updates of made-up weights by each.

Some of these weights are zeros, and their gradients are ours, so the lengths that the usual
mistakes in LAMB's trust ratio would give are known.
"""

import math
import sys
from argparse import Namespace

import torch

from dlojz.runs import records
from dlojz.training import imports
from dlojz.watch import auditor, calls, geometry, inventory, readings

OPTIMIZERS = ("adamw", "lamb", "lars", "lion", "muon")
RATE, DECAY = 0.02, 0.1
NEAR = 1e-3  # of lengths


def watch(run, training, args):
    """Log how a training begins, the made-up updates, and the geometry of the run as it ends.

    Nothing of a run that is timed, or by SGD without a finder.
    """
    plain = getattr(args, "optimizer", "sgd") == "sgd" and not getattr(args, "find_lr", 0)
    if plain or "timed" in auditor.wished() or inventory.is_sharded(training.model):
        return
    run.evidence(records.Begun(**begun(training)))
    run.evidence(records.MadeUp(**updates(args)))
    if "keep" in auditor.wished():
        measured = geometry.Measured(training)
        run.before_end(lambda: run.evidence(measured.finish()))


def begun(training) -> dict:
    """Return the state of a training as it begins: a finder has put it back."""
    optimizer, model = training.optimizer, training.model
    states = {
        f"{name} {key}"
        for name, weight in model.named_parameters()
        for key, value in optimizer.state.get(weight, {}).items()
        if torch.is_tensor(value) and not value.is_meta and value.any()
    }
    return {
        "optimizer": readings.kind(optimizer),
        "weights": inventory.digest(model),
        "buffers": inventory.checksum(model.buffers()),
        "states": len(states),
        "rates": [float(group["lr"]) for group in optimizer.param_groups],
        "updates": getattr(training.scheduler, "last_epoch", None),
    }


# Made-up weights ---------------------------------------------------------------------------------


class MadeUp(torch.nn.Module):
    """A model that is never called: weights of each kind, `hidden` of zeros, and gradients."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(3, 6, 3), torch.nn.BatchNorm2d(6)
        self.hidden, self.fc = torch.nn.Linear(24, 8), torch.nn.Linear(8, 5)
        draws = torch.Generator().manual_seed(0)
        for place, weight in enumerate(self.parameters()):
            weight.data.normal_(std=0.1 + 0.1 * place, generator=draws)
            signs = torch.randn(weight.shape, generator=draws).sign()
            sizes = 0.5 + torch.rand(weight.shape, generator=draws)
            weight.grad = 10.0 ** (place % 3) * signs * sizes
        self.hidden.weight.data.zero_()


def updates(args) -> dict:
    """Return the made-up updates by each optimizer of the file beside this program."""
    found = {"ways": {}}
    try:
        build = imports.beside(sys.modules["__main__"].__file__, "optimizers").build
        with torch.random.fork_rng(devices=[]):
            for how in OPTIMIZERS:
                own = {"optimizer": how, "lr": RATE, "wd": DECAY, "mom": 0.9}
                found["ways"][how] = made(build, Namespace(**vars(args) | own))
    except Exception as error:  # of any kind: it is the trainee's code
        found["error"] = f"{type(error).__name__}: {error}".partition("\n")[0]
    return found


def made(build, args) -> dict:
    """Return the geometry of two made-up updates by an optimizer, and the mistakes in LAMB's."""
    model, found = MadeUp(), []
    optimizer = build(args, model)
    for _ in range(2):
        before = {weight: weight.detach().clone() for weight in model.parameters()}
        with calls.counted() as count:
            optimizer.step()
        found.append(geometry.layers(optimizer, model, before))
    seen = {"updates": found, "reads": count.reads}
    return seen | ({"mistakes": mistakes(found[0])} if args.optimizer == "lamb" else {})


def mistakes(rows: list[dict]) -> dict:
    """Return the mistake in LAMB that gives these lengths in its first update, by kind of weight.

    "": none; "ratio": another one. Adam's first update is the sign of the gradient.
    """
    parts = {"matrices": [], "zeros": [], "vectors": []}
    weights = dict(MadeUp().named_parameters())
    for row in rows:
        weight = weights[row["name"]]
        kind = "vectors" if weight.ndim < 2 else "matrices" if weight.any() else "zeros"
        parts[kind].append((row["length"], _lengths(weight.detach(), weight.grad)))
    return {kind: _mistake(kind, found) for kind, found in parts.items()}


def _lengths(weight, gradient) -> dict[str, float]:
    """Return the right length of a step, as "", and those that mistakes give."""
    size, adam = weight.norm(), gradient.sign()
    if weight.ndim < 2:
        found = {"": adam.norm(), "vectors": size, "decayed": (adam + DECAY * weight).norm()}
    else:
        update = adam + DECAY * weight
        found = {
            "": size if size else adam.norm(),
            "upside-down": update.norm() ** 2 / size,
            "of-gradient": update.norm() * size / gradient.norm(),
            "decay-outside": (size * adam / adam.norm() + DECAY * weight).norm(),
            "no-ratio": update.norm(),
        }
    return {name: float(length) for name, length in found.items()}


# All steps are one number times these: the hint.
ALIKE = {"matrices": ("no-ratio", "one-ratio"), "vectors": ("", "bias-correction")}


def _mistake(kind, found) -> str:
    if kind == "zeros":
        return "" if all(0 < length < math.inf for length, _ in found) else "zero-norm"
    for name in found[0][1]:
        if all(abs(length / lengths[name] - 1) <= NEAR for length, lengths in found):
            return name
    name, hint = ALIKE[kind]
    shares = [length / lengths[name] for length, lengths in found]
    return hint if max(shares) <= (1 + NEAR) * min(shares) else "ratio"
