"""How a large model is spread over GPUs: its blocks, FSDP2, and activation checkpointing."""

from collections import Counter
from functools import partial

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor._ops._pointwise_ops import list_pointwise_strategy
from torch.distributed.tensor._ops.utils import register_op_strategy
from torch.utils.checkpoint import checkpoint

# torch 2.11 knows how to shard fused Adam, but not fused SGD, which works element by element too.
FUSED_SGD = [torch.ops.aten._fused_sgd_.default, torch.ops.aten._fused_sgd_.tensor_lr]
register_op_strategy(FUSED_SGD, schema_info=RuntimeSchemaInfo(needs_pytree=True))(
    list_pointwise_strategy
)
# Nor does it say that tensors without values need nothing: it would make real ones, whole, to see.
WITHOUT_VALUES = torch.library.Library("aten", "IMPL")
for each in FUSED_SGD:
    WITHOUT_VALUES.impl(each, lambda *_, **__: None, "Meta")


def blocks(model) -> list[torch.nn.Module]:
    """Return the parts that a model repeats, [] if it has none: a ViT's layers, a ResNet's blocks.

    They are of one class, not one of torch.nn's own, and no part of each other. Of several such
    classes it is the one that holds most parameters.
    """
    own = [m for m in model.modules() if not type(m).__module__.startswith("torch.nn.")]
    count, held = Counter(map(type, own)), Counter()
    for module in own:
        held[type(module)] += sum(p.numel() for p in module.parameters())
    kinds = [kind for kind in held if count[kind] > 1 and held[kind]]
    return outermost(model, max(kinds, key=held.get)) if kinds else []


def outermost(module, kind) -> list[torch.nn.Module]:
    """Return the modules of this class inside, without those inside one of them."""
    if isinstance(module, kind):
        return [module]
    return [found for child in module.children() for found in outermost(child, kind)]


def shard(model, mesh, dtype=None, **options):
    """Spread each block's parameters over the mesh, then those outside of all blocks.

    It must come before the optimizer, which then holds the state of this process's shard only.
    dtype: in which they are gathered. Without it autocast would keep a copy of all of them until
        the forward pass ends, so that they are whole on each GPU.
    """
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    for part in (*blocks(model), model):
        fully_shard(part, mesh=mesh, mp_policy=policy, **options)


def checkpoint_blocks(model):
    """Keep only the input of each block; the backward pass computes the rest again."""
    for block in blocks(model):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
