"""Hooks on a model that is wrapped: each call is noted once, whichever of the two is called."""

from types import SimpleNamespace

import pytest
import torch

from dlojz.watch import calls


class Wrapper(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


@pytest.fixture
def wrapped(monkeypatch):
    """A wrapper, and what its hooks were called with."""
    monkeypatch.setattr(calls, "DistributedDataParallel", Wrapper)
    seen, model = [], Wrapper(torch.nn.Linear(2, 3))
    calls.hook(
        model,
        lambda inner, args, kwargs: seen.append((inner, inner.training, len(args))),
        lambda inner, args, output: seen.append((inner, inner.training, tuple(output.shape))),
    )
    return model, seen


@pytest.mark.parametrize("training", [True, False])
def test_a_call_of_the_wrapper_is_noted_once(wrapped, training):
    model, seen = wrapped
    model.train(training)(torch.ones(1, 2))
    model(torch.ones(1, 2))
    assert seen == 2 * [(model.module, training, 1), (model.module, training, (1, 3))]


def test_the_wrapped_model_may_validate_on_its_own_and_not_train(wrapped):
    model, seen = wrapped
    model.module(torch.ones(1, 2))
    assert seen == [], "it would exchange no gradients"
    model(torch.ones(1, 2))
    seen.clear()
    model.module.eval()  # the wrapper is still in training
    model.module(torch.ones(1, 2))
    assert seen == [(model.module, False, 1), (model.module, False, (1, 3))]


def test_a_model_without_a_wrapper_has_each_hook_once():
    model, seen = torch.nn.Linear(2, 3), []
    hooks = calls.hook(model, lambda inner, args, kwargs: seen.append(inner))
    model.eval()(torch.ones(1, 2))
    assert seen == [model]
    for hook in hooks:
        hook.remove()
    model(torch.ones(1, 2))
    assert seen == [model]


def test_a_loss_for_display_stays_unseen():
    """In training it has no graph; in a validation no loss has one."""
    training = SimpleNamespace(model=torch.nn.Linear(2, 3), criterion=torch.nn.MSELoss())
    seen = []
    calls.hook_loss(training, lambda criterion, args, kwargs, loss: seen.append(loss.requires_grad))
    for mode in (True, False):
        training.model.train(mode)
        out = training.model(torch.ones(1, 2))
        training.criterion(out, torch.zeros(1, 3))
        training.criterion(out.detach(), torch.zeros(1, 3))
    assert seen == [True, True, False]
