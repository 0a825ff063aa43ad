"""Logs of chapter 08's experiments, with made-up accuracies, as their jobs would write them."""

import math
from pathlib import Path

from logs import with_cases

SIZES = {"model": "resnet18", "image_size": 32, "classes": 24, "images_per_class": 400}
SIZES |= {"val_per_class": 100, "epochs": 8, "seeds": 5, "at": 1024}
SIZES |= {"batches": [64, 256, 1024, 4096]}
NOISE = (0.003, -0.002, 0.005, -0.006, 0.001, -0.004, 0.002)  # of the seeds
IMAGES = 9600
# The accuracy at the best rate, which is given for 1,024 images.
REACHED = {"sgd": (0.83, 0.1), "lamb": (0.85, 0.02), "adamw": (0.84, 0.01), "lars": (0.85, 12.0)}
REACHED |= {"lion": (0.80, 0.001), "muon": (0.885, 0.02)}
BY_BATCH = {64: 0.09, 256: 0.07, 1024: 0.0, 4096: -0.4}


def case(optimizer, batch, rate, seed, accuracy, updates=None, **about):
    """Return a training's name and case."""
    updates = updates or 8 * (IMAGES // batch)
    seconds = 0.0012 * updates + updates * batch * 4e-6
    apart = NOISE[(seed * (1 + batch % 5) + updates) % 7]
    accuracy = min(0.99, max(0.04, accuracy + apart))
    found = {"optimizer": optimizer, "batch": batch, "rate": rate, **about, "seed": seed}
    name = ", ".join(f"{key} {value}" for key, value in found.items())
    found |= {"updates": updates, "images": updates * batch, "seconds": seconds}
    found |= {
        "joules": 300 * seconds,
        "accuracy": accuracy,
        "accuracy_again": accuracy + abs(apart),
    }
    return name, found


def batches(path: Path, joules=True, **changes) -> Path:
    """Write the log of batches.py."""
    made = []
    wanted = [(name, batch) for name in ("sgd", "lamb") for batch in BY_BATCH]
    wanted += [(name, 1024) for name in REACHED if name not in ("sgd", "lamb")]
    for name, batch in wanted:
        best, rate = REACHED[name]
        best += BY_BATCH[batch]
        for power in range(-2, 3):
            tried, lost = rate * 2.5**power, 0.08 * power**2
            made += [case(name, batch, tried, s, best - lost, phase="tuning") for s in (100, 101)]
        made += [case(name, batch, rate, s, best - 0.01, phase="fresh") for s in range(5)]
    rules = {"same rate": (0.1, 0.82), "square root": (0.4, 0.15), "linear": (1.6, 0.05)}
    for rule, (rate, reached) in rules.items():
        about = {"phase": "rule", "rule": rule}
        made += [case("sgd", 1024, rate, s, reached, **about) for s in range(5)]
    for rule, rate in (("same rate", 0.1), ("linear", 1.6)):
        about = {"phase": "as many updates", "rule": rule}
        made += [case("sgd", 1024, rate, s, 0.93, 1200, **about) for s in range(5)]
    cases = dict(made)
    if not joules:
        for each in cases.values():
            del each["joules"]
    return with_cases(path, cases, **SIZES | changes)


LENGTHS = {(64, 600): 0.86, (64, 1200): 0.9, (64, 2400): 0.95, (256, 148): 0.8}
LENGTHS |= {(256, 296): 0.88, (256, 592): 0.94, (1024, 72): 0.7, (1024, 144): 0.8}


def lengths(path: Path, reached: dict | None = None, joules=True) -> Path:
    """Write the log of lengths.py; reached: {(batch, updates): accuracy}, on average."""
    made = []
    for (batch, updates), accuracy in (reached or LENGTHS).items():
        for seed, apart in enumerate((-0.002, -0.001, 0.0, 0.001, 0.002)):
            name, found = case("sgd", batch, 0.1, seed, accuracy, updates, phase="fresh")
            made.append((f"{name}, {updates}", found | {"accuracy": accuracy + apart}))
    cases = dict(made)
    if not joules:
        for each in cases.values():
            del each["joules"]
    return with_cases(path, cases, **SIZES, rates=5)


def variants(path: Path, brought: dict[str, dict[str, tuple[str, float]]]) -> Path:
    """Write the log of variants.py; brought: {optimizer: {name: (title, points)}}."""
    made = []
    for optimizer, changes in brought.items():
        for name, (title, points) in changes.items():
            about = {"phase": "fresh", "variant": name, "title": title}
            for seed in range(5):
                apart = NOISE[(seed + len(name)) % 5]
                reached = 0.82 + points / 100 + apart
                made.append(case(optimizer, 1024, 0.1, seed, reached, **about))
    return with_cases(path, dict(made), **SIZES)


def finder(path: Path, batches=(64, 256, 1024), seeds=3) -> Path:
    """Write the log of finder.py: the loss is lowest at 0.2, and grows beyond."""
    made = {}
    for batch in batches:
        for seed in range(seeds):
            rates = [1e-5 * 10 ** (6 * n / 99) for n in range(100)]
            losses = [3.2 - 0.9 / (1 + (0.02 / r) ** 1.5) + max(0, r / 0.2 - 1) ** 2 for r in rates]
            losses = [x + 64 / batch * 0.05 * math.sin(7 * n + seed) for n, x in enumerate(losses)]
            end = next((n for n, x in enumerate(losses) if x > 9), len(losses) - 1) + 1
            about = {"optimizer": "sgd", "batch": batch, "seed": seed}
            curve = {"rates": rates[:end], "losses": losses[:end]}
            made[f"batch {batch}, seed {seed}"] = about | curve
    return with_cases(path, made, **SIZES)


def costs(path: Path) -> Path:
    """Write the log of optimizer_costs.py."""
    ways = {"SGD": ((6, 0.4, 0.2, 0.2), 4), "AdamW": ((11, 0.9, 0.4, 0.4), 8)}
    ways |= {"LAMB": ((22, 1.1), 8), "LARS": ((15, 0.9), 4), "Lion": ((8, 0.6), 4)}
    ways |= {"Muon": ((60,), 4.3)}
    made = {}
    for title, (times, size) in ways.items():
        names = ("one by one", "foreach", "fused", "compiled")
        names = ("one by one", "compiled") if len(times) < 4 else names
        for way, ms in zip(names, times, strict=False):
            about = {"optimizer": title.lower(), "title": title, "way": way, "first_s": 30.0}
            about |= {"parameters": 25_000_000, "weights": 161}
            about |= {"state_bytes": int(size * 25_000_000), "ms": [ms, 1.05 * ms, 0.97 * ms]}
            made[f"{title}, {way}"] = about
    return with_cases(path, made, **SIZES)
