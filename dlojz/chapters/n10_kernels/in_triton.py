"""A softmax of each row, [rows, columns], in Triton: with a whole row on the chip, and online.

Online: Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867
"""

import os

import torch

from dlojz.course import UserError

if not torch.cuda.is_available():  # read at each `@triton.jit`, of Triton's own modules, too
    os.environ["TRITON_INTERPRET"] = "1"

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise UserError(f"no Triton beside torch {torch.__version__}: {error}") from error

LOWEST = tl.constexpr(-float("inf"))  # has no part in a row's maximum, and its power is 0
BLOCK = 4096  # columns of a step of the online kernel


@triton.jit
def _whole_row(x, out, columns, block: tl.constexpr):
    """Write the softmax of one row, of which a program keeps all columns in registers."""
    begin = tl.program_id(0).to(tl.int64) * columns
    places = tl.arange(0, block)
    inside = places < columns
    values = tl.load(x + begin + places, mask=inside, other=LOWEST)
    powers = tl.exp(values - tl.max(values, axis=0))
    tl.store(out + begin + places, powers / tl.sum(powers, axis=0), mask=inside)


@triton.jit
def _online(x, out, columns, block: tl.constexpr):
    """Write the softmax of one row, block by block: maximum and sum in one pass, then the powers.

    A new maximum makes all powers so far smaller by the same factor, and with them their sum.
    """
    begin = tl.program_id(0).to(tl.int64) * columns
    largest, total = tl.full([], LOWEST, tl.float32), 0.0
    for first in range(0, columns, block):
        places = first + tl.arange(0, block)
        values = tl.load(x + begin + places, mask=places < columns, other=LOWEST)
        before, largest = largest, tl.maximum(largest, tl.max(values, axis=0))
        total = total * tl.exp(before - largest) + tl.sum(tl.exp(values - largest), axis=0)
    for first in range(0, columns, block):
        places = first + tl.arange(0, block)
        values = tl.load(x + begin + places, mask=places < columns, other=LOWEST)
        powers = tl.exp(values - largest) / total
        tl.store(out + begin + places, powers, mask=places < columns)


def launch(kernel, x, most):
    """Return the softmax of each row, and the compiled kernel, which the interpreter has none of.

    most: columns of a program at a time. Each thread has 8 of them, or more in 32 warps.
    """
    out, columns = torch.empty_like(x), x.shape[1]
    block = min(most, triton.next_power_of_2(columns))
    warps = min(32, max(1, block // 256))
    return out, kernel[(len(x),)](x, out, columns, block, num_warps=warps)


def whole_row(x):
    """Launch the kernel that reads a row once, and keeps it."""
    return launch(_whole_row, x, x.shape[1] * 2)


def online(x):
    """Launch the kernel that reads a row twice, in blocks."""
    return launch(_online, x, BLOCK)


WAYS = {"Triton": whole_row, "online": online}


def about(kernel) -> dict:
    """Return the resources that a compiled kernel takes; {} for the interpreter's."""
    if kernel is None:
        return {}
    return {
        "registers": kernel.n_regs,  # of a thread
        "spills": kernel.n_spills,  # registers of a thread that lie in memory instead
        "shared_bytes": kernel.metadata.shared,  # of a program
        "warps": kernel.metadata.num_warps,  # of a program
    }
