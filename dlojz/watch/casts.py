"""Stale casts: a step that computes with autocast's copies of an earlier step's weights.

Autocast casts a weight once, and caches the cast until its context is left. A context around many
steps computes all of them with the weights of the first (https://docs.pytorch.org/docs/stable/amp.html,
"autocast ... should wrap only the forward pass(es)").
"""

import torch


def enabled(device: torch.device) -> bool:
    """Return whether autocast is on now."""
    known = torch.amp.is_autocast_available(device.type)
    return known and torch.is_autocast_enabled(device.type)


class Canary:
    """A weight that is cast under autocast at the end of an update, and then changed."""

    def __init__(self, device: torch.device):
        self._one = torch.ones(1, 1, device=device)
        self._weight = torch.ones(1, 1, device=device, requires_grad=True)
        self._product()

    def stale(self) -> torch.Tensor:
        """Return 1 if the old cast is still in use, else 0: a tensor on the device."""
        with torch.no_grad():
            self._weight.zero_()
        return self._product().float().sum()

    def _product(self):
        with torch.enable_grad():  # autocast caches only casts of tensors that require gradients
            return torch.nn.functional.linear(self._one, self._weight).detach()
