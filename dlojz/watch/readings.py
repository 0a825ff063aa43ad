"""Readings of the parts of a training: its model, its criterion, its optimizer."""

import math

import torch

from dlojz.training import checkpoint, private

NAMED = ("params", "param_names")  # the weights, and their names if the trainer gave them


SCHEDULED = ("initial_lr", "max_lr", "min_lr")  # written into an optimizer's group by a scheduler


HOW = ("foreach", "fused", "capturable", "differentiable", *SCHEDULED)  # without effect on results


def plain(name: str) -> str:
    """Return a weight's name without the additions of DDP, torch.compile and checkpointing."""
    return name.replace("_checkpoint_wrapped_", "").replace("module.", "").replace("_orig_mod.", "")


def around(model) -> str:
    """Return the common prefix of all weights: "1." if the model is in a Sequential, else ""."""
    first, *others = (plain(name).partition(".") for name, _ in model.named_parameters())
    inside = others and first[2] and all(other[0] == first[0] and other[2] for other in others)
    return f"{first[0]}." if inside else ""


def plainly(model):
    """Return a function from the name of a weight or buffer to its name in the solution."""
    inside = around(model)
    return lambda name: plain(name).removeprefix(inside)


def entered(args, kwargs):
    """Return the first argument of a model, given by position or by name."""
    return next(iter((*args, *kwargs.values())))


def layout(tensor) -> str:
    """Return the memory layout of a [N, C, H, W] tensor, by its strides and not its shape.

    "any" if both layouts match, as for 1x1 images, or for other than four dimensions.
    """
    if tensor.ndim != 4:
        return "any"
    nchw = tensor.is_contiguous()
    nhwc = tensor.is_contiguous(memory_format=torch.channels_last)
    if nchw and nhwc:
        return "any"
    return "NCHW" if nchw else "channels_last" if nhwc else "other"


def given(args, kwargs):
    """Return a criterion's logits and labels, given by position or by name."""
    names = dict(zip(("input", "target"), (*args, *kwargs.values()), strict=False)) | kwargs
    return names["input"], names["target"]


def classes(labels):
    """Return the classes of a batch; labels: class indices, or probabilities [N, classes]."""
    return labels if labels.ndim == 1 else labels.argmax(1)


def sums(criterion) -> bool:
    """Return whether a criterion is set to return the sum of a batch's losses."""
    return getattr(criterion, "reduction", None) == "sum"


def per_image(criterion, loss, images: int):
    """Return the mean loss of a batch, also if a criterion returns the sum, or each image's."""
    loss = loss.detach()
    if sums(criterion):
        return loss / images
    return loss.mean() if loss.ndim else loss.clone()


def scaler(training):
    """Return the enabled gradient scaler, a part of a training or inside one; None without one."""
    for part in checkpoint.parts(training).values():
        for held in (part, *getattr(part, "__dict__", {}).values()):
            if isinstance(held, torch.amp.GradScaler) and held.is_enabled():
                return held
    return None


def scale(training):
    """Return a copy of the gradient scaler's factor, on its device; None without a scaler."""
    found = scaler(training)
    return None if found is None else private.scale(found).detach().clone()


@torch.no_grad()
def met(logits, labels, loss) -> list:
    """Return a batch's loss, and its numbers of images and of correctly classified ones."""
    alike = labels.shape == logits.shape[:1]  # else the labels are not class indices
    right = (logits.argmax(1) == labels).sum() if alike else math.nan
    return [loss, len(logits), right]


def kind(optimizer) -> str:
    """Return the name of an optimizer's class, or of torch's class that it is derived from."""
    classes = type(optimizer).__mro__
    own = torch.optim.Optimizer
    known = (c for c in classes if c.__module__.startswith("torch.optim.") and c is not own)
    name = next(known, classes[0]).__name__
    if name == "Adam" and all(g.get("decoupled_weight_decay") for g in optimizer.param_groups):
        return "AdamW"
    return name


def settings(group, optimizer) -> dict:
    """Return the settings of an optimizer's group, without tensors and the learning rate.

    Keys unknown to the optimizer, such as a name, are left out. They are sorted: in a group they
    have the order in which the trainer gave them.
    """
    known = getattr(optimizer, "defaults", group).keys() - {*NAMED, "lr", *HOW}
    return {k: v for k, v in sorted(group.items()) if k in known and not torch.is_tensor(v)}


def named_buffers(model):
    """Yield the buffers of a model by name, without its own methods: a trainer may replace them."""
    seen = set()
    for prefix, module in _named_modules(model, "", seen):
        for key, buffer in private.own_buffers(module).items():
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                yield prefix + key, buffer


def _named_modules(module, prefix, seen):
    """Yield each module once, with the prefix of its buffers' names."""
    if module is not None and id(module) not in seen:
        seen.add(id(module))
        yield prefix, module
        for key, child in private.children(module).items():
            yield from _named_modules(child, f"{prefix}{key}.", seen)
