"""One model over several processes, in four ways: by hand, by a plan, in a ring and in stages.

Submitted by notebook 12, from your own copy: submit(course.own("12_parallel"), n_gpu=2).

A process, or rank, holds a part of the model or of the tokens. Outputs and the gradients of all
parameters must be those of one process. The ways are judged one by one: what is still to be written
raises NotImplementedError. The last one is optional.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.nn import functional

from dlojz.chapters.n12_model_parallel import job

# 12a, by hand ------------------------------------------------------------------------------------


class Copy(torch.autograd.Function):
    """Megatron's f: all ranks go on with the same x, each with its part of the layer."""

    @staticmethod
    def forward(context, x):
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        # TODO 12a: return the gradient of x, to which each rank adds its part
        raise NotImplementedError


class Sum(torch.autograd.Function):
    """Megatron's g: each rank has computed a part of x, and all go on with the sum."""

    @staticmethod
    def forward(context, x):
        # TODO 12a: return the sum over all ranks
        raise NotImplementedError

    @staticmethod
    def backward(context, gradient):
        # TODO 12a: return the gradient of this rank's part
        raise NotImplementedError


def share(tensor, dim):
    """Return this rank's part of a tensor that is cut along a dimension, as a new parameter."""
    parts = tensor.detach().chunk(dist.get_world_size(), dim)
    return nn.Parameter(parts[dist.get_rank()].clone())


class Column(nn.Module):
    """The first of two layers: each rank has all inputs, and computes its part of the outputs."""

    def __init__(self, whole: nn.Linear):
        super().__init__()
        # TODO 12a: set self.weight, a share of [outputs, inputs], and self.bias
        raise NotImplementedError

    def forward(self, x):
        # TODO 12a: return this rank's outputs
        raise NotImplementedError


class Row(nn.Module):
    """The second of two layers: each rank has a part of the inputs, and computes all outputs."""

    def __init__(self, whole: nn.Linear):
        super().__init__()
        # TODO 12a: set self.weight, a share, and self.bias
        raise NotImplementedError

    def forward(self, x):
        # TODO 12a: return the outputs, the same on each rank
        raise NotImplementedError


def divide(block):
    """Divide a block of `n12_model_parallel.blocks` among all ranks; return it."""
    attention = block.attention
    attention.q, attention.k, attention.v = map(Column, (attention.q, attention.k, attention.v))
    attention.o = Row(attention.o)
    block.up, block.down = Column(block.up), Row(block.down)
    return block


def dropout(x, rate, seed):
    """Drop a share of the hidden features, of which each rank has others. The seed is the same."""
    generator = torch.Generator(x.device)
    # TODO 12a: seed the generator
    raise NotImplementedError

    kept = torch.rand(x.shape, generator=generator, device=x.device) >= rate
    return x * kept / (1 - rate)


def norm(divided, whole):
    """Return the norm of the whole model's gradient, as clipping needs it, from lists of tensors.

    divided: gradients of parts, which no other rank has. whole: those that each rank has.
    """
    # TODO 12a: return the same tensor on each rank
    raise NotImplementedError


# 12b, by a plan ----------------------------------------------------------------------------------


def mesh(device_type, copies):
    """Return a grid of all ranks, "data" by "tensor", for a number of copies of the model."""
    # TODO 12b: return a mesh whose second dimension holds the ranks of one copy
    raise NotImplementedError


def plan():
    """Return the plan for `parallelize_module` of a block, with sequence parallelism.

    The block gets and returns this rank's tokens, Shard(1). The norms stay whole, and see these
    tokens only. Between column- and row-wise layers a rank has all tokens.
    """
    # TODO 12b: a style for each of attention_norm, attention, .q, .k, .v, .o, mlp_norm, up, down
    raise NotImplementedError


# 12c, in a ring ----------------------------------------------------------------------------------


class Shift(torch.autograd.Function):
    """Send x to the next rank, and get that of the rank before. Gradients go the other way.

    Each rank must use what it gets, or its backward pass has no message for the rank before.
    """

    @staticmethod
    def forward(context, x):
        return exchanged(x, 1)

    @staticmethod
    def backward(context, gradient):
        return exchanged(gradient, -1)


def exchanged(x, hops):
    """Return the tensor of the rank that is `hops` before this one; send x as far ahead."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x, found = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    send = dist.P2POp(dist.isend, x, (rank + hops) % size)
    receive = dist.P2POp(dist.irecv, found, (rank - hops) % size)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    return found


def ring(q, k, v, causal):
    """Return the attention of this rank's queries to the keys of all ranks, which go round.

    q, k, v: [batch, heads, tokens, head], this rank's tokens, which follow those of the rank
    before. causal: a query sees its own token and those before it.
    """
    rank, size, tokens = dist.get_rank(), dist.get_world_size(), q.shape[2]
    number = torch.arange(tokens, device=q.device)  # add tokens * rank: in the whole sequence
    out, total = torch.zeros_like(q), q.new_zeros((*q.shape[:3], 1))
    largest = torch.full_like(total, -torch.inf)
    for step in range(size):
        source = (rank - step) % size  # the rank whose keys and values are here
        scores = q @ k.mT / q.shape[-1] ** 0.5
        # TODO 12c: hide later tokens, add to out and total by the online softmax, shift k and v
        raise NotImplementedError
    return out / total


# 12d, in stages: optional ------------------------------------------------------------------------

MICRO_BATCHES = 4


def stage(model):
    """Return this rank's part of a `blocks.Model`: as many blocks as each other rank has.

    The first one has the first layer, too, the last one the norm and the last layer.
    """
    # TODO 12d: return a module of layers of this model, not of copies
    raise NotImplementedError


def schedule(module, device, loss):
    """Return a schedule for this rank's stage, which keeps as few activations as it can.

    loss: takes a micro-batch's outputs and targets, and returns their mean loss.
    """
    # TODO 12d: return a schedule of torch.distributed.pipelining with MICRO_BATCHES
    raise NotImplementedError


if __name__ == "__main__":
    job.examine(__file__)
