"""A linear layer with weights of 16, 8 and 4 bits: weights per second, by width and by batch.

Submitted by a notebook: submit("dlojz/chapters/n10b_formats/experiments/int8.py").

Weights and inputs are random, and no cache holds the weights: each call has others. The compiler
may write matrix products itself, so that it can convert weights where it reads them. On a
processor the widest weights have 32 bits.
"""

import argparse
from functools import partial
from importlib.util import find_spec

import torch
from torch.nn import functional
from tqdm import tqdm

from dlojz import idr_torch
from dlojz.chapters import session
from dlojz.chapters.n10_kernels import timing
from dlojz.chapters.n10b_formats import bits
from dlojz.training import flags, imports

ON_GPU = {"widths": [1024, 2048, 4096, 8000], "batches": [], "width": 4096}
ON_CPU = {"widths": [512, 1024, 2048], "batches": [], "width": 1024}


def random(width: int, batch: int, device) -> tuple:
    """Return random inputs and weights, in float32."""
    x, weight = (torch.randn(n, width, device=device) for n in (batch, width))
    return x, weight / width**0.5


def made(kind: str, x, weight) -> tuple:
    """Return the operands of a layer: the input, the weights, and their scales."""
    dtype = bits.DTYPE[x.device.type]
    if kind in bits.WIDE.values():
        return x.to(dtype), weight.to(dtype)
    if kind == "torchao int8":
        return x.to(dtype), of_torchao(weight.to(dtype))
    values, scale = bits.quantized(weight, 4 if kind == "int4" else 8)
    values = bits.packed(values) if kind == "int4" else values
    return x.to(dtype), values, scale.flatten().to(dtype)


def of_torchao(weight):
    """Return the weights of a linear layer as torchao quantizes them."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    layer = torch.nn.Linear(*weight.shape[::-1], bias=False, device=weight.device)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    quantize_(layer, Int8WeightOnlyConfig())
    return layer.weight


def ways(device, batch, with_compiled=True) -> dict:
    """Return the kind of the weights, and the function, by name."""
    products = {bits.WIDE[device.type]: functional.linear, "int8": bits.linear8}
    if batch == 1:
        products["int4"] = bits.linear4
    options = {"coordinate_descent_tuning": True}  # with it one row is a sum, not a library's call
    if device.type == "cuda":
        options["max_autotune_gemm"] = batch > 1
    compiled = partial(torch.compile, dynamic=False, options=options)
    found = {kind: (kind, call) for kind, call in products.items()}
    if with_compiled:
        found |= {f"{kind}, compiled": (kind, compiled(call)) for kind, call in products.items()}
    if device.type == "cuda" and find_spec("torchao") and batch == 1:
        found["torchao int8, compiled"] = ("torchao int8", compiled(functional.linear))
    return found


def measured(args, width, batch, device):
    """Yield the name and the fields of each way; one that fails has its error instead of a time."""
    torch.compiler.reset()
    cycles, found, operands = {}, {}, {}
    x, weight = random(width, batch, device)
    for name, (kind, call) in ways(device, batch, not args.eager).items():
        found[name] = {"way": name, "kind": kind, "width": width, "batch": batch}
        try:
            out = call(*made(kind, x, weight))
            found[name]["away"] = session.away([out.float()], [functional.linear(x, weight)])
            if kind not in operands:

                def make(kind=kind):
                    return made(kind, *random(width, batch, device))

                operands[kind] = timing.copies(make, device)
            cycles[name] = timing.Cycle(call, operands[kind])
            timing.in_graph(cycles[name], device)
            found[name]["bytes"] = sum(map(session.size, operands[kind][0][1:]))
        except Exception as error:  # of a compiler, or of a package: the others are still timed
            cycles.pop(name, None)
            found[name]["error"] = f"{type(error).__name__}: {imports.first_line(error)}"
    for name, ms in timing.by_call(cycles, device, args.rounds).items():
        found[name]["ms"] = ms
    yield from found.items()


def main():
    device = idr_torch.device()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    number = flags.at_least(1)
    parser.add_argument("--widths", type=number, nargs="*", help="K = N, with one row")
    parser.add_argument("--batches", type=number, nargs="*", help="rows, with --width")
    parser.add_argument("--width", type=number, help="K = N of --batches")
    parser.add_argument("--rounds", type=flags.at_least(2), default=5, help="timings of each")
    parser.add_argument("--eager", action="store_true", help="leave out what is compiled")
    parser.set_defaults(**(ON_GPU if device.type == "cuda" else ON_CPU))
    args = parser.parse_args()
    with session.begin(args, device) as (run, _), torch.no_grad():
        torch.manual_seed(0)
        timing.keep_pages()
        session.measure_memory(run, device, args.rounds)
        session.measure_product(run, device, bits.WIDE[device.type], args.rounds)
        cases = [(width, 1) for width in args.widths] + [(args.width, b) for b in args.batches]
        for width, batch in tqdm(cases, unit="size"):
            for name, fields in measured(args, width, batch, device):
                run.case(f"{name}, {width} x {width}, batch {batch}", **fields)


if __name__ == "__main__":
    main()
