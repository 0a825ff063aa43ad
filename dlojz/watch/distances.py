"""Distances of a run of a check from the solution's, link by link: see `dlojz.watch.replay`."""

import math

import torch

from dlojz.runs import records

EPS = 2.0**-23  # a rounding of float32
LARGE = 1e-3  # share of the whole gradient: smaller tensors are only checked for existence
GONE = 99.0  # the distance of a gradient of zeros


def every_step(replay, mine, solution) -> records.Every:
    """Return the comparison of every step and update of both runs."""
    pairs = list(zip(mine.steps, solution.steps, strict=False))
    unseen = None, None
    losses = [unseen if b.labels is None else replay.criterion(a, b.labels) for a, b in pairs]
    return records.Every(
        steps=[len(mine.steps), len(solution.steps)],
        images=[[int(batch.images or 0) for batch in pair] for pair in pairs],
        pixels=[pixels(*pair) for pair in pairs],
        criterion=[off for off, _ in losses],
        scales=[scale for _, scale in losses],
        updates=[settings(u, replay) for u in mine.updates],
        usual=[settings(u, replay) for u in solution.updates],
    )


def same_labels(mine, solution) -> bool | None:
    """Return whether two batches have the same labels; None: unknown, or no class indices."""
    a, b = mine.labels, solution.labels
    if a is None or b is None or a.ndim != b.ndim:
        return None
    return equal(a, b)


def equal(a, b) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def pixels(mine, solution) -> float | None:
    """Return the median difference of pixels in the worst image of a batch."""
    a, b = mine.pixels, solution.pixels
    if b is None:
        return 0.0
    if a is None or a.shape != b.shape:
        return None
    return float((a - b).abs().median(1).values.max())


def settings(update, replay) -> records.Settings:
    """Return the settings of an update, with the distance of its learning rates."""
    number = update.update
    rates = [float(rate) for rate in update.lr]
    usual = replay.rates[number] if number < len(replay.rates) else [math.nan]
    # Groups may be others, so each rate needs its like in the other run, and none is left.
    off = [min(_rate_off(a, b) for b in usual) for a in rates]
    off += [min(_rate_off(a, b) for a in rates) for b in usual]
    same = ("update", "optimizer", "settings", "missing", "evaluating", "random")
    return records.Settings(
        lr=rates, lr_off=max(off), **{name: getattr(update, name) for name in same}
    )


def _rate_off(mine, usual) -> float:
    """Return the distance of two learning rates, as a share; of one that is 0, in itself."""
    kept = usual, float(torch.tensor(usual))  # an optimizer may keep its rate in float32
    return min(abs(mine - as_is) for as_is in kept) / max(usual, 1e-12)


def skips(update) -> bool:
    """Return whether a fused optimizer skipped an update: others are not called then."""
    return update.found_inf is not None and bool(float(update.found_inf))


def gradients(mine, solution) -> dict:
    """Return the distance of the gradients, as a whole and by the norms of large tensors."""
    usual = list(solution.values())
    there = [
        mine[name].to(expected) if name in mine else torch.zeros_like(expected)
        for name, expected in solution.items()
    ]
    off = math.hypot(*norms(minus(there, usual)))
    each = list(zip(solution, norms(there), norms(usual), strict=True))
    whole, worst, where = math.hypot(*(norm for _, _, norm in each)), 0.0, None
    for name, mine_is, norm in each:
        if norm and (norm >= LARGE * whole or not mine_is):
            apart = abs(math.log(mine_is / norm)) if 0 < mine_is / norm < math.inf else GONE
            if not apart <= worst:
                worst, where = apart, name
    return {
        "gradients": off / whole if whole else math.inf if off else 0.0,  # a model may be dead
        "gradients_tensor": worst,
        "gradients_worst": where,
        "missing": sorted(solution.keys() - mine.keys()),
        "unexpected": sorted(mine.keys() - solution.keys()),
    }


def apart(found) -> float:
    """Return the distance by which the nearest gradients are chosen; NaN is the farthest."""
    whole = found["gradients"]
    return math.inf if math.isnan(whole) else whole


def noise(solved, moved) -> dict:
    found = gradients(moved["gradients"], solved["gradients"])
    return {
        "gradients_noise": found["gradients"],
        "gradients_tensor_noise": found["gradients_tensor"],
        "buffers_noise": buffers(moved["buffers"], solved["buffers"]),
        "outputs_noise": outputs(moved["outputs"], solved["outputs"]),
    }


def outputs(mine, solution) -> float | None:
    """Return the distance of the logits, the worst of an update's batches.

    None: they were not kept, for lack of memory.
    """
    if any(logits is None for logits in mine):
        return None
    if [tuple(a.shape) for a in mine] != [tuple(b.shape) for b in solution]:
        return math.inf
    pairs = [(a.to(b.device).float(), b.float()) for a, b in zip(mine, solution, strict=True)]
    return max(_away(a, b) for a, b in pairs)


def _away(a, b) -> float:
    """Return the distance of two tensors, as a share; infinite with a NaN."""
    off, size = float((a - b).norm()), float(b.norm())
    if off == 0:  # a classifier that begins with zeros has logits of 0
        return 0.0
    share = off / size if size else math.inf
    return math.inf if math.isnan(share) else share


def buffers(mine, solution) -> float:
    """Return the distance of the buffers, one norm over all of them."""
    if solution.keys() - mine.keys():
        return math.inf
    usual = [buffer.double() for buffer in solution.values()]
    there = [mine[name].to(buffer) for name, buffer in zip(solution, usual, strict=True)]
    off, size = (math.hypot(*norms(those)) for those in (minus(there, usual), usual))
    return off / size if size else 0.0


def minus(minuends, subtrahends) -> list:
    return [a - b for a, b in zip(minuends, subtrahends, strict=True)]


def norms(tensors) -> list[float]:
    """Return the norm of each tensor. Waits for the device once, not for each."""
    return torch.stack([t.norm() for t in tensors]).tolist() if tensors else []


def not_zero(tensors) -> list[int]:
    """Return the indices of the tensors that hold anything but zeros."""
    flags = torch.stack([(t != 0).any() for t in tensors]).tolist() if tensors else []
    return [i for i, flag in enumerate(flags) if flag]


def keep_worst(worst, name, off, scale):
    found = _worst(off, scale)
    if not found <= worst["roundings"]:
        worst.update(name=name, roundings=found)


def _worst(off, scale) -> float:
    """Return the largest of off / scale; 0 where both are 0."""
    return float(torch.where(off == 0, torch.zeros_like(off), off / scale).max())
