"""A count of what a kernel asks of memory, in Triton's interpreter, which needs no GPU.

It runs one program after the other, in NumPy: its results are right, its times mean nothing.
"""

from collections import Counter
from contextlib import contextmanager


@contextmanager
def counting():
    """Yield a Counter of the kernels, programs, loads, stores, and their bytes, inside it.

    Bytes are those of the places that a mask lets through; "idle" counts the others.
    """
    from triton.runtime import interpreter

    found, builder = Counter(), interpreter.InterpreterBuilder
    own = (interpreter.GridExecutor.__call__, builder.create_masked_load)
    own += (builder.create_masked_store,)

    def launched(executor, *args, **options):
        found["kernels"] += 1
        return own[0](executor, *args, **options)

    def access(what, pointers, mask):
        through = int(mask.data.sum())
        item = pointers.get_element_ty().primitive_bitwidth // 8
        found[what] += 1
        found[f"{what} bytes"] += through * item
        found["idle"] += mask.data.size - through

    def load(builder, pointers, mask, *rest):
        access("loads", pointers, mask)
        return own[1](builder, pointers, mask, *rest)

    def store(builder, pointers, value, mask, *rest):
        access("stores", pointers, mask)
        return own[2](builder, pointers, value, mask, *rest)

    interpreter.GridExecutor.__call__ = launched
    builder.create_masked_load, builder.create_masked_store = load, store
    try:
        yield found
    finally:
        interpreter.GridExecutor.__call__ = own[0]
        builder.create_masked_load, builder.create_masked_store = own[1:]
