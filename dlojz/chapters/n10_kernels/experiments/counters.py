"""The bytes that each softmax really moves, counted by the GPU: recorded with Nsight Compute.

Submitted on a machine with a GPU and `ncu`, as an administrator (or where counters are open to all:
https://developer.nvidia.com/ERR_NVGPUCTRPERM).

A second process calls each softmax once. ncu runs its kernels again for each group of counters,
with empty caches. What lies in the L2 cache at a kernel's end is not written to memory yet.
"""

import argparse
import csv
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable

import torch

from dlojz.chapters import session
from dlojz.chapters.n10_kernels import in_pytorch
from dlojz.course import UserError
from dlojz.training import flags

ELEMENTS = 2**26
COLUMNS = [4096, 131072]
COUNTERS = {"read": "dram__bytes_read.sum", "written": "dram__bytes_write.sum"}


def ways() -> dict[str, Callable]:
    """Return the softmaxes, by way."""
    from dlojz.chapters.n10_kernels import in_triton

    compiled = torch.compile(in_pytorch.naive, dynamic=False)
    of_torch = {"PyTorch": in_pytorch.naive, "compiled": compiled}
    of_torch["torch.softmax"] = in_pytorch.of_torch
    return of_torch | {way: lambda x, c=call: c(x)[0] for way, call in in_triton.WAYS.items()}


def call_each(columns: int):
    """Call each softmax once, in a range with its name, after warm-up that ncu leaves out."""
    x, calls = torch.randn(ELEMENTS // columns, columns, device="cuda"), ways()
    for call in calls.values():
        call(x)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for way, call in calls.items():
        with torch.cuda.nvtx.range(way):
            call(x)
            torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def counted(columns: int) -> dict[str, dict]:
    """Return the counters of each softmax, by way: the sums of its kernels.

    Raises UserError with ncu's own words, if it counted nothing.
    """
    if not (ncu := shutil.which("ncu")):
        raise UserError("no ncu on this machine: install NVIDIA Nsight Compute, or load its module")
    how = "--profile-from-start off --nvtx --csv --page raw --print-units base --metrics".split()
    asked = ",".join(COUNTERS.values())
    program = [sys.executable, __file__, "--of", str(columns)]
    ran = subprocess.run([ncu, *how, asked, *program], capture_output=True, encoding="utf-8")
    lines = [line for line in ran.stdout.splitlines() if line.startswith('"')]
    if ran.returncode or not lines:
        said = [line for line in ran.stdout.splitlines() + ran.stderr.splitlines() if line.strip()]
        raise UserError(f"ncu counted nothing: {' '.join(said[-3:])}")
    return added(csv.DictReader(lines))


def added(rows: Iterable[dict]) -> dict[str, dict]:
    """Return the sums of kernels by way, from the rows of ncu: the first one has the units."""
    found = {}
    for row in list(rows)[1:]:
        (text,) = (value for name, value in row.items() if "Push/Pop_Range" in name)
        way = found.setdefault(text.split(":")[1], dict.fromkeys((*COUNTERS, "kernels"), 0))
        for what, counter in COUNTERS.items():
            way[what] += int(row[counter].replace(",", ""))  # "268,511,744"
        way["kernels"] += 1
    return found


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    positive = flags.at_least(1)
    parser.add_argument("--columns", type=positive, nargs="+", default=COLUMNS, help="row lengths")
    parser.add_argument("--of", type=positive, help=argparse.SUPPRESS)  # the process under ncu
    args = parser.parse_args()
    if args.of:
        with torch.no_grad():
            call_each(args.of)
        return
    with session.begin(args) as (run, _):
        for columns in args.columns:
            once = ELEMENTS // columns * columns * torch.float32.itemsize  # to read all rows
            for way, found in counted(columns).items():
                about = {"way": way, "columns": columns, "once": once}
                run.case(f"{way}, {columns} columns", **about, **found)


if __name__ == "__main__":
    main()
