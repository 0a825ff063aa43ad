"""Real texts, padded in several ways, in buckets, or packed: tokens per second, and gradients.

Submitted by a notebook: submit("dlojz/chapters/n10c_attention/experiments/sequences.py").

The texts are the docstrings of Python's standard library. An encoder guesses words that are hidden
from it. All ways train on the same texts, and make their masks within the timed steps.
"""

import argparse
import random
from functools import cache, partial
from itertools import chain

import torch
from torch.nn import functional
from torch.nn.attention import flex_attention, varlen
from tqdm import tqdm

from dlojz import idr_torch
from dlojz.chapters import session
from dlojz.chapters.n10c_attention import packing
from dlojz.training import flags, imports

ON_GPU = {"texts": 3840, "longest": 512, "batch_size": 128, "width": 1024, "layers": 8}
ON_CPU = {"texts": 192, "longest": 256, "batch_size": 8, "width": 64, "layers": 2}
HEAD = 64  # numbers of a head; on a processor 16
VOCABULARY = 8192
SHARE = 0.15  # of the words that are hidden
CHECKED = 16  # texts whose gradients are compared
PICTURED = 24  # rows of a batch that are drawn


class Rows:
    """The tensors of a batch: words, positions in their texts, and the text of each word."""

    def __init__(self, batch, texts, device, restart=True):
        shape = len(batch.rows), batch.columns
        words, places, owner = (torch.full(shape, n) for n in (packing.PADDING, 0, -1))
        at, answers, ends = [], [], [0]
        for row, numbers in enumerate(batch.rows):
            start = 0
            for n in numbers:
                here = slice(start, start + len(texts[n]))
                words[row, here], owner[row, here] = torch.tensor(texts[n]), n
                places[row, here] = torch.arange(len(texts[n])) + (0 if restart else start)
                for hidden in hidden_of(n, texts[n]):
                    words[row, start + hidden] = packing.HIDDEN
                    at.append(row * batch.columns + start + hidden)
                    answers.append(texts[n][hidden])
                start = here.stop
                ends.append(row * batch.columns + start)
            ends += [(row + 1) * batch.columns] if start < batch.columns else []
        self.ends = torch.tensor(ends, dtype=torch.int32).to(device)
        self.words, self.places, self.owner = (x.to(device) for x in (words, places, owner))
        self.at, self.answers = (torch.tensor(x).to(device) for x in (at, answers))


def hidden_of(number, text) -> list[int]:
    """Return the places of a text's hidden words, the same in every batch."""
    return random.Random(number).sample(range(len(text)), max(1, round(SHARE * len(text))))


# The ways to attend: each returns a function of queries, keys and values [rows, heads, columns, d]


def any_word(rows):
    """Attend to everything in the row: other texts, and padding."""
    return functional.scaled_dot_product_attention


def no_padding(rows):
    """Attend to all words of the row, and not to its padding."""
    return partial(any_word(rows), attn_mask=(rows.owner >= 0)[:, None, None, :])


def boolean(rows):
    """Attend to the words of the same text, by a mask of columns x columns for each row."""
    return partial(
        any_word(rows), attn_mask=rows.owner[:, None, :, None] == rows.owner[:, None, None]
    )


@cache
def compiled():
    """Return flex_attention and the maker of its masks, which are slow unless compiled."""
    made = torch.compile(flex_attention.create_block_mask, dynamic=False)
    return torch.compile(flex_attention.flex_attention, dynamic=False), made


def flex(rows):
    """Attend to the words of the same text, by blocks: one of other texts alone is left out."""
    attend, blocks = compiled()
    owner, (count, columns) = rows.owner, rows.owner.shape

    def same(row, head, query, key):
        return owner[row, query] == owner[row, key]

    mask = blocks(same, count, None, columns, columns, device=owner.device)
    return partial(attend, block_mask=mask)


def by_ends(rows):
    """Attend to the words of the same text, by the places where the texts end."""
    longest = rows.owner.shape[1]

    def attend(q, k, v):
        flat = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        out = varlen.varlen_attn(*flat, rows.ends, rows.ends, longest, longest)
        return out.view(q.transpose(1, 2).shape).transpose(1, 2)

    return attend


WAYS = {
    **{layout: (layout, no_padding) for layout in packing.LAYOUTS if layout != "packed"},
    "packed": ("packed", boolean),
    "packed, flex": ("packed", flex),
    "packed, varlen": ("packed", by_ends),
}
ONLY_ON_GPU = (flex, by_ends)  # a processor has no varlen, and would compile flex for long


