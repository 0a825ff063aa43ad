"""The work of Triton's interpreter, which runs a kernel's programs one after the other, in NumPy.

Each load and store has the addresses of all its values, so those outside of the kernel's tensors
are known, before they do harm that shows.
"""

from contextlib import contextmanager
from dataclasses import dataclass

from dlojz.training import private
from dlojz.training.replaced import replaced


@dataclass
class Count:
    """The numbers of launches, loads and stores, and of the values that these move."""

    launches: int = 0
    loads: int = 0
    stores: int = 0
    outside: int = 0  # values that were loaded from other memory
    outside_floats: int = 0  # those of them that are no whole numbers
    read_bytes: int = 0
    written_bytes: int = 0
    idle: int = 0  # places of a block that a mask has kept out


def is_used() -> bool:
    """Return whether Triton is there, and interprets kernels."""
    try:
        import triton
    except ImportError:
        return False
    return triton.knobs.runtime.interpret


@contextmanager
def counted():
    """Count the interpreter's work until the context ends; all 0 where it is not used."""
    count = Count()
    if not is_used():
        yield count
        return
    from triton.runtime import interpreter

    launch, builder = interpreter.GridExecutor.__call__, interpreter.interpreter_builder
    load, store, inside = builder.create_masked_load, builder.create_masked_store, []

    def launched(executor, *args, **kwargs):
        count.launches += 1
        inside[:] = [_range(t) for t in (*args, *kwargs.values()) if hasattr(t, "data_ptr")]
        with private.without_modes():  # it copies its arguments by torch
            return launch(executor, *args, **kwargs)

    def loaded(pointers, mask, *more):
        count.loads += 1
        places = pointers.data[mask.data]
        count.read_bytes += places.size * _size(pointers)
        count.idle += mask.data.size - places.size
        known = sum((places >= begin) & (places < end) for begin, end in inside)
        outside = int((known == 0).sum())
        count.outside += outside
        count.outside_floats += outside * pointers.get_element_ty().is_floating()
        return load(pointers, mask, *more)

    def stored(pointers, value, mask, *more):
        count.stores += 1
        through = int(mask.data.sum())
        count.written_bytes += through * _size(pointers)
        count.idle += mask.data.size - through
        return store(pointers, value, mask, *more)

    with (
        replaced(interpreter.GridExecutor, __call__=launched),
        replaced(builder, create_masked_load=loaded, create_masked_store=stored),
    ):
        yield count


def _size(pointers):
    """Return the bytes of a value at these addresses."""
    return pointers.get_element_ty().primitive_bitwidth // 8


def _range(tensor):
    """Return the addresses of a tensor's first byte, and of the one after its last."""
    places = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    size = (places + 1) * tensor.element_size() if tensor.numel() else 0
    return tensor.data_ptr(), tensor.data_ptr() + size
