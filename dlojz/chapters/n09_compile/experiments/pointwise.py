"""Chains of pointwise operations, eager and compiled: time, launches, bytes, the kernel's source.

Submitted by a notebook: submit("dlojz/chapters/n09_compile/experiments/pointwise.py").

Each chain is timed on a long tensor, where moving its elements takes the time, and on a short one,
where only the calls do. All calls of one size take turns, so that a disturbance affects all.
"""

import argparse
import re
import statistics
import time
from functools import partial

import torch
from torch._inductor.utils import run_and_get_code

from dlojz.chapters import session
from dlojz.watch import profile

LONG, SHORT = {"cpu": 2**22, "cuda": 2**27}, 2**10  # elements
FLOATS_PER_S = 2e9  # a rough guess, for the number of calls between two readings of the clock
READING_S, MOST_CALLS = 0.02, 200
# The begin of a kernel in Inductor's source, in C++ and in Triton.
KERNEL = re.compile(r"^\w+ = async_compile\.(?:cpp\w*|triton)\(", re.M)


def sines(count):
    """Return a function that takes the sine of its input `count` times."""

    def repeated(x):
        for _ in range(count):
            x = torch.sin(x)
        return x

    return repeated


def gelu(x):
    """Return GELU in its approximation by tanh, an operation per sign."""
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--elements", type=int, nargs="+", help="sizes (default: a long and a short tensor)")
    add("--sines", type=int, nargs="*", default=[1, 2, 4, 8], help="lengths of the chains")
    add("--rounds", type=int, default=11, help="timings of each case")
    args = parser.parse_args()
    with session.begin(args) as (run, device):
        functions = {f"{n} sin": sines(n) for n in args.sines} | {"GELU": gelu}
        for elements in args.elements or (LONG[device.type], SHORT):
            torch.manual_seed(0)
            x = torch.randn(elements, device=device)
            cases = {name: case(name, function, x) for name, function in functions.items()}
            calls = {
                (name, way): partial(call, x)
                for name, (ways, _) in cases.items()
                for way, call in zip(("eager", "compiled"), ways, strict=True)
            }
            session.in_turn(calls, device, 3)  # a warm-up
            times = max(1, min(MOST_CALLS, int(READING_S * FLOATS_PER_S / elements)))
            for (name, way), ms in session.in_turn(calls, device, args.rounds, times).items():
                run.measure(name, statistics.median(ms), "ms", x=elements, variant=way)
                cases[name][1][f"{way}_ms"] = ms
            for name, (_, seen) in cases.items():
                run.case(f"{name}, {elements} elements", **seen)


def case(name, function, x):
    """Return a function, eager and compiled, and its figures apart from time."""
    torch.compiler.reset()  # each chain is compiled alone, for one size
    compiled = torch.compile(function, dynamic=False)
    begin = time.perf_counter()
    out, sources = run_and_get_code(compiled, x)
    compile_s = time.perf_counter() - begin
    torch.testing.assert_close(out, function(x), rtol=1e-4, atol=1e-5)
    with session.Operations() as operations:
        function(x)
    kernels = sum(len(KERNEL.findall(source)) for source in sources)
    return (function, compiled), {
        "function": name,
        "elements": x.numel(),
        "compile_s": round(compile_s, 3),
        "launches": {
            "eager": launched(function, x) if x.is_cuda else operations.count,
            "compiled": launched(compiled, x) if x.is_cuda else kernels,
        },
        # A kernel that keeps values in registers only reads its input and writes its output.
        "bytes": {"eager": operations.moved, "compiled": session.size(x) + session.size(out)},
        "source": "\n".join(sources),
    }


def launched(call, x):
    """Return the number of the GPU's kernels in one call."""
    call(x)
    return profile.counts(profile.profiled(lambda: call(x)))["kernels"]


if __name__ == "__main__":
    main()
