"""The account of a training's first steps: what it works on, with which settings, to what loss.

`dlojz pair` compares the accounts of two programs. Each step is a case of the log. An account reads
tensors back from the device, so a run that keeps one is not timed.
"""

import os
import zlib
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress

import torch

from dlojz.watch import readings

VARIABLE = "DLOJZ_ACCOUNT"  # the number of steps to keep an account of
LAST = "DLOJZ_STEPS"  # the number of steps after which the process ends
NUDGE = "DLOJZ_NUDGE"  # set: the first weights are off by a rounding
NO_SETTINGS = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")


def asked(variable) -> int:
    """Return the number in one of these variables of the environment, or 0."""
    return int(os.environ.get(variable) or 0)


class Account:
    """The account of one step so far."""

    def __init__(self):
        self.counts, self._batch, self._inputs, self._settings = Counter(), [], [], {}
        self._autocast = "off"

    def batch(self, batch):
        """Note the tensors that a loader gave."""
        self._batch = [_told(tensor) for tensor in tensors(batch)]

    def forward(self, given):
        """Note a call of the model, with its first tensor."""
        self.counts["forwards"] += 1
        kind = given.device.type if given is not None else "cpu"
        if torch.is_autocast_enabled(kind):
            self._autocast = _name(torch.get_autocast_dtype(kind))
        if given is not None:
            self._inputs.append(_told(given))

    def update(self, optimizer):
        """Note that an optimizer has stepped."""
        self.counts["updates"] += 1
        plain = int | float | bool | str | tuple | None
        groups = [
            {n: v for n, v in group.items() if n not in NO_SETTINGS and isinstance(v, plain)}
            | {"weights": sum(p.numel() for p in group["params"])}
            for group in optimizer.param_groups
        ]
        self._settings[f"{type(optimizer).__name__} {len(self._settings)}"] = groups

    def closed(self, model, loss) -> dict:
        """Return the fields of the step's case."""
        parameters = [*model.parameters()] if model else []
        weights = [p.detach() for p in parameters]
        norms = [float(torch.linalg.vector_norm(w.float())) for w in map(_local, weights)]
        return {
            **{name: self.counts[name] for name in ("forwards", "backwards", "updates")},
            "batch": self._batch,
            "inputs": self._inputs,
            "settings": self._settings,
            "autocast": self._autocast,
            "loss": None if loss is None else float(loss),
            "weights": sum(norm**2 for norm in norms) ** 0.5,
            "parameters": sum(w.numel() for w in weights),
            "trained parameters": sum(p.numel() for p in parameters if p.requires_grad),
            "formats": dict(Counter(_name(w.dtype) for w in weights)),
            "layouts": dict(Counter(filter("any".__ne__, map(readings.layout, weights)))),
        }


def _local(tensor):
    return getattr(tensor, "to_local", lambda: tensor)()


def _told(tensor) -> list:
    """Return a tensor's shape, format and the checksum of its values; None for a sparse one."""
    values = _local(tensor.detach())
    if values.layout is not torch.strided or values.is_nested:  # such as the edges of a graph
        return [list(tensor.shape), f"{_name(tensor.dtype)} {_name(values.layout)}", None]
    values = values.cpu().contiguous()
    crc = zlib.crc32(values.reshape(-1).view(torch.uint8).numpy())
    return [list(tensor.shape), _name(tensor.dtype), crc]


def _name(dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tensors(batch, depth: int = 3):
    """Yield the tensors of a batch, in their order, also those of objects such as graphs.

    depth: how far to look into lists within lists.
    """
    if isinstance(batch, torch.Tensor):
        yield batch
    elif depth >= 0:
        values = batch if isinstance(batch, Mapping) else getattr(batch, "__dict__", {})
        for part in batch if isinstance(batch, list | tuple) else values.values():
            yield from tensors(part, depth - 1)


@torch.no_grad()
def nudge(model):
    """Change each weight by at most one rounding, as another order of sums would."""
    generator = torch.Generator().manual_seed(0)  # the program's own draws stay
    for weight in map(_local, model.parameters()):
        with suppress(TypeError):  # of a format without roundings
            eps = torch.finfo(weight.dtype).eps
            signs = torch.randint(-1, 2, weight.shape, generator=generator).to(weight)
            weight.add_(weight * signs * eps)
