"""One process's share of a vision transformer that is divided over several, and what it sends.

tensor: the heads of each attention and the columns of each MLP's first layer, then the rows of
the layers behind them, are dealt out over this number of processes. Between these products each
process has some of the tokens (sequence parallelism). So tokens are all-gathered before the
columns, and reduce-scattered behind the rows.
stages: the blocks are cut into this number of stages of a pipeline, which runs 1F1B on `parts`
micro-batches: stage r holds the activations of stages - r of them, or of all if they are fewer.

No plan for `parallelize_module` reaches the queries, keys and values of nn.MultiheadAttention, as
they are one weight. Here its share is a module of our own: the same products with fewer heads.
"""

import math
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torchvision.models import VisionTransformer

from dlojz.course import UserError
from dlojz.training import models


def check(model, plan):
    """Raise UserError for a whole model that can't be divided as planned."""
    if not isinstance(model, VisionTransformer):
        raise UserError(
            f"{plan.model} is not a vision transformer, whose equal blocks --tensor and --stages "
            "divide: leave them out, or take --model vit_b_16 or vit_2b"
        )
    blocks = model.encoder.layers
    heads, hidden = blocks[0].num_heads, blocks[0].mlp[0].out_features
    for count, what in ((heads, "heads"), (hidden, "columns of each MLP")):
        if count % plan.tensor:
            even = [n for n in range(1, heads + 1) if heads % n == hidden % n == 0]
            raise UserError(
                f"--tensor {plan.tensor}: {plan.model} has {count:,} {what}, which don't divide "
                f"evenly; expected one of {', '.join(map(str, even))}"
            )
    if len(blocks) < 2 * plan.stages:
        raise UserError(
            f"--stages {plan.stages}: {plan.model} has {len(blocks)} blocks; expected at most "
            f"{len(blocks) // 2} stages, of two blocks or more"
        )


def held(blocks: int, plan) -> tuple[int, int]:
    """Return the first block of the plan's stage, and the next one's: some have one more."""
    least, more = divmod(blocks, plan.stages)
    first = plan.stage * least + min(plan.stage, more)
    return first, first + least + (plan.stage < more)


def live(plan) -> int:
    """Return the micro-batches whose activations the plan's stage holds at most, under 1F1B."""
    return min(plan.parts, plan.stages - plan.stage)


