"""The softmax of each row, written in five ways: their times, kernels, bytes and errors.

Submitted by a notebook: submit("dlojz/chapters/n10_kernels/experiments/softmax.py").

All rows together are as long for each number of columns, and no cache holds them. Without a GPU
Triton's interpreter runs its two ways on a few rows: it counts what they ask of memory, and their
times are left out.
"""

import argparse
from dataclasses import asdict

import torch
from tqdm import tqdm

from dlojz import idr_torch
from dlojz.chapters import session
from dlojz.chapters.n10_kernels import counting, in_pytorch, timing
from dlojz.course import UserError
from dlojz.training import flags, imports
from dlojz.watch import interpreted

ON_GPU = {"elements": 2**26, "columns": [2**n for n in range(7, 19)]}
ON_CPU = {"elements": 2**22, "columns": [256, 4096, 65536]}
INTERPRETED = 2**16  # elements, for the interpreter
CHECKED = 64  # rows whose errors are computed
FLOPS = 5  # of an element: a comparison, a difference, a power, a sum, a quotient
SCALES = (1, 100)  # of the inputs that are checked; exp(89) is infinite in float32


def kernels_of_triton():
    """Return the module of Triton's ways; None, after a note, without Triton."""
    try:
        from dlojz.chapters.n10_kernels import in_triton
    except UserError as error:
        print(f"Triton's kernels are left out: {error}")
        return None
    return in_triton


def least(x) -> int:
    """Return the bytes of one pass: each number is read once, and each result written."""
    return 2 * session.size(x)


def of_pytorch(x):
    """Yield the ways that need no Triton, for rows as x has them: name, function, fields."""
    yield "PyTorch", in_pytorch.naive, counting.eager(in_pytorch.naive, x)
    torch.compiler.reset()
    call = torch.compile(in_pytorch.naive, dynamic=False)
    try:
        kernels = counting.compiled(call, x)
    except RuntimeError as error:
        print(f"compiled: left out: {imports.first_line(error)}")
    else:
        yield "compiled", call, {"kernels": kernels, "moved": least(x)}
    yield "torch.softmax", in_pytorch.of_torch, counting.eager(in_pytorch.of_torch, x)


def of_triton(triton, x):
    """Yield Triton's ways on a GPU, for rows as x has them: name, function, fields."""
    for way, call in triton.WAYS.items():
        taken = triton.about(call(x)[1])
        yield way, lambda x, call=call: call(x)[0], {"kernels": 1, "moved": least(x)} | taken


def in_interpreter(call, columns) -> dict:
    """Return the fields of one of Triton's ways in the interpreter, on a few rows."""
    rows = max(2, INTERPRETED // columns)
    x = torch.randn(rows, columns)
    with interpreted.counted() as found:
        call(x)
    result = errors(lambda x: call(x)[0], x)
    return {"rows": rows, "kernels": found.launches, "error": result, "asked": asdict(found)}


def errors(call, x) -> list[float]:
    """Return the largest errors relative to a row's largest value, for inputs of each scale.

    NaN for results that are no numbers.
    """
    found = []
    for scale in SCALES:
        expected = torch.softmax((scale * x).double(), dim=1)
        off = (call(scale * x).double() - expected).abs() / expected.amax(dim=1, keepdim=True)
        found.append(off.max().item())
    return found


def timed(args, columns, device, triton):
    """Yield the way and the fields of each softmax that is timed, for one number of columns."""
    shape = max(1, args.elements // columns), columns
    operands = timing.copies(lambda: (torch.randn(shape, device=device),), device)
    (x,) = operands[0]
    found = [*of_pytorch(x), *(of_triton(triton, x) if triton and x.is_cuda else ())]
    cycles = {way: timing.Cycle(call, operands) for way, call, _ in found}
    ms = timing.by_call(cycles, device, args.rounds)
    for way, call, about in found:
        about |= {"rows": len(x), "error": errors(call, x[:CHECKED]), "ms": ms[way]}
        yield way, about | {"flops": FLOPS * x.numel(), "least": least(x)}


def main():
    device = idr_torch.device()
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    positive = flags.at_least(1)
    parser.add_argument("--elements", type=positive, help="numbers of all rows together")
    parser.add_argument("--columns", type=positive, nargs="+", help="numbers of a row")
    parser.add_argument("--rounds", type=flags.at_least(2), default=5, help="timings of each")
    parser.set_defaults(**(ON_GPU if device.type == "cuda" else ON_CPU))
    args = parser.parse_args()
    with session.begin(args, device) as (run, _), torch.no_grad():
        torch.manual_seed(0)
        timing.keep_pages()
        session.measure_memory(run, device, args.rounds)
        triton = kernels_of_triton()
        for columns in tqdm(args.columns, unit="length"):
            found = dict(timed(args, columns, device, triton))
            if triton and device.type == "cpu":
                found |= {way: in_interpreter(call, columns) for way, call in triton.WAYS.items()}
            for way, fields in found.items():
                run.case(f"{way}, {columns} columns", way=way, columns=columns, **fields)


if __name__ == "__main__":
    main()
