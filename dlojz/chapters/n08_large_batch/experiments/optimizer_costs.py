"""The cost of an optimizer: its state's bytes, and the time of one update of all weights.

Submitted by a notebook: submit("dlojz/chapters/n08_large_batch/experiments/optimizer_costs.py").

Each optimizer updates the weights of the same model, from gradients that stay as they are: one
weight after the other, in lists (foreach), in one kernel (fused), and compiled. All take turns.
"""

import argparse
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace

import torch
from tqdm import tqdm

from dlojz import idr_torch
from dlojz.chapters import session
from dlojz.chapters.n08_large_batch import trainings
from dlojz.training import flags, imports, models

ON_GPU = {"model": "resnet50", "image_size": 224, "classes": 1000, "compiled": True}
ON_CPU = {"model": "resnet18", "image_size": 64, "classes": 10, "compiled": False}
GIVEN = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}  # torch's
WAYS = {
    "one by one": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "compiled": {"foreach": True},
}
COMPILED = (*GIVEN, "lamb")  # a loop over 161 tensors compiles for minutes: one of its kind


def of_torch(name, model, way):
    """Return torch's SGD or AdamW, which updates the weights in this way."""
    more = {"momentum": 0.9} if name == "sgd" else {}
    return GIVEN[name](model.parameters(), 1e-4, **more, **WAYS[way])


def our_own(name, model):
    """Return an optimizer of optimizers.py."""
    kind = trainings.KINDS[name]
    given = SimpleNamespace(optimizer=name, lr=kind.rate / 100, wd=kind.decay, mom=0.9)
    return trainings.optimizers().build(given, model)


def combinations() -> list[tuple[str, str]]:
    """Return the optimizers with the ways in which each updates."""
    own = [name for name in trainings.KINDS if name not in GIVEN]
    found = [*product(GIVEN, WAYS), *product(own, ("one by one", "compiled"))]
    return [(name, way) for name, way in found if way != "compiled" or name in COMPILED]


def prepared(name, way, args, device) -> tuple[torch.optim.Optimizer, Callable]:
    """Return an optimizer with gradients, and the call that updates with it."""
    torch.manual_seed(0)
    model = models.build(args.model, args.classes, args.image_size).to(device)
    for weight in model.parameters():
        weight.grad = 1e-3 * torch.randn_like(weight)
    optimizer = of_torch(name, model, way) if name in GIVEN else our_own(name, model)
    if way != "compiled":
        return optimizer, optimizer.step
    optimizer.step()  # makes the states, which is not to be compiled
    return optimizer, torch.compile(lambda: optimizer.step())


def state_bytes(optimizer) -> int:
    """Return the bytes of an optimizer's values for each weight, without its counts of updates."""
    values = [v for state in optimizer.state.values() for v in state.values()]
    return sum(v.numel() * v.element_size() for v in values if v.ndim)


def first_updates(name, way, args, device) -> tuple[Callable, dict] | None:
    """Return the call of an update, and its sizes, after a few of them.

    None, after a note, for an update that this machine's compiler refuses.
    """
    optimizer, call = prepared(name, way, args, device)
    try:
        first = session.seconds(call, device)  # the states are made, or the code is compiled
    except RuntimeError as error:
        if way != "compiled":
            raise
        print(f"{name}, {way}: left out: {imports.first_line(error)}")
        return None
    session.seconds(call, device, 2)
    weights = [w for group in optimizer.param_groups for w in group["params"]]
    sizes = {"parameters": sum(w.numel() for w in weights), "weights": len(weights)}
    return call, {"first_s": first, "state_bytes": state_bytes(optimizer), **sizes}


def main():
    device = idr_torch.device()
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    positive = flags.at_least(1)
    parser.add_argument("--model", help="a classifier of torchvision")
    parser.add_argument("--image-size", type=positive, help="pixels")
    parser.add_argument("--classes", type=positive, help="outputs of the model")
    parser.add_argument("--rounds", type=flags.at_least(2), default=7, help="timings of each")
    parser.add_argument("--times", type=positive, default=5, help="updates in each timing")
    compiled = argparse.BooleanOptionalAction
    parser.add_argument("--compiled", action=compiled, help="also compiled updates")
    parser.set_defaults(**(ON_GPU if device.type == "cuda" else ON_CPU))
    args = parser.parse_args()
    # All compiled updates are of the same function, and LAMB reads its count of updates.
    compiler = torch._dynamo.config.patch(recompile_limit=64, capture_scalar_outputs=True)
    with session.begin(args, device) as (run, _), compiler:
        calls, about = {}, {}
        wanted = [c for c in combinations() if args.compiled or c[1] != "compiled"]
        for each in tqdm(wanted, unit="optimizer"):
            if found := first_updates(*each, args, device):
                calls[each], about[each] = found
        for each, ms in session.in_turn(calls, device, args.rounds, args.times, warm_up=1).items():
            name, way = each
            title = trainings.KINDS[name].title
            run.case(f"{title}, {way}", optimizer=name, title=title, way=way, ms=ms, **about[each])


if __name__ == "__main__":
    main()