def tokens(model, plan) -> int:
    """Return the tokens of an image in each process, padded to an equal number."""
    return -(-model.seq_length // plan.tensor)


class Share(nn.Module):
    """One process's share of a vision transformer, and its part of a step."""

    def __init__(self, whole, plan, dtype: torch.dtype, group=None):
        """Take the share out of a whole model on meta.

        dtype: of what a stage receives. group: the tensor's processes.
        """
        super().__init__()
        encoder, classes = whole.encoder, whole.heads[-1].out_features
        self.received = plan.batch // plan.parts, tokens(whole, plan), whole.hidden_dim
        self.first, self.last = first, last = plan.stage == 0, plan.stage == plan.stages - 1
        self.live, self.dtype = live(plan), dtype
        self.receive = receive = partial(torch.empty, self.received, dtype=dtype)
        blocks = nn.Sequential(*encoder.layers[slice(*held(len(encoder.layers), plan))])
        layers = [blocks]
        if plan.tensor > 1:
            gather, reduce = (partial(each, group=group) for each in (gathered, reduced))
            for block in blocks:
                block.self_attention = Attention(block.self_attention, plan.tensor, gather, reduce)
                mlp = narrow(block.mlp, plan.tensor)
                block.mlp = nn.Sequential(Between(gather, reduce), mlp, Between(reduce, gather))
            unpadded = partial(gather, count=whole.seq_length)
            cut = Between(partial(cut_to, count=self.received[1]), unpadded)
            layers = [cut] * first + layers + [Between(gather, reduce)] * last
        if not last:  # the loss is another stage's, and so are the layers before it
            layers.append(Between(partial(no_logits, classes=classes), lambda _: receive()))
            encoder.ln, whole.heads = nn.Identity(), nn.Identity()
        if not first:
            del whole.conv_proj, whole.class_token, encoder.pos_embedding
        encoder.layers, self.whole = nn.Sequential(*layers), whole

    def forward(self, images):
        """Run as many micro-batches as are alive when the first backward pass begins.

        Only the last one has such a pass: its graph keeps the others alive.
        """
        *others, last = (self.one(images) for _ in range(self.live))
        last.grad_fn.metadata["others"] = others
        return last

    def one(self, images):
        if self.first:
            return self.whole(images)
        # As VisionTransformer.forward ends.
        encoder = self.whole.encoder
        x = encoder.layers(self.receive(requires_grad=True))
        return self.whole.heads(encoder.ln(x)[:, 0])

    def sent(self, plan, blocks: int, dtype: torch.dtype) -> dict[str, float]:
        """Return the bytes of the messages between the shares of one model."""
        first, last, again = self.first, self.last, plan.checkpointing == "blocks"
        message = plan.batch * math.prod(self.received[1:])
        tokens = (plan.tensor - 1) * message * dtype.itemsize
        cut = (plan.tensor - 1) * message * self.dtype.itemsize  # gradients of the first tokens
        small = 6 * blocks * self.received[-1]  # of a block: two layer norms, two biases
        # Recomputation repeats all messages of a block but the last, which no gradient needs.
        return {
            "tokens, gathered": ((4 + 2 * again) * blocks + last) * tokens + first * cut,
            "tokens, reduced": ((4 + again) * blocks + last) * tokens,
            "small gradients": 2 * others(plan.tensor) * plan.parts * 4 * small,
            "to other stages": (2 - first - last) * message * self.dtype.itemsize,
        }


class Attention(nn.Module):
    """A process's heads of an nn.MultiheadAttention, called as torchvision calls that."""

    def __init__(self, whole, processes: int, gather, reduce):
        super().__init__()
        width, self.head, self.dropout = whole.embed_dim, whole.head_dim, whole.dropout
        with torch.device("meta"):
            self.columns = nn.Linear(width, 3 * width // processes)
            self.rows = nn.Linear(width // processes, width)
        self.gather, self.reduce = Between(gather, reduce), Between(reduce, gather)

    def forward(self, x, *_, **__):
        parts = self.columns(self.gather(x)).unflatten(-1, (3, -1, self.head))
        # One copy of all three, laid out for a result that needs none, as torch's own are.
        q, k, v = parts.permute(2, 0, 1, 3, 4).contiguous().transpose(2, 3)
        out = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        return self.reduce(self.rows(out.transpose(1, 2).flatten(2))), None


def narrow(mlp, processes: int):
    """Give an MLP's two layers a process's columns, and its rows; return it."""
    up, down = (place for place, layer in enumerate(mlp) if isinstance(layer, nn.Linear))
    width, columns = mlp[up].in_features, mlp[up].out_features // processes
    with torch.device("meta"):
        mlp[up], mlp[down] = nn.Linear(width, columns), nn.Linear(columns, width)
    return mlp


# Between processes --------------------------------------------------------------------------------


class Between(nn.Module):
    """A message: a function of the activations, and one of their gradients."""

    def __init__(self, there, back):
        super().__init__()
        self.there, self.back = there, back

    def forward(self, x):
        return _Both.apply(x, self.there, self.back)


class _Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, there, back):
        ctx.back = back
        with torch.enable_grad():  # so `Storages` counts the result among the activations
            return there(x.detach())

    @staticmethod
    def backward(ctx, gradient):
        return ctx.back(gradient), None, None


def gathered(x, group, count: int | None = None):
    """Return all processes' tokens, from each its own; count: without those of the padding."""
    if torch.is_autocast_enabled("cpu"):  # sent as the product will read it
        x = x.to(torch.get_autocast_dtype("cpu"))
    whole = x.new_empty(group.size() * len(x), *x.shape[1:])  # stacked along the first dimension
    dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
    return torch.cat(whole.chunk(group.size()), dim=1)[:, :count]


def reduced(x, group):
    """Return this process's tokens, summed over the processes."""
    whole = torch.cat(x.chunk(group.size(), dim=1))
    own = x.new_empty(len(x), x.shape[1] // group.size(), x.shape[2])
    dist.reduce_scatter_tensor(own, whole, group=group)
    return own


def cut_to(x, count: int):
    """Return the first process's tokens of whole images."""
    return x[:, :count].contiguous()


def no_logits(x, classes: int):
    """Return logits for the trainer, from a stage that has none: it has sent its activations."""
    return x.new_zeros(len(x), 1, classes)


# Bytes sent ---------------------------------------------------------------------------------------


def sent(model, plan, dtype: torch.dtype) -> dict[str, float]:
    """Return the bytes that a process sends in a step, by memory.SENT, with collectives in rings.

    model: the process's share. dtype: of products, and of the weights that FSDP gathers.
    """
    blocks = models.blocks(model)
    inner = size(p for block in blocks for p in block.parameters())
    outer = size(model.parameters()) - inner
    shards = plan.replicas // plan.copies if plan.sharding == "fsdp" else 1
    copies = plan.replicas // shards
    passes = 1 if plan.stages > 1 else 2  # a pipeline keeps FSDP's gathered weights for all parts
    found = {
        "weights": others(shards) * (passes * inner + outer) * dtype.itemsize,
        "gradients": (others(shards) + 2 * others(copies) / shards) * 4 * (inner + outer),
    }
    if isinstance(model, Share):
        found |= model.sent(plan, len(blocks), dtype)
    return {name: count for name, count in found.items() if count}


def others(processes: int) -> float:
    """Return the share of a tensor that a process sends to gather it, or to reduce it."""
    return 1 - 1 / processes


def size(parameters) -> int:
    """Return the number of these parameters."""
    return sum(p.numel() for p in parameters)
