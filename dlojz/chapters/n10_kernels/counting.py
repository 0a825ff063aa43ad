"""The number of kernels of a call: those that a GPU ran, or of a processor's generated code."""

import re

from dlojz.chapters import session
from dlojz.training import private
from dlojz.watch import profile

KERNEL = re.compile(r"^\w+ = async_compile\.(?:cpp\w*|triton)\(", re.M)  # in generated code


def launched(call, *operands) -> int:
    """Return the number of the GPU's kernels in one call."""
    call(*operands)
    return profile.counts(profile.profiled(lambda: call(*operands)))["kernels"]


def compiled(call, *operands) -> int:
    """Compile a function by its first call; return the number of its kernels.

    Raises RuntimeError without a compiler.
    """
    sources = private.generated(call, *operands)
    if operands[0].is_cuda:
        return launched(call, *operands)
    return sum(len(KERNEL.findall(source)) for source in sources)


def eager(call, *operands) -> dict:
    """Return the kernels of a function in PyTorch, and the bytes that they move at least.

    Not for a compiled function: one that is called while operations are counted, is not compiled.
    """
    with session.Operations() as operations:
        call(*operands)
    kernels = launched(call, *operands) if operands[0].is_cuda else operations.count
    return {"kernels": kernels, "moved": operations.moved}
