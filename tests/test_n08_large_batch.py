"""The verdict of 08: the geometry of updates names each fault, and the exercise judges by it."""

from argparse import Namespace

import pytest
import torch

from dlojz.watch import optimizing

ARGS = Namespace(optimizer="lamb", lr=optimizing.RATE, wd=optimizing.DECAY)


class Rule(torch.optim.Optimizer):
    """Weights move by rate times `rule(weight, gradient, decay)`; two groups of weights."""

    def __init__(self, rule, model, decays=(optimizing.DECAY, 0.0)):
        weights = list(model.parameters())
        parts = ([w for w in weights if w.ndim > 1], [w for w in weights if w.ndim < 2])
        groups = [{"params": p, "weight_decay": d} for p, d in zip(parts, decays, strict=True)]
        super().__init__(groups, {"lr": optimizing.RATE, "weight_decay": 0.0})
        self.rule = rule

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for w in group["params"]:
                w -= group["lr"] * self.rule(w, w.grad, group["weight_decay"])


def norm_or_1(tensor):
    return tensor.norm() or torch.tensor(1.0)


def lamb(weight, gradient, decay, adam=torch.sign):
    update = adam(gradient) + decay * weight
    return update * trust(weight, update)


def trust(weight, update):
    return weight.norm() / update.norm() if weight.ndim > 1 and weight.any() else 1.0


def upside_down(weight, gradient, decay):
    update = gradient.sign() + decay * weight
    return update / trust(weight, update)


def of_gradient(weight, gradient, decay):
    return (gradient.sign() + decay * weight) * trust(weight, gradient)


def of_vectors(weight, gradient, decay):
    update = gradient.sign() + decay * weight
    return update * norm_or_1(weight) / update.norm()


def outside(weight, gradient, decay):
    return gradient.sign() * trust(weight, gradient.sign()) + decay * weight


def frozen(weight, gradient, decay):
    update = gradient.sign() + decay * weight
    return update * weight.norm() / update.norm() if weight.ndim > 1 else update


def named(rule, **more):
    return optimizing.made(lambda args, model: Rule(rule, model, **more), ARGS)["mistakes"]


RIGHT = {"matrices": "", "zeros": "", "vectors": ""}


@pytest.mark.parametrize(
    ("rule", "found"),
    [
        (lamb, {}),
        (upside_down, {"matrices": "upside-down"}),
        (of_gradient, {"matrices": "of-gradient"}),
        (of_vectors, {"vectors": "vectors"}),
        (outside, {"matrices": "decay-outside"}),
        (frozen, {"zeros": "zero-norm"}),
        (lambda w, g, decay: lamb(w, g, decay) * w.norm() / w.norm(), {"zeros": "zero-norm"}),
        (lambda w, g, decay: g.sign() + decay * w, {"matrices": "no-ratio"}),
        (
            lambda w, g, decay: 7 * (g.sign() + decay * w),
            {"matrices": "one-ratio", "vectors": "bias-correction"},
        ),
        (
            lambda w, g, decay: lamb(w, g, decay, lambda gradient: gradient.sign() / 0.1**0.5),
            {"vectors": "bias-correction"},
        ),
        (
            lambda w, g, decay: lamb(w, g, decay) * (1 + w.ndim),
            {"matrices": "ratio", "vectors": "bias-correction"},
        ),
    ],
)
def test_each_fault_of_lamb_is_named_by_the_lengths_of_its_made_up_steps(rule, found):
    assert named(rule) == RIGHT | found


def test_decay_of_norms_and_biases_is_named():
    assert named(lamb, decays=(optimizing.DECAY, optimizing.DECAY)) == RIGHT | {
        "vectors": "decayed"
    }
