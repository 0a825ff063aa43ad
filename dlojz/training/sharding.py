"""Additions to torch's FSDP2 and DTensor, for a model in shards, one in each process."""

from collections import Counter

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from dlojz.training import private
from dlojz.training.models import blocks, recompute

FUSED_SGD = private.shard_fused_sgd()  # registered as long as it is kept


def own(tensor):
    """Return this process's part of a tensor: its shard, or the whole if it has no shards."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():  # else it would be a step of autograd
        return tensor.to_local()


def share(model, states: list[torch.Tensor]) -> dict:
    """Return this process's part of a model and its training, for evidence.

    states: the tensors of the optimizer, this process's shards of them.
    """
    weights = list(model.parameters())
    gradients = [p.grad for p in weights if p.grad is not None]
    parts = {"parameters": weights, "gradients": gradients, "optimizer": states}
    return {
        "placements": dict(Counter(map(placement, weights))),
        "held": {part: sum(own(t).nbytes for t in tensors) for part, tensors in parts.items()},
        "units": sum(isinstance(module, FSDPModule) for module in model.modules()),
    }


def placement(tensor) -> str:
    """Return a tensor's placement over the processes: "whole", or such as "Shard(dim=0)"."""
    places = tensor.placements if isinstance(tensor, DTensor) else ()
    return ", ".join(map(repr, places)) or "whole"


def shard(model, mesh, dtype=None, **options):
    """Shard each block's parameters over the mesh, then those outside of all blocks.

    It must come before the optimizer, which then holds the state of this process's shard only.
    dtype: that of gathered parameters. Without it autocast would keep a copy of all of them, whole,
    on each GPU until the forward pass ends.
    """
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    for part in (*blocks(model), model):
        fully_shard(part, mesh=mesh, mp_policy=policy, **options)


def checkpoint_blocks(model):
    """Keep only the input of each block; the backward pass computes the rest again."""
    for block in blocks(model):
        recompute(block)
