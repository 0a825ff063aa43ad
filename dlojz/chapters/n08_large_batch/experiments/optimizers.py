"""Optimizers for large batches, and a finder of learning rates: the trainer imports this file.

LAMB:  You et al. 2020, https://arxiv.org/abs/1904.00962
LARS:  You et al. 2017, https://arxiv.org/abs/1708.03888
Lion:  Chen et al. 2023, https://arxiv.org/abs/2302.06675
Muon:  Jordan et al. 2024, https://kellerjordan.github.io/posts/muon, with the scale of
       Liu et al. 2025, https://arxiv.org/abs/2502.16982
"""

import math

import torch

from dlojz.training import finder


def groups(model, wd):
    """Return the weights in two groups: matrices and convolutions decay, norms and biases don't."""
    weights = list(model.parameters())
    return [
        {"params": [w for w in weights if w.ndim > 1], "weight_decay": wd},
        {"params": [w for w in weights if w.ndim <= 1], "weight_decay": 0.0},
    ]


def trust_ratio(weight, update):
    """Return a layer's factor for its update, after which it is as long as the weights are.

    It is 1 for norms and biases, and where the weights or the update are zero. It is a tensor on
    the device, because a number would make the host wait.
    """
    # TODO 08a: divide the norm of the weights by that of the update
    return torch.ones((), device=weight.device)


class ByLayer(torch.optim.Optimizer):
    """An optimizer that updates one tensor of weights after the other, by its `update`."""

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure() if closure else None
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self.update(weight, weight.grad, self.state[weight], group)
        return loss


def adam(grad, state, betas, eps):
    """Return Adam's update: the mean gradient by the root of its mean square, both corrected.

    The means begin with zeros; the correction divides them by the share that they have yet.
    """
    if not state:
        state["step"] = torch.tensor(0.0)  # on the host, as torch's own optimizers have it
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(grad), torch.zeros_like(grad)
    state["step"] += 1
    mean, square = state["exp_avg"], state["exp_avg_sq"]
    mean.lerp_(grad, 1 - betas[0])
    square.mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])
    shares = [1 - beta ** state["step"].item() for beta in betas]
    return (mean / shares[0]) / ((square / shares[1]).sqrt() + eps)


class Lamb(ByLayer):
    """Adam, whose update of each layer gets the length of the layer's weights."""

    def __init__(self, groups, lr, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0):
        own = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(groups, {"lr": lr} | own)

    def update(self, weight, grad, state, group):
        change = adam(grad, state, group["betas"], group["eps"])
        change += group["weight_decay"] * weight
        weight -= group["lr"] * trust_ratio(weight, change) * change


class Lars(ByLayer):
    """SGD with momentum; each layer's gradient gets a share of the length of its weights."""

    def __init__(self, groups, lr, momentum=0.9, trust=0.001, eps=1e-8, weight_decay=0.0):
        own = {"momentum": momentum, "trust": trust, "eps": eps, "weight_decay": weight_decay}
        super().__init__(groups, {"lr": lr} | own)

    def update(self, weight, grad, state, group):
        wd = group["weight_decay"]
        change = grad + wd * weight
        if weight.ndim > 1:
            long, steep = weight.norm(), grad.norm()
            ratio = group["trust"] * long / (steep + wd * long + group["eps"])
            change *= torch.where((long > 0) & (steep > 0), ratio, 1.0)
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        weight -= group["lr"] * state["momentum_buffer"].mul_(group["momentum"]).add_(change)


class Lion(ByLayer):
    """The sign of a mean gradient: each weight changes by the rate, up or down."""

    def __init__(self, groups, lr, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def update(self, weight, grad, state, group):
        if not state:
            state["exp_avg"] = torch.zeros_like(weight)
        weight *= 1 - group["lr"] * group["weight_decay"]
        weight -= group["lr"] * state["exp_avg"].lerp(grad, 1 - group["betas"][0]).sign()
        state["exp_avg"].lerp_(grad, 1 - group["betas"][1])


class Muon(ByLayer):
    """SGD with momentum, whose update of each matrix has singular values near 1.

    A convolution is a matrix with one row for each output channel. Weights of one dimension, and
    groups with `matrices` False, have AdamW; a ViT's embeddings want such a group. The scale gives
    a matrix the changes that Adam's have on average, so that one rate suits both.
    """

    def __init__(self, groups, lr, momentum=0.95, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        own = {"momentum": momentum, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(groups, {"lr": lr, "matrices": True} | own)

    def update(self, weight, grad, state, group):
        if weight.ndim <= 1 or not group["matrices"]:
            change = adam(grad, state, group["betas"], group["eps"])
        else:
            if not state:
                state["momentum_buffer"] = torch.zeros_like(weight)
            state["momentum_buffer"].lerp_(grad, 1 - group["momentum"])
            mean = grad.lerp(state["momentum_buffer"], group["momentum"])  # Nesterov's
            matrix = orthogonal(mean.flatten(1))
            change = 0.2 * math.sqrt(max(matrix.shape)) * matrix.view_as(weight)
        weight *= 1 - group["lr"] * group["weight_decay"]
        weight -= group["lr"] * change


def orthogonal(matrix):
    """Return a matrix with the same singular vectors, and singular values from 0.68 to 1.22.

    Newton and Schulz's iteration needs products of matrices only, which a GPU computes fast. Its
    polynomial, a x + b x^3 + c x^5, is Jordan's, five times.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if tall else x


def build(args, model):
    """Return the optimizer of --optimizer for a model's weights, in groups."""
    both = groups(model, args.wd)
    if args.optimizer == "adamw":
        return torch.optim.AdamW(both, args.lr, fused=True)
    if args.optimizer == "lars":
        return Lars(both, args.lr, args.mom)
    if args.optimizer == "muon":
        classifier = both[0]["params"].pop()  # its rows are the classes: no matrix between layers
        last = {"params": [classifier], "weight_decay": args.wd, "matrices": False}
        return Muon([both[0], last, both[1]], args.lr)
    return {"lamb": Lamb, "lion": Lion}[args.optimizer](both, args.lr)


def schedule(args, optimizer, updates):
    """Return the scheduler of --schedule cosine or constant: both rise to each group's own rate."""
    warm_up = round(args.warm_up * updates)

    def share(update):
        if update < warm_up:
            return (update + 1) / warm_up
        if args.schedule == "constant":
            return 1.0
        return (1 + math.cos(math.pi * (update - warm_up) / max(1, updates - warm_up))) / 2

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    scheduler.total_steps = updates  # a resume must not change it
    return scheduler


def find_rate(training, train, batches, lowest=1e-5, highest=10.0):
    """Return [(rate, loss), ...]: one update at each of len(batches) rates, ever higher ones.

    train(images, labels) makes an update, and returns the loss before it: a number, the mean of all
    processes, so that all of them stop together. They do when it is four times the lowest one.
    """
    # TODO 08b: grow the rate geometrically, and put everything back
    raise NotImplementedError("TODO 08b: try one rate after the other in find_rate")


def trial(run, train_step, training, loader, args):
    """Log the table of `find_rate` for the trainer's `train_step`, before a training."""
    train = finder.updating(train_step, training, args)
    run.rates(find_rate(training, train, finder.Batches(loader, args.find_lr)))
