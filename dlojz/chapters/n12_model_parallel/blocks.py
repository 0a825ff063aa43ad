"""A small transformer whose layers can be divided: separate q, k, v and o, and a free attention.

Each part takes and returns [batch, tokens, width]. Heads are counted where they are used, so a rank
that holds half of the rows of q, k and v computes half of the heads.
"""

from torch import nn
from torch.nn import functional


class Attention(nn.Module):
    """Attention whose core can be replaced: attend(q, k, v), of [batch, heads, tokens, head]."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.head = width // heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.attend = functional.scaled_dot_product_attention

    def forward(self, x):
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        return self.o(self.attend(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then two linear layers, each behind a norm and beside a shortcut."""

    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(functional.gelu(self.up(self.mlp_norm(x))))


class Model(nn.Module):
    """Blocks between a first and a last linear layer; a token is a row of `inputs` numbers."""

    def __init__(self, layers: int, width: int, heads: int, hidden: int, inputs: int, outputs: int):
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.last = nn.Linear(width, outputs)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.norm(x))
