"""Linear layers of vision transformers in FP8: what their casts cost, and what their products save.

Submitted by a notebook: submit("dlojz/chapters/n10b_formats/experiments/break_even.py").

Beside each time is a prediction, from three speeds that are measured first: of memory, and of a
large product in 16 and in 8 bits. A processor emulates the product in 8 bits, number by number: a
thousand times slower, so there the layers are tiny, and are timed in the cache.
"""

import argparse
from functools import partial

import torch
from torch.nn import functional
from tqdm import tqdm

from dlojz import idr_torch
from dlojz.chapters import session
from dlojz.chapters.n10_kernels import timing
from dlojz.chapters.n10b_formats import bits
from dlojz.runs import log
from dlojz.training import flags, imports

ON_GPU = {"models": [768, 1280, 3200], "images": [1, 8, 32, 128], "elements": 2**26}
ON_GPU |= {"backend": "inductor"}  # the widths of ViT-B, ViT-H, and InternViT-6B
ON_CPU = {"models": [32], "images": [1], "elements": 2**20, "backend": "eager"}
EMULATED = 64  # rows of a matrix product
TOKENS = 197  # of an image of 224 pixels
CAST = {"current": (2, 1), "delayed": (1, 1), "row": (2, 1)}  # times that it reads, and writes
CAST |= {"delayed, row by row": (1, 1)}


# The casts ---------------------------------------------------------------------------------------


def current(x):
    """Return a tensor in E4M3 and its scale, from its largest magnitude: it is read twice."""
    scale = bits.scaled(x.abs().amax(), bits.E4M3)
    return bits.cast(x.float(), scale), scale.reciprocal()


def delayed(x, largest):
    """Return a tensor in E4M3 by a magnitude of before, and its own for later, in one pass."""
    scale = bits.scaled(largest, bits.E4M3)
    return bits.cast(x.float(), scale), scale.reciprocal(), x.abs().amax()


def row_by_row(x, largest):
    """Return the same as `delayed`, by a maximum of each row first: one kernel can do both."""
    scale = bits.scaled(largest, bits.E4M3)
    return bits.cast(x.float(), scale), scale.reciprocal(), x.abs().amax(1).amax()


def row(x):
    """Return a matrix in E4M3 with a scale for each of its rows."""
    scale = bits.scaled(x.abs().amax(1, keepdim=True), bits.E4M3)
    return bits.cast(x.float(), scale), scale.reciprocal()


def product(x, weight, scale_x, scale_weight):
    """Return x times the transpose of a weight, both in 8 bits."""
    out = bits.DTYPE[x.device.type]
    return torch._scaled_mm(
        x, weight.t(), scale_x, scale_weight.t(), out_dtype=out, use_fast_accum=x.is_cuda
    )


def layers(compiled) -> dict:
    """Return each way to compute a linear layer: compiled: what makes a function of a cast."""
    by_tensor, by_row, before = compiled(current), compiled(row), compiled(delayed)

    def with_casts(cast):
        def call(x, weight, *_):
            (x8, scale_x), (w8, scale_w) = cast(x), cast(weight)
            return product(x8, w8, scale_x, scale_w)

        return call

    def with_history(x, weight, of_x, of_weight):
        x8, scale_x, _ = before(x, of_x)
        w8, scale_w, _ = before(weight, of_weight)
        return product(x8, w8, scale_x, scale_w)

    def linear(x, weight, *_):
        return functional.linear(x, weight)

    casts = {"current": with_casts(by_tensor), "row": with_casts(by_row)}
    return {"wide": linear, "delayed": with_history, **casts}


# What they cost ----------------------------------------------------------------------------------


def predicted(way: str, shape, speeds, wide: int) -> float:
    """Return the milliseconds under the roof. speeds: bytes and operations per ms; wide: bytes."""
    m, n, k = shape
    flops, operands, out = 2 * m * n * k, (m + n) * k, m * n * wide
    if way == "wide":
        return max(flops / speeds[way], (operands * wide + out) / speeds["memory"])
    reads, writes = CAST[way]
    casts = operands * (reads * wide + writes) / speeds["memory"]
    return casts + max(flops / speeds["8 bits"], (operands + out) / speeds["memory"])


def operands(m, n, k, device) -> tuple:
    """Return random inputs and weights, and the largest magnitudes of both."""
    made = [torch.randn(size, k, device=device, dtype=bits.DTYPE[device.type]) for size in (m, n)]
    made[1] *= k**-0.5
    return (*made, *(x.abs().amax() for x in made))


