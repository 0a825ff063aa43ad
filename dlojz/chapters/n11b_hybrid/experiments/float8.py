"""Matrix products in 8 bits: their errors, and on a GPU the sizes for which they are faster.

Submitted by a notebook: submit("dlojz/chapters/n11b_hybrid/experiments/float8.py").

It needs torchao, an optional package, whose recipes scale a tensor by one number (tensorwise) or
each of its rows by its own (rowwise). The error is the relative distance from float32 of a linear
layer whose input has one value that is much larger than all others. A processor emulates 8 bits:
its numbers are those of a GPU, its times are not, so sizes are timed only on request.
"""

import argparse
import statistics
from dataclasses import replace
from importlib.util import find_spec

import torch
from torch import nn

from dlojz import idr_torch
from dlojz.chapters import session
from dlojz.course import UserError

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")  # the last: weights' gradients in bf16
ROWS, WIDTH = 256, 512  # of the layer with the errors
OUTLIERS = (1, 1e2, 1e3, 1e4, 1e5, 1e6)
SIZES = [(m, k, 4 * k) for m in (1024, 4096, 16384) for k in (1024, 4096)]
SINCE = (8, 9)  # CUDA's compute capability: Ada and Hopper have products in 8 bits


def main():
    device = idr_torch.device()
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= SINCE
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    sizes = "sizes MxKxN, such as 1024x1024x4096: (M, K) times (K, N)"
    add("--sizes", nargs="*", type=size, default=SIZES if able else [], help=sizes)
    add("--rounds", type=int, default=20, help="timings of each size")
    add("--backend", default="inductor", help="torch.compile's backend")
    args = parser.parse_args()
    with session.begin(args, device) as (run, _):
        if not find_spec("torchao"):
            raise UserError("torchao is not installed: pip install -c constraints.txt -e .[float8]")
        for outlier in OUTLIERS:
            for recipe, found in lost(outlier, device, able).items():
                run.measure(recipe, found["output"], "relative distance", x=outlier)
                run.case(f"{recipe}, {outlier:g}", recipe=recipe, outlier=outlier, away=found)
        for each in args.sizes:
            run.case("x".join(map(str, each)), step_ms=timed(each, args, device, able))


def size(text) -> tuple[int, ...]:
    """Return the numbers of "1024x1024x4096": products in 8 bits need multiples of 16."""
    found = tuple(int(word) for word in text.split("x") if word.isdigit())
    if len(found) != 3 or any(number < 16 or number % 16 for number in found):
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected three multiples of 16, like 64x64x128"
        )
    return found


def linear(recipe, shape, device, able):
    """Return a linear layer without bias, (K, N), in bf16, or in 8 bits by this recipe."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(*shape, bias=False, device=device))
    if recipe == "fp32":
        return layer
    layer = layer.to(torch.bfloat16)
    if recipe != "bf16":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=not able)
        layer = convert_to_float8_training(layer, config=config)
    return layer


def lost(outlier, device, able):
    """Return the distance of output and gradients from float32, by recipe.

    outlier: a value in the input's first row. That row is left out of the output's distance.
    """
    torch.manual_seed(1)
    x, gradient = (torch.randn(ROWS, WIDTH, device=device) for _ in range(2))
    x[0, 0] = outlier
    exact = passes(linear("fp32", (WIDTH, WIDTH), device, able), x, gradient)
    found = {}
    for recipe in ("bf16", *RECIPES):
        layer = linear(recipe, (WIDTH, WIDTH), device, able)
        mine = passes(layer, x.bfloat16(), gradient.bfloat16())
        found[recipe] = {what: session.away([mine[what]], [exact[what]]) for what in exact}
    return found


def passes(layer, x, gradient):
    """Return the output without its first row, and both gradients, in float32."""
    x = x.clone().requires_grad_()
    output = layer(x)
    output.backward(gradient)
    found = {"output": output.detach()[1:], "input's gradient": x.grad}
    found["weights' gradient"] = layer[0].weight.grad
    return {what: tensor.float() for what, tensor in found.items()}


def timed(shape, args, device, able):
    """Return the milliseconds of a forward and a backward pass by recipe, in turn."""
    m, *shape = shape
    x = torch.randn(m, shape[0], device=device, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(m, shape[1], device=device, dtype=torch.bfloat16)
    calls = {}
    for recipe in ("bf16", *RECIPES):
        layer = torch.compile(linear(recipe, shape, device, able), backend=args.backend)

        def call(layer=layer):
            layer(x).backward(gradient)

        calls[recipe] = call
    times = 20 if device.type == "cuda" else 1
    session.in_turn(calls, device, rounds=3)  # the first compiles
    spent = session.in_turn(calls, device, args.rounds, times)
    torch.compiler.reset()
    return {recipe: statistics.median(ms) for recipe, ms in spent.items()}


if __name__ == "__main__":
    main()