class Block(torch.nn.Module):
    """A layer of the encoder."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norms = heads, torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in "ab")
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        wide = torch.nn.Linear(width, 4 * width)
        self.mlp = torch.nn.Sequential(wide, torch.nn.GELU(), torch.nn.Linear(4 * width, width))

    def forward(self, x, attend):
        q, k, v = (
            self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        )
        x = x + self.out(attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Encoder(torch.nn.Module):
    """A transformer that guesses the hidden words of its rows."""

    def __init__(self, width, layers, longest, heads):
        super().__init__()
        self.words = torch.nn.Embedding(VOCABULARY, width)
        self.places = torch.nn.Embedding(longest, width)
        self.blocks = torch.nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, VOCABULARY)

    def forward(self, rows, attend):
        x = self.words(rows.words) + self.places(rows.places)
        for block in self.blocks:
            x = block(x, attend)
        guesses = self.head(self.norm(x).flatten(0, 1)[rows.at])
        return functional.cross_entropy(guesses, rows.answers)


def backward(model, rows, way, bf16):
    """Return the loss of a batch, with its gradients in the weights."""
    model.zero_grad()
    with torch.autocast(rows.words.device.type, torch.bfloat16, enabled=bf16):
        loss = model(rows, way(rows))
    loss.backward()
    return loss.detach()


# What is compared ---------------------------------------------------------------------------------


def speeds(args, texts, model, device):
    """Yield the fields of each way of making batches."""
    lengths, batches, calls, found = [*map(len, texts)], {}, {}, {}
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    for name, (layout, way) in WAYS.items():
        if way in ONLY_ON_GPU and device.type != "cuda":
            continue
        made = packing.LAYOUTS[layout](lengths, args.batch_size, args.longest)
        rows = [Rows(batch, texts, device) for batch in made]

        def epoch(rows=rows, way=way):
            for each in rows:
                backward(model, each, way, device.type == "cuda")
                optimizer.step()

        batches[name] = made
        try:
            backward(model, rows[0], way, device.type == "cuda")
        except RuntimeError as failed:
            found[name] = {"error": imports.first_line(failed)}
        else:
            calls[name] = epoch
    ms = session.in_turn(calls, device, args.rounds, warm_up=device.type == "cuda")
    for name, made in batches.items():
        yield name, of_layout(made, lengths) | found.get(name, {"ms": ms.get(name)})


def of_layout(batches, lengths) -> dict:
    """Return the numbers of a layout: words, their places, columns, and a batch to draw."""
    middle = batches[len(batches) // 2]
    return {
        "texts": sum(map(len, batches)),
        "words": sum(lengths[n] for batch in batches for n in chain(*batch.rows)),
        "places": sum(len(batch.rows) * batch.columns for batch in batches),
        "columns": [batch.columns for batch in batches],
        "picture": [[lengths[n] for n in row] for row in middle.rows[:PICTURED]],
        "width": middle.columns,
    }


def gradients(args, texts, model, device):
    """Yield the loss and the relative distance of gradients from those of padded float64."""
    few = texts[:CHECKED]
    lengths = [*map(len, few)]
    padded = packing.whole(lengths, CHECKED, args.longest)[0]
    rows = packing.first_fit(lengths, args.longest)
    together = packing.Batch(rows, args.longest)
    cases = {
        "padded": (padded, no_padding, True, False),
        "packed": (together, boolean, True, False),
        "packed, without the mask": (together, any_word, True, False),
        "packed, positions go on": (together, boolean, False, False),
        "padded, without the mask": (padded, any_word, True, False),
    }
    if device.type == "cuda":
        cases["padded, bf16"] = (padded, no_padding, True, True)
        for name, way in {"boolean mask": boolean, "flex": flex, "varlen": by_ends}.items():
            cases[f"packed, {name}, bf16"] = (together, way, True, True)
    expected = None
    for name, (batch, way, restart, bf16) in cases.items():
        model = model.float() if bf16 else model.double()
        try:
            loss = backward(model, Rows(batch, few, device, restart), way, bf16)
        except RuntimeError as failed:
            yield name, {"error": imports.first_line(failed)}
            continue
        own = [weight.grad.double() for weight in model.parameters()]
        expected = expected or own
        yield (
            name,
            {"loss": loss.item(), "away": session.away(own, expected), "rows": len(batch.rows)},
        )


def main():
    device = idr_torch.device()
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    positive = flags.at_least(1)
    parser.add_argument("--texts", type=flags.at_least(CHECKED), help="texts to train on")
    parser.add_argument("--longest", type=positive, help="words of a text, at most")
    parser.add_argument("-b", "--batch-size", type=positive, help="texts of a batch")
    parser.add_argument("--width", type=positive, help="numbers for each word")
    parser.add_argument("--layers", type=positive, help="layers of the encoder")
    parser.add_argument("--rounds", type=flags.at_least(2), default=5, help="timed epochs of each")
    parser.set_defaults(**(ON_GPU if device.type == "cuda" else ON_CPU))
    args = parser.parse_args()
    with session.begin(args, device) as (run, _):
        torch.manual_seed(0)
        texts = packing.texts(args.texts, args.longest, VOCABULARY)
        run.measure("all texts", len(packing.docstrings()), "")
        heads = args.width // (HEAD if device.type == "cuda" else 16)
        model = Encoder(args.width, args.layers, args.longest, heads).to(device)
        for name, found in gradients(args, texts, model, device):
            run.case(f"gradients: {name}", gradients=name, **found)
        model = model.float()
        for name, found in tqdm(speeds(args, texts, model, device), unit="way"):
            run.case(name, layout=name, **found)


if __name__ == "__main__":
    main()
