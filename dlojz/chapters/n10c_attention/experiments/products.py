"""Sizes in eights, and one product instead of several: a vocabulary, queries, gates of an LSTM.

Submitted by a notebook: submit("dlojz/chapters/n10c_attention/experiments/products.py").

Each case is a forward and a backward pass, timed from Python, beside the others of its comparison.
"""

import argparse
from functools import partial
from itertools import product

import torch
from torch.nn.functional import linear, scaled_dot_product_attention
from tqdm import tqdm

from dlojz import idr_torch
from dlojz.chapters import session
from dlojz.training import flags, imports

ON_GPU = {"tokens": 8192, "width": 1024, "steps": 128, "batch_size": 64, "precision": "bf16"}
ON_CPU = {"tokens": 64, "width": 128, "steps": 32, "batch_size": 8, "precision": "fp32"}
VOCABULARIES = (50_257, 50_264, 50_304)  # GPT-2's, and the next multiples of 8 and of 64
LENGTHS = (1021, 1024)
FEWER = 16  # tokens for q, k and v, where launches count: this many times fewer
ODD = 3  # less than a round width
GATES = 4


def plain_attention(q, k, v):
    """Return attention with its matrix in memory."""
    return torch.softmax(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5, dim=-1) @ v


def three(x, *weights):
    """Return queries, keys and values by a product for each."""
    return torch.cat([linear(x, weight) for weight in weights], dim=-1)


def separate(x, hidden, cell, own, other):
    """Return a step of an LSTM whose gates are products of their own."""
    gates = [
        linear(x, a) + linear(hidden, b)
        for a, b in zip(own.chunk(GATES), other.chunk(GATES), strict=True)
    ]
    return gated(gates, cell)


def together(x, hidden, cell, own, other):
    """Return a step of an LSTM whose gates are one product, of x beside the hidden state."""
    both = linear(torch.cat([x, hidden], dim=-1), torch.cat([own, other], dim=-1))
    return gated(both.chunk(GATES, dim=-1), cell)


def gated(gates, cell):
    """Return the hidden state and the cell; the gates are in torch's order."""
    enter, forget, new, leave = gates
    cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
    return leave.sigmoid() * cell.tanh(), cell


def loop(step, x, own, other):
    """Return the hidden states of a sequence [steps, batch, width], step by step."""
    hidden = cell = torch.zeros_like(x[0])
    found = []
    for each in x:
        hidden, cell = step(each, hidden, cell, own, other)
        found.append(hidden)
    return torch.stack(found)


def fused(x, own, other):
    """Return the same by the kernel that torch.nn.LSTM calls."""
    zeros = torch.zeros_like(x[:1])
    return torch.lstm(x, (zeros, zeros), [own, other], False, 1, 0.0, True, False, False)[0]


def comparisons(args):
    """Yield comparison, case, function, the shapes of its operands, and its operations."""
    tokens, width = args.tokens, args.width
    for words in VOCABULARIES:
        shapes = (tokens, width), (words, width)
        yield "vocabulary", f"{words:,}", linear, shapes, 6 * tokens * width * words
    for length in LENGTHS:
        shapes = [(max(1, tokens // 1024), width // 64, length, 64)] * 3
        flops = 12 * shapes[0][0] * width * length**2
        yield "tokens, naive", f"{length:,}", plain_attention, shapes, flops
        yield "tokens, SDPA", f"{length:,}", scaled_dot_product_attention, shapes, flops
    for count in (tokens // FEWER, tokens):
        named, flops = f"q, k, v of {count:,} tokens", 18 * count * width**2
        yield named, "three products", three, [(count, width), *[(width, width)] * 3], flops
        yield named, "one product", linear, [(count, width), (3 * width, width)], flops
    ways = {"separate gates": partial(loop, separate), "one product": partial(loop, together)}
    ways["fused"] = fused
    for size, (way, call) in product((width - ODD, width), ways.items()):
        shapes = (args.steps, args.batch_size, size), *[(GATES * size, size)] * 2
        flops = 12 * GATES * args.steps * args.batch_size * size**2
        if size == width:
            yield "LSTM", way, call, shapes, flops
        if way != "separate gates":
            yield f"hidden numbers, {way}", f"{size:,}", call, shapes, flops


def operands(shapes, device, dtype) -> list:
    """Return random operands; the weights keep the results near 1."""
    scales = [1.0, *(1.0 if len(shape) > 2 else shape[-1] ** -0.5 for shape in shapes[1:])]
    made = [scale * torch.randn(s, device=device) for scale, s in zip(scales, shapes, strict=True)]
    return [x.to(dtype).requires_grad_() for x in made]


def both(call, given, gradient):
    """Compute the gradients of a call's operands, by random gradients of its output."""
    torch.autograd.grad(call(*given), given, gradient)


def measured(args, device, dtype):
    """Yield the fields of each case; those of a comparison take turns."""
    cases = list(comparisons(args))
    for named in tqdm(dict.fromkeys(case[0] for case in cases), unit="comparison"):
        calls, found = {}, {}
        for _, way, call, shapes, flops in (case for case in cases if case[0] == named):
            found[way] = {"comparison": named, "way": way, "flops": flops}
            given = operands(shapes, device, dtype)
            try:
                out = call(*given)
                calls[way] = partial(both, call, given, torch.randn_like(out))
                calls[way]()
            except RuntimeError as failed:
                calls.pop(way, None)
                found[way]["error"] = imports.first_line(failed)
        times = session.TIMES if device.type == "cuda" else 1
        spent = session.in_turn(calls, device, args.rounds, times, warm_up=1)
        yield from (fields | {"ms": spent.get(way)} for way, fields in found.items())


def main():
    device = idr_torch.device()
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    positive = flags.at_least(1)
    parser.add_argument("--tokens", type=flags.at_least(FEWER), help="rows of a linear layer")
    parser.add_argument("--width", type=flags.at_least(64), help="numbers for each token")
    parser.add_argument("--steps", type=positive, help="steps of the LSTM")
    parser.add_argument("-b", "--batch-size", type=positive, help="sequences of the LSTM")
    parser.add_argument("--precision", choices=("fp32", *session.DTYPES), help="a format")
    parser.add_argument("--rounds", type=flags.at_least(2), default=5, help="timings of each")
    parser.set_defaults(**(ON_GPU if device.type == "cuda" else ON_CPU))
    args = parser.parse_args()
    with session.begin(args, device) as (run, _):
        torch.manual_seed(0)
        session.measure_product(run, device, args.precision, args.rounds)
        dtype = session.DTYPES.get(args.precision, torch.float32)
        for found in measured(args, device, dtype):
            run.case(f"{found['comparison']}: {found['way']}", **found)


if __name__ == "__main__":
    main()