def tried(calls, given) -> tuple[dict, dict]:
    """Return the calls that work on these operands, and the errors of the others."""
    works, errors = {}, {}
    for name, call in calls.items():
        try:
            timing.in_graph(timing.Cycle(call, given), given[0][0].device)
            works[name] = call
        except Exception as error:  # a processor has no product with scales of rows
            errors[name] = f"{type(error).__name__}: {imports.first_line(error)}"
    return works, errors


def measured(calls, make, device, rounds) -> tuple[dict, dict]:
    """Return the milliseconds by round of the calls that work, and the errors of the others."""
    given = timing.copies(make, device) if device.type == "cuda" else [make()]
    works, errors = tried(calls, given)
    cycles = {name: timing.Cycle(call, given) for name, call in works.items()}
    return timing.by_call(cycles, device, rounds), errors


def measure_speeds(run, device, rounds) -> dict:
    """Measure the speeds of the prediction; return them per millisecond."""
    n = session.MATRIX[device.type]
    session.measure_memory(run, device, rounds)
    session.measure_product(run, device, bits.WIDE[device.type], rounds)
    one, n = torch.ones((), device=device), n if device.type == "cuda" else EMULATED
    x, y = (torch.randn(n, n, device=device).to(bits.E4M3) for _ in range(2))
    ms = session.median_ms(lambda: product(x, y, one, one), device, rounds)
    run.measure("product in 8 bits", 2 * n**3 / ms / 1e9, "TFLOP/s")
    memory, wide, eight = (m.value for m in log.read(run.folder).measures)
    return {"memory": 1e6 * memory, "wide": 1e9 * wide, "8 bits": 1e9 * eight}


def shapes(args):
    """Yield the part of a transformer and its M, N, K: tokens, outputs, inputs."""
    for images in args.images:
        for width in args.models:
            yield "attention, out", (TOKENS * images, width, width)
            yield "MLP, first", (TOKENS * images, 4 * width, width)


def casts(args, compiled, device) -> dict:
    """Return the times of the casts alone, of one large matrix, by way; and the errors."""
    x, _, largest, _ = operands(args.elements // 4096, 1, 4096, device)

    def make():
        return (torch.randn_like(x),)

    before, rows = compiled(delayed), compiled(row_by_row)
    calls = {"current": compiled(current), "delayed": lambda x: before(x, largest)}
    calls["delayed, row by row"] = lambda x: rows(x, largest)
    return measured(calls | {"row": compiled(row)}, make, device, args.rounds)


def main():
    device = idr_torch.device()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    number = flags.at_least(1)
    parser.add_argument("--models", type=number, nargs="+", help="widths of transformers")
    parser.add_argument(
        "--images", type=number, nargs="+", help="images of a batch, 197 tokens each"
    )
    parser.add_argument("--elements", type=number, help="numbers of the casts that are timed")
    parser.add_argument("--rounds", type=flags.at_least(2), default=5, help="timings of each")
    parser.add_argument("--backend", help="torch.compile's backend")
    parser.set_defaults(**(ON_GPU if device.type == "cuda" else ON_CPU))
    args = parser.parse_args()
    torch._dynamo.config.recompile_limit = 256  # each shape has code of its own
    compiled = partial(torch.compile, dynamic=False, backend=args.backend)
    with session.begin(args, device) as (run, _), torch.no_grad():
        torch.manual_seed(0)
        timing.keep_pages()
        speeds, wide = measure_speeds(run, device, args.rounds), bits.DTYPE[device.type].itemsize
        ms, errors = casts(args, compiled, device)
        for way, found in ms.items():
            reads, writes = CAST[way]
            moved = args.elements * (reads * wide + writes)
            run.case(f"cast, {way}", part="cast", way=way, ms=found, bytes=moved)
        for way, found in errors.items():
            run.case(f"cast, {way}", part="cast", way=way, error=found)
        for part, shape in tqdm(list(shapes(args)), unit="layer"):
            make = partial(operands, *shape, device)
            ms, errors = measured(layers(compiled), make, device, args.rounds)
            guess = {
                way: predicted(way, shape, speeds, wide)
                for way in ("wide", "current", "delayed", "row")
            }
            name = f"{part}, M {shape[0]}, N {shape[1]}, K {shape[2]}"
            run.case(name, part=part, shape=shape, ms=ms, predicted=guess, errors=errors)
        for m, n, k in (
            (64, 64, 72),
            (64, 72, 64),
            (72, 64, 64),
        ):  # one of them not a multiple of 16
            _, errors = tried(
                {"current": layers(lambda f: f)["current"]}, [operands(m, n, k, device)]
            )
            result = errors.get("current", "works")
            run.case(f"M {m}, N {n}, K {k}", part="size", shape=(m, n, k), result=result)


if __name__ == "__main__":
    main()
