"""Hooks on the calls of a model, and of the model that DistributedDataParallel wraps.

A validation may call the wrapped model itself: there are no gradients to exchange. A training
step that does so exchanges none, so its call stays unseen.
"""

import torch
from torch.nn.parallel import DistributedDataParallel

from dlojz.training import compilation


def inner(model):
    """Return the model that is wrapped, or this one. It alone knows whether it is in training."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def hook(model, on_input, on_output=None) -> list:
    """Call `on_input(model, args, kwargs)` and `on_output(model, args, output)`; return the hooks.

    model: in them, the one that is wrapped.
    """
    wrapped, within = inner(model), []  # within: a call of the wrapper is under way

    def enter(_, args, kwargs):
        within.append(True)
        on_input(wrapped, args, kwargs)

    def leave(_, args, output):
        within.clear()
        if on_output:
            on_output(wrapped, args, output)

    def enter_alone(_, args, kwargs):
        if not (within or wrapped.training):
            on_input(wrapped, args, kwargs)

    def leave_alone(_, args, output):
        if on_output and not (within or wrapped.training):
            on_output(wrapped, args, output)

    pairs = [(model, enter, leave)]
    if wrapped is not model and not compilation.is_compiled(wrapped):  # or it has other graphs
        pairs.append((wrapped, enter_alone, leave_alone))
    aside = torch.compiler.disable
    return [
        hooked
        for module, before, after in pairs
        for hooked in (
            module.register_forward_pre_hook(aside(before), with_kwargs=True),
            module.register_forward_hook(aside(after)),
        )
    ]
