"""The tensors of a run of a check, in files: packed, since hundreds take long to write."""

import errno
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path

import torch

from dlojz.training import private

BEFORE, AFTER = ("weights", "optimizer", "gradients"), ("weights", "optimizer")


def pack(tensors: dict, by="cpu", memory: dict | None = None) -> dict:
    """Return these tensors on the CPU, one for each dtype, because hundreds take long to write.

    by: the device that puts them together; the tensors' own is faster, but needs memory for it.
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
        kept = memory[dtype]
        flat = kept if torch.device(by).type == "cpu" else torch.empty_like(kept, device=by)
        places, offset = [], 0
        for name, tensor in alike.items():
            place = _place(name, tensor, offset)
            _view(flat, place).copy_(tensor)
            places.append(place)
            offset += tensor.numel()
        if flat is not kept:
            kept.copy_(flat)
        packed[str(dtype)] = {"places": places, "flat": kept}
    return packed


def _place(name, tensor, offset):
    """Return (name, shape, stride, offset) of a tensor within a flat one, in its own layout."""
    return name, tuple(tensor.shape), torch.empty_like(tensor, device="meta").stride(), offset


def _view(flat, place):
    _, shape, stride, offset = place
    return flat.as_strided(shape, stride, offset)


def unpack(packed: dict, to="cpu") -> dict:
    """Return the tensors given to `pack`, by name; to: a device."""
    found = {}
    for part in packed.values():
        flat = part["flat"].to(to)
        found |= {place[0]: _view(flat, place) for place in part["places"]}
    return found


def load(file: Path, device="cpu") -> dict:
    """Return an update that was kept.

    Its tensors are on `device` if they stayed there during the run. Otherwise they are read from
    the file as they are used.
    """
    kept = torch.load(file, mmap=True)
    to = device if kept["reserved"] else "cpu"
    for name in BEFORE:
        kept[name] = unpack(kept[name], to)
    kept["begun"]["buffers"] = unpack(kept["begun"]["buffers"], to)
    kept["after"] = {name: unpack(packed, to) for name, packed in kept["after"].items()}
    return kept


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


class Copies:
    """Copies of tensors by name, into the same memory each time."""

    def __init__(self):
        self.tensors = {}

    def take(self, tensors: dict):
        """Copy these tensors, without waiting for the device."""
        kept = self.tensors
        if {k: t.shape for k, t in kept.items()} != {k: t.shape for k, t in tensors.items()}:
            kept = self.tensors = {k: torch.empty_like(t) for k, t in tensors.items()}
        by_dtype = {}
        for name, tensor in tensors.items():
            into, source = by_dtype.setdefault((tensor.dtype, tensor.device), ([], []))
            into.append(kept[name])
            source.append(tensor.detach())
        for into, source in by_dtype.values():
            private.copy_all(into, source)


class State:
    """An update: the state of a training before and after its optimizer's step."""

    def __init__(self):
        self.before = {name: Copies() for name in BEFORE}
        self.after = {name: Copies() for name in AFTER}
        self.reserved = False  # it has memory on the device until the end of the run
        self.begun, self.buffers = None, None  # buffers before its forward pass, and after it
        self.facts = None  # None: there is no update


def fill(copies: dict, tensors: dict):
    for name, kept in copies.items():
        kept.take(tensors[name])


def nbytes(tensors: dict, *parts) -> int:
    return sum(t.nbytes for names in parts for name in names for t in tensors[name].values())
