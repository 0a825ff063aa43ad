"""A trained vision transformer with weights of fewer bits: its accuracy and its images per second.

Submitted by a notebook: submit("dlojz/chapters/n10b_formats/experiments/quantized.py").

The trainer's own `evaluate` judges it. With 8 bits and a scale for each row the layers hold int8;
for other bits and scales their weights are rounded to the same values.
"""

import copy

import torch
from tqdm import tqdm

from dlojz import idr_torch
from dlojz.chapters import resident, session
from dlojz.chapters.n10b_formats import bits, vit
from dlojz.training import flags, imports

BITS = (8, 6, 5, 4, 3, 2)
SCALES = {"tensor": "tensor", "row": "row", "32 numbers": 32}


def rounded(model, count: int, per):
    """Return a model with rounded weights, and their distance from what they were."""
    model = copy.deepcopy(model)
    weights = [layer.weight for layer in bits.linears(model).values()]
    before = [weight.detach().clone() for weight in weights]
    with torch.no_grad():
        for weight in weights:
            weight.copy_(bits.restored(weight, count, per))
    return model, session.away(weights, before)


def accuracies(model, evaluate):
    """Yield the bits, what shares a scale, the accuracy, and the distance of the weights."""
    yield None, None, {"accuracy": evaluate(model), "away": 0.0}
    for per, width in SCALES.items():
        for count in BITS:
            changed, away = rounded(model, count, width)
            yield count, per, {"accuracy": evaluate(changed), "away": away}


def speeds(model, evaluate, device, rounds):
    """Yield the way and the milliseconds of each evaluation."""
    small = bits.replace(copy.deepcopy(model))
    yield "int8, accuracy", {"accuracy": evaluate(small)}
    calls = {bits.WIDE[device.type]: model, "int8": small}
    if device.type == "cuda":
        calls |= {f"{name}, compiled": torch.compile(each) for name, each in calls.items()}
    for name in list(calls):
        try:
            evaluate(calls[name])
        except Exception as error:  # of the compiler: the others are still timed
            yield name, {"error": f"{type(error).__name__}: {imports.first_line(error)}"}
            del calls[name]
    timed = {name: lambda each=each: evaluate(each) for name, each in calls.items()}
    images = len(evaluate.loader.images)
    for name, ms in session.in_turn(timed, device, rounds, warm_up=1).items():
        yield name, {"ms": ms, "images": images}


def main():
    device = idr_torch.device()
    parser = vit.parser(__doc__, device)
    seeds = 3 if device.type == "cuda" else 1
    parser.add_argument("--seeds", type=flags.at_least(1), default=seeds, help="trainings")
    parser.add_argument("--rounds", type=flags.at_least(2), default=5, help="timings of each")
    args = parser.parse_args()
    with session.begin(args, device) as (run, _):
        images = resident.draw(args, device)
        evaluate = vit.Evaluation(args, images, device)
        for seed in tqdm(range(args.seeds), unit="training"):
            model = vit.train(args, images, device, seed)
            for count, per, fields in accuracies(model, evaluate):
                about = {"bits": count, "per": per, "seed": seed}
                run.case(f"{count} bits, {per}, seed {seed}", **about, **fields)
        inside = sum(layer.weight.numel() for layer in bits.linears(model).values())
        whole = sum(weight.numel() for weight in model.parameters())
        run.measure("weights", whole, "")
        run.measure("weights of linear layers", inside, "")
        for way, fields in speeds(model, evaluate, device, args.rounds):
            run.case(way, bits=None, per=None, way=way, **fields)


if __name__ == "__main__":
    main()
