"""Hooks on the calls of a model, of the model inside DistributedDataParallel, and of the loss.

A validation may call the wrapped model itself, having no gradients to exchange. A training step
that does so exchanges none, so its call is ignored.
"""

import torch
from torch.nn.parallel import DistributedDataParallel

from dlojz.training import private
from dlojz.watch import compilation

READS = ("_local_scalar_dense", "nonzero")  # operations that make the host wait


def inner(model):
    """Return the wrapped model, or this one. Only its own `training` is reliable."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def hook_loss(training, on_loss) -> list:
    """Hook `on_loss(criterion, args, kwargs, loss)`; return the hooks, [] if the loss is no module.

    A loss in training without a graph is for display, and ignored.
    """
    criterion = getattr(training, "criterion", None)
    unseen = torch.jit.ScriptModule  # such a module has no hooks, and a function neither
    if not isinstance(criterion, torch.nn.Module) or isinstance(criterion, unseen):
        return []

    def leave(criterion, args, kwargs, loss):
        if loss.requires_grad or not inner(training.model).training:
            on_loss(criterion, args, kwargs, loss)

    return [criterion.register_forward_hook(torch.compiler.disable(leave), with_kwargs=True)]


def hook_layer(layer, on_output):
    """Hook `on_output(layer, args, output)`; return the hook, which ignores copies of the layer."""

    def leave(called, args, output):
        if called is layer:
            on_output(called, args, output)

    return layer.register_forward_hook(leave)


def hook(model, on_input, on_output=None) -> list:
    """Hook `on_input(model, args, kwargs)` and `on_output(model, args, output)`; return the hooks.

    model: for the hooks, the wrapped one.
    """
    wrapped, under_way = inner(model), []  # calls of the wrapper

    def counts(called):
        if called is model:
            return True
        return called is wrapped and not (under_way or wrapped.training)  # `called` may be a copy

    def enter(called, args, kwargs):
        if counts(called):
            on_input(wrapped, args, kwargs)
        if called is model:
            under_way.append(called)

    def leave(called, args, output):
        if called is model:
            under_way.clear()
        if on_output and counts(called):
            on_output(wrapped, args, output)

    modules = {model} if compilation.is_compiled(wrapped) else {model, wrapped}  # or other graphs
    aside = torch.compiler.disable
    before = [m.register_forward_pre_hook(aside(enter), with_kwargs=True) for m in modules]
    return before + [m.register_forward_hook(aside(leave)) for m in modules]


def counted():
    """Return a context with the numbers of operations, and of those that make the host wait."""

    class Count(private.dispatch_mode()):
        operations = reads = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.operations += 1
            self.reads += func.overloadpacket.__name__ in READS
            return func(*args, **(kwargs or {}))

    return Count()
