"""The geometry of an optimizer's updates, from outside: weights before and after, and the rates.

A layer's step is (before - after) / rate; its free step is the part without the weight decay.

lamb    the step is as long as the layer's weights, in every update
lars    the same share of them in all layers, in the first update: a momentum mixes later ones
lion    each element of the free step is 1 or -1, in every update
muon    the free step's singular values are near 0.2 times the root of the matrix' larger side
vectors, weights of one dimension, have no decay, and their step is not as long as they are

A run's steps are measured where a check audits it; made-up ones in `dlojz.watch.optimizing`.
"""

import math

import torch

from dlojz.runs import records
from dlojz.training import private
from dlojz.watch import readings

UPDATES = 12  # of a run, the first ones
SCALE = 0.2  # Muon's updates are as large as Adam's are on average: arxiv.org/abs/2502.16982


class Measured:
    """The geometry of the first updates of a training."""

    def __init__(self, training):
        optimizer, self._model = training.optimizer, training.model
        self._kind, self._before, self._found = readings.kind(optimizer), {}, []
        self._hooks = [
            optimizer.register_step_pre_hook(self._begin),
            optimizer.register_step_post_hook(self._end),
        ]

    def _begin(self, optimizer, args, kwargs):
        # A step under a profiler is left out: products of the geometry would count as its work.
        if len(self._found) < UPDATES and not private.is_profiling():
            self._before = {p: p.detach().clone() for p in self._model.parameters()}

    def _end(self, optimizer, args, kwargs):
        if self._before:
            self._found.append(summary(layers(optimizer, self._model, self._before)))
            self._before = {}

    def finish(self) -> records.Geometry:
        """Return the geometry of the run's updates, which are over."""
        for hook in self._hooks:
            hook.remove()
        return records.Geometry(self._kind, self._found)


@torch.no_grad()
def layers(optimizer, model, before) -> list[dict]:
    """Return the geometry of each layer's step, but for those with a rate of 0."""
    settings = {w: group for group in optimizer.param_groups for w in group["params"]}
    rows = []
    for name, weight in model.named_parameters():
        rate, decay = (float(settings[weight].get(key, 0)) for key in ("lr", "weight_decay"))
        if not rate:
            continue
        old = before[weight].double()
        step = (old - weight.double()) / rate
        free = step - decay * old
        length, size = torch.stack([step.norm(), old.norm()]).tolist()
        row = {"name": name, "rate": rate, "length": length, "size": size}
        row |= {"free": torch.stack(free.abs().aminmax()).tolist()}
        rows.append(row | ({"singular": singular(free.flatten(1))} if weight.ndim > 1 else {}))
    return rows


def singular(matrix) -> list[float]:
    """Return the least and the largest singular value, divided by Muon's scale for the matrix."""
    if not matrix.isfinite().all():
        return [math.nan, math.nan]
    square = matrix @ matrix.T if len(matrix) < matrix.shape[1] else matrix.T @ matrix
    values = torch.linalg.eigvalsh(square)[[0, -1]].clamp(min=0).sqrt()
    return (values / (SCALE * math.sqrt(max(matrix.shape)))).tolist()


def summary(rows: list[dict]) -> dict:
    """Return the least and the largest number of each kind, by part of the model.

    The last matrix is the classifier. The length of a step is divided by that of the weights.
    """
    if not rows:
        return {}
    *matrices, last = [row for row in rows if "singular" in row]
    parts = {"matrices": matrices, "classifier": [last]}
    parts["vectors"] = [row for row in rows if "singular" not in row]
    found = {"rate": min(row["rate"] for row in rows)}
    for part, own in parts.items():
        numbers = {"ratio": [r["length"] / r["size"] for r in own if r["size"]]}
        for kind in ("free", "singular"):
            numbers[kind] = [number for row in own for number in row.get(kind, ())]
        found[part] = {kind: _range(n) for kind, n in numbers.items() if n}
    return found


def _range(numbers):
    return [math.nan] * 2 if any(map(math.isnan, numbers)) else [min(numbers), max(numbers)]
