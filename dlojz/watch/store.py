"""The tensors of a run of a check, in files: packed, since hundreds take long to write."""

import errno
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path

import torch

BEFORE, AFTER = ("weights", "optimizer", "gradients"), ("weights", "optimizer")


def pack(tensors: dict, memory: dict | None = None) -> dict:
    """Return these tensors on the CPU, one for each dtype, because hundreds take long to write.

    memory: the last call's, by dtype, to be overwritten: new memory is eight times as slow.
    """
    memory = {} if memory is None else memory
    by_dtype, packed = {}, {}
    for name, tensor in tensors.items():
        by_dtype.setdefault(tensor.dtype, {})[name] = tensor.detach()
    for dtype, alike in by_dtype.items():
        total = sum(tensor.numel() for tensor in alike.values())
        if dtype not in memory or len(memory[dtype]) != total:
            memory[dtype] = torch.empty(total, dtype=dtype)
        flat = memory[dtype]
        places, offset = [], 0
        for name, tensor in alike.items():
            place = _place(name, tensor, offset)
            _view(flat, place).copy_(tensor)
            places.append(place)
            offset += tensor.numel()
        packed[str(dtype)] = {"places": places, "flat": flat}
    return packed


def _place(name, tensor, offset):
    """Return (name, shape, stride, offset) of a tensor within a flat one, in its own layout."""
    return name, tuple(tensor.shape), torch.empty_like(tensor, device="meta").stride(), offset


def _view(flat, place):
    _, shape, stride, offset = place
    return flat.as_strided(shape, stride, offset)


def unpack(packed: dict) -> dict:
    """Return the tensors given to `pack`, by name."""
    return {
        place[0]: _view(part["flat"], place) for part in packed.values() for place in part["places"]
    }


def load(file: Path) -> dict:
    """Return an update that was kept. Its tensors are read from the file as they are used."""
    kept = torch.load(file, mmap=True)
    for name in BEFORE:
        kept[name] = unpack(kept[name])
    kept["begun"]["buffers"] = unpack(kept["begun"]["buffers"])
    kept["after"] = {name: unpack(packed) for name, packed in kept["after"].items()}
    return kept


def touched(last: dict, state: dict) -> list[str]:
    """Return the weights and momenta that changed between two updates: "fc.weight in update 6"."""
    number = state["facts"].update
    return [
        f"{name} in update {number}"
        for part in AFTER
        for name, tensor in last["after"][part].items()
        if name not in state[part] or not _same(tensor, state[part][name])
    ]


def _same(a, b) -> bool:
    nothing = {"rtol": 0, "atol": 0, "equal_nan": True}
    return torch.equal(a, b) or (a.shape == b.shape and torch.allclose(a, b, **nothing))


def drop(file: Path):
    """Free an update's memory or disk space. Its tensors are lost."""
    file.open("wb").close()
    if file.parent.name != "fd":
        file.unlink()


def on_cpu(value):
    """Return this value with all tensors on the CPU. Waits for the device."""
    if torch.is_tensor(value):
        return value.detach().cpu().clone() if value.device.type == "cpu" else value.detach().cpu()
    if isinstance(value, dict):
        return {k: on_cpu(v) for k, v in value.items()}
    if is_dataclass(value):
        return type(value)(**on_cpu(vars(value)))
    if isinstance(value, list | tuple):
        return type(value)(on_cpu(v) for v in value)
    return value


NO_ROOM = "no room for what a check keeps"


def save(value, file):
    """Write to a file. Raises OSError if there is no room."""
    try:
        if file.parent.name == "fd":  # in memory: it has no folder
            with _no_checksums():
                torch.save(value, file)
            return
        file.parent.mkdir(exist_ok=True)
        torch.save(value, file.with_name(f".{file.name}"))
        file.with_name(f".{file.name}").replace(file)
    except RuntimeError as error:  # torch's writer gives no reason
        raise OSError(errno.ENOSPC, f"{NO_ROOM} ({error})", str(file)) from error


@contextmanager
def _no_checksums():
    """Save without checksums, which take a third of the time."""
    usual = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(usual)
